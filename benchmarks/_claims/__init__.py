"""Parts of `claims.py`: trained arms, measured costs, and the table."""
