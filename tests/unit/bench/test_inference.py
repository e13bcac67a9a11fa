"""A contender of `preheat bench --inference`, in this process: what it measures of each way to write."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preheat.bench.inference import _require_room
from preheat.bench.inference_worker import InferenceWorker, _load_plain
from preheat.bench.messages import InferenceJob
from preheat.errors import DataError, DoesNotFit, RecipeError, RunError
from preheat.recipe import Sample


@pytest.fixture(scope="module")
def model(data_folder: Path) -> str:
    return str(data_folder / "stories260K-hf")


def _job(model: str, settings: dict[str, Any], **more: Any) -> InferenceJob:
    sample = Sample(**settings, max_new_tokens=8)
    return replace(InferenceJob(model, sample, None, "preheat", 8, [(2, 24)], None), **more)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"cache": "static"}, None),
        ({"draft_model": "itself"}, None),
        ({}, "bf16"),
        ({"cache": "int8", "window": 9}, "bf16"),
    ],
)
def test_a_contender_measures_itself(
    model: str, data_folder: Path, settings: dict[str, Any], dtype: str | None
) -> None:
    text = str(data_folder / "text" / "tinystories_train_excerpt.txt")
    if "draft_model" in settings:
        settings = {"draft_model": model}
    speaker = InferenceWorker(_job(model, settings, dtype=dtype, text=text))
    about = speaker.about()
    assert about.weights_bytes == pytest.approx(
        (2 if dtype else 8 if "draft_model" in settings else 4) * 260_032, rel=0.01
    )
    speaker.begin()
    found = speaker.measure(2, 24)
    assert found.first > 0 < found.rest
    assert [len(t) for t in found.texts] == [8, 8]
    assert found.drawn == 14, "all but the first token of each row"
    if "draft_model" in settings:  # each row by itself: 1, 5 and 2 tokens
        assert found.passes == 4
        assert found.texts == _texts(model, text)
    else:
        assert found.passes == 7
        assert found.cache_bytes == about.cache_bytes[0]
    assert 1.5 < speaker.end().loss < 2.6 + 2 * ("window" in settings), (
        "1.8 on whole stories; short rows and windows cost"
    )


def test_transformers_by_itself_writes_the_same_texts(model: str, data_folder: Path) -> None:
    text = str(data_folder / "text" / "tinystories_train_excerpt.txt")
    theirs = InferenceWorker(_job(model, {}, engine="transformers", text=text))
    theirs.begin()
    found = theirs.measure(2, 24)
    assert found.texts == _texts(model, text)
    assert (found.passes, found.drawn, found.cache_bytes) == (7, 14, theirs.about().cache_bytes[0])


def test_a_kernel_of_torch_s_attention_writes_the_same_texts(model: str, data_folder: Path) -> None:
    text = str(data_folder / "text" / "tinystories_train_excerpt.txt")
    for kernel in ("math", "flash"):
        worker = InferenceWorker(_job(model, {}, text=text, kernel=kernel))
        worker.begin()
        assert worker.measure(2, 24).texts == _texts(model, text)
    missing = InferenceWorker(_job(model, {}, text=text, kernel="cudnn"))
    missing.begin()
    with pytest.raises(RecipeError, match=r"efficient_attention\.kernel: cudnn: torch has no such kernel for float32"):
        missing.measure(2, 24)


def test_transformers_by_itself_draws_no_weights_that_a_folder_does_not_name(model: str, tmp_path: Path) -> None:
    """Folders of `preheat compress` have codes in their place: it would write, as fast as from real ones."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    folder.joinpath("model.safetensors").chmod(0o644)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.codes"] = tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"no weights for 1 tensors of the model \(model.layers.2.mlp.up_proj.weight\)"):
        _load_plain(_job(str(folder), {}), "cpu")


def _texts(model: str, text: str) -> list[list[int]]:
    plain = InferenceWorker(_job(model, {}, text=text))
    plain.begin()
    return plain.measure(2, 24).texts


def test_shapes_that_cannot_be_are_said_before_they_are_tried(model: str, tmp_path: Path) -> None:
    for cell, error, words in (
        (
            (1, 600),
            RecipeError,
            "--lengths 600: and 8 generated tokens are more than the 512 positions of tiny; use 504 or less",
        ),
        ((1 << 26, 64), DoesNotFit, "--batches 67108864: with prompts of 64 tokens the cache of tiny needs"),
    ):
        speaker = InferenceWorker(_job(model, {}, cells=[cell]))
        with pytest.raises(error) as found:
            _require_room({"tiny": speaker.about()}, [cell], 8)
        assert words in str(found.value)
    (tmp_path / "short.txt").write_text("Once upon a time.")
    with pytest.raises(DataError, match=r"short.txt: has \d+ tokens, and a prompt has 24"):
        InferenceWorker(_job(model, {}, text=str(tmp_path / "short.txt"))).begin()
