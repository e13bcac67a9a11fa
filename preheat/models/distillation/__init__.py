"""A student and its teacher as models."""
