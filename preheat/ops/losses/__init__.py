"""Losses over logits and over sequences."""
