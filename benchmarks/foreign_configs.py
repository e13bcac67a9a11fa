"""Plans configurations that other trainers ship, and counts by trainer what was planned and why the rest was not.

    PREHEAT_CONFIGS=FOLDER python benchmarks/foreign_configs.py [--gpu H100] [--count 8] [--only NAME] [--resume]

FOLDER has a folder of files for each trainer (axolotl, automodel, ...). Each file is planned as `preheat plan FILE --gpu
GPU --count N` does, but for the line `instead`, in a process of its own that starts with torch imported; N is what the
file's degrees of parallelism need, if that is more than `--count` or if its batch is too small for so many. A file is out of scope if it trains something other than the text part of a
language model on text (images, sound, rewards, classifiers, diffusion), or is no configuration of a training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = 300  # longest plan

OUT_OF_SCOPE = (
    ("images and sound", r"images|sound|image|video|audio|rows have (images|videos|audios)"),
    ("rewards", r"on rewards|reward model|of or on rewards"),
    ("classifier", r"classifier"),
    ("diffusion", r"diffusion"),
)
"""Kinds of training that preheat does not read from another trainer's file -> how its message says so."""
NO_SIZES = r"model\.path: .*no such folder"
NOT_TRAINED = r"cannot be trained here"
"""Messages of a model of which no sizes are here, and of an architecture that preheat does not train."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of planning a file.

    Attributes:
        fits: None if it was not planned.
        error: one line; empty if it was planned.
    """

    trainer: str
    file: str
    count: int
    fits: bool | None
    peak: float
    seconds: float
    unknown_keys: int
    error: str

    @property
    def kind(self) -> str:
        """`planned`, a kind that is out of scope, `sizes not here`, `not trained`, or `refused`."""
        if not self.error:
            return "planned"
        for kind, pattern in OUT_OF_SCOPE:
            if re.search(pattern, self.error):
                return kind
        if re.search(NO_SIZES, self.error):
            return "sizes not here"
        return "not trained" if re.search(NOT_TRAINED, self.error) else "refused"


def answer(file: Path, gpu: str, least: int) -> dict[str, object]:
    """Plans the run of a file on `least` devices or more, and if that cannot be on as many as it needs."""
    from preheat.cli.options.subject import find_subject
    from preheat.errors import PreheatError

    try:
        needed = find_subject(str(file)).recipe.parallel.devices
        fewest = int(needed) if isinstance(needed, int) else 1
    except PreheatError as error:
        return {"error": str(error)}
    with contextlib.suppress(PreheatError):
        return plan_on(file, gpu, max(fewest, least))
    try:
        return plan_on(file, gpu, fewest)
    except PreheatError as error:
        return {"error": str(error)}


def plan_on(file: Path, gpu: str, count: int) -> dict[str, object]:
    """Plans the run of a file as its trainer does it, without the alternatives that `preheat plan` adds.

    Raises:
        PreheatError: it cannot be planned.
    """
    from preheat.cli.options.subject import find_subject
    from preheat.hardware.catalogue import resolve_accelerator
    from preheat.planning.plan import plan, resolve_auto
    from preheat.planning.plan_request import request_of

    subject = find_subject(str(file), devices=count)
    request = request_of(
        subject.recipe, resolve_accelerator(gpu), world=count, per_host=min(count, 8), count_rows=False
    )
    planned = plan(resolve_auto(request))
    unknown = len(subject.reading.not_understood) if subject.reading else 0
    return {"count": count, "fits": planned.fits, "peak": round(planned.peak_gib, 2), "unknown_keys": unknown}


