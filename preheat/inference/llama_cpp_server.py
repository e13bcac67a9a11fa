"""Serves a GGUF file with llama.cpp: `python -m preheat.inference.llama_cpp_server FILE NAME HOST PORT LENGTH`."""

from __future__ import annotations

import sys
import threading

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Starts llama.cpp's server in this process, and ends with it.

    Args:
        arguments: the file, the model's name in answers, host, port, and the tokens of a sequence.
    """
    import xllamacpp

    file, name, host, port, length = arguments
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.model_alias = file, {name}
    settings.hostnames, settings.port = [host], int(port)
    settings.n_ctx, settings.n_parallel = int(length), 1
    # Keeps the server alive: it listens in threads of its own until it is deleted.
    _server = xllamacpp.Server(settings)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
