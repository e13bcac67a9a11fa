"""Attention kernels and masks. `sdpa` has the slow reference beside torch's fused kernels."""
