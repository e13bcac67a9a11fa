"""Optimizers, their states and what shards them."""
