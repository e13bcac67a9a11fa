"""Teacher and student models: builds the teacher, and picks the layers to compare and to initialize from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.core import Axis, Batch, Build, Context, ModelFacts, Slot, Stage, Tag
from preheat.errors import RecipeError
from preheat.models import hf

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.models.weights import WeightSource
    from preheat.recipe import Recipe

__all__ = [
    "MAPS",
    "Teacher",
    "add_maps",
    "init_from_layers",
    "compared_layers",
    "read_config",
    "build_teacher",
    "is_read_from_teacher",
    "find_row_problems",
    "space_layers",
    "find_spacing_problems",
    "capture_hidden",
]

MAPS = "preheat_maps"
"""Attribute of a student with its linear maps to the teacher's width: trained with it, and not exported."""


def read_config(folder: Path, length: int) -> PretrainedConfig:
    """The configuration of a frozen model, from its Hugging Face folder.

    Args:
        length: of the rows that it must be able to read.

    Raises:
        RecipeError: the model cannot be a teacher; the message begins with `teacher:`.
    """
    from preheat.recipe import Batch, Model, Recipe, Stop

    if (folder / "recipe.yaml").is_file():
        raise RecipeError(
            f"teacher: {folder} is a run; export it first (preheat export {folder} --to hf), and name that folder"
        )
    if (folder / "adapter_config.json").is_file():
        raise RecipeError(
            f"teacher: {folder} is an adapter; merge it into its base first (preheat export {folder} --to hf), and "
            "name that folder"
        )
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"teacher: {folder} has no config.json; name the folder of a Hugging Face model (download one of the "
            "hub's first)"
        )
    try:
        # The recipe of a teacher alone: its folder and the length of the rows that it has to read.
        config = hf.configure(
            Recipe(model=Model(path=str(folder)), batch=Batch(seq_len=length), stop=Stop(max_steps=1))
        )
    except RecipeError as error:
        raise RecipeError(f"teacher: {error}") from None
    if getattr(config, "quantization_config", None):
        raise RecipeError(
            f"teacher: {folder} is stored quantized, which a teacher cannot be yet; name the original model"
        )
    return config


def build_teacher(config: PretrainedConfig, *, bf16: bool) -> PreTrainedModel:
    """Builds a frozen model on the meta device, without dropout; parameters in bf16, or as its folder's are built."""
    import torch

    model = hf.build_on_meta(config).requires_grad_(False).eval()
    if bf16:
        for p in model.parameters():  # not buffers: rotary tables need fp32
            p.data = p.data.to(torch.bfloat16)
    return model


@dataclass(frozen=True)
class Teacher:
    """The teacher of a build: runs on micro-batches through the build's own slots and contexts.

    Attributes:
        windowed: an attention kernel with windows and capped scores, which the student's may not support.
    """

    build: Build
    model: PreTrainedModel
    facts: ModelFacts
    windowed: Callable[..., Tensor]

    def read(self, batch: Batch, places: int = 0) -> tuple[Tensor, list[Tensor]]:
        """Its last hidden states in the matmul dtype, and the compared hidden states; without gradients."""
        import torch

        def run() -> Tensor:
            # The student's kernel was chosen for the student, and may lack the window or cap of its teacher.
            if (self.facts.window or self.facts.score_softcap) and self.build.owner(Slot.ATTENTION_KERNEL) != "plain":
                return hf.hidden_states(self.model, batch.tokens, batch.positions, batch.mask, self.windowed)
            hidden: Tensor = self.build.slot(Slot.HIDDEN)(self.model, batch)
            return hidden

        # The scope gathers a sharded teacher's weights around the whole pass.
        with torch.no_grad():
            last, states = self.build.slot(Slot.UNSHARD_SCOPE)(
                self.model, lambda: capture_hidden(self.model, places, run)
            )
        kind = last.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else last.dtype
        return last.to(dtype), states


def compared_layers(layers: int, matched: int) -> list[int]:
    """Indices of the layers compared in addition to the last hidden states; `matched` in all, evenly spaced in depth.

    Example:
        >>> compared_layers(12, 3), compared_layers(6, 3), compared_layers(6, 1)
        ([3, 7], [1, 3], [])
    """
    # The last of the `matched` states is the model's output, so only matched - 1 are taken from layers.
    return [round(n * layers / matched) - 1 for n in range(1, matched)]


