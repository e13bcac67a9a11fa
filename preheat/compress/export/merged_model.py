"""The merged fp32 model that format writers start from, already verified against the run."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat import recipe as recipes
from preheat import remote_code
from preheat.compress.atomic_folder import choose_home
from preheat.compress.export import huggingface, verify
from preheat.compress.export.held_out_text import HeldOutText, Replay
from preheat.core.export import ExportResult
from preheat.data.tokenizer import load_tokenizer
from preheat.errors import RunError
from preheat.model_folder import count_embedding_rows, read_object
from preheat.models.hf import configure, read_facts
from preheat.recipe import Model, Recipe, Stop
from preheat.run.reader import Reader

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


__all__ = ["Plain", "build_configuration", "write_plain_model", "require"]


@dataclass
class Plain:
    """A language model to write in another format.

    Attributes:
        source: the exported model, as the user named it.
        folder: a temporary Hugging Face folder of it, in fp32.
        model: plain transformers' class, fp32, on the CPU.
        rows: tokens to compare logits over, [1, length] each.
        reference_logits: its logits there, [1, length, vocabulary] each.
        merged: number of merged adapters.
        end_tokens: tokens that end a text.
        end_of_turn: the token that ends an answer, if the model was trained on chats.
        chats: True if it was trained on chats, rendered by the tokenizer's template.
        string: the string that ends an answer if no token does; else ''.
        notes: properties that the folder cannot express.
        held_out_text: text that perplexity is measured on.
    """

    source: Path
    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    rows: list[Tensor]
    reference_logits: list[Tensor]
    merged: int
    end_tokens: list[int]
    end_of_turn: int | None
    chats: bool
    string: str
    notes: list[str]
    held_out_text: HeldOutText

    def use(self, load: str, step: str, *, positions: int = 0) -> str:
        """Returns Python code for the card that decodes greedily until an end token, as `preheat generate` does.

        Args:
            load: lines that open the file.
            step: lines that compute `logits` [1, n, vocabulary] for the tokens `ids + answer`.
            positions: maximum sequence length of the file; 0: the model's.
        """
        positions = positions or read_facts(self.model.config).positions
        prompt = 'tokenizer.encode("Once upon a time")'
        if self.chats:
            prompt = (
                'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], '
                'add_generation_prompt=True)["input_ids"]'
            )
        condition = f"len(ids + answer) < {min(positions or 256, 256)} and not ends.intersection(answer)"
        text = "tokenizer.decode(answer, skip_special_tokens=True)"
        if self.string:
            condition, text = (
                f"{condition} and {self.string!r} not in tokenizer.decode(answer)",
                f"{text}.partition({self.string!r})[0]",
            )
        return (
            f'{load}\ntokenizer = transformers.AutoTokenizer.from_pretrained(".")\nids = {prompt}\n'
            f"answer, ends = [], {{{', '.join(map(str, self.end_tokens))}}}  # as in generation_config.json\n"
            f"while {condition}:\n{textwrap.indent(step, '    ')}\n    answer.append(int(logits[0, "
            f"-1].argmax()))\nprint({text})"
        )

    def finish(
        self, out: Path, file: Path, dtype: str, replay: Replay, bound: verify.Bound, *, reader: str
    ) -> ExportResult:
        """Compares a written file with the model and copies the settings beside it; returns the writer's result.

        Args:
            out: the folder of the export, under its final name.
            replay: computes the file's logits.
            reader: the runtime and its version.

        Raises:
            RunError: the difference exceeds the bound.
        """
        # The replay runs the written file in its own runtime.
        difference = verify.compare(self.reference_logits, replay(self.rows), self.rows)
        verify.refuse_beyond(difference, bound, str(out), "use --dtype float32, or raise --tolerance")
        self.copy_settings(file.parent)
        return ExportResult(
            path=str(out),
            bytes=verify.count_bytes(file.parent, file.name),
            dtype=dtype,
            merged=self.merged,
            read_by=reader,
            **vars(verify.build_comparison(difference, bound)),
            **vars(self.held_out_text.perplexities(difference, replay)),
            note="; ".join(self.notes),
        )

    def copy_settings(self, folder: Path) -> None:
        """Copies the tokenizer, configuration and generation settings to the export's folder."""
        for file in self.folder.iterdir():
            # Neither weights nor their index.
            if file.suffix in (".json", ".jinja") and not file.name.endswith(".index.json"):
                shutil.copy(file, folder)


