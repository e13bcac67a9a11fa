"""Writers of model formats (Hugging Face, PEFT, GGUF, ONNX, ExecuTorch, AOTInductor, vLLM, torchchat)."""
