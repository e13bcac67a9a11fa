"""Context parallelism of architectures with sinks, chunks and recurrent layers: two and four processes train as one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from preheat import recipe as recipes

from ..architectures.columns import VOCABULARY, Subject, write_data
from ..architectures.fsdp import Sharded
from ..architectures.tiny import ARCHITECTURES, tiny_config
from .exactness import run, verdict

RECURRENT = "data_parallel: {}, context_parallel: {kind: ulysses}"
TWO = [
    # Sinks with windows, and attention in chunks.
    ("gpt_oss", RECURRENT),
    ("gpt_oss", "data_parallel: {}, context_parallel: {kind: ring}"),
    ("llama4_text", RECURRENT),
    ("llama4_text", "data_parallel: {}, context_parallel: {kind: ring}"),
    # Heads on each device: Mamba-2 with a norm and with a gate alone, three forms of the delta rule, a convolution.
    ("nemotron_h", RECURRENT),
    ("falcon_h1", RECURRENT),
    ("qwen3_next", RECURRENT),
    ("qwen3_5_text", RECURRENT),
    ("olmo_hybrid", RECURRENT),
    ("lfm2", "fsdp: {}, context_parallel: {kind: ulysses}, activation_checkpointing: {}"),
    # Whole sequences on each device: the first Mamba.
    ("jamba", RECURRENT),
]
FOUR = [
    # Two groups of states on four devices; two heads of keys, which they cannot split; sharded weights.
    ("granitemoehybrid", "data_parallel: {}, context_parallel: {degree: 4}"),
    ("qwen3_5_text", "data_parallel: {}, context_parallel: {degree: 4}"),
    ("qwen3_5_text", "tensor_parallel: {degree: 2}, data_parallel: {}, context_parallel: {degree: 2}"),
    ("gpt_oss", "fsdp: {}, context_parallel: {degree: 2}"),
]


@dataclass(frozen=True)
class Split(Sharded):
    """Rows of a model's folder split across processes; a large eps: Adam makes no whole step of a rounded zero."""

    def recipe(self, *, alone: bool) -> recipes.Recipe:
        return recipes.override(super().recipe(alone=alone), "optimizer.eps=1e-3")


def compare(settings: list[tuple[str, str]], world: int, folder: Path) -> None:
    write_data(folder)
    delta = tiny_config("olmo_hybrid", **ARCHITECTURES["qwen3_5_text"], vocab_size=VOCABULARY)
    subjects = {name: Subject(name, folder, delta if name == "olmo_hybrid" else None) for name in dict(settings)}
    cases = [
        Split(name, scale, together="degree: 2" not in scale, model=str(subjects[name].folder / "model"))
        for name, scale in settings
    ]
    faults = {case.name: verdict(case, found) for case, found in zip(cases, run(cases, world, folder), strict=True)}
    assert faults == dict.fromkeys(faults, "")


def test_two_processes_split_the_rows_of_every_kind_of_layer(tmp_path: Path) -> None:
    compare(TWO, 2, tmp_path)


def test_four_processes_split_heads_and_groups_that_are_fewer(tmp_path: Path) -> None:
    compare(FOUR, 4, tmp_path)
