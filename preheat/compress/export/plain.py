"""What is exported as plain transformers has it: adapters merged, in fp32, already compared with the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat import trust
from preheat.compress.export import huggingface, shared
from preheat.compress.export.held import Held
from preheat.errors import RunError
from preheat.models.adapter import facts

__all__ = ["Plain", "plain", "require"]


@dataclass
class Plain:
    """A language model to write in another format.

    Attributes:
        source: what was exported, as the user named it.
        folder: a Hugging Face folder of it, fp32, until the writer is done.
        model: plain transformers' class, fp32, on the CPU.
        rows: tokens to compare over, [1, length] each.
        wanted: its logits there, [1, length, vocabulary] each.
        merged: adapters that were merged.
        ends: tokens that end a text.
        turn: the one that ends an answer, where the model was trained on chats.
        notes: what the folder cannot say.
        held: what perplexity is measured on.
    """

    source: Path
    folder: Path
    model: Any
    tokenizer: Any
    rows: list[Tensor]
    wanted: list[Tensor]
    merged: int
    ends: list[int]
    turn: int | None
    notes: list[str]
    held: Held

    def copy_settings(self, folder: Path) -> None:
        """Puts the tokenizer, the configuration and the settings of generation beside what is written."""
        for file in self.folder.iterdir():
            if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder)


@contextmanager
def plain(run: str | Path, beside: Path, *, base: str | None = None) -> Iterator[Plain]:
    """Merges and writes a Hugging Face folder in `beside`, by `huggingface.write`, and removes it in the end.

    Args:
        run: as `open_model` takes it.

    Raises:
        RunError: as `huggingface.write`; a classifier or an encoder-decoder, which other formats have no place for.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = beside / "huggingface"
    made, held = huggingface.write_held(run, folder, dtype=torch.float32, base=base, final=False)
    try:
        if made["before"]["perplexity"] is None:
            raise RunError(f"{run}: is a classifier, and this format is for language models; use --to hf")
        if AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust.allowed()).is_encoder_decoder:
            raise RunError(f"{run}: is an encoder-decoder, and this format is for decoder-only models; use --to hf")
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=trust.allowed()
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust.allowed())
        known = [n for n in sorted(tokenizer.added_tokens_decoder) if n < model.config.vocab_size][:32]
        rows = shared.rows(tokenizer, facts(model.config).positions, known)
        notes = [made["note"]] if made["note"] else []
        wanted = shared.logits(model, rows)
        ends, turn = made["tokens_that_end"], made["turn_ends"]
        yield Plain(Path(run), folder, model.eval(), tokenizer, rows, wanted, made["merged"], ends, turn, notes, held)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require(to: str, *packages: str, extra: str | None = None) -> None:
    """Raises before any work is done where a package is not installed, with the command that installs it.

    Args:
        to: the format.
        packages: as they are imported.
        extra: of preheat, that brings them; named as the format when None.
    """
    import importlib.util

    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise RunError(f"--to {to}: needs {' and '.join(missing)}, not installed: pip install 'preheat[{extra or to}]'")
