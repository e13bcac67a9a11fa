"""Predicted against published: memory and speed of training runs that others measured, from their settings alone.

    python benchmarks/published.py --runs IN.csv --gpus GPUS.csv --out OUT.csv [--jobs 2] [--new PREFIX ...]

Each row becomes a recipe (model by its sizes, mesh, micro-batch, precision, techniques), planned for its accelerator as `preheat plan` does.
What a row leaves open is what its trainer does by default (trainers.py), else what published_rows.py says for all rows. Of a row's notes only these
are read: which trainer ran (`find_trainer`), which layers adapters act on (`adapted`), which memory was read (`estimate_gib`), that lengths vary, that rows are
Alpaca's and that nothing is recomputed (`leaves_open`, `filled`); of its model's name the sizes if none are stated, and whether it is a GPT. Writes
`id,predicted_gib,low_gib,high_gib,predicted_tok_s,low_tok_s,high_tok_s,seconds,reason` (tokens a second of each accelerator; empty where it
cannot be said, with the reason) and prints errors by source.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from published_rows import (
    LENGTH,
    Open,
    add_time_settings,
    build_mesh,
    build_recipe,
    count_micro_batches,
    fill_defaults,
    is_by_transformer_engine,
    is_compiled,
    is_kept_as_transformers,
    is_underspecified,
    parse_integer,
    parse_number,
)
from trainers import Row, find_trainer

if TYPE_CHECKING:  # the import of preheat takes seconds
    from preheat.core.plan import Plan

COLUMNS = (
    "id",
    "predicted_gib",
    "low_gib",
    "high_gib",
    "predicted_tok_s",
    "low_tok_s",
    "high_tok_s",
    "seconds",
    "reason",
)

# What a plan refuses together is left out in this order, until the rest can be planned: each changes less than what stands behind it.
LESS = (
    "fused_operators",
    "fp8",
    "chunked_loss",
    "zero1",
    "optimizer_in_backward",
    "low_bit_adamw",
    "activation_offload",
    "efficient_attention",
    "gradient_accumulation",
)
# A run that was measured had room: what a row does not say and what frees memory, in the order in which it is tried.
MORE = (
    {"activation_checkpointing": "{}"},
    {"optimizer_offload": "{}"},
    {"optimizer_in_backward": "{}", "gradient_accumulation": None},
)


def plan_row(row: Row, recipe: Any, roofline: Any, *, timed: bool = False) -> tuple[Plan, Any]:
    """A plan of the recipe, or of the nearest that is not refused; `timed`: with its trainer's slower operators."""
    from dataclasses import replace

    from preheat.core import conflicts_of
    from preheat.engine.builder import build_context
    from preheat.models import hf
    from preheat.planning.layer_extrapolation import extrapolate_all_layers, observe_few_layers
    from preheat.planning.plan import describe
    from preheat.planning.request import Request

    config, by_hand = hf.configure(recipe, None), is_by_transformer_engine(row)
    eights, bits = by_hand, 4 if row["precision"].startswith("nvfp4") else 8
    device = replace(roofline.as_device, expandable=has_growing_segments(row, recipe, roofline))

    def list_problems(chosen: Any) -> list[Any]:
        return conflicts_of(chosen.techniques.values(), build_context(chosen, config, device))

    problems = list_problems(recipe)
    attention = recipe.techniques.get("efficient_attention")
    if problems and attention is not None:
        # FlashAttention has windows, which torch's kernel of that name lacks.
        other = replace(
            recipe, techniques={**recipe.techniques, "efficient_attention": replace(attention, kernel="auto")}
        )
        if len(list_problems(other)) < len(problems):
            recipe, problems = other, list_problems(other)
    for name in ("", *LESS):
        if name and (name not in recipe.techniques or not problems):
            continue
        without = replace(recipe, techniques={k: t for k, t in recipe.techniques.items() if k != name})
        remaining = list_problems(without) if name else problems
        if name and len(remaining) == len(problems):
            continue  # no conflict is about it
        recipe, problems = without, remaining
        if name == "fp8":
            eights = True
        if not problems:
            with patch_adapter_layers(row, timed=timed):
                # The allocations of all layers, as `preheat plan` replays them; a pipeline's fullest rank is found by the other.
                logged = extrapolate_all_layers(Request(recipe, device)) if parse_integer(row, "pp") == 1 else None
                seen = logged or observe_few_layers(Request(recipe, device))
            if eights:
                seen = replace(seen, kernels=Counter({_compute_in_bits(k, bits): n for k, n in seen.kernels.items()}))
            if by_hand and roofline.device.generation == "hopper":
                seen = replace(seen, kernels=Counter({_speed_up_to_cudnn(k): n for k, n in seen.kernels.items()}))
            if seen.idle:
                idle = (parse_integer(row, "pp") - 1) / (
                    count_micro_batches(row, build_mesh(row)[2]) * parse_integer(row, "vpp")
                )
                seen = replace(seen, idle=idle)
            if timed and find_trainer(row).bitsandbytes:
                seen = replace(seen, kernels=Counter({_slow_to_bitsandbytes(k): n for k, n in seen.kernels.items()}))
            if find_trainer(row).foreach_update:
                seen = replace(seen, kernels=Counter({_convert_to_foreach(k): n for k, n in seen.kernels.items()}))
            if find_trainer(row).overlaps_update:
                seen = replace(seen, kernels=Counter({_make_overlapped(k): n for k, n in seen.kernels.items()}))
            seen = replace(seen, compiled=is_compiled(row))
            return describe(Request(recipe, device, rates=roofline, in_use=0), seen), recipe
    raise Open("; ".join(map(str, problems)))


