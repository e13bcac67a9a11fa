"""What one session on a GPU runs: is it right, does it need what the plan says, how fast is it.

    python benchmarks/gpu_check.py correct | memory | ladder [--budget SECONDS] [--only WORDS ...] [--out FOLDER]
    python benchmarks/gpu_check.py correct --device cpu          # tries the cases themselves, at tiny sizes
    python benchmarks/gpu_check.py ladder --plan-to PLANS --card H100            # on any machine, beforehand
    python benchmarks/gpu_check.py ladder --planned PLANS --peer-sites trl=DIR   # on the card

Cases run one after another in a process that is started anew where one crashed, hung or left the device unusable. First come cases that
never ran, by the results in FOLDER and in what `--after` names; then those whose code changed; the oldest first, and otherwise the ones that
matter most. Each ends with one JSON line on stdout and in FOLDER/gpu_check-PART.jsonl, to which commands append, so that a session that is
cut off keeps what it has; FOLDER/gpu_check-PART.md has the newest result of each case, and FOLDER/gpu_check-PART.log what the cases printed. Ctrl-C, SIGTERM and SIGHUP end the running case and its
processes; the table then has the cases that ended before. Exit codes: 0 all that ran is right, 1 something is not, 2 the command is wrong, 128 + signal
if it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # preheat and its tests, installed or not

from _gpu import peers, records  # noqa: E402
from _gpu.case import Case, Skip, Where, Wrong  # noqa: E402

# Before `find_missing` has looked for what preheat needs: these import the standard library only.
from preheat.hardware.child_processes import tie_to_parent  # noqa: E402
from preheat.hardware.interrupts import Interrupted, raise_on_signal  # noqa: E402

PARTS = ("correct", "memory", "ladder")
NEEDED = {  # module -> the name that pip knows it by
    "torch": "torch",
    "transformers": "transformers",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "typer": "typer",
    "rich": "rich",
    "jinja2": "jinja2",
    "datasets": "datasets",
    "peft": "peft",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "matplotlib": "matplotlib",
    "PIL": "pillow",
    "psutil": "psutil",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "ruamel": "ruamel.yaml",
    "pynvml": "nvidia-ml-py",
    "pytest": "pytest",
}
START = 120.0  # seconds that a process may take for its imports and the first kernel
SHARED = 4.0  # times a case's limit on a CPU, which other work may share; the limits are those of a GPU's machine
ENDS = ("CUDA error", "AcceleratorError", "device-side assert", "illegal memory access", "CUBLAS_STATUS", "cuDNN error")
"""Words of errors after which a process can do nothing more on its device."""


def find_missing() -> list[str]:
    """What must be installed first, by the names that pip knows."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def list_cases(part: str, where: Where) -> list[Case]:
    """The cases of a part, or of another module, in their order."""
    module = importlib.import_module(f"_gpu.{part}" if part in PARTS else part)
    cases: list[Case] = module.plans(where) if where.plan_to else module.cases(where)
    return cases


def serve(part: str, where: Where, requests: TextIO, answers: TextIO) -> None:
    """Runs cases by name, a line each, and answers with one JSON line each."""
    cases = {case.name: case for case in list_cases(part, where)}
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in requests:
        print(json.dumps(run(cases[line.strip()], where)), file=answers, flush=True)


def run(case: Case, where: Where) -> dict[str, Any]:
    """A case's result: {case, result: ok, wrong, failed or skipped, seconds, why, figures}."""
    import traceback

    begun = time.perf_counter()
    result, why, figures = "ok", "", dict[str, Any]()
    try:
        figures = case.run(where)
    except Skip as reason:
        result, why = "skipped", str(reason)
    except Wrong as wrong:
        result, why, figures = "wrong", str(wrong), wrong.figures
    except Exception as error:  # noqa: BLE001  # whatever it is, the next case is to run
        traceback.print_exc()
        result, why = (
            "failed",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
        )
    _free_device(where)
    return {
        "case": case.name,
        "result": result,
        "seconds": round(time.perf_counter() - begun, 2),
        "why": why[:600],
        "figures": figures,
    }


