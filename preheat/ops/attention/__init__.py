"""Attention kernels and masks. `sdpa` also contains the slow reference."""
