"""Configurations of other trainers: read to a recipe, with an account of every key. One file per trainer. No torch."""
