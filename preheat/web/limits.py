"""Limits of what the server reads of a run at once, so that a damaged folder cannot take its memory."""

from __future__ import annotations

__all__ = ["LARGEST_FILE"]

LARGEST_FILE = 2 << 20
"""Bytes of a JSON file of a run, or of a line: a plan has 100 kB, and parsed JSON takes many times its length."""
