"""After training: quantize and prune (one file a method in `methods/`, measured by `compress`), and export."""
