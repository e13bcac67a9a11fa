"""After training: export, and (later) quantize, prune, distil."""