@contextlib.contextmanager
def patch_adapter_layers(row: Row, *, timed: bool) -> Iterator[None]:
    """Has dry runs compute adapters as the row's trainer does: by peft's own layers, whose product a compiler fuses.

    Timed ones also have what peft's layers copy and cast (`Trainer.peft_layers`); autocast casts inputs back.
    """
    from unittest import mock

    from peft.tuners.lora import Linear

    # `joint_lora` must have the class of our own layers when these are replaced, or it takes peft's for ours.
    from preheat.ops.adapters import joint_lora, peft_layers  # noqa: F401
    from preheat.techniques import mixed_precision

    class Cloned(Linear):  # type: ignore[misc]
        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward(x, *args, **kwargs).clone()

    trainer = find_trainer(row)
    with contextlib.ExitStack() as stack:
        if not (trainer.adds_in_place or is_compiled(row)):
            copies = timed and trainer.peft_layers
            layer = Cloned if copies and row["method"] == "qlora" else Linear
            stack.enter_context(mock.patch.object(peft_layers, "added_linear_class", return_value=layer))
            if copies and row["method"] == "lora":
                stack.enter_context(mock.patch.object(peft_layers, "prevent_fp32_cast"))
        if timed and not trainer.autocasts:
            without = contextlib.nullcontext()
            stack.enter_context(mock.patch.object(mixed_precision, "autocast", return_value=without))
        yield


def has_growing_segments(row: Row, recipe: Any, roofline: Any) -> bool:
    """Says whether the allocator's segments grow; AMD's driver cannot. In a pipeline neither kind of segments is believed, see `estimate_gib`."""
    trains_sharded = row["method"] == "pretrain" and "fsdp" in recipe.techniques and parse_integer(row, "pp") == 1
    return trains_sharded and find_trainer(row).expandable_segments and roofline.device.generation != "cdna"


