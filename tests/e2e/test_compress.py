"""preheat compress: folders that the other commands open, what is told of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Command


@pytest.fixture
def stories(data_folder: Path, tmp_path: Path) -> tuple[str, str]:
    """The model, and some of the text that it was trained on."""
    text = (data_folder / "text" / "tinystories_train_excerpt.txt").read_text(encoding="utf-8")
    (tmp_path / "stories.txt").write_text(text[:60_000], encoding="utf-8")
    return str(data_folder / "stories260K-hf"), "stories.txt"


def test_a_model_is_compressed_measured_and_used(preheat: Command, stories: tuple[str, str]) -> None:
    model, text = stories
    how = ("--data", text, "--rows", "8", "--measured", "8", "--length", "128")
    made = preheat.here.json(
        "compress",
        model,
        "--method",
        "int8",
        "--method",
        "int4,keep=[head, embedding]",
        *how,
        "--out",
        "made",
        "--within",
        "0.01",
    )
    assert set(made) >= {"path", "bytes", "before", "after", "max_logit_difference"}
    assert (made["chosen"], Path(made["path"]).name) == ("int8", "int8")
    by_name = {v["method"]: v for v in made["variants"]}
    assert abs(by_name["int8"]["perplexity_rise"]) < 0.005
    assert 0.01 < by_name["int4"]["perplexity_rise"] < 0.2
    assert by_name["int4"]["after"]["bytes"] < by_name["int8"]["after"]["bytes"] < 0.6 * made["before"]["bytes"]
    assert all(v["after"]["decode_tokens_per_second"] > 0 for v in made["variants"])
    out = preheat.folder / "made"
    assert json.loads((out / "compress.json").read_text(encoding="utf-8")) == made
    page = (out / "compress.html").read_text(encoding="utf-8")
    assert "Perplexity against size" in page
    assert "<svg" in page
    card = (out / "int8" / "README.md").read_text(encoding="utf-8")
    assert f"{made['after']['perplexity']:.4f}" in card
    assert str(preheat.folder) not in card
    # The other commands open it as any model, and find what was measured.
    measured = preheat.here.json("eval", "made/int8", "--data", text, "--length", "128", "--rows", "8")
    assert 1 < measured["perplexity"] < 20
    assert preheat.here.json("generate", "made/int8", "--prompt", "Once upon a time", "--tokens", "6")["text"].strip()
    few = ("--batches", "1", "--lengths", "16", "--tokens", "4", "--repeats", "1")
    (row,) = preheat.here.json("bench", "made/int8", "--inference", *few)["rows"]
    assert row["cache_bytes"] == row["cache_predicted_bytes"], "keys and values are no codes"
    _, error = preheat.here("compress", model, "--method", "int8", *how, "--out", "made", code=1)
    assert "already exists" in error
    _, error = preheat.here("export", "made/int8", "--out", "hf", code=1)
    assert "is compressed, and quantized weights cannot be written in other formats" in error
    (preheat.folder / "r2.yaml").write_text(
        "model: {path: made/int8}\ndata: {source: text}\nbatch: {size: 2, seq_len: 64}\nstop: {max_steps: 1}\n",
        encoding="utf-8",
    )
    _, error = preheat.here("train", "r2.yaml", code=2)
    assert "is compressed (int8): quantized weights cannot be trained" in error


def test_a_run_is_compressed_as_it_was_trained_for(preheat: Command) -> None:
    recipe = (preheat.folder / "r.yaml").read_text(encoding="utf-8")
    text = (
        recipe.replace("name: small", "name: aware")
        .replace("num_layers: 2", "num_layers: 3")
        .replace("techniques: {", "techniques: {quantization_aware: {}, lora: {rank: 4}, ")
    )
    (preheat.folder / "aware.yaml").write_text(text, encoding="utf-8")
    preheat.here.json("train", "aware.yaml")
    made = preheat.here.json("compress", "runs/aware", "--rows", "8", "--measured", "4")
    assert Path(made["path"]).name == "compressed-int4"
    assert abs(made["after"]["loss"] - made["before"]["loss"]) < 0.01 * made["before"]["loss"]
    assert made["variants"][0]["top_1_agreement"] > 0.9
    told = preheat.here.json("export", "runs/aware", "--out", "hf")
    assert "before rounding" in told["note"]
    assert told["merged"] > 0
    _, error = preheat.here("compress", "runs/aware", "--method", "gptq", "--rows", "3", "--out", "x", code=4)
    assert "calibration: 3 sequences, and 8 are needed" in error
    assert not (preheat.folder / "x").exists()


def test_what_is_not_named_is_listed(preheat: Command, stories: tuple[str, str]) -> None:
    _, error = preheat.here("compress", stories[0], code=2)
    assert "gptq: GPTQ: four bits" in error
    _, error = preheat.here("compress", stories[0], "--method", "int8", "--out", "y", code=2)
    assert "--data: is needed with a model's folder" in error
