"""Runs another trainer's own entry point in this process, and writes each step's loss and the memory that training took.

    PYTHON foreign_worker.py JOB.json

The environment has the trainer, and not preheat. Nothing of the trainer is changed but: losses are noted unrounded, an
adapter starts from the values of a file if the job names one, and modules are imported early, or replaced by an empty one, if
the job names them. Memory is
the growth of the process from just before the model is loaded to its high-water mark at the end of the last step.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import runpy
import sys
import types
from pathlib import Path
from typing import Any


def read_memory(name: str) -> int:
    """Returns a line of /proc/self/status in bytes: VmRSS, or VmHWM, its maximum."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:"))) << 10


def watch(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Makes transformers' Trainer note what it does in `result`."""
    import transformers

    # By class, not by name: trainers import these before or after this function runs.
    trainer: Any = transformers.Trainer
    loader: Any = transformers.PreTrainedModel
    train, step, load = trainer.train, trainer.training_step, loader.from_pretrained.__func__

    def note_load(cls: Any, *arguments: Any, **named: Any) -> Any:
        if "before" not in result:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
            result["before"] = read_memory("VmRSS")
        return load(cls, *arguments, **named)

    def note_train(self: Any, *arguments: Any, **named: Any) -> Any:
        if job["adapter"]:
            start_adapter(self.model, Path(job["adapter"]))
        done = train(self, *arguments, **named)
        result["after"] = read_memory("VmHWM")
        return done

    def note_step(self: Any, *arguments: Any, **named: Any) -> Any:
        loss = step(self, *arguments, **named)
        losses, number = result["losses"], self.state.global_step
        losses += [0.0] * (number + 1 - len(losses))
        losses[number] += float(loss)  # of micro-batches, which are parts of the step's mean
        return loss

    trainer.train, trainer.training_step = note_train, note_step
    loader.from_pretrained = classmethod(note_load)
    # Classes that have a method of their own call this one through super().
    result["losses"] = []


def start_adapter(model: Any, file: Path) -> None:
    """Copies the first values of an adapter into peft's."""
    import torch
    from safetensors.torch import load_file

    values, known = load_file(file), dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            known[f"base_model.model.{name}"].copy_(value)
    trained = {name for name, parameter in known.items() if parameter.requires_grad}
    assert trained == {f"base_model.model.{name}" for name in values}, trained


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    imported = Path(job["modules"])
    for name in json.loads(imported.read_text(encoding="utf-8")) if imported.exists() else []:
        with contextlib.suppress(Exception):  # modules of other platforms and optional ones
            importlib.import_module(name)
    for name in job["stubs"]:
        sys.modules[name] = stub = types.ModuleType(name)
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
    result: dict[str, Any] = {}
    sys.argv = [job["module"], *job["arguments"]]
    if job["expand"]:
        module, _, function = job["expand"].partition(":")
        arguments = sys.argv[1:]
        getattr(importlib.import_module(module), function)(arguments)
        sys.argv[1:] = arguments
    watch(job, result)
    if job["module"].endswith(".py"):
        runpy.run_path(job["module"], run_name="__main__")
    elif ":" in job["module"]:
        module, _, function = job["module"].partition(":")
        getattr(importlib.import_module(module), function)(*job.get("call", ()))
    else:
        runpy.run_module(job["module"], run_name="__main__")
    if not imported.exists():
        imported.write_text(json.dumps(sorted(sys.modules)), encoding="utf-8")
    names = {name: sys.modules[name].__version__ for name in job["versions"] if name in sys.modules}
    Path(job["result"]).write_text(json.dumps({**result, "versions": names}), encoding="utf-8")


if __name__ == "__main__":
    main()
