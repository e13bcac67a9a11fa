"""The recipe's segments of torch's CUDA allocator, and what a plan replays of them. Not yet run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SCRIPT = """
import torch
from preheat.hardware.probe import probe
from preheat.planning.memory.cuda_caching_allocator import Caching

device = probe("cuda", segments="{segments}")
assert device.expandable == {expandable}
held = [torch.empty(n * 30 << 20, dtype=torch.uint8, device="cuda") for n in (1, 2)]
replayed = Caching(expandable=device.expandable)
for block, tensor in enumerate(held):
    replayed.allocate(block, tensor.nbytes)
segments = torch.cuda.memory_snapshot()
assert all(s["is_expandable"] == {expandable} for s in segments), segments
assert torch.cuda.memory_reserved() == replayed.reserved, (torch.cuda.memory_reserved(), replayed.reserved)
"""


@pytest.mark.parametrize(("segments", "expandable"), [("fixed", False), ("expandable", True)])
def test_segments_are_set_and_replayed(segments: str, expandable: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTORCH_")}
    script = SCRIPT.format(segments=segments, expandable=expandable)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
