"""The adapter to Hugging Face models: the only package that depends on their internals."""
