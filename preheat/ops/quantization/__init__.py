"""Quantized weights: grids, codes, linear layers and serialization."""
