"""`preheat export` to other tools' formats, as a user types it."""

from __future__ import annotations

import pytest

from preheat.compress.export import llama_cpp

from .conftest import Command

LORA = "techniques={lora: {rank: 4}}"


def test_a_run_becomes_gguf_with_a_card(preheat: Command) -> None:
    run = preheat.here.json("train", "r.yaml", "--set", LORA, "--set", "stop.steps=6")["run"]
    made = preheat.here.json("export", run, "--to", "gguf", "--dtype", "q8_0")
    assert made["path"] == f"{run}/export-gguf-q8_0"
    assert made.keys() >= {"bytes", "before", "after", "max_logit_difference", "mean_logit_difference", "top1_agreement"}
    assert made["merged"] == 14
    assert made["types"]["Q8_0"] > made["types"].get("F16", 0)
    assert made["after"]["perplexity"] == pytest.approx(made["before"]["perplexity"], rel=0.02)
    card = (preheat.folder / made["path"] / "README.md").read_text()
    for words in (
        "small: GGUF, q8_0",
        "from the run `small`, 14 adapters merged",
        "- lora: ",
        "- data: ",
        "after 6 steps",
        "validation loss",
        "rank: 4",
        f"{made['top1_agreement']:.1%} of positions",
        "llama-cli -m small-q8_0.gguf",
    ):
        assert words in card, words
    said, _ = preheat.here("export", f"{run}/checkpoints/step-6", "--to", "gguf", "--dtype", "f32", "--out", "whole")
    assert "read back by transformers" in said
    assert ("run by llama.cpp (" in said) == llama_cpp.installed()
    alone = "alone: llama.cpp did not run the file, since its wheel is not installed here (pip install 'preheat[llama-cpp]')"
    assert (alone in said) != llama_cpp.installed()
    assert "perplexity" in said
    assert "from the run `small`" in (preheat.folder / "whole/README.md").read_text()

    for arguments, words, code in (
        (
            ("--to", "gguf", "--dtype", "int8"),
            "--dtype int8: --to gguf has f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0",
            2,
        ),
        (("--to", "onnx", "--dtype", "q8_0"), "--dtype q8_0: --to onnx has float32, int8", 2),
        (("--to", "hf", "--dtype", "int4"), "--dtype int4: --to hf has float32, float16, bfloat16", 2),
        (("--to", "onnx", "--length", "64"), "--length: is of executorch's cache; --to onnx has none", 2),
        (("--to", "gguf", "--dtype", "q8_0"), "stands there already; name another folder with --out", 1),
        (("--to", "gguf", "--dtype", "q4_0", "--tolerance", "1e-6"), "more than the 1e-06 of it that is accepted", 1),
    ):
        _, error = preheat.here("export", run, *arguments, code=code)
        assert words in error
        assert error.count("\n") == 1
    assert not (preheat.folder / run / "export-gguf-q4_0").exists(), "what is beyond the bound is not left there"
