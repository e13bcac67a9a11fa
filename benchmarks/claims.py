"""Claims of papers and cookbooks on techniques, and measurements of them at the size of this machine.

    python benchmarks/claims.py [--part heads zero ...] [--out benchmarks/results]

positions, heads, depth, tying, difficulty, feed_forward   held-out losses of small models, each at its own best learning
            rate, three seeds (`_claims/arms.py`); stored after each run, and an interrupted measurement goes on
precision   memory of a 1B Llama in fp32, bf16 autocast and bf16 weights, by the dry run
attention   fused attention alone against its plain form: time and memory
zero        ZeRO-1, 2 and 3 on two processes: memory and speed
together    mixed precision, fused attention, accumulation and ZeRO-3 at once, on two processes
memory      speed and memory of each technique alone on a 15M Llama, and of a 1B Llama as predicted for two GPUs
states      memory per device of a 1B Llama under each way of sharding, by the dry run
rope        trained at 128 tokens, perplexity at 256, 512 and 1,024 with each rotary scaling

Parts store claims-PART.json (claims-arms.json for the first six), and claims.md is written from these files alone;
`--table` measures nothing. The first six parts take about 5 minutes per arm on two quiet cores.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from _claims.arms import measure_arms
from _claims.table import LOSS_CLAIMS, list_arms, render

from preheat.core.json_types import JsonObject
from preheat.files import to_json, to_plain_data, write_atomic

LOSSES = list(dict.fromkeys(claim.part for claim in LOSS_CLAIMS))


PARTS = ("precision", "attention", "zero", "together", "memory", "states", "rope")


def measure(part: str) -> JsonObject:
    """Measures one of `PARTS`."""
    from _claims import cookbooks, costs

    match part:
        case "precision":
            return {"costs": to_plain_data(costs.measure_precision())}
        case "attention":
            return {"machine": costs.describe_machine(), "costs": to_plain_data(costs.measure_attention())}
        case "zero":
            return {
                "title": "ZeRO on two processes",
                "size": "35M Llama, fp32, 2 x 64 tokens per process, gloo",
                "machine": costs.describe_machine(),
                "costs": to_plain_data(costs.measure_zero()),
            }
        case "together":
            return {
                "title": "The four together on two processes",
                "size": "6-layer Llama of 288, 8 x 512 tokens per process, gloo",
                "machine": costs.describe_machine(),
                "costs": to_plain_data(costs.measure_together()),
            }
        case "memory":
            return cookbooks.measure_memory()
        case "states":
            return {"stages": cookbooks.measure_states()}
        case _:
            return cookbooks.measure_rope()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=[*LOSSES, *PARTS], default=[*LOSSES, *PARTS])
    parser.add_argument("--table", action="store_true", help="measure nothing; write claims.md from the stored figures")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    today = datetime.date.today().isoformat()
    for part in [] if options.table else options.part:
        if part in LOSSES:
            measure_arms(list_arms(part), options.out / "claims-arms.json", today)
        else:
            measured = {"date": today, **measure(part)}
            write_atomic(options.out / f"claims-{part}.json", to_json(measured, indent=1) + "\n")
        write_page(options.out)
    write_page(options.out)


def write_page(folder: Path) -> None:
    write_atomic(folder / "claims.md", render(folder))


if __name__ == "__main__":
    main()
