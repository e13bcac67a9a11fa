"""Reserved memory of allocators, and the memory overhead of a process."""
