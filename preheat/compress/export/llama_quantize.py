"""Runs llama.cpp's quantizer from the package llama-cpp-py-sync, with the arguments of its tool `llama-quantize`.

A process of its own (`python -m`), because the library logs to stderr and ends the process on an internal error.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(source: str, file: str, dtype: str) -> int:
    """Quantizes a GGUF file; returns 0 if it succeeded."""
    from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

    import gguf

    ffi, library = get_ffi(), get_lib()
    settings = ffi.new("llama_model_quantize_params *", library.llama_model_quantize_default_params())
    settings.ftype = int(gguf.LlamaFileType[f"MOSTLY_{dtype}"])
    return int(library.llama_model_quantize(source.encode(), file.encode(), settings))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
