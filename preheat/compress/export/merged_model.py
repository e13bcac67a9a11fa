"""What is exported as plain transformers has it: adapters merged, in fp32, already compared with the run."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preheat import remote_code
from preheat.compress.export import huggingface, verify
from preheat.compress.export.held_out_text import Held
from preheat.errors import RunError
from preheat.models.hf import facts

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
        chats: it was trained on chats, laid out by the tokenizer's template.
        string: what ends an answer where no token does; '' otherwise.
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
    chats: bool
    string: str
    notes: list[str]
    held: Held

    def use(self, load: str, step: str, *, positions: int = 0) -> str:
        """Lines of Python for the card that write what `preheat generate` writes: the likeliest token, until one that ends.

        Args:
            load: lines that open the file.
            step: lines that give `logits` [1, n, vocabulary] for the tokens `ids + answer`.
            positions: that the file takes; those of the model where 0.
        """
        positions = positions or facts(self.model.config).positions
        asked = 'tokenizer.encode("Once upon a time")'
        if self.chats:
            asked = 'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)["input_ids"]'
        going = f"len(ids + answer) < {min(positions or 256, 256)} and not ends.intersection(answer)"
        text = "tokenizer.decode(answer, skip_special_tokens=True)"
        if self.string:
            going, text = (
                f"{going} and {self.string!r} not in tokenizer.decode(answer)",
                f"{text}.partition({self.string!r})[0]",
            )
        return (
            f'{load}\ntokenizer = transformers.AutoTokenizer.from_pretrained(".")\nids = {asked}\n'
            f"answer, ends = [], {{{', '.join(map(str, self.ends))}}}  # as in generation_config.json\n"
            f"while {going}:\n{textwrap.indent(step, '    ')}\n    answer.append(int(logits[0, -1].argmax()))\nprint({text})"
        )

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
        if AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote_code.allowed()
        ).is_encoder_decoder:
            raise RunError(f"{run}: is an encoder-decoder, and this format is for decoder-only models; use --to hf")
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=remote_code.allowed()
        )
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote_code.allowed()
        )
        known = [n for n in sorted(tokenizer.added_tokens_decoder) if n < model.config.vocab_size][:32]
        rows = verify.rows(tokenizer, facts(model.config).positions, known)
        notes = [made["note"]] if made["note"] else []
        wanted = verify.logits(model, rows)
        yield Plain(
            source=Path(run),
            folder=folder,
            model=model.eval(),
            tokenizer=tokenizer,
            rows=rows,
            wanted=wanted,
            merged=made["merged"],
            ends=made["tokens_that_end"],
            turn=made["turn_ends"],
            chats=made["chats"],
            string=made["string_ends"],
            notes=notes,
            held=held,
        )
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
