"""transformers' Trainer and TRL's SFTTrainer with and without `accelerate_trainer`: losses, speed, memory, and the plan.

python benchmarks/trainer_integration.py            # real weights of $PREHEAT_DATA, fp32, on a CPU; needs trl for its rows

Each case runs in a process of its own, plain and accelerated in turn. Without PlanCallback nothing of preheat runs in a
plain case; a third case of each kind has the callback alone, whose plan is compared with what it measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "trainer_integration.md"
STEPS = 20
ROWS = 16
LENGTH = 384
CASES = {
    "Trainer": ("trainer", False),
    "Trainer, activation checkpointing": ("trainer", True),
    "SFTTrainer": ("sft", False),
    "SFTTrainer, activation checkpointing (its default)": ("sft", True),
}


def read_texts(data: Path) -> list[str]:
    rows = json.loads((data / "instruct" / "alpaca_en_demo.json").read_text())
    return [f"{row['instruction']}\n{row['input']}\n{row['output']}" for row in rows]


def create_trainer(kind: str, recomputes: bool, folder: str, data: Path) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    weights = str(data / "stories260K-hf")
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "activation_checkpointing": recomputes,
    }
    texts = read_texts(data)
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        args = SFTConfig(max_length=LENGTH, **settings)
        rows = Dataset.from_list([{"text": text} for text in texts])
        return SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    from transformers import DataCollatorForLanguageModeling

    rows = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"][:LENGTH]} for text in texts])
    tokenizer.pad_token = tokenizer.eos_token
    return Trainer(
        model,
        TrainingArguments(**settings),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def run_case(kind: str, recomputes: bool, how: str) -> None:
    """Trains in this process, and prints the figures as JSON."""
    import time

    import torch
    from transformers import TrainerCallback

    from preheat.hardware.probe import peak_resident_bytes, reset_peak, resident_bytes
    from preheat.integrations import PlanCallback, accelerate_trainer

    torch.set_num_threads(1)
    data = Path(os.environ["PREHEAT_DATA"])
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            # After the plan of the callback before this one.
            self.before = resident_bytes()
            reset_peak()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.process_time() - self.begun)

    with tempfile.TemporaryDirectory() as folder:
        trainer = create_trainer(kind, recomputes, folder, data)
        changes = str(accelerate_trainer(trainer)) if how.startswith("accelerated") else ""
        callback, clock = PlanCallback(), Clock()
        if how.endswith("planned"):
            trainer.add_callback(callback)
        trainer.add_callback(clock)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        result = {
            "losses": losses,
            "seconds": median(seconds[2:]),
            "peak_mib": (peak_resident_bytes() - clock.before) / 2**20,
            "made": changes,
        }
        if how.endswith("planned"):
            from preheat.run.reader import Reader

            assert callback.plan is not None
            assert callback.run is not None
            measured = Reader(callback.run).measured().peak_gib
            assert measured is not None
            result |= {"planned_mib": callback.plan.peak_gib * 1024, "measured_mib": measured * 1024}
    print("RESULT " + json.dumps(result))


def start_case(kind: str, recomputes: bool, how: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", kind, str(int(recomputes)), how]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    return result


def write_results(repeats: int) -> None:
    speeds, plans, changes, worst = [], [], "", 0.0
    farthest = {"heap": 0.0, "torch": 0.0}
    for name, (kind, recomputes) in CASES.items():
        runs: dict[str, list[dict[str, Any]]] = {"plain": [], "accelerated": []}
        for _ in range(repeats):
            for how, results in runs.items():
                results.append(start_case(kind, recomputes, how))
        plain, fast = runs["plain"], runs["accelerated"]
        difference = max(abs(a - b) for a, b in zip(plain[0]["losses"], fast[0]["losses"], strict=True))
        worst = max(worst, difference)
        before, after = (median(run["seconds"] for run in results) for results in (plain, fast))
        spread = " to ".join(f"{value:.2f}" for value in sorted(run["seconds"] for run in fast)[:: max(repeats - 1, 1)])
        memory = [median(run["peak_mib"] for run in results) for results in (plain, fast)]
        speeds.append(
            f"| {name} | {difference:.1e} | {before:.2f} | {after:.2f} ({spread}) | {before / after:.2f} | "
            f"{memory[0]:.0f} | {memory[1]:.0f} |"
        )
        changes = changes or fast[0]["made"]
        for how in ("planned", "accelerated planned"):
            run = start_case(kind, recomputes, how)
            off = run["planned_mib"] / run["measured_mib"] - 1
            # TRL's buffer of logits is wider than this vocabulary: the callback leaves torch's allocator in use.
            allocator = "torch" if (kind, how) == ("sft", "planned") else "heap"
            farthest[allocator] = max(farthest[allocator], abs(off))
            shown = name if how == "planned" else f"{name}, accelerated"
            plans.append(f"| {shown} | {run['planned_mib']:.0f} | {run['measured_mib']:.0f} | {off:+.1%} |")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    RESULTS.write_text(
        "\n".join(
            [
                "# A Trainer with and without `accelerate_trainer`",
                "",
                f"The losses of {STEPS} steps differ by at most {worst:.1e}. The callback's plan of the peak differs by at "
                f"most {farthest['heap']:.0%} from what it measured, except for a plain SFTTrainer, whose memory is up to "
                f"{farthest['torch']:.0%} less in the plan: its buffer of logits is wider than this vocabulary of 512, so "
                "torch's own allocator stays in use, whose holes are not planned.",
                "",
                "| trainer | largest difference of a loss | s/step before | s/step after (spread) | times as fast | "
                "MiB before | MiB after |",
                "|---|---|---|---|---|---|---|",
                *speeds,
                "",
                "The plan of `PlanCallback` against its measurement, MiB without the imports:",
                "",
                "| trainer | planned | measured | difference |",
                "|---|---|---|---|",
                *plans,
                "",
                f"`python benchmarks/trainer_integration.py --repeats {repeats}`: real weights (stories260K), fp32, rows "
                f"of Alpaca up to {LENGTH} tokens padded on the right, {ROWS} a micro-batch, one thread of a CPU. Each "
                "case is a process of its own, in alternation; seconds are of CPU time, the median of the steps after "
                "the second and of the repetitions; memory is the growth of the resident peak during training, which "
                f"does not count the weights (1 MiB). {versions}.",
                "",
                "What `accelerate_trainer` says of the first case:",
                "",
                "```text",
                changes,
                "```",
                "",
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=3, help="run one case in this process")
    chosen = parser.parse_args()
    if chosen.case:
        kind, recomputes, how = chosen.case
        run_case(kind, recomputes == "1", how)
    else:
        write_results(chosen.repeats)


if __name__ == "__main__":
    main()
