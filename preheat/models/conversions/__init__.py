"""Conversions of a model's architecture or size, and the modules that they need."""
