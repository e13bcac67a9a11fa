"""Dry runs of the phases outside training steps: load, checkpoint, evaluation, sample generation.

Each phase runs the real code on fake tensors if that code reads no values. If it does (initialization, sampling), that
code is asked for its memory, or a pass that needs at least as much is recorded instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from preheat.core import STEP, Batch, Build, Images, MaskSpec, Phase, Shape, Slot, Vision
from preheat.data.rows.example_kinds import examples_of
from preheat.engine.async_checkpoint import count_host_bytes
from preheat.engine.step import forward, transform
from preheat.models.vision import set_attention
from preheat.planning.dispatch_recorder import Recorder
from preheat.recipe import Recipe

__all__ = [
    "run_evaluation",
    "build_fake_batch",
    "run_generation",
    "run_load",
    "run_dataset_passes",
    "run_saving",
    "track_phases",
]

_PROMPTS = 8  # prompts per batch, as in `models.generation.generate.generate`


def build_fake_batch(recipe: Recipe, rows: int, vision: Vision | None = None) -> Batch:
    """Returns a micro-batch of the recipe's shape, one example per row; a dry run does not read its contents.

    Args:
        vision: image layout of the model: each row then has the images of the recipe (`data.images`,
            `data.image_pixels`), or as many as fit.
    """
    length, kind = recipe.batch.seq_len, examples_of(recipe).kind
    tokens, labels, positions = (torch.empty(rows, length, dtype=torch.int64) for _ in range(3))
    if kind == "pairs":
        # A row of a preference pair holds both answers as two documents of half the length.
        mask = MaskSpec(documents=((length - length // 2, length // 2),) * rows)
        return Batch(tokens, labels, positions, mask, rows, tuple(range(rows)), group=2)
    if kind == "desirable":
        mask = MaskSpec(documents=((length,),) * rows)
        return Batch(tokens, labels, positions, mask, rows, tuple(range(rows)), desirable=((1,),) * rows)
    plain = Batch(tokens, labels, positions, MaskSpec(), rows * length, tuple(range(rows)))
    if vision is None:
        return plain
    if vision.mrope:
        plain = replace(plain, positions=torch.empty(rows, length, 3, dtype=torch.int64))
    return replace(plain, images=_build_fake_images(recipe, rows, vision))


def _build_fake_images(recipe: Recipe, rows: int, vision: Vision) -> Images:
    data, token = recipe.data, vision.merge**2  # patches per token
    grid = vision.grid(data.image_pixels)
    each = math.prod(grid) // token
    in_row = min(round(data.images * each), recipe.batch.seq_len - 1)  # tokens
    full, rest = divmod(in_row, each)
    if vision.tile:  # the tower takes whole squares only; the last image has fewer tokens than they make
        grids = ((grid,) * full + ((grid,) if rest else ())) * rows or (vision.blank,)
    else:
        grids = ((grid,) * full + (((vision.merge, rest * vision.merge),) if rest else ())) * rows or (vision.blank,)
    patches = sum(math.prod(each) for each in grids)
    inputs = {} if vision.tile else {"position_ids": torch.empty(patches, 2, dtype=torch.int64)}
    if vision.side:
        inputs["interp_indices"] = torch.empty(patches, 4, dtype=torch.int64)
        inputs["interp_weights"] = torch.empty(patches, 4)
    windows: list[int] = []
    if vision.window:
        inputs["window_index"] = torch.empty(patches // token, dtype=torch.int64)
        windows = [size for each in grids for size in vision.windows(*each)]
    return Images(
        torch.empty(patches, vision.values),
        inputs,
        torch.empty(rows * in_row, dtype=torch.int64),
        grids,
        tuple(windows),
    )


def track_phases(build: Build, recorder: Recorder) -> None:
    """Wraps the build's slots in place so that the recorder knows the phase: forward, head and loss, backward."""

    def run_in_phase(slot: Slot, during: Phase, then: Phase) -> None:
        inner = build.slot(slot)

        def run_tracked(*args: object, **kwargs: object) -> object:
            # Evaluation and generation run the same slots and keep their own phase.
            if recorder.phase not in STEP:
                return inner(*args, **kwargs)
            recorder.phase = during
            try:
                return inner(*args, **kwargs)
            finally:
                recorder.phase = then

        # The owner stays: it is reported in the plan, and this wrapper is no technique.
        build.claim(slot, run_tracked, build.owner(slot))

    run_in_phase(Slot.HIDDEN, Phase.FORWARD, Phase.FORWARD)
    # Head and loss last until the pass ends or the next one through the layers begins.
    run_in_phase(Slot.OVER_LOGITS, Phase.HEAD_AND_LOSS, Phase.HEAD_AND_LOSS)
    # Hooks at the end of backward run outside autograd nodes, so the phase must be set here.
    run_in_phase(Slot.MODEL_LOSS, Phase.FORWARD, Phase.BACKWARD)


