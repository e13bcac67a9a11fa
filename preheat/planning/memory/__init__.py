"""What allocators reserve for the tensors of a dry run, and what a process holds beside them."""