def _compute_in_bits(kernel: Any, bits: int) -> Any:
    """A matrix product in fp8, where what computes it so was left out, or in fp4, of which data sheets have twice as many; anything else as it is."""
    from dataclasses import replace

    if not kernel.flops or "attention" in kernel.operator:
        return kernel
    return replace(kernel, dtype="float8", flops=kernel.flops * bits // 8)


def _make_overlapped(kernel: Any) -> Any:
    """Returns a collective of the update as one that overlaps with compute."""
    from dataclasses import replace

    return replace(kernel, alone=False) if kernel.group is not None else kernel


def _slow_to_bitsandbytes(kernel: Any) -> Any:
    """Dequantization of NF4 at bitsandbytes' rate: 1.5 times as long as plans, on an H100 (results/gpu_layer.md)."""
    from dataclasses import replace

    if kernel.operator != "preheat::nf4_values":
        return kernel
    return replace(kernel, bytes_read=int(1.5 * kernel.bytes_read), bytes_written=int(1.5 * kernel.bytes_written))


def _convert_to_foreach(kernel: Any) -> Any:
    """Returns a fused AdamW as torch's foreach one, whose kernels read and write each state again."""
    from dataclasses import replace

    if kernel.operator != "_fused_adamw_":
        return kernel
    return replace(kernel, bytes_read=3 * kernel.bytes_read, bytes_written=3 * kernel.bytes_written)


def _speed_up_to_cudnn(kernel: Any) -> Any:
    """Attention on Hopper, which plans have at FlashAttention 2's rate, at 1.5 times that: the least that FlashAttention 3 says of itself (arXiv:2407.08608); cuDNN's is taken to be near."""
    from dataclasses import replace

    return replace(kernel, flops=int(kernel.flops / 1.5)) if "attention" in kernel.operator else kernel


def estimate_gib(row: Row, made: Plan, recipe: Any) -> float:
    """Returns the memory that the row's trainer reports: allocated, reserved, or reserved with the driver's context; its notes may name which."""
    words = re.search("nvidia-smi|allocated|active memory|reserved", row["notes"])
    memory = words[0] if words else find_trainer(row).reports
    reserved, allocated = (
        size + made.overhead["workspaces"] for size in (made.reserved_gib, made.allocated_gib)
    )  # torch's own
    reserved = min(reserved, made.available_gib - made.overhead["context"])  # it had room
    if "pipeline_parallel" in recipe.techniques and "fsdp" not in recipe.techniques:
        # A replay with segments of fixed sizes reserves too much, and one without segments too little.
        reserved = (reserved + allocated) / 2
        if not words:
            memory = "reserved" if memory == "allocated" else memory
    context = made.overhead["context"]
    return float({"nvidia-smi": reserved + context, "reserved": reserved}.get(memory, allocated))


def estimate_loss_memory(row: Row, made: Plan, recipe: Any) -> float:
    """GiB by which the peak is higher because the trainer's loss keeps more of the logits than ours.

    Ours holds 6 bytes a logit if the vocabulary is split and 2 if the loss takes all logits at once.
    """
    from preheat.models import hf

    tokens = parse_integer(row, "micro_batch") * parse_integer(row, "seq_len", LENGTH)
    split, chunked = recipe.techniques.get("tensor_parallel"), recipe.techniques.get("chunked_loss")
    trainer = find_trainer(row)
    if split is not None:
        more = trainer.split_logit_bytes - 6 if split.rows >= tokens else 0
    elif chunked is None or (chunked.rows < tokens and not trainer.loss_in_place):
        more = 0
    else:
        chunks = trainer.chunks_logits or "chunk" in row["fused_or_chunked_ce"]
        more = (trainer.chunked_logit_bytes if chunks else trainer.logit_bytes) - 2
    vocabulary = hf.configure(recipe, None).get_text_config().vocab_size
    logits = tokens * vocabulary / parse_integer(row, "tp") / parse_integer(row, "cp")
    return max(made.phases.get("head and loss", 0.0) + more * logits / 2**30 - made.peak_gib, 0.0)


def estimate_our_memory(row: Row, made: Plan, recipe: Any) -> float:
    """GiB that preheat holds and other trainers' data parallelism does not, where weights are in half precision.

    torch's `replicate` computes with a second copy of them, as large as the buckets that DistributedDataParallel has from the beginning; those of adapters
    are small. And sums of gradients are fp32 here, which beside fp16 they are not everywhere.
    """
    adapts = "lora" in recipe.techniques
    half = recipe.techniques["mixed_precision"].mode.endswith("_master") or adapts
    if not half or "data_parallel" not in recipe.techniques:
        return 0.0
    trainer = find_trainer(row)
    second = float(made.memory.get("gathered weights", 0.0))
    if "zero1" not in recipe.techniques and trainer.torch_ddp and not adapts:
        second = 0.0
    halves = row["precision"].startswith("fp16") and trainer.fp16_gradients_in_fp16
    return second + (float(made.memory["parameters"]) if halves else 0.0)


def estimate_root_memory(row: Row, made: Plan, recipe: Any) -> float:
    """GiB of the embedding, which FSDP1's root keeps gathered from a step's first layer to its last."""
    if "fsdp" not in recipe.techniques or not find_trainer(row).whole_root or is_compiled(row):
        return 0.0
    from preheat.models import hf

    config = hf.configure(recipe, None).get_text_config()
    if config.tie_word_embeddings:
        return 0.0
    return float(2 * config.vocab_size * config.hidden_size / 2**30)


def estimate_quantization_states(row: Row, made: Plan, recipe: Any) -> float:
    """GiB of the scales of 4-bit weights that ours shards or offloads: a byte for 64 weights, and 4 for 256 of these."""
    if (
        "nf4" not in recipe.techniques
        or "fsdp" not in recipe.techniques
        or not find_trainer(row).whole_quantization_states
    ):
        return 0.0
    from preheat.models import hf

    config = hf.configure(recipe, None).get_text_config()
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    quantized = made.parameters.total - made.parameters.trained - ends
    ours = 0.0 if recipe.techniques["fsdp"].offload else 1 / parse_integer(row, "dp_shard")
    return float(quantized / 64 * (1 + 4 / 256) * (1 - ours) / 2**30)


def estimate_half_gradients(row: Row, made: Plan, recipe: Any) -> float:
    """GiB of a micro-batch's gradients in bf16, until they are added to fp32 sums."""
    beside = find_trainer(row).bf16_gradients_beside_sums and row["precision"].startswith("bf16")
    return float(made.memory["parameters"]) if beside and "pipeline_parallel" in recipe.techniques else 0.0


def estimate_kept_inputs(row: Row, made: Plan, recipe: Any) -> float:
    """GiB of the inputs of 4-bit layers, which bitsandbytes kept for nothing; what is recomputed is not kept."""
    keeps = find_trainer(row).keeps_quantized_inputs and is_kept_as_transformers(row)
    if row["method"] != "qlora" or not keeps or "activation_checkpointing" in recipe.techniques:
        return 0.0
    from preheat.models import hf

    config = hf.configure(recipe, None).get_text_config()
    tokens = parse_integer(row, "micro_batch") * parse_integer(row, "seq_len", LENGTH) * config.num_hidden_layers
    return (
        tokens * 2 * (2 * config.hidden_size + config.intermediate_size) / 2**30
    )  # attention keeps the input of the map out of it


def estimate_dropout_masks(row: Row, made: Plan, recipe: Any) -> float:
    """GiB of the masks of hidden states of GPT models, two a layer.

    A pipeline's first stage has as many micro-batches on their way as there are stages, so as many masks as all layers have of one.
    """
    drops = row["model"].startswith("GPT") and find_trainer(row).hidden_dropout
    if not drops or "activation_checkpointing" in recipe.techniques:
        return 0.0
    width, layers = _count_hidden(row, recipe)
    return 2 * width * layers / (1 if row["sequence_parallel"] == "no" else parse_integer(row, "tp"))


def _count_hidden(row: Row, recipe: Any) -> tuple[float, int]:
    """Numbers of a device's hidden states between two layers, in 2**30, and layers."""
    from preheat.models import hf

    config = hf.configure(recipe, None).get_text_config()
    tokens = parse_integer(row, "micro_batch") * parse_integer(row, "seq_len", LENGTH) // parse_integer(row, "cp")
    return tokens * config.hidden_size / 2**30, config.num_hidden_layers


# What is beside what ours has; each: (row, plan, recipe) -> GiB.
HELD_BY_OTHERS = (
    estimate_loss_memory,
    estimate_half_gradients,
    estimate_root_memory,
    estimate_quantization_states,
    estimate_kept_inputs,
    estimate_dropout_masks,
)


def estimate_memory(row: Row, made: Plan, recipe: Any, opened: bool) -> tuple[float, float, float]:
    """GiB that a row's tool would report: the least, the prediction, the most; `opened`: what they grow with is a guess."""
    gib = (_UNSEEN_OPEN if opened else _UNSEEN) * (
        estimate_gib(row, made, recipe)
        + sum(held(row, made, recipe) for held in HELD_BY_OTHERS)
        - estimate_our_memory(row, made, recipe)
    )
    edges = (edge / made.peak_gib for edge in made.peak_gib_interval)
    low, high = (edge * gib for edge in (_OPEN if opened else edges))
    return low, gib, high


# What other programs hold that neither a row says nor ours has, more of it where a row says less: 1.0 has the least median error, 4.0 %, but 27 rows more than 5 % too
# low, which is what kills runs; these two had 8 for 1.5 points.
_UNSEEN, _UNSEEN_OPEN = 1.05, 1.10

_OPEN, _OPEN_SPEED = (0.55, 1.5), (0.53, 1.6)  # where what they grow with is a guess


def has_room(row: Row, made: Plan, recipe: Any, roofline: Any) -> bool:
    """Whether a device may have held it: what tensors take, since an allocator gives back what it keeps before it fails.

    Where products are in 8 bits by hand so is what they keep, and buffers are made once: seven tenths are taken there.
    """
    takes = made.allocated_gib - estimate_our_memory(row, made, recipe)
    if is_by_transformer_engine(row):
        takes *= 0.7
    return bool(takes <= roofline.device.memory / 2**30)


def find_roofline(name: str, gpus: Mapping[str, Row]) -> tuple[Any, bool]:
    """An accelerator of the catalogue, else of the table of GPUS, else one of which the memory alone is known: (it, whether its speed is known)."""
    from dataclasses import replace

    from preheat.errors import RecipeError
    from preheat.hardware.catalogue import Accelerator, accelerators, find_accelerator
    from preheat.planning.speed.roofline import Roofline

    try:
        return Roofline.of(name), True
    except RecipeError:
        sized = re.search(r"(\d+) ?GB", name)
        if name in gpus:
            row = gpus[name]

            def read_rate(key: str, unit: float) -> float | None:
                value = parse_number(row, key)
                return None if value is None else value * unit

            bf16, achieved = read_rate("bf16_dense_tflops_peak", 1e12), read_rate("achieved_matmul_tflops", 1e12)
            made = Accelerator(
                name=name,
                memory=int(float(row["mem_gib"])) * 2**30 if row["mem_gib"] else None,
                bandwidth=read_rate("hbm_gb_s", 1e9),
                bf16=bf16,
                fp16=bf16,
                fp32=None,
                fp8=read_rate("fp8_dense_tflops_peak", 1e12),
                achieved_bf16=achieved,
                achieved_fp8=read_rate("achieved_fp8_matmul_tflops", 1e12),
                link=read_rate("nvlink_gb_s", 1e9),
                network=None,
            )
            kin = [
                a for a in accelerators().values() if name.startswith(a.name)
            ]  # "H100-SXM-96GB" is kin of what begins like it
            if kin:
                made = replace(
                    made, units=kin[-1].units, generation=kin[-1].generation, network=kin[-1].network, fp32=kin[-1].fp32
                )
            if made.memory and made.bandwidth and made.bf16:
                return Roofline(made), True
        if sized is None:
            raise
        return Roofline(replace(find_accelerator("RTX-3090"), name=name, memory=int(sized[1]) * 2**30)), False


def set_network(row: Row, roofline: Any) -> Any:
    """Returns the roofline with the network between hosts that the row names; its hosts have eight devices."""
    from dataclasses import replace

    said = re.search(r"inter-node (\d+)x(\d+) Gb|()(\d+) Gbps node-node", row["notes"])
    if said is None:
        return roofline
    gigabits = int(said[1]) * int(said[2]) if said[1] else int(said[4])
    return replace(roofline, device=replace(roofline.device, network=gigabits * 1e9 / 8 / 8))


def answer_row(row: Row, gpus: Mapping[str, Row]) -> dict[str, Any]:
    from dataclasses import replace

    from preheat.errors import PreheatError
    from preheat.recipe import override

    begun = time.monotonic()
    out: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"id": row["id"]}
    try:
        roofline, timed = find_roofline(row["gpu"], gpus)
        roofline = replace(roofline, alone=parse_integer(row, "n_gpus") == 1)
        roofline = set_network(row, roofline)
        opened, row = is_underspecified(row), fill_defaults(row)
        recipe = build_recipe(row)
        made, used = plan_row(row, recipe, roofline)
        chosen = recipe
        for more in MORE:
            if has_room(row, made, used, roofline):
                break
            if more.keys() & recipe.techniques.keys() - {"gradient_accumulation"}:
                continue
            if "activation_checkpointing" in more and row["activation_checkpointing"] == "none":
                continue  # the row says so
            beside = ["optimizer.max_grad_norm=0"] if "optimizer_in_backward" in more else []
            if "activation_checkpointing" in more and "tensor_parallel" in recipe.techniques:
                beside.append("techniques.tensor_parallel.regather=false")  # what is computed again is gathered again
            recipe = override(recipe, *beside, *(f"techniques.{name}={value}" for name, value in more.items() if value))
            recipe = replace(
                recipe, techniques={k: t for k, t in recipe.techniques.items() if more.get(k, "") is not None}
            )
            with contextlib.suppress(Open):
                made, used = plan_row(row, recipe, roofline)
                chosen = recipe
        low, gib, high = (
            min(edge, roofline.device.memory / 2**30) for edge in estimate_memory(row, made, used, opened)
        )  # it had room
        out |= {"predicted_gib": gib, "low_gib": low, "high_gib": high}
        if timed:
            timed_plan, timed_recipe = made, chosen
            if "gradient_accumulation" in used.techniques and count_micro_batches(row, build_mesh(row)[2]) == 1:
                timed_recipe = build_recipe(row, kept_sums=False)
            alone = parse_integer(row, "n_gpus") == 1  # what of it overlaps with gathers is not known
            if alone:
                timed_recipe = add_time_settings(row, timed_recipe)
            if timed_recipe != chosen or (alone and "lora" in used.techniques):  # see `patch_adapter_layers`
                timed_plan, _ = plan_row(row, timed_recipe, roofline, timed=alone)
            speed = timed_plan.tokens_per_second / recipe.parallel.devices
            edges = (edge / timed_plan.tokens_per_second for edge in timed_plan.tokens_per_second_interval)
            low, high = (edge * speed for edge in (_OPEN_SPEED if opened else edges))
            out |= {"predicted_tok_s": speed, "low_tok_s": low, "high_tok_s": high}
        out["made"], out["used"] = made, sorted(used.techniques)
    except (PreheatError, ValueError) as error:
        out["reason"] = str(error).replace("\n", "; ")
    except Exception as error:  # noqa: BLE001 - ours, or a library's, to be mended; a row must not take the others with it
        traceback.print_exc()
        out["reason"] = f"failed: {type(error).__name__}: {error}".replace("\n", "; ")
    out["seconds"] = round(time.monotonic() - begun, 2)
    return out


