"""The first import of torchao logs nothing that a user cannot act on, and everything else."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys

import pytest

from preheat.models.torchao_import import silence_torchao


def test_only_its_own_lines_are_dropped_and_only_inside(caplog: pytest.LogCaptureFixture) -> None:
    ao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    filters = [list(ao.filters), list(pytree.filters)]
    with caplog.at_level(logging.WARNING, "torchao"), caplog.at_level(logging.WARNING, "torch.utils._pytree"):
        with contextlib.suppress(ImportError), silence_torchao():
            ao.warning("Failed to load %s: %s", "_C.so", "no")
            pytree.warning("<enum 'A'> is an Enum subclass and is now natively supported")
            ao.warning("this kernel is wrong")
            raise ImportError
        ao.warning("Failed to load %s", "b.so")
    assert [record.getMessage() for record in caplog.records] == ["this kernel is wrong", "Failed to load b.so"]
    assert [ao.filters, pytree.filters] == filters


@pytest.mark.parametrize(
    "calls",
    [
        "from preheat.techniques.efficient_attention import convert_model_to_efficient_attention as f\n"
        "f(torch.nn.TransformerEncoderLayer(16, 4))\n"
        "assert 'transformers' not in sys.modules, 'seconds for a model that is none of its'",
        "from preheat.techniques.fp8 import convert_to_fp8 as f\nf(torch.nn.Linear(16, 16), emulate=True)\n"
        "import torchao",
        "from preheat.models.hf import auto_class, _register_attention\n_register_attention()\nimport torchao",
    ],
    ids=["efficient_attention", "fp8", "transformers"],
)
def test_a_users_own_script_prints_nothing_of_torchaos(calls: str) -> None:
    pytest.importorskip("torchao")
    script = f"import sys, torch\n{calls}\nprint('end')"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("end\n", "")
