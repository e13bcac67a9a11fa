"""Takes every architecture through every column and writes docs/pages/architectures.md (`make architectures`)."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from .columns import COLUMNS, Row, Subject, channel_mixers, fault_of, token_mixers, write_data
from .fsdp import compare
from .tiny import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "architectures.md"
FSDP = "FSDP"
INTRO = """\
# Architectures

This page lists what works with each architecture. `make architectures` writes it: it runs a tiny randomly initialized model of each architecture through the checks below. A check either works or is refused with a one-line error; anything else fails the command.
The classes and configurations are those of transformers {version}; the layer types are read from the model's modules and configuration.
{causal}

| column | check |
|---|---|
| plan | `preheat plan` predicts memory and time |
| packed | loss and gradients of packed sequences equal those of transformers' eager forward pass on single documents: loss and gradients to 1e-5 in fp32 (gradients of gated delta nets 2e-5), and to 1e-10 in fp64 |
| ckpt | the same with `activation_checkpointing` |
| chunked | the same with `chunked_loss` |
| FSDP | losses and gradient norms of five steps on two processes (gloo) agree with those of one process |
| resume | losses after a restart from a checkpoint equal those of the uninterrupted run |
| export | `preheat export --to hf`, read by transformers: logits agree to 1e-5 |
| generate | `preheat generate` with its KV cache gives the greedy text of transformers |
| LoRA | `all-linear` and, if the family has them there, pairs on experts are trained, merged and exported: logits agree as above |

"""
SHORT = {
    "packed loss and gradients": "packed",
    "checkpointing": "ckpt",
    "chunked loss": "chunked",
    "generation": "generate",
}
ORDER = [
    "plan",
    "packed loss and gradients",
    "checkpointing",
    "chunked loss",
    FSDP,
    "resume",
    "export",
    "generation",
    "LoRA",
]


def page(rows: list[Row]) -> str:
    """The page: a table of cells, and the reasons of what is refused below it."""
    notes: list[str] = []
    titles = ["architecture", "token mixers", "channel mixers", *(SHORT.get(c, c) for c in ORDER)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = []
        for column in ORDER:
            reason = row.cells[column]
            if reason and reason not in notes:
                notes.append(reason)
            cells.append(f"refused ({notes.index(reason) + 1})" if reason else "works")
        lines.append(f"| `{row.name}` | {row.token_mixers} | {row.channel_mixers} | {' | '.join(cells)} |")
    intro = INTRO.format(version=transformers.__version__, causal=CAUSAL)
    reasons = [f"{n}. {reason}" for n, reason in enumerate(notes, 1)]
    return (
        intro
        + "\n".join(lines)
        + "\n"
        + ("\nError messages of the refused checks:\n\n" + "\n".join(reasons) + "\n" if notes else "")
    )


CAUSAL = (
    "A slow test builds all other causal architectures of transformers: each either trains with the loss of "
    "transformers, or is refused before the data is read."
)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    faults, rows, subjects = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        for name in names or ARCHITECTURES:
            start = time.monotonic()
            subject = Subject(name, folder)
            cells = {}
            for title, column in COLUMNS.items():
                try:
                    cells[title] = fault_of(column, subject)
                except Exception:  # noqa: BLE001  # the matrix goes on, and fails at its end
                    cells[title] = "FAULT"
                    faults.append(f"{name}: {title}:\n{traceback.format_exc()[-2500:]}")
                    print(faults[-1], flush=True)
            rows.append(Row(name, *_kinds(subject), cells))
            subjects.append(subject)
            refused = {title: reason for title, reason in cells.items() if reason}
            print(json.dumps(asdict(rows[-1])), flush=True)
            print(f"{name} {time.monotonic() - start:.0f} s {refused or ''}", flush=True)
            subject.forget()
            gc.collect()
        for name, (right, reason) in compare(subjects, folder).items():
            next(row for row in rows if row.name == name).cells[FSDP] = reason
            if reason:
                print(f"{name}: {FSDP}: {reason}", flush=True)
            if not right:
                faults.append(f"{name}: {FSDP}: {reason}")
    if not names and not faults:
        PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{len(rows)} architectures, {len(faults)} faults", *faults, sep="\n")
    return bool(faults)


def _kinds(subject: Subject) -> tuple[str, str]:
    return ", ".join(token_mixers(subject.model)), channel_mixers(subject.config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
