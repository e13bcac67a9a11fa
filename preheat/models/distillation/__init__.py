"""Models for distillation: teachers, on-policy answers, alignment of tokenizers."""
