"""The one adapter to Hugging Face models: the only place that knows a model's insides."""
