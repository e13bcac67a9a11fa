"""preheat: know that it fits and how fast it will run before you train; then train it, and see the evidence."""

__version__ = "0.1.0"