@contextmanager
def write_plain_model(run: str | Path, parent: Path, *, base: str | None = None) -> Iterator[Plain]:
    """Context manager that writes the merged model to a temporary Hugging Face folder inside `parent`.

    Args:
        run: as `load_model` takes it.

    Raises:
        RunError: as `huggingface.write`; a classifier or an encoder-decoder, which other formats do not support.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = parent / "huggingface"
    # fp32, so that the other format rounds once, from full precision.
    summary, held_text = huggingface.write_held(run, folder, dtype=torch.float32, base=base, final=False)
    try:
        # Only classifiers have none.
        if summary.before.perplexity is None:
            raise RunError(f"{run}: is a classifier, and this format is for language models; use --to hf")
        if AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote_code.is_allowed()
        ).is_encoder_decoder:
            raise RunError(f"{run}: is an encoder-decoder, and this format is for decoder-only models; use --to hf")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=remote_code.is_allowed()
        )
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote_code.is_allowed()
        )
        # Rows of added tokens too; at most 32, which fit into one row. Some tokenizers have more tokens than rows.
        known = [n for n in sorted(tokenizer.added_tokens_decoder) if n < model.config.vocab_size][:32]
        rows = verify.tokenize_samples(tokenizer, read_facts(model.config).positions, known)
        notes = [summary.note] if summary.note else []
        # Of the folder's model, which `write_held` has compared with the run.
        wanted = verify.compute_logits(model, rows)
        yield Plain(
            source=Path(run),
            folder=folder,
            model=model.eval(),
            tokenizer=tokenizer,
            rows=rows,
            reference_logits=wanted,
            merged=summary.merged or 0,
            end_tokens=list(summary.tokens_that_end),
            end_of_turn=summary.turn_ends,
            chats=summary.chats,
            string=summary.string_ends,
            notes=notes,
            held_out_text=held_text,
        )
    finally:
        # Also if the writer fails: its weights must not end up in the export.
        shutil.rmtree(folder, ignore_errors=True)


def build_configuration(run: str | Path, base: str | None = None) -> PretrainedConfig | None:
    """Returns the configuration of a model to export, as it is trained; None if its files do not tell.

    Args:
        run: a run or a checkpoint of it, a model's folder, or an adapter's.
        base: as in `open_model`.
    """
    path, _ = choose_home(run)
    vocabulary = None
    if (path / "recipe.yaml").is_file():
        recipe = recipes.parse(Reader(path).recipe_text, where=str(path / "recipe.yaml"))
        folder = recipe.model.path
        if folder is not None and base is not None:
            recipe = replace(recipe, model=replace(recipe.model, path=base))
        elif folder is not None and not Path(folder).is_dir():
            return None  # `load_model` looks for where it is now
        if folder is None and recipe.model.vocab_size is None and (path / "tokenizer").is_dir():
            # A model without a size of its own has a row for each token of the run's tokenizer.
            vocabulary = count_embedding_rows(load_tokenizer(str(path / "tokenizer")))
    else:
        named: object = str(path)
        if (path / "adapter_config.json").is_file():
            named = base or read_object(path / "adapter_config.json", "adapter").get("base_model_name_or_path")
        if not isinstance(named, str) or not (Path(named) / "config.json").is_file():
            return None
        recipe = Recipe(name="export", model=Model(path=named), stop=Stop(max_steps=1))
        recipe = replace(recipe, batch=replace(recipe.batch, seq_len=2))
    return configure(recipe, vocabulary)


def require(to: str, *packages: str, extra: str | None = None) -> None:
    """Raises RunError if a package is not installed, with the command that installs it; called before any work is done.

    Args:
        to: the format.
        packages: import names.
        extra: preheat's extra that installs them; None: the format's name.
    """
    import importlib.util

    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise RunError(f"--to {to}: needs {' and '.join(missing)}, not installed: pip install 'preheat[{extra or to}]'")
