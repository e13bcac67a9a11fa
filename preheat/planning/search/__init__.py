"""Search for techniques, parallel layout and micro-batch size."""
