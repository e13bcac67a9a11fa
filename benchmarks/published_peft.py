"""Speed planned and published of PEFT's method comparison: one step of Llama 3.2 3B on an L40S, by each method.

    python benchmarks/published_peft.py --runs peft_runs.csv [--tokens 216]

Each row is planned by its adapter's configuration with what its trainer does: bf16 base and fp32 adapters without autocast, peft's own layers, no
checkpointing, no clipping. `--tokens`: length of a padded row in the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:  # the import of preheat takes seconds
    from preheat.core.plan import Plan

# Settings of a configuration that change neither shapes nor operators, or that a recipe states elsewhere.
_LEFT_OUT = {
    *("task_type", "peft_type", "peft_version", "base_model_name_or_path", "target_modules", "feedforward_modules"),
    *("bias", "use_rslora", "init_lora_weights", "init_weights", "init_ia3_weights", "megatron_core"),
    "qalora_group_size",
}


def build_techniques(row: Mapping[str, str]) -> dict[str, Any]:
    """Returns the techniques of a row's recipe."""
    config, method = json.loads(row["peft_config"]), row["peft_type"].lower()
    target = {"target_modules": rf".*\.({'|'.join(sorted(config['target_modules']))})"}
    techniques: dict[str, Any] = {"mixed_precision": {"mode": "bf16_weights"}, "efficient_attention": {}}
    if method == "lora":
        return techniques | {"lora": {"rank": config["r"], "dropout": 0.0} | target}
    settings = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    if method == "oft":
        settings["oft_block_size"] = 0  # peft wants one of the two
    return techniques | {"peft_adapter": {"method": method, "settings": settings} | target}


def plan_row(row: Mapping[str, str], tokens: int) -> Plan:
    """Returns the plan of a row's step."""
    from peft.tuners.lora import Linear

    from preheat import recipe as recipes
    from preheat.ops.adapters import peft_layers
    from preheat.planning.layer_extrapolation import observe_few_layers
    from preheat.planning.plan import describe
    from preheat.planning.request import Request
    from preheat.planning.speed.roofline import Roofline
    from preheat.techniques import mixed_precision

    values = {
        "name": "published",
        "model": {"preset": "llama-3.2-3b"},
        "batch": {"size": int(row["micro_batch"]), "seq_len": tokens},
        "stop": {"max_steps": 1},
        "optimizer": {"max_grad_norm": 0.0},
        "hardware": {"device": "cuda"},
        "techniques": build_techniques(row),
    }
    rates = replace(Roofline.of(row["gpu"]), alone=True)
    request = Request(recipes.parse(json.dumps(values)), rates.as_device, rates=rates, in_use=0)
    with (
        mock.patch.object(peft_layers, "added_linear_class", return_value=Linear),
        mock.patch.object(mixed_precision, "autocast", return_value=contextlib.nullcontext()),
    ):
        return describe(request, observe_few_layers(request))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=216, help="tokens of a padded row, in the mean")
    options = parser.parse_args()
    with options.runs.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print("| row | planned ms | measured ms | speed planned over measured | in the interval |\n|---|---|---|---|---|")
    errors, inside = [], 0
    for row in rows:
        plan = plan_row(row, options.tokens)
        measured = float(row["step_seconds"])
        low, high = (plan.tokens_per_step / speed for speed in reversed(plan.tokens_per_second_interval))
        errors.append(measured / plan.seconds_per_step - 1)
        inside += low <= measured <= high
        milliseconds = f"{plan.seconds_per_step * 1e3:.1f} | {measured * 1e3:.1f}"
        print(f"| {row['id']} | {milliseconds} | {errors[-1]:+.1%} | {low <= measured <= high} |")
    print(f"median {statistics.median(map(abs, errors)):.1%} off, {inside} of {len(rows)} in the interval")


if __name__ == "__main__":
    main()
