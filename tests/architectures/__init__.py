"""Every architecture that transformers has a tiny configuration for here, through everything that preheat does with a model.

`make architectures` writes docs/pages/architectures.md; the tests take a few architectures through the same columns.
"""