# Name, column of the prediction, of its interval and of the measurement.
MEASURES = (
    ("memory", "predicted_gib", "low_gib", "high_gib", "peak_mem_gib"),
    ("speed", "predicted_tok_s", "low_tok_s", "high_tok_s", "tokens_per_s_per_gpu"),
)


class Error(NamedTuple):
    source: str
    relative: float
    """Predicted over measured, less one."""
    covered: bool
    """The measurement lies within the interval."""


def compute_errors(
    rows: Sequence[Row], answers: Mapping[str, Mapping[str, Any]], measure: Sequence[str]
) -> list[Error]:
    """Returns the error of each row that was measured and answered."""
    results = []
    for row in rows:
        _, predicted, low, high, measured = measure
        answer, value = answers[row["id"]], parse_number(row, measured)
        if answer[predicted] != "" and value:
            covered = float(answer[low]) <= value <= float(answer[high])
            results.append(Error(row["source_repo"], float(answer[predicted]) / value - 1, covered))
    return results


def summarize_errors(name: str, results: Sequence[Error]) -> str:
    """Returns a line of the tables."""
    sizes = sorted(abs(e.relative) for e in results)
    within = (f"{sum(size <= limit for size in sizes) / len(sizes):.0%}" for limit in (0.1, 0.2))
    low = sum(e.relative < -0.05 for e in results)
    covered = sum(e.covered for e in results) / len(results)
    return (
        f"| {name} | {len(results)} | {statistics.median(sizes):.1%} | {' | '.join(within)} | {low} | {covered:.0%} |"
    )


