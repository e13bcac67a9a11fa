"""The columns of the matrix of architectures: each does one thing with a tiny model and compares it with transformers."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from preheat import recipe as recipes
from preheat.cli import main
from preheat.core import Batch
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients
from preheat.errors import PreheatError
from preheat.inference.load import load_model
from preheat.models import alibi, configs, hf, moe
from preheat.models.token_mixers import find_attentions, find_recurrent_mixers
from preheat.run.reader import Reader
from preheat.sanitize import escape_control_characters

from ..conftest import DEVICE, difference, uneven
from .tiny import create_model, tiny_config

__all__ = ["COLUMNS", "PROMPT", "Subject", "channel_mixers", "fault_of", "token_mixers", "write_data"]

VOCABULARY = 320
PROMPT = "the cat sat"
RECIPE = """\
model: {path: model}
data: {source: ../rows.jsonl, validation: 0.1}
batch: {size: 4, seq_len: 32}
optimizer: {lr: 0.01}
stop: {max_steps: 4}
checkpoint: {every: 2}
techniques: {efficient_attention: {}}
"""
BALANCED = ("mixtral", "qwen3_moe", "qwen2_moe")
"""Families whose load-balancing loss preheat adds by default: without it the loss is that of the labels alone."""


class Double(TorchFunctionMode):
    """Context manager in which functions that name fp32 take fp64: models compute norms, softmax and states in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def doubled(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if getattr(func, "__name__", "") in ("_grouped_mm", "grouped_mm") and args[0].dtype == torch.float64:
            func = _grouped_product  # torch's has no fp64
        return func(*map(doubled, args), **{key: doubled(value) for key, value in (kwargs or {}).items()})


def _grouped_product(rows: Tensor, weights: Tensor, offs: Tensor, **settings: Any) -> Tensor:
    """Multiplies the rows up to each offset by a matrix of their own: [n, i] x [groups, i, o] -> [n, o]."""
    ends = offs.tolist()
    parts = [rows[a:b] @ w for a, b, w in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


def write_data(folder: Path) -> None:
    """Writes the rows and the tokenizer that all architectures share."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    generator = random.Random(0)
    words = ["the", "a", "cat", "dog", "sat", "on", "mat", "red", "blue", "house", "tree", "runs", "then", "sleeps"]
    texts = [" ".join(generator.choice(words) for _ in range(generator.randint(5, 40))) + "." for _ in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "tokenizer")


class Subject:
    """A tiny model of an architecture in a folder of its own, with what several columns share."""

    def __init__(self, name: str, parent: Path, config: Any = None):
        self.name, self.folder = name, parent / name
        shutil.copytree(parent / "tokenizer", self.folder / "model")
        more = {"vocab_size": VOCABULARY}
        self.config = config or tiny_config(name, **more)
        if config is None and getattr(self.config, "vocab_size_per_layer_input", 0):
            self.config = tiny_config(name, **more, vocab_size_per_layer_input=VOCABULARY)
        configs.disable_dropout(self.config)
        if name in BALANCED:
            self.config.router_aux_loss_coef = 0.0
        self.model = create_model(self.config)
        # A training class may scale its output norm otherwise; all start from the same files.
        self.model.save_pretrained(self.folder / "model")
        (self.folder / "r.yaml").write_text(RECIPE)

    def run(self, *arguments: str) -> str:
        """Runs a command in this process and returns its output.

        Raises:
            PreheatError: it was refused, with the one line that it printed.
        """
        out, error = io.StringIO(), io.StringIO()
        code: Any = 0
        with (
            contextlib.chdir(self.folder),
            mock.patch.object(sys, "stdin", io.StringIO()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(error),
        ):
            try:
                main(list(arguments))
            except SystemExit as ended:
                code = ended.code
        if code:
            lines = [line for line in error.getvalue().splitlines() if line.startswith("error: ")]
            assert len(lines) == 1, error.getvalue()
            raise PreheatError(lines[0].removeprefix("error: "))
        return out.getvalue()

    def recipe(self, techniques: str) -> recipes.Recipe:
        return recipes.parse(
            RECIPE.replace("path: model", f"path: {self.folder / 'model'}")
            .replace("{efficient_attention: {}}", f"{{{techniques}}}")
            .replace("../rows.jsonl", str(self.folder.parent / "rows.jsonl"))
        )

    def loss_and_gradients(self, techniques: str, *, double: bool = False) -> tuple[float, dict[str, Any]]:
        """What preheat computes for the packed rows of `batch`, in fp32 or fp64."""
        build_ = build(self.recipe(techniques), vocabulary=VOCABULARY, device=DEVICE)
        if double:
            build_.trained[0].double()
        with Double() if double else contextlib.nullcontext():
            loss = accumulate_gradients(build_, [self.batch])
        grads = {key: p.grad for key, p in build_.trained[0].named_parameters() if p.grad is not None}
        return float(loss.total.detach() / loss.weight), grads

    @functools.cached_property
    def batch(self) -> Batch:
        return uneven()

    @functools.cached_property
    def alone(self) -> tuple[float, dict[str, Any]]:
        """The same by transformers' own eager forward, each document a call of its own."""
        return self._documents(self.model)

    def _documents(self, model: Any) -> tuple[float, dict[str, Any]]:
        model, batch = model.train(), self.batch
        total = torch.zeros((), dtype=model.dtype)
        for row, documents in enumerate(batch.mask.documents):
            start = 0
            for n in documents:
                span = slice(start, start + n)
                logits = model(input_ids=batch.tokens[row : row + 1, span], use_cache=False).logits[0].float()
                total = total + functional.cross_entropy(
                    logits, batch.labels[row, span], ignore_index=-100, reduction="sum"
                )
                start += n
        (total / batch.weight).backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return float(total.detach() / batch.weight), grads

    def forget(self) -> None:
        """Frees the model and what was computed by it."""
        del self.model
        self.__dict__.pop("alone", None)

    @functools.cached_property
    def trained(self) -> Path:
        self.run("train", "r.yaml", "--out", "run")
        return self.folder / "run"

    @functools.cached_property
    def exported(self) -> Path:
        self.run("export", self.trained.name, "--to", "hf", "--out", "exported")
        return self.folder / "exported"

    def compare(self, techniques: str) -> None:
        """Compares packed loss and gradients with those of transformers, one document at a time."""
        loss, grads = self.loss_and_gradients(techniques)
        expected, theirs = self.alone
        assert abs(loss - expected) <= 1e-5 * abs(expected), f"the loss is {loss}, transformers has {expected}"
        # The chunks of a delta rule sum exponentials in another order for other lengths: transformers' own gradients are
        # 4e-5 from those in fp64.
        bound = 2e-5 if hasattr(self.config, "linear_num_key_heads") else 1e-5
        assert (worst := difference(grads, theirs)) < bound, f"gradients differ by {worst:.1e}"

    def compare_in_double(self) -> None:
        """Compares the same in fp64, without recomputation: what it computes in backward would be in fp32."""
        loss, grads = self.loss_and_gradients("efficient_attention: {}", double=True)
        with Double():
            expected, theirs = self._documents(copy.deepcopy(self.model).double())
        assert abs(loss - expected) <= 1e-12 * abs(expected), f"in fp64 the loss is {loss}, transformers has {expected}"
        assert (worst := difference(grads, theirs)) < 1e-10, f"in fp64 gradients differ by {worst:.1e}"

    def compare_logits(self, run: str, folder: str) -> None:
        """Compares a run's model with the folder that it was exported to, as transformers reads it."""
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(self.folder / folder, dtype=torch.float32).eval()
        with contextlib.chdir(self.folder):  # the recipe names its model relative to where it was started
            ours: Any = load_model(run).build.trained[0]
        tokens = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            expected = theirs(input_ids=tokens, use_cache=False).logits.float()
        logits = hf.compute_reference_logits(ours, tokens)
        worst = float((logits - expected).norm() / expected.norm())
        assert worst < 1e-5, f"logits differ by {worst:.1e}"
        before = hf.compute_reference_logits(self.model, tokens)
        assert float((before - expected).norm()) > 1e-3 * float(expected.norm()), "training changed nothing"


def plan(subject: Subject) -> None:
    summary = json.loads(subject.run("plan", "r.yaml", "--json"))
    assert summary["fits"] is True, summary


def packed(subject: Subject) -> None:
    subject.compare("efficient_attention: {}")
    subject.compare_in_double()


def checkpointing(subject: Subject) -> None:
    subject.compare("efficient_attention: {}, activation_checkpointing: {}")


def chunked_loss(subject: Subject) -> None:
    subject.compare("chunked_loss: {rows: 40}")


def resume(subject: Subject) -> None:
    shutil.copytree(subject.trained, subject.folder / "resumed")
    shutil.rmtree(subject.folder / "resumed" / "checkpoints" / "step-4")
    subject.run("train", "r.yaml", "--out", "resumed", "--resume")
    runs = [{row.step: row.loss for row in Reader(subject.folder / name).metrics()} for name in ("run", "resumed")]
    assert len(runs[0]) == 4
    assert runs[0] == runs[1], f"losses differ: {runs}"


def export(subject: Subject) -> None:
    subject.compare_logits(subject.trained.name, subject.exported.name)


def generation(subject: Subject) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = json.loads(
        subject.run(
            "generate", subject.trained.name, "--prompt", PROMPT, "--tokens", "12", "--temperature", "0", "--json"
        )
    )["text"]
    model = AutoModelForCausalLM.from_pretrained(subject.exported, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(subject.exported)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True)
    expected = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    assert escape_control_characters(text) == escape_control_characters(expected), f"{text!r} is not {expected!r}"


def lora(subject: Subject) -> None:
    settings = "{expert_rank: 4}" if moe.experts_of(subject.model) else "{}"
    subject.run("train", "r.yaml", "--out", "adapted", "--set", f"techniques.lora={settings}")
    subject.run("export", "adapted", "--to", "hf", "--out", "merged")
    subject.compare_logits("adapted", "merged")


COLUMNS: dict[str, Callable[[Subject], None]] = {
    "plan": plan,
    "packed loss and gradients": packed,
    "checkpointing": checkpointing,
    "chunked loss": chunked_loss,
    "resume": resume,
    "export": export,
    "generation": generation,
    "LoRA": lora,
}
"""Title -> what is done. FSDP runs for all architectures in one start of two processes (fsdp.py)."""


def token_mixers(model: Any) -> list[str]:
    """The kinds of token mixers of a model's layers."""
    kinds = []
    alibi.replace_alibi(model)  # by which their attention is found; transformers' own forward stays
    count = model.config.num_hidden_layers
    stacks = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    for layer in next(stacks):
        for mixer in find_recurrent_mixers(layer):
            kinds.append(_recurrent(type(mixer).__name__, mixer._parameters))
        for mixer in find_attentions(layer):
            config: Any = getattr(mixer, "config", model.config)
            number = getattr(mixer, "layer_idx", 0)
            kind = (getattr(config, "layer_types", None) or [""] * (number + 1))[number]
            window = getattr(mixer, "sliding_window", None) or getattr(config, "sliding_window", None)
            name = "attention"
            if "chunked" in kind:
                name = "chunked attention"
            elif "sliding" in kind or (window and not kind):
                name = "sliding window"
            if hasattr(mixer, "kv_b_proj"):
                name = "latent attention"
            if model.config.model_type in alibi.FAMILIES:
                name = "attention with ALiBi"
            kinds.append(f"{name} with sinks" if "sinks" in mixer._parameters else name)
    return list(dict.fromkeys(kinds))


def _recurrent(name: str, parameters: Any) -> str:
    if "DeltaNet" in name or "DeltaAttention" in name:
        return "gated delta net"
    if "Conv" in name:
        return "short convolution"
    if "D" in parameters:
        return "Mamba-2" if "dt_bias" in parameters else "Mamba"
    return "lightning attention" if "Lightning" in name else name


def channel_mixers(config: Any) -> str:
    """What follows the token mixers: dense blocks, experts, or both."""
    experts = moe.expert_layers(config)
    shared = " with a shared one" if moe.shared_width(config) else ""
    if not experts:
        return "dense" if getattr(config, "intermediate_size", None) or config.model_type == "gpt2" else "none"
    return f"experts{shared}" + ("" if experts == config.num_hidden_layers else ", dense")


def fault_of(column: Callable[[Subject], None], subject: Subject) -> str:
    """Returns "" if the column works, else the one line of the refusal; any other error goes on to the caller."""
    try:
        column(subject)
    except PreheatError as error:
        reason = str(error)
    else:
        reason = ""
    assert "\n" not in reason, reason
    return reason


@dataclass(frozen=True)
class Row:
    """One architecture of the page."""

    name: str
    token_mixers: str
    channel_mixers: str
    cells: dict[str, str]
