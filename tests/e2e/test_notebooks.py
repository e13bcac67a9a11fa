"""Each notebook runs from its first cell to its last, at test size, in a kernel of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert {"01_large_models_limited_hardware", "02_multi_gpu_training", "05_fine_tuning"} <= {
        path.stem for path in NOTEBOOKS
    }


@pytest.mark.filterwarnings("default")  # the kernel's client is not ours
@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.slow, id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "notebooks are run with nbclient and ipykernel: pip install 'preheat[dev]'"
    nbformat = pytest.importorskip("nbformat", reason=reason)
    pytest.importorskip("nbclient", reason=reason)
    spec = importlib.util.spec_from_file_location("store_notebooks", FOLDER / "store.py")
    assert spec is not None
    assert spec.loader is not None
    store = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(store)
    monkeypatch.setenv("PREHEAT_CACHE", str(cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    store.execute(notebook, tmp_path, small=True, timeout=280)
    shown = [kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})]
    assert shown.count("image/png") >= 2, "plots are drawn"
