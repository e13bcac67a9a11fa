"""Losses, gradient norms and every final parameter of several processes against one: a selection, and on demand the whole matrix.

PREHEAT_SCALE=all (`make test-scale`) tries every technique of the registry under each kind of parallelism, on all families.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat import recipe as recipes
from preheat.core import registry
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.errors import RecipeError
from preheat.ops.distributed.dtensor_utils import local

from ..conftest import DEVICE, tiny
from ..contract.settings import BRINGS, CANNOT_RUN_HERE, FAMILY, FURTHER, asked
from .exactness import Case, run, verdict
from .processes import ALL, processes

SCALES = ("fsdp: {}", "data_parallel: {}", "data_parallel: {}, zero1: {}")
SCALING = {name for scale in SCALES for name in (part.split(":")[0] for part in scale.split(", "))}

# GPT-2 has biases of keys, whose gradient is zero but for rounding, which AdamW makes as large as any other.
GPT2 = {"weights": 5e-4}
# A value that lies at the edge of two half numbers falls to the other side for a difference in the last bit of fp32.
HALF = {"loss": 2e-3, "norm": 2e-2, "weights": 0.1}

# What is refused: a part of the scale's and of the technique's settings, and words of the reason.
REFUSED: list[tuple[str, str, str]] = [
    ("zero1: {}", "adafactor: {}", "per-matrix-states"),
    ("zero1: {}", "apollo: {", "per-matrix-states"),
    ("zero1: {}", "optimizer_in_backward: {}", "step-in-backward"),
    ("{}", "mode: 'bf16_weights', keep_fp32", "need one precision"),
    *(
        (scale, f"{{{bits}least: 0}}", "whole blocks")
        for scale in ("fsdp", "zero1")
        for bits in ("", "bits: 4, block_size: 64, ")
    ),
]


def flow(settings: dict[str, Any]) -> str:
    """Settings in YAML's flow style."""
    words = {True: "true", False: "false"}
    return (
        "{"
        + ", ".join(f"{k}: {words.get(v, v) if isinstance(v, bool) else repr(v)}" for k, v in settings.items())
        + "}"
    )


def of(scale: str, name: str, settings: dict[str, Any]) -> Case:
    """One technique with what it needs, under one kind of parallelism."""
    cls = registry()[name]
    t = cls(**settings)
    parts = [f"{name}: {flow(settings)}", *(f"{BRINGS[tag]}: {{}}" for tag in sorted(cls.needs - t.provided()))]
    family = FAMILY.get(name, "llama")
    bounds: dict[str, float] = GPT2 if family == "gpt2" else {}
    if "mixed_precision" in parts[-1] or cls.numerics == "rounding":
        bounds = HALF
    together = name == "optimizer_in_backward"
    return Case(family, scale, ", ".join(parts), " ".join(asked(name)), together, **bounds)


def everything() -> list[Case]:
    """The whole matrix for two processes."""
    names = sorted(registry().keys() - CANNOT_RUN_HERE.keys() - SCALING)
    settings: list[tuple[str, dict[str, Any]]] = [*((name, {}) for name in names), *FURTHER]
    cases = [of(scale, name, how) for scale in SCALES for name, how in settings]
    for scale in (
        *SCALES,
        "fsdp: {reshard_after_forward: false}",
        "fsdp: {reduce: last}",
        "fsdp: {reshard_after_forward: false, reduce: last}",
    ):
        for family in ("llama", "qwen3", "gpt2"):
            bounds: dict[str, float] = GPT2 if family == "gpt2" else {}
            cases += [
                Case(family, scale, rest, **bounds)
                for rest in (
                    "",
                    "gradient_accumulation: {steps: 2}",
                    "gradient_accumulation: {steps: 2}, chunked_loss: {rows: 7}, activation_checkpointing: {}",
                    "lora: {rank: 4}",
                    "nf4: {}, lora: {rank: 4}, gradient_accumulation: {steps: 4}",
                )
            ]
            # Newton-Schulz in bf16 makes directions that are hardly there, and all but noise, as long as the others.
            cases.append(Case(family, scale, "muon: {}, efficient_attention: {}", weights=5e-2))
    return cases


