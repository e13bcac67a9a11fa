"""Low-rank adapters: peft's, and those of MoE experts and tied heads."""
