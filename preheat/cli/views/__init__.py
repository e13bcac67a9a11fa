"""How commands print: the screen, tables, plans, live progress."""
