"""preheat compress on an image classifier, as a user types it: a chain over a folder of images, up to files for devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..unit.compress.test_image_classifiers import new_classifier, tinted
from .conftest import Command

CHAIN = """\
chain:
  - {train: 4, rate: 1.0, settings: {batch.size: 16}}
  - {compress: width, settings: {channels: 0.5}}
"""


def test_a_classifier_is_trained_and_made_narrower_by_a_command(preheat: Command) -> None:
    new_classifier(preheat.folder / "new")
    tinted(preheat.folder / "images", 8)
    (preheat.folder / "c.yaml").write_text("name: mine\n" + CHAIN)
    said, _ = preheat.here("compress", "new", "--recipe", "c.yaml", "--data", "images")
    assert "before" in said
    assert "expand_ratio 6.0 -> 3.0" in said
    told = json.loads((preheat.folder / "new/mine/compress.json").read_text())
    assert [step["name"] for step in told["variants"]] == ["1-train-4-passes", "2-width-0.5"]
    for step in told["variants"]:
        assert f"{step['after']['accuracy']:.1%}" in said
        assert {"model.safetensors", "preprocessor_config.json", "README.md"} <= {
            p.name for p in (preheat.folder / step["path"]).iterdir()
        }
    for arguments, words, code in (
        (
            ("--method", "int8", "--data", "images"),
            "--method 'int8': would change nothing: MODEL is an image classifier",
            2,
        ),
        (("--recipe", "c.yaml", "--data", "images", "--measured", "3"), "--measured 3: would change nothing: MODEL", 2),
        (("--data", "images"), "new is an image classifier: it needs a chain of steps", 2),
        (("--recipe", "c.yaml"), "preheat compress MODEL --recipe edge-vision --data IMAGES", 2),
        (("--recipe", "c.yaml", "--data", "gone", "--out", "x"), "--data gone: no such folder", 4),
        (("--recipe", "c.yaml", "--data", "images"), "already exists", 1),
    ):
        _, error = preheat.here("compress", "new", *arguments, code=code)
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.filterwarnings("ignore")  # the exporters' own, of many kinds
@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "executorch"])
def test_a_chain_ends_in_files_that_their_runtimes_read(preheat: Command, to: str) -> None:
    if to == "executorch":
        pytest.importorskip("executorch", reason="ExecuTorch is not installed here (pip install 'preheat[executorch]')")
    new_classifier(preheat.folder / "new")
    tinted(preheat.folder / "images", 12)
    steps = "".join(f"  - {{export: {to}, settings: {{dtype: {kind}}}}}\n" for kind in ("float32", "int8"))
    (preheat.folder / "c.yaml").write_text(CHAIN + steps)
    made = preheat.here.json("compress", "new", "--recipe", "c.yaml", "--data", "images", "--out", "out")
    narrow, whole, small = made["variants"][1:]
    assert whole["logits"]["largest"] <= 1e-4 * max(whole["logits"]["scale"], 1.0)
    assert whole["after"]["accuracy"] == narrow["after"]["accuracy"]
    assert small["after"]["bytes"] < 0.6 * whole["after"]["bytes"]
    assert small["logits"]["agreement"] >= 0.8
    card = (preheat.folder / small["path"] / "README.md").read_text()
    assert f"{small['after']['accuracy']:.1%}" in card
    assert "scores differ by at most" in card
    assert Path(preheat.folder / small["path"] / "preprocessor_config.json").is_file()