def run_load(build: Build, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the categories while weights are initialized or loaded; the optimizer states are created afterwards.

    Args:
        sizes: categories at the end of the build, which the dry run recorded without initializing values.
    """
    model = build.recipe.model
    # Drawing values and reading files need different temporary memory.
    drawn = model.weights == "random" or not (model.path or model.preset)
    kwargs = {"drawn": drawn, "on_cpu": build.device.kind == "cpu"}
    filling = max(
        build.sources[role].beside(part, drawn=False, on_cpu=kwargs["on_cpu"])
        if role in build.sources
        else build.weights.beside(part, **kwargs, at_home=build.storage_device is not None)
        for role, parts in build.parts.items()
        for part in parts
    )
    # Loading precedes the optimizer, so its states do not add to this peak.
    return {**sizes, "optimizer": 0, "temporary": filling}


def run_dataset_passes(build: Build, recorder: Recorder, recipe: Recipe, shape: Shape) -> None:
    """Runs the passes over the dataset before training, after the build and before the first step."""
    for beforehand in build.hooks.dataset_passes:
        recorder.begin(Phase.LOAD)
        recorder.place = "rows"
        beforehand.once(build_fake_batch(recipe, shape.micro, build.model.vision))
        recorder.place = ""


def run_saving(build: Build, recorder: Recorder) -> None:
    """Saves a checkpoint between two steps.

    On a CPU the files are assembled in the device's memory. `plan` adds the copy of async checkpointing.
    """
    recorder.begin(Phase.SAVING)
    needed = count_host_bytes(build)
    if build.device.kind == "cpu":
        # Freed at once, which is enough to record the peak.
        torch.empty(needed, dtype=torch.uint8)


def run_evaluation(build: Build, recorder: Recorder, recipe: Recipe, shape: Shape) -> None:
    """Evaluates one batch of validation rows."""
    recorder.begin(Phase.EVALUATION)
    for part in build.trained:
        part.eval()
    with torch.no_grad():
        rows = min(recipe.evaluate.micro_batch_size or shape.micro, shape.micro)
        forward(build, transform(build, build_fake_batch(recipe, rows, build.model.vision)))


def run_generation(build: Build, recorder: Recorder, recipe: Recipe) -> None:
    """Generates the recipe's samples, approximated by one prefill of the final length with logits of one token.

    Decoding token by token needs less memory for the same KV cache. A prompt has at most as many tokens as bytes.
    """
    prompts = [p if isinstance(p, str) else "".join(str(m["content"]) for m in p) for p in recipe.sample.prompts]
    if not recipe.sample.is_active:
        return
    recorder.begin(Phase.GENERATION)
    longest = max((len(p.encode()) for p in prompts), default=0)
    if recipe.sample.rows:  # the prompt of a row is shorter than the row
        longest = max(longest, recipe.batch.seq_len)
    length = longest + 1 + recipe.sample.max_new_tokens
    length = min(length, build.model.positions or length)
    tokens = torch.empty(min(len(prompts) + recipe.sample.rows, _PROMPTS), length, dtype=torch.int64)
    given = {"input_ids": tokens, "logits_to_keep": 1}
    if build.model.encoder:  # encoder reads the prompt, decoder generates the rest
        given = dict(
            zip(
                ("decoder_input_ids", "input_ids"),
                tokens.split([recipe.sample.max_new_tokens, length - recipe.sample.max_new_tokens], 1),
                strict=True,
            )
        )
    model: Any = build.trained[0]
    attention = model.config._attn_implementation
    # The build's attention function takes packed training batches; generation uses transformers' own.
    set_attention(model, "sdpa" if model._supports_sdpa else "eager")
    try:
        with torch.no_grad():
            model(**given, use_cache=True)
    finally:
        set_attention(model, attention)
