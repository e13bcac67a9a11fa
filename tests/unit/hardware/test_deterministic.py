"""`hardware.deterministic`: torch's settings, what has no deterministic version, and what is said without it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from preheat import load_recipe
from preheat.engine.device import resolve_device
from preheat.errors import RecipeError
from preheat.hardware.deterministic import describe_exactness, explain_lacking, set_deterministic


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield
    set_deterministic(False)


def test_the_key_sets_torch_s_mode_and_its_absence_undoes_it() -> None:
    torch.backends.cudnn.benchmark = True
    on, off = (load_recipe("demo", [f"hardware.deterministic={value}"]) for value in ("true", "false"))
    resolve_device(on)
    resolve_device(on)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[has-type]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    resolve_device(off)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[has-type]
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)  # what a user sets stays
    resolve_device(off)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


def test_a_workspace_of_the_environment_that_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(
        RecipeError, match=r"hardware.deterministic: CUBLAS_WORKSPACE_CONFIG is .*:0:0.* set it to :4096:8"
    ):
        set_deterministic(True)
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_an_operator_without_a_deterministic_version_is_one_line() -> None:
    set_deterministic(True)
    with pytest.raises(
        RuntimeError, match="put_"
    ) as raised:  # torch's own words, of an operator that has none on CPUs either
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    error = explain_lacking(raised.value)
    assert str(error) == (
        "hardware.deterministic: true, and put_ has no deterministic version; "
        "set it to false, or leave out the technique that uses it"
    )
    cublas = RuntimeError("... it uses CuBLAS and you have CUDA >= 10.2. ... CUBLAS_WORKSPACE_CONFIG=:4096:8 or ...")
    assert "start the run in a new process" in str(explain_lacking(cublas))
    assert explain_lacking(RuntimeError("shapes differ")) is None


def test_what_holds_without_the_key() -> None:
    assert [describe_exactness("cpu", False), describe_exactness("cpu", True), describe_exactness("cuda", True)] == [
        "bit for bit"
    ] * 3
    assert describe_exactness("cuda", False).startswith("up to rounding")
