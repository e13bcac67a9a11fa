"""Activation checkpointing, offload and copies between host and device."""
