"""Seconds of an observed step: on this machine and on accelerators of the catalogue."""
