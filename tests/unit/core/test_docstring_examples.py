"""The examples in docstrings are run."""

import doctest
import importlib
from pathlib import Path

import pytest

import preheat

HOUSE = Path(preheat.__path__[0])
MODULES = {
    ".".join(("preheat", *path.relative_to(HOUSE).with_suffix("").parts)).removesuffix(".__init__")
    for path in HOUSE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
}


@pytest.mark.filterwarnings("default")  # an example may show what a reader would see
@pytest.mark.parametrize("name", sorted(MODULES))
def test_examples_of(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert done.failed == 0


def test_there_are_examples() -> None:
    assert len(MODULES) > 100