def _free_device(where: Where) -> None:
    """Gives back what a case left on the device."""
    import gc

    gc.collect()
    if "torch" not in sys.modules:
        return
    import torch

    torch.compiler.reset()
    if where.kind == "cuda":
        with contextlib.suppress(RuntimeError):  # the device is gone: the answer says so, and the process is ended
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Process:
    """A process that serves cases."""

    def __init__(self, part: str, where: Where, log: Any, seconds: float = START):
        ours, theirs = os.pipe()
        command = [
            sys.executable,
            __file__,
            part,
            "--serve",
            str(theirs),
            "--where",
            json.dumps(dataclasses.asdict(where)),
        ]
        self.process = subprocess.Popen(
            # Tethered, for a `kill -9` of this process; a session of its own, so that `end` reaches all of its processes.
            tie_to_parent(command),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            text=True,
            start_new_session=True,
        )
        os.close(theirs)
        self.answers = os.fdopen(ours, encoding="utf-8")
        self.ran = 0
        try:
            self.ready = self._answer(seconds) is not None
        except BaseException:  # a signal: nothing else knows this process yet
            self.kill()
            raise

    def ask(self, name: str, seconds: float) -> dict[str, Any] | None:
        """The answer; None where it does not come in time or the process has ended."""
        assert self.process.stdin
        self.ran += 1
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        if not select.select([self.answers], [], [], max(seconds, 0.0))[0]:
            return None
        line = self.answers.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def end(self) -> int | None:
        """Ends it and what it has started; its exit code if it had ended by itself."""
        code = self.process.poll()
        if code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert self.process.stdin
                self.process.stdin.close()
                self.process.wait(timeout=0.5 if self.ran and not self.ready else 3)
        self.kill()
        return code

    def kill(self) -> None:
        """Kills it and the processes that it has started, without waiting for a case."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.answers.close()


def run_cases(
    part: str, where: Where, chosen: list[Case], budget: float, log: Any
) -> Generator[dict[str, Any], None, None]:
    """Runs the cases as far as `budget` seconds allow; what is left is named."""
    until = time.monotonic() + budget
    process: Process | None = None
    try:
        for case in chosen:
            left = until - time.monotonic()
            if left < min(case.seconds, 5.0):
                yield {
                    "case": case.name,
                    "result": "left out",
                    "seconds": 0.0,
                    "why": "the budget is used up",
                    "figures": {},
                }
                continue
            if process is not None and case.fresh and process.ran:
                process.end()
                process = None
            if process is None:
                process = Process(part, where, log, min(START, until - time.monotonic()))
            if not process.ready:
                process.end()
                process = None
                why = "the process that runs cases did not start: see the log"
                yield {"case": case.name, "result": "failed", "seconds": 0.0, "why": why, "figures": {}}
                continue
            allowed = min(case.seconds * (SHARED if where.kind == "cpu" else 1), until - time.monotonic())
            begun = time.monotonic()
            answer = process.ask(case.name, allowed)
            if answer is None:
                taken = time.monotonic() - begun
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.process.wait(timeout=0.2)
                code = process.end()
                process = None
                why = (
                    f"took longer than {allowed:.0f} s" if code is None else f"ended with exit code {code}: see the log"
                )
                if code is not None and code < 0:
                    why = f"was ended by {signal.Signals(-code).name}: see the log"
                late = "cut off" if allowed < case.seconds and code is None else "failed"
                yield {"case": case.name, "result": late, "seconds": round(taken, 2), "why": why, "figures": {}}
                continue
            yield answer
            if case.spoils or any(word in answer["why"] for word in ENDS):
                process.end()
                process = None
    except BaseException:  # a signal, or a fault of this loop
        if process is not None:
            process.kill()
            process = None
        raise
    finally:
        if process is not None:
            process.end()


def describe_machine(where: Where) -> str:
    """The device and the versions, in a line; "" if torch finds no CUDA device but needs one."""
    if where.plan_to or where.kind == "cpu":
        device = f"{where.card} (planned)" if where.plan_to else f"CPU, {os.cpu_count()} cores"
        device += f", torch {importlib.metadata.version('torch')}"
    else:
        # In a process of its own: asked here, the context would take memory of the card for as long as cases run.
        script = "import torch as t; print(t.cuda.is_available() and f'{t.cuda.get_device_name()}, torch {t.__version__}' or '')"
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
        device = done.stdout.strip()
    return device and f"{device}, transformers {importlib.metadata.version('transformers')}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", metavar="correct|memory|ladder", help="or the name of a module with cases of your own")
    parser.add_argument(
        "--budget", type=float, default=540.0, help="seconds; what does not fit is named (default: 540)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cases whose name contains one of these")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results (default on CUDA: benchmarks/results, of plans: theirs; on a CPU none is written)",
    )
    parser.add_argument(
        "--after",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="results of earlier runs besides those in --out: files, or their folders",
    )
    parser.add_argument(
        "--peer-sites",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="packages of another trainer of the ladder (trl, torchtitan, unsloth), for its process only; FOLDER:FOLDER for several",
    )
    parser.add_argument("--planned", default="", metavar="FOLDER", help="ladder: recipes that --plan-to wrote")
    parser.add_argument("--plan-to", default="", metavar="FOLDER", help="ladder: plan for --card instead of training")
    parser.add_argument("--card", default="", help="with --plan-to: a GPU as in `preheat plan --gpu`")
    parser.add_argument("--list", action="store_true", help="print the cases in their order and end")
    parser.add_argument("--full", action="store_true", help="the GPU's sizes on a CPU too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--where", help=argparse.SUPPRESS)
    return parser.parse_args()


def find_mistake(options: argparse.Namespace) -> str:
    """Returns the error of a wrong command, with its fix; "" if it is right."""
    if names := find_missing():
        return f"not installed here: {', '.join(names)}; pip install {' '.join(names)}"
    if options.part not in PARTS and importlib.util.find_spec(options.part) is None:
        return f"{options.part}: no such part; use {', '.join(PARTS)}, or a module with `cases(where)`"
    for key in ("planned", "plan_to"):
        if getattr(options, key) and options.part != "ladder":
            return f"--{key.replace('_', '-')}: only the recipes of ladder are planned, not those of {options.part}"
    if bool(options.plan_to) != bool(options.card):
        return "--plan-to FOLDER and --card NAME belong together: name both, as in --plan-to plans --card H100"
    if options.plan_to and options.planned:
        return "--plan-to writes plans and --planned trains by them: use one of them"
    if options.planned and not Path(options.planned).is_dir():
        return f"--planned {options.planned}: no such folder; --plan-to {options.planned} --card NAME writes it"
    for path in options.after:
        if not path.exists():
            return f"--after {path}: no such file or folder"
    trainers = [run.__name__ for run in peers.PEERS.values()]
    for value in options.peer_sites:
        name, _, folders = value.partition("=")
        if name not in trainers:
            return f"--peer-sites {value}: no such trainer; use NAME=FOLDER with one of {', '.join(trainers)}"
        for folder in folders.split(os.pathsep):
            if not folder or not Path(folder).is_dir():
                return f"--peer-sites {value}: no folder '{folder}'; pip install --target FOLDER {name}"
    return ""


def build_where(options: argparse.Namespace, folder: str) -> Where:
    sites = dict(value.split("=", 1) for value in options.peer_sites)
    return Where(
        options.device,
        tiny=options.device == "cpu" and not options.full,
        folder=folder,
        sites={
            name: os.pathsep.join(map(os.path.abspath, folders.split(os.pathsep))) for name, folders in sites.items()
        },
        planned=os.path.abspath(options.planned) if options.planned else "",
        plan_to=os.path.abspath(options.plan_to) if options.plan_to else "",
        card=options.card,
    )


def compute_code_digest(part: str) -> str:
    """A digest of the code that a part runs."""
    folders = [ROOT / "preheat", ROOT / "benchmarks/_gpu"]
    if part not in PARTS:
        spec = importlib.util.find_spec(part)
        assert spec
        assert spec.origin
        folders.append(Path(spec.origin))
    return records.compute_digest(folders)


def main() -> int:
    options = parse_options()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if options.serve:
        with os.fdopen(options.serve, "w", encoding="utf-8") as answers:
            serve(options.part, Where(**json.loads(options.where)), sys.stdin, answers)
        return 0
    if fault := find_mistake(options):
        print(f"gpu_check: {fault}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        where = build_where(options, folder)
        device = describe_machine(where)
        if not device:
            print(
                "gpu_check: torch finds no CUDA device here; --device cpu tries the cases themselves", file=sys.stderr
            )
            return 2
        cases = [c for c in list_cases(options.part, where) if any(words in c.name for words in options.only or [""])]
        if not cases:
            print(
                f"gpu_check: --only {' '.join(options.only)}: no case of {options.part} has that in its name; --list shows them",
                file=sys.stderr,
            )
            return 2
        stem = f"gpu_check-{options.part}" + ("-plans" if where.plan_to else "")
        default = (
            Path(where.plan_to) if where.plan_to else ROOT / "benchmarks/results" if where.kind == "cuda" else None
        )
        out: Path | None = options.out or default
        files = [path / f"{stem}.jsonl" if path.is_dir() else path for path in [*options.after, *filter(None, [out])]]
        code = compute_code_digest(options.part)
        chosen = records.order_cases(cases, [row for file in dict.fromkeys(files) for row in records.read(file)], code)
        if options.list:
            print("\n".join(f"{case.name:60s} {case.seconds:5.0f} s at most" for case in chosen))
            return 0
        for made in filter(None, [where.plan_to, out]):
            Path(made).mkdir(parents=True, exist_ok=True)
        target = out or Path(folder)
        rows = []
        interrupted: Interrupted | None = None
        with (
            (target / f"{stem}.log").open("a", encoding="utf-8") as log,
            (target / f"{stem}.jsonl").open("a", encoding="utf-8") as lines,
        ):
            try:
                # Closing the generator ends its process, also if the signal arrives outside of it.
                with (
                    raise_on_signal(),
                    contextlib.closing(run_cases(options.part, where, chosen, options.budget, log)) as done,
                ):
                    for result in done:
                        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                        rows.append(result | {"at": now, "code": code, "machine": device})
                        for file in (sys.stdout, lines):
                            print(json.dumps(rows[-1]), file=file, flush=True)
            except Interrupted as signalled:
                interrupted = signalled
        if out is None and any(row["result"] == "failed" for row in rows):
            sys.stderr.write((target / f"{stem}.log").read_text(encoding="utf-8")[-6000:])
        everything = records.find_newest(records.read(target / f"{stem}.jsonl")).values()
        command = "python " + shlex.join(sys.argv)
        (target / f"{stem}.md").write_text(records.render_table(options.part, [*everything], command), encoding="utf-8")
        print(records.summarize_results(rows), file=sys.stderr)
        if interrupted is not None:
            print(f"gpu_check: {interrupted} after {len(rows)} of {len(chosen)} cases", file=sys.stderr)
            return interrupted.exit_code
    return int(any(row["result"] in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
