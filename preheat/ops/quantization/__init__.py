"""Quantized weights: grids, codes, linear layers and how they are stored."""