def plan_file(file: Path, trainer: str, gpu: str, least: int) -> Outcome:
    """Plans a file in a child of this process, whose answer goes to a file."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        if (child := os.fork()) == 0:
            import logging
            import signal

            logging.disable(logging.WARNING)
            signal.alarm(SECONDS)
            json.dump(answer(file, gpu, least), out)
            out.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        planned = json.loads(out.read() or "{}")
    seconds = round(time.monotonic() - started, 1)
    if status:
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == 14
        planned = {"error": f"no plan after {seconds:,.0f} s" if late else f"ended with status {status}"}
    values = {"count": least, "fits": None, "peak": 0.0, "unknown_keys": 0, "error": ""} | planned
    return Outcome(trainer=trainer, file=file.name, seconds=seconds, **values)


def describe_reason(outcome: Outcome) -> str:
    """Returns the error of a file without its name and line, which differ from file to file."""
    text = re.sub(rf"\S*{re.escape(outcome.file)}(:\d+)?:? ?", "", outcome.error)
    text = re.sub(r"(no such folder).*", r"\1", text.replace("\n", "; "))
    return text.replace("|", "/")[:200]


def write_table(outcomes: list[Outcome], gpu: str, count: int, out: Path) -> None:
    """Writes the result's page."""
    by_trainer = {name: [o for o in outcomes if o.trainer == name] for name in sorted({o.trainer for o in outcomes})}
    rows, total = [], Counter[str]()
    for name, some in [*by_trainer.items(), ("all", outcomes)]:
        total = Counter(outcome.kind for outcome in some)
        outside = sum(total[kind] for kind, _ in OUT_OF_SCOPE)
        fits = sum(outcome.fits is True for outcome in some)
        rows.append(
            f"| {name} | {len(some)} | {outside} | {total['sizes not here']} | {total['not trained']} | {total['refused']} | "
            f"{total['planned']} | {fits} |"
        )
    planned = total["planned"]
    known = planned + total["refused"]
    supported, scope = known + total["not trained"], known + total["not trained"] + total["sizes not here"]
    seconds = [outcome.seconds for outcome in outcomes if not outcome.error]
    unknown = sum(outcome.unknown_keys == 0 for outcome in outcomes if not outcome.error)
    fewer = sum(outcome.count < count for outcome in outcomes if not outcome.error)
    lines = [
        "# Configurations of other trainers, planned",
        "",
        f"**{planned} of {scope} files in scope are planned ({planned / scope:.0%}). Without the {total['sizes not here']} whose "
        f"model has no sizes here it is {planned / supported:.0%}, and without the {total['not trained']} of architectures that "
        f"preheat does not train {planned / known:.0%}.** {unknown} of those planned have no key that is not understood.",
        "",
        "| trainer | files | out of scope | sizes not here | not trained | refused | planned | fits |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"`python benchmarks/foreign_configs.py --gpu {gpu} --count {count}`: example files that the trainers' own "
        "repositories ship. Out of scope: "
        + ", ".join(kind for kind, _ in OUT_OF_SCOPE)
        + ". Sizes not here: the model is on the hub, which was not reached, and has no preset; most of their architectures are "
        f"supported, so that a run with the hub plans more. `fits`: on {count} {gpu}, or as many as the file's degrees of "
        f"parallelism need; {fewer} files are planned on fewer, because their batch is too small for {count}. A plan took "
        f"{statistics.median(seconds or [0]):.0f} s (median; longest {max(seconds, default=0):.0f} s).",
        "",
        "## Reasons",
        "",
        "| trainer | files | kind | reason |",
        "|---|---|---|---|",
    ]
    reasons = Counter((o.trainer, o.kind, describe_reason(o)) for o in outcomes if o.error)
    lines += [
        f"| {trainer} | {number} | {kind} | {reason} |" for (trainer, kind, reason), number in sorted(reasons.items())
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[:12]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--only", default="", help="Files whose path has this text.")
    parser.add_argument("--resume", type=Path, help="A .jsonl file of outcomes: those in it are not planned again.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/foreign_configs.md"))
    options = parser.parse_args()
    folder = Path(os.environ.get("PREHEAT_CONFIGS", "../shared/configs"))
    files = sorted(
        file
        for trainer in ("automodel", "axolotl", "litgpt", "llamafactory")
        for file in (folder / trainer).glob("*.y*ml")
        if options.only in str(file)
    )
    if not files:
        sys.exit(f"no configurations in {folder}: set PREHEAT_CONFIGS")
    import preheat.planning.plan  # noqa: F401  # once, with torch, before the children are forked

    known: dict[tuple[str, str], Outcome] = {}
    if options.resume and options.resume.exists():
        stored = [Outcome(**json.loads(line)) for line in options.resume.read_text(encoding="utf-8").splitlines()]
        known = {(outcome.trainer, outcome.file): outcome for outcome in stored}
    for file in files:
        key = (file.parent.name, file.name)
        if key in known:
            continue
        known[key] = plan_file(file, file.parent.name, options.gpu, options.count)
        print(json.dumps(asdict(known[key])), flush=True)
        if options.resume:
            with options.resume.open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(known[key])) + "\n")
    write_table([known[file.parent.name, file.name] for file in files], options.gpu, options.count, options.out)


if __name__ == "__main__":
    main()