def render_tables(rows: Sequence[Row], answers: Mapping[str, Mapping[str, Any]], new: tuple[str, ...]) -> str:
    """Returns the tables by source; rows whose ids begin with one of `new` are reported apart."""
    groups = {
        "known": [r for r in rows if not r["id"].startswith(new)],
        "new": [r for r in rows if r["id"].startswith(new)],
    }
    lines = []
    for measure in MEASURES:
        lines += [
            f"| {measure[0]} | rows | median error | within 10 % | within 20 % | more than 5 % too low | in the interval |",
            "|---|---|---|---|---|---|---|",
        ]
        every = {group: compute_errors(members, answers, measure) for group, members in groups.items()}
        for group, results in every.items():
            if results:
                asked = sum(parse_number(row, measure[-1]) is not None for row in groups[group])
                lines.append(summarize_errors(f"**{group} sources, of {asked} measured**", results))
        for group, results in every.items():
            for source in sorted({e.source for e in results}):
                lines.append(summarize_errors(f"{source}, {group}", [e for e in results if e.source == source]))
        lines.append("")
    return "\n".join(lines)


def _answer_in_process(job: tuple[Row, Mapping[str, Row]]) -> dict[str, Any]:
    return answer_row(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--gpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--new", nargs="*", default=[], help="how ids of new sources begin, which are reported apart")
    options = parser.parse_args()
    with options.runs.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with options.gpus.open(encoding="utf-8") as file:
        gpus = {row["gpu"]: row for row in csv.DictReader(file)}
    answers: dict[str, dict[str, Any]] = {}
    with (
        multiprocessing.get_context("spawn").Pool(options.jobs) as pool,
        options.out.open("w", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for made in pool.imap(_answer_in_process, [(row, gpus) for row in rows]):
            answers[made["id"]] = made
            writer.writerow(made)
            file.flush()
    print(render_tables(rows, answers, tuple(options.new)))


if __name__ == "__main__":
    main()