QUICK = [
    Case("llama", "fsdp: {}", "gradient_accumulation: {steps: 2}"),
    Case("qwen3", "fsdp: {reshard_after_forward: false, reduce: last}", "gradient_accumulation: {steps: 2}"),
    Case("gpt2", "fsdp: {}", "chunked_loss: {rows: 7}, activation_checkpointing: {}", **GPT2),
    Case("llama", "fsdp: {gather: bf16}", instead="mixed_precision: {mode: bf16_master}", **HALF),
    Case(
        "llama",
        "fsdp: {reduce_dtype: bf16, reduce: last}",
        "gradient_accumulation: {steps: 2}",
        **HALF | {"loss": 5e-3},
    ),
    Case("llama", "data_parallel: {}", "gradient_accumulation: {steps: 2}, efficient_attention: {}"),
    Case("qwen3", "data_parallel: {}, zero1: {}", "gradient_accumulation: {steps: 2}"),
    Case("gpt2", "data_parallel: {}, zero1: {}", **GPT2),
    Case("llama", "fsdp: {}", "nf4: {}, lora: {rank: 4}, gradient_accumulation: {steps: 2}"),
    Case("llama", "data_parallel: {}", "nf4: {}, lora: {rank: 4, variant: dora}"),
    Case("qwen3_moe", "fsdp: {}", "nf4: {}, lora: {rank: 4, expert_rank: 2}, gradient_accumulation: {steps: 2}"),
    Case("qwen3_moe", "data_parallel: {}, expert_parallel: {}", "nf4: {experts: false}, lora: {rank: 4}"),
    Case(
        "gpt2", "fsdp: {}", "lora: {rank: 4, embedding_rank: 3}, chunked_loss: {rows: 7}"
    ),  # whose blocks draw weights of theirs through an adapter
    Case("llama", "fsdp: {}", "lora: {rank: 4, variant: pissa}"),
    Case("llama", "fsdp: {}", "mixed_precision: {mode: bf16_weights}"),  # rounded at random as one process would
    Case("llama", "fsdp: {}", "mixed_precision: {mode: bf16_master}"),
    Case("llama", "fsdp: {}", "mixed_precision: {mode: fp16_master}", **HALF),
    Case("llama", "data_parallel: {}, zero1: {}", "muon: {}"),
    Case("qwen3", "fsdp: {}", "muon: {}"),
    Case("llama", "fsdp: {}", "lion: {}"),
    Case("llama", "fsdp: {}", "adafactor: {}"),
    Case("llama", "fsdp: {}", "apollo: {}"),
    Case("llama", "fsdp: {}", "low_bit_adamw: {min_size: 512, block_size: 64}"),
    Case("llama", "data_parallel: {}, zero1: {}", "low_bit_adamw: {min_size: 512, block_size: 64}"),
    Case("llama", "fsdp: {}", "optimizer_in_backward: {}", "optimizer.max_grad_norm=0", together=True),
    Case("llama", "fsdp: {}", "dynamic_batch: {start: 2, every: 2}"),
    Case("llama", "fsdp: {}", "preference: {}"),
    Case("qwen3_moe", "data_parallel: {}, expert_parallel: {}", "preference: {}"),
    Case("t5", "fsdp: {}", "gradient_accumulation: {steps: 2}, chunked_loss: {rows: 7}, activation_checkpointing: {}"),
    Case("t5", "data_parallel: {}", "lora: {rank: 4}, gradient_accumulation: {steps: 2}"),
]
FOUR = [
    Case("llama", "fsdp: {replicate: 2}", "gradient_accumulation: {steps: 2}"),
    Case("qwen3", "data_parallel: {}, zero1: {}"),
    Case("llama", "fsdp: {replicate: 2}", "nf4: {}, lora: {rank: 4}", norm=5e-4),
]
# DeepSpeed keeps groups of its first start, so one start of processes serves all of these.
DEEPSPEED = [
    *(
        Case("llama", f"parallel.engine=deepspeed parallel.zero_stage={z}", "gradient_accumulation: {steps: 2}")
        for z in (1, 2, 3)
    ),
    *(
        Case("gpt2", f"parallel.engine=deepspeed parallel.zero_stage={z}", "chunked_loss: {rows: 7}", **GPT2)
        for z in (1, 2, 3)
    ),
    *(
        Case("qwen3", f"parallel.engine=deepspeed parallel.zero_stage={z}", "nf4: {}, lora: {rank: 4}")
        for z in (1, 2, 3)
    ),
    *(
        Case("gpt2", f"parallel.engine=deepspeed parallel.zero_stage={z}", "lora: {rank: 4, embedding_rank: 3}")
        for z in (2, 3)
    ),
    Case(
        "gpt2",
        "parallel.engine=deepspeed parallel.zero_stage=3",
        "lora: {rank: 4, embedding_rank: 3}, chunked_loss: {rows: 7}",
    ),
]


def check(cases: list[Case], world: int, folder: Path, timeout: float = 600) -> list[list[dict[str, Any]]]:
    found = run(cases, world, folder, timeout)
    wrong = {case.name: words for case, of in zip(cases, found, strict=True) if (words := verdict(case, of))}
    assert not wrong, "\n".join(f"{name}: {words}" for name, words in wrong.items())
    return found


