"""Out-of-memory errors in a run: fallbacks, their log and the report of `preheat doctor oom`."""
