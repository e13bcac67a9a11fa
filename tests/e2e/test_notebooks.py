"""Each notebook runs from its first cell to its last, at test size, in a kernel of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert {"01_large_models_limited_hardware", "02_multi_gpu_training", "05_fine_tuning"} <= {
        path.stem for path in NOTEBOOKS
    }


@pytest.mark.filterwarnings("default")  # the kernel's client is not ours
@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.slow, id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip(
        "nbformat", reason="notebooks are run with nbclient and ipykernel: pip install 'preheat[dev]'"
    )
    nbclient = pytest.importorskip(
        "nbclient", reason="notebooks are run with nbclient and ipykernel: pip install 'preheat[dev]'"
    )
    for name, value in {
        "PREHEAT_NOTEBOOK": "test",
        "PREHEAT_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})]
    assert shown.count("image/png") >= 2, "plots are drawn"
