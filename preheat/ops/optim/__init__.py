"""Optimizers, optimizer state and ZeRO sharding."""
