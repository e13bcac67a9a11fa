"""Compression of image classifiers for devices: pruning, distillation, and export to ONNX and ExecuTorch in int8."""