def test_two_processes_are_one(tmp_path: Path) -> None:
    distilled = [of("fsdp: {}", "distillation", {"hidden": 0.05}), of("data_parallel: {}", "distillation", {})]
    cases = [*QUICK, *distilled]
    found = check(cases, 2, tmp_path)
    for case, (one, *many) in zip(cases, found, strict=True):
        if case.instead is None and (
            "muon" in case.rest or not case.rest
        ):  # what each process keeps of the optimizer's states
            for made in many:
                assert made["states"] == pytest.approx(one["states"] / 2, rel=0.05), case.name


def save_reference(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    made = build(tiny("{fsdp: {}, preference: {}}", rows=8), vocabulary=96, device=DEVICE)
    for tensor in made.parts["reference"][0].parameters():
        assert local(tensor).numel() <= tensor.numel() / 2 + tensor.shape[-1]
    checkpoint.save(made, checkpoint.Progress(step=1, samples=8), folder / "checkpoints", keep=1)
    dist.destroy_process_group()


def test_a_sharded_reference_is_saved_whole(tmp_path: Path) -> None:
    recipe = tiny("{preference: {}}", rows=8)
    with processes(save_reference, 2, tmp_path):
        wanted = build(recipe, vocabulary=96, device=DEVICE)
        other = build(recipes.override(recipe, "seed=7"), vocabulary=96, device=DEVICE)
    path, _ = checkpoint.find(tmp_path / "checkpoints")
    assert path is not None
    checkpoint.load(other, path)
    read, written = (dict(made.parts["reference"][0].named_parameters()) for made in (other, wanted))
    assert all(torch.equal(read[name], value) for name, value in written.items())


def test_four_processes_are_one(tmp_path: Path) -> None:
    found = check(FOUR, 4, tmp_path)
    assert [made["states"] / found[1][0]["states"] for made in found[1][1:]] == pytest.approx([0.25] * 4, rel=0.05)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'preheat[deepspeed]'"
)
def test_deepspeed_is_the_native_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    check(DEEPSPEED, 2, tmp_path)


@pytest.mark.skipif(not ALL, reason="the whole matrix takes minutes: make test-scale")
def test_the_whole_matrix(tmp_path: Path) -> None:
    cases = everything()
    found = run(cases, 2, tmp_path, timeout=3000)
    wrong = []
    for case, of in zip(cases, found, strict=True):
        words = verdict(case, of)
        refused = [why for scale, how, why in REFUSED if scale in case.scale and how in case.rest]
        if bool(words) != bool(refused) or any(why not in words for why in refused):
            wrong.append(f"{case.name}: {words or 'was not refused'}")
    assert not wrong, "\n".join(wrong)


def test_what_does_not_go_together_is_refused() -> None:
    from preheat.core import conflicts_of
    from preheat.engine.builder import build_context, list_techniques
    from preheat.models.hf import configure

    def refusal(techniques: str, more: str = "") -> str:
        recipe = tiny(techniques, rows=8, more=f"parallel: {{devices: 2{more}}}")
        context = build_context(recipe, configure(recipe, 96), DEVICE)
        return "; ".join(map(str, conflicts_of(list_techniques(recipe), context)))

    for name, why in (
        ("adafactor", "per-matrix-states"),
        ("apollo", "per-matrix-states"),
        ("optimizer_in_backward", "step-in-backward"),
    ):
        assert why in refusal(f"{{data_parallel: {{}}, zero1: {{}}, {name}: {{}}}}")
    for scale in ("fsdp", "data_parallel"):
        assert "need one precision" in refusal(
            f"{{{scale}: {{}}, mixed_precision: {{mode: bf16_master, keep_fp32: norm}}}}"
        )
    assert "replicated-weights" in refusal("{fsdp: {}, zero1: {}}")
    engine = ", engine: deepspeed"
    assert "muon: replaces what parallel.engine: deepspeed does by itself; leave it out" in refusal(
        "{muon: {}}", engine
    )
    with pytest.raises(RecipeError, match="deepspeed and fsdp both take the devices that are left"):
        refusal("{fsdp: {}}", engine)
    assert "use mode: bf16 instead of fp16" in refusal("{mixed_precision: {mode: fp16}}", engine)
    assert "checkpoint.every" in refusal("{}", engine + "}\ncheckpoint: {every: 5")
    assert "dynamic_batch: start: 5 sequences are more than batch.size 8 over 2 devices; use at most 4" in refusal(
        "{fsdp: {}, dynamic_batch: {start: 5}}"
    )
    assert (
        "steps: 5 micro-batches are more than the sequences of batch.size 8 over 2 devices, which is 4 a device; use at most 4"
        in refusal("{fsdp: {}, gradient_accumulation: {steps: 5}}")
    )
