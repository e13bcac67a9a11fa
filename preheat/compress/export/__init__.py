"""One writer a format; each export is read again by its own reader and compared at the logits."""
