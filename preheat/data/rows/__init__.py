"""Rows of the user's files: readers, layouts, and kinds of examples."""
