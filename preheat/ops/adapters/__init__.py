"""Low-rank adapters: peft's, those of experts and of tied heads."""
