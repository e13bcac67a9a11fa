"""Compression and export of trained models: methods in `methods/`, the pipeline, and writers in `export/`."""
