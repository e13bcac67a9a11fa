"""The search for techniques, layout and micro-batch: candidates, their ranking, the result."""
