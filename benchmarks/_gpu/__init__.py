"""Cases of `gpu_check.py`: what a GPU must do right, what it needs, and how fast it is."""
