"""Tensor, context, pipeline and data parallelism on plain modules."""
