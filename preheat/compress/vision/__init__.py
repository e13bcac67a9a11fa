"""Image classifiers for devices: read images by class, train and distil, make narrower, in 8 bits to ONNX and ExecuTorch."""
