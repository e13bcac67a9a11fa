"""What works without Linux: a Python from which POSIX-only modules and functions were taken, as Windows lacks them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from preheat import train
from preheat.errors import RunError
from preheat.hardware.probe import probe
from preheat.recipe import parse

WITHOUT_POSIX = """
import os, signal, sys, time
import asyncio, multiprocessing, platform, subprocess, tempfile, uuid
import datasets, matplotlib.pyplot, peft, psutil, pydantic, rich, torch, transformers, typer
from transformers.models import gpt2, llama
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

# From here on, as on Windows: after the libraries, which have their own ways there.
for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for owner, names in (
    (os, "fork forkpty getpgid getuid geteuid killpg sched_getaffinity setsid sysconf"),
    (signal, "SIGHUP SIGKILL SIGUSR1 SIGALRM setitimer pthread_sigmask"),
    (time, "pthread_getcpuclockid clock_gettime"),
):
    for name in names.split():
        delattr(owner, name)
sys.platform = "win32"
"""
PLAN = """
from preheat.cli import main

sys.argv = ["preheat", "plan", "gpt2", "--gpu", "H100", "--json"]
main()

"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_system_without_posix_plans() -> None:
    plan = json.loads(run(PLAN))
    assert plan["fits"]
    assert plan["device"]["kind"] == "cuda"


def test_windows_trains_in_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RunError, match="WSL 2"):
        train(parse("{name: a, model: {preset: tiny}, data: {text: abc}, stop: {max_steps: 1}}"))


def test_apple_gpus_are_named_where_the_cpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = probe("auto", None, None)
    assert device.kind == "cpu"
    assert "Apple's GPUs (MPS)" in device.notice
