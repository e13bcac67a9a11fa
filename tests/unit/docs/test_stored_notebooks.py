"""The notebooks' stored outputs belong to today's cells, recipes and planner, and name no machine's paths."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def store() -> ModuleType:
    spec = importlib.util.spec_from_file_location("store_notebooks", ROOT / "notebooks/store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_stored_outputs_belong_to_todays_code(store: ModuleType) -> None:
    assert len(store.NOTEBOOKS) >= 7
    assert [fault for path in store.NOTEBOOKS for fault in store.find_faults(path)] == []


def test_each_first_cell_names_the_content_and_the_time(store: ModuleType) -> None:
    for path in store.NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        first = store.join(notebook["cells"][0]["source"])
        assert first.startswith("# "), path.name
        assert "**You will see**" in first, path.name
        (minutes,) = re.findall(r"\*\*It takes\*\* about (\d+) minutes?\b", first)
        assert int(minutes) * 60 >= notebook["metadata"]["preheat"]["cpu_seconds"] / 2, path.name  # two cores


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda book: book["metadata"].pop("preheat"), "01_large_models_limited_hardware.ipynb has no stored outputs"),
        (lambda book: book["cells"][1].update(source="import os"), "its outputs are older than its cells"),
        (
            lambda book: recorded(book).update(settings="of before"),
            "its outputs are older than the recipe limited-hardware",
        ),
        (
            lambda book: recorded(book).update(planned_mib=recorded(book)["planned_mib"] * 1.1),
            "its outputs are older than the planner: limited-hardware",
        ),
        (lambda book: output(book, output_type="error", ename="ValueError"), "the stored output is an error (ValueE"),
        (lambda book: output(book, output_type="stream", text="read /home/ann/a.py"), "stored it (/home/ann/a.py)"),
        (lambda book: [cell.update(outputs=[]) for cell in book["cells"] if "outputs" in cell], "two plots are stored"),
    ],
)
def test_outdated_outputs_are_named(store: ModuleType, tmp_path: Path, change, fault: str) -> None:
    path = tmp_path / "01_large_models_limited_hardware.ipynb"
    book = json.loads((ROOT / "notebooks" / path.name).read_text(encoding="utf-8"))
    change(book)
    path.write_text(json.dumps(book), encoding="utf-8")
    (line,) = store.find_faults(path)
    assert fault in line
    assert line.startswith(path.name)
    assert line.endswith("python notebooks/store.py 01_large_models_limited_hardware")


def recorded(book: dict) -> dict:
    return book["metadata"]["preheat"]["recipes"]["limited-hardware"]


def output(book: dict, **fields: str) -> None:
    book["cells"][1]["outputs"].append(fields)


def test_text_changes_do_not_make_outputs_outdated_and_code_changes_do(store: ModuleType) -> None:
    book = json.loads((ROOT / "notebooks/05_fine_tuning.ipynb").read_text(encoding="utf-8"))
    before = store.describe_code(book)
    book["cells"][2]["source"] = "Another text."
    assert store.describe_code(book) == before
    book["cells"][3]["source"] = ["a = 1\n", "b = 2"]
    lines = store.describe_code(book)
    assert lines["cells"] != before["cells"]
    book["cells"][3]["source"] = "a = 1\nb = 2"
    assert store.describe_code(book) == lines


def test_stored_text_has_no_progress_paths_or_addresses(store: ModuleType, tmp_path: Path) -> None:
    text = f"10 %\r100 %\rdone\n{tmp_path}/tmpab12_/runs <F at 0x7f01> {ROOT}/preheat\r\n"
    assert store.clean_text(text, tmp_path) == "done\nfolder/runs <F> ./preheat\r\n"


def test_stored_texts_are_joined_up_to_the_next_plot(store: ModuleType, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    texts = [nbformat.v4.new_output("stream", text=f"{n}\n") for n in range(3)]
    plot = nbformat.v4.new_output("display_data", data={"text/plain": "a plot"})
    logged = nbformat.v4.new_output("stream", name="stderr", text="a warning\n")
    cell = nbformat.v4.new_code_cell(outputs=[texts[0], logged, texts[1], plot, texts[2]])
    assert store.clean(nbformat.v4.new_notebook(cells=[cell]), tmp_path) == ["a warning\n"]
    assert [output.get("text") for output in cell.outputs] == ["0\n1\n", None, "2\n"]
