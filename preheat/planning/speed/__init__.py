"""Predicted step time, on this machine and on accelerators of the catalogue."""