def capture_hidden(model: PreTrainedModel, matched: int, run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Runs `run`, a pass through the model, and captures the compared hidden states, the last among them.

    Args:
        matched: number of compared hidden states; 0: none.
    """
    from torch import Tensor

    states: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
        states.append(out if isinstance(out, Tensor) else out[0])

    # Hooks rather than `output_hidden_states`, which keeps the states of all layers in memory.
    layers = hf.find_anatomy(model).layers
    hooks = [layers[n].register_forward_hook(keep) for n in compared_layers(len(layers), matched)]
    try:
        last = run()
    finally:
        for hook in hooks:
            hook.remove()
    return last, [*states, last] if matched else []


def add_maps(student: PreTrainedModel, width: int, matched: int, weights: WeightSource) -> nn.ModuleList:
    """Gives a student on meta one linear map from its width to the teacher's per compared hidden state, in place.

    Initialized as the identity for equal widths, otherwise orthogonal.

    Args:
        weights: the student's, which will initialize them.
    """
    from torch import nn

    own = student.config.get_text_config().hidden_size
    dtype = next(p.dtype for p in student.parameters() if p.requires_grad)  # FSDP gathers them in one buffer

    def draw(module: Any) -> None:
        for linear in module:
            (nn.init.eye_ if linear.in_features == linear.out_features else _init_orthogonal)(linear.weight)

    maps = nn.ModuleList(nn.Linear(own, width, bias=False, device="meta", dtype=dtype) for _ in range(matched))
    student.add_module(MAPS, maps)
    weights.fresh(rf"^{MAPS}\.", [MAPS], draw)
    return maps


def _init_orthogonal(weight: Tensor) -> None:
    from torch import nn

    weight.copy_(nn.init.orthogonal_(weight.float()))


def space_layers(layers: int, of: int) -> list[int]:
    """`layers` of `of` layers, evenly spaced, including the first and the last.

    Example:
        >>> space_layers(3, 5), space_layers(1, 5)
        ([0, 2, 4], [4])
    """
    return [round(n * (of - 1) / (layers - 1)) for n in range(layers)] if layers > 1 else [of - 1]


def init_from_layers(student: PreTrainedModel, weights: WeightSource, of: int) -> list[int]:
    """Initializes a student from evenly spaced layers of a folder with `of` layers. Returns their indices.

    Raises:
        RecipeError: layers are of several kinds, so one cannot be initialized from another.
    """
    if len(kinds := set(getattr(student.config.get_text_config(), "layer_types", None) or ())) > 1:
        raise RecipeError(
            f"techniques.distillation.layers: the teacher's layers are of several kinds ({', '.join(sorted(kinds))}), "
            "so one cannot start as another; use layers: own"
        )
    layers = hf.find_anatomy(student).layers
    (name,) = (name for name, module in student.named_modules() if module is layers)
    # Values are redirected as they are read: layer n of the student gets those of layer chosen[n] of the folder.
    chosen, at = space_layers(len(layers), of), re.compile(rf"^{re.escape(name)}\.(\d+)\.")

    def other(parameter: str, value: Tensor) -> Tensor:
        match = at.match(parameter)
        assert match is not None
        return weights.read(f"{name}.{chosen[int(match[1])]}.{parameter[match.end() :]}")

    weights.map(at.pattern, other)
    # Without it every skipped layer would be reported as unused.
    weights.leave(at.pattern)
    return chosen


def find_spacing_problems(recipe: Recipe, teacher: Path, layers: int, found: int) -> list[str]:
    """Why a student cannot be initialized from evenly spaced layers of its teacher; each message begins with the knob.

    Args:
        layers, found: of the student, and of the teacher.
    """
    why = []
    if not is_read_from_teacher(recipe, teacher):
        why.append(
            "layers: spread is for a student initialized from the teacher: set model.path to the teacher, and "
            "model.config: {num_hidden_layers: N}"
        )
    elif layers >= found:
        why.append(
            f"layers: spread needs fewer layers than the teacher's {found}; set model.config: {{num_hidden_layers: N}}"
        )
    others = [name for name, t in recipe.techniques.items() if t.stage <= Stage.ADAPT]
    if others:
        why.append(
            f"layers: spread changes which layers are loaded, and {others[0]} changes them; leave one out (or export "
            "such a student first)"
        )
    return why


def is_read_from_teacher(recipe: Recipe, teacher: Path) -> bool:
    """True if a recipe's weights are read from its teacher's folder."""
    model = recipe.model
    return model.path is not None and model.weights != "random" and Path(model.path).resolve() == teacher.resolve()


def find_row_problems(context: Context, *, cached: bool, hidden: bool, writes: bool, common: bool) -> list[str]:
    """Conflicts of cached teacher outputs, on-policy answers and common pieces; each message begins with the knob.

    Args:
        cached: teacher outputs are cached on disk; hidden: hidden states are compared; writes: the student generates
            answers; common: the teacher has another tokenizer.
    """
    tags = context.tags
    shared = Tag.SHARDED_WEIGHTS in tags or context.recipe.parallel.engine == "deepspeed"
    cut = context.sizes[Axis.CONTEXT] > 1
    reasons = (
        (cached and hidden, "cache: holds no hidden states; set hidden: 0, or leave cache out"),
        (
            cached and context.recipe.data.streaming,
            "cache: streamed rows have no index to look them up by; set data.streaming: false",
        ),
        (
            cached and Tag.GROWING_LENGTH in tags,
            "cache: holds whole sequences, and shorter ones are cut from them here; leave one out",
        ),
        (
            writes and cached,
            "on_policy: the student generates new text in every step, and cache holds the teacher's outputs for the "
            "data; leave one out",
        ),
        (
            writes and shared,
            "on_policy: the student generates a different number of tokens on each device, for which sharded weights "
            "(fsdp, expert_parallel, deepspeed) would wait; use data_parallel, or leave it out",
        ),
        (
            writes and cut,
            "on_policy: sequences that are split across devices (context_parallel) cannot be generated; leave one out",
        ),
        (
            common and cut,
            "pieces: common reads whole documents, and context_parallel splits sequences across devices; leave one out",
        ),
    )
    return [message for applies, message in reasons if applies]
