"""Rows of the user's files: readers, formats, and what objectives need of them."""
