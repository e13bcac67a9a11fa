"""Decoding: generation loop, KV caches, speculative decoding, detokenizer."""
