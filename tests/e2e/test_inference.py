"""`preheat bench --inference`, and writing with other caches and with proposals, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Command


@pytest.fixture
def model(data_folder: Path) -> str:
    return str(data_folder / "stories260K-hf")


def test_models_as_they_write_side_by_side(preheat: Command, model: str) -> None:
    made = preheat.here.json("bench", model, "--inference", "--batches", "1,2", "--lengths", "16", "--tokens", "6", "--repeats", "2", "--out", "b",
                        "--variant", "cache=int8")  # fmt: skip
    names = [m["name"] for m in made["models"]]
    assert names == ["stories260K-hf", "stories260K-hf, cache=int8"]
    assert all(m["parameters"] == 260_032 and not m["failed"] and m["startup_seconds"] > 0 for m in made["models"])
    losses = [m["loss"] for m in made["models"]]
    assert 1e-5 < abs(losses[1] - losses[0]) < 0.05
    assert made["models"][0]["weights_bytes"] == pytest.approx(4 * 260_032, rel=0.01)
    rows = {(r["name"], r["rows"]): r for r in made["rows"]}
    assert len(rows) == 2 * 2
    for (_, count), row in rows.items():
        for key in (
            "first_token_seconds",
            "prefill_tokens_per_second",
            "decode_tokens_per_second",
            "ratio",
            "first_token_ratio",
        ):
            assert 0 < row[key]["low"] <= row[key]["value"] <= row[key]["high"]
        fastest = 16 * count / row["first_token_seconds"]["low"]
        assert row["prefill_tokens_per_second"]["high"] == pytest.approx(fastest)
        assert row["tokens_per_pass"] == 1
        assert row["cache_bytes"] == row["cache_predicted_bytes"]
    plain = rows[names[0], 2]
    assert (
        plain["cache_bytes"] == 2 * 21 * 5 * 2 * 4 * 8 * 4
    )  # rows, tokens read, layers, keys and values, heads, width, fp32
    assert rows[names[1], 2]["cache_bytes"] == plain["cache_bytes"] * 12 / 32
    assert plain["ratio"] == {"value": 1, "low": 1, "high": 1}
    assert 0.5 <= rows[names[1], 2]["same_text"] <= plain["same_text"] == 1
    page = (preheat.folder / "b" / "inference.html").read_text()
    assert page.count("<svg") == 2
    assert all(name in page for name in names)
    kept = json.loads((preheat.folder / "b" / "inference.json").read_text())
    assert [r["name"] for r in kept["rows"]] == [r["name"] for r in made["rows"]]


def test_what_cannot_be_measured_is_said(preheat: Command, model: str) -> None:
    inference = ("bench", model, "--inference", "--repeats", "1", "--tokens", "4")
    for arguments, code, words in (
        (
            (*inference, "--lengths", "64", "--batches", "90000000"),
            3,
            "--batches 90000000: with prompts of 64 tokens the cache",
        ),
        ((*inference, "--lengths", "8", "--batches", "1,x"), 2, "--batches 1,x: must be numbers"),
        ((*inference, "--variant", "engine=vllm"), 2, "--variant engine=vllm: must be one of preheat, transformers"),
        (
            (*inference, "--variant", "kernel=blocks"),
            2,
            "--variant kernel=blocks: must be one of cudnn, efficient, flash, math",
        ),
        (
            (*inference, "--variant", "cache=int3"),
            2,
            "--variant cache=int3: sample.cache: must be 'auto', 'dynamic', 'static' or 'int8'",
        ),
        (
            (*inference, "--variant", "prompt_lookup_tokens=0"),
            2,
            "sample.prompt_lookup_tokens: must be at least 1, got 0",
        ),
        ((*inference, "--ablate"), 2, "--ablate: would change nothing: --inference measures generation"),
        (("bench", "nowhere", "--inference"), 1, "neither a run"),
        (("bench", "r.yaml", "other.yaml", "--ablate"), 2, "for models side by side add --inference"),
    ):
        assert words in preheat.here(*arguments, code=code)[1].replace("\n", " ")


def test_text_is_the_same_however_it_is_kept(preheat: Command, model: str) -> None:
    ask = ("generate", model, "--prompt", "Once upon a time", "--tokens", "24")
    wanted = preheat.here.json(*ask)["text"]
    assert wanted.startswith(", there was a little girl named Lily")
    for setting in ("sample.cache=static", "sample.prompt_lookup_tokens=4", f"sample.draft_model={model}"):
        assert preheat.here.json(*ask, "--set", setting)["text"] == wanted
    assert preheat.here.json(*ask, "--set", "sample.cache=int8")["text"].startswith(", there was a little")
    for settings, words in (
        (("batch.size=3",), "here it takes generation settings"),
        (
            ("sample.prompt_lookup_tokens=4", "sample.temperature=0.5"),
            "sample.prompt_lookup_tokens: proposes tokens for greedy decoding",
        ),
        (("sample.lokup=4",), "did you mean 'prompt_lookup_tokens'?"),
    ):
        assert words in preheat.here(*ask, *(part for s in settings for part in ("--set", s)), code=2)[1]


def test_a_plan_to_serve_says_what_the_cache_in_eight_bits_gives(preheat: Command) -> None:
    made = preheat.here.json("plan", "llama-3.1-8b", "--gpu", "RTX-4090", "--inference", "--length", "8192")
    rows = {(f["weights"], f["cache"]): f for f in made["formats"]}
    assert len(rows) == 6
    half, eighth = rows["bf16", "bf16"], rows["bf16", "int8"]
    assert half["rows"] == 8
    assert eighth["cache_gib_per_row"] == pytest.approx(half["cache_gib_per_row"] * (128 + 4) / 256)
    assert eighth["rows"] > 1.8 * half["rows"]
    assert half["tokens_per_second_alone"] == pytest.approx(
        1008e9 / ((half["weights_gib"] + half["cache_gib_per_row"]) * 2**30)
    )
    # 2 x 6.98e9 x 8192 + 2 x 32 x 32 x 128 x 8192^2 FLOPs at a good half of 165 TFLOP/s
    assert 132e12 / 165e12 < half["seconds_to_first_token"] < 132e12 / (0.5 * 165e12)
