"""Public models by name, as a user types them."""

from __future__ import annotations

import json

from .conftest import Command

FEW = ["--set", "model.config={num_hidden_layers: 1}", "--set", "batch={size: 2, seq_len: 64}"]
SMALL = "techniques={lora: {}, chunked_loss: {}, efficient_attention: {}}"


def test_models_are_listed_shown_and_planned(preheat: Command) -> None:
    out, _ = preheat.here("models")
    assert "qwen2.5-0.5b" in out
    assert "494,032,768" in out
    shown = preheat.here.json("models", "show", "gemma-2-2b")
    assert shown["needs"]["soft caps"] == "attention scores 50, logits 30"
    assert "gated" in shown["needs"]["licence"]
    assert "did you mean google/gemma-2-2b?" in preheat.here("models", "show", "gemma2-2b", code=2)[1]
    recipe = ["r.yaml", "--set", "model={preset: qwen2.5-0.5b}", "--set", SMALL, *FEW]
    plan = preheat.here.json("plan", *recipe)
    # Embedding 151,936 x 896, tied; one layer; LoRA of rank 16.
    assert plan["parameters"]["total"] - plan["parameters"]["trained"] == 151936 * 896 + 14_912_384 + 896
    _, error = preheat.here("train", *recipe, code=2)
    assert "model.preset: qwen2.5-0.5b is a configuration without weights" in error
    assert len([line for line in error.splitlines() if not line.startswith("warning: ")]) == 1
    assert not list(preheat.folder.glob("runs/*"))


def test_a_model_is_shown_by_its_name_on_the_hub(preheat: Command) -> None:
    out, _ = preheat.here("models")
    assert "a model that is not listed: preheat plan OWNER/NAME" in out
    shown = preheat.here.json("models", "show", "qwen/QWEN3-8b")
    assert (shown["name"], shown["parameters"], shown["active"]) == ("qwen3-8b", 8_190_735_360, None)
    text = " ".join(preheat.here("models", "show", "Qwen/Qwen3.5-9B")[0].split())
    assert "parameters 9,409,813,744 " in text
    assert "9,653,104,368: also a module that predicts further tokens (MTP)" in text
    assert "24 with a gated delta net (linear), 8 with attention" in text
    text = " ".join(preheat.here("models", "show", "openai/gpt-oss-20b")[0].split())
    assert "20,914,757,184, of which 4,187,440,704 are active" in text
    text = " ".join(preheat.here("models", "show", "tiiuae/Falcon-H1-7B-Base")[0].split())
    assert "embedding_multiplier" in text.partition("not confirmed")[2]
    _, error = preheat.here("models", "show", "nobody/Zebra-9000", code=2)
    assert "nobody/Zebra-9000: not a known model" in error
    assert len(error.splitlines()) == 1


def test_devices_of_the_catalogue_are_listed_and_an_unknown_one_is_one_line(preheat: Command) -> None:
    out, _ = preheat.here("plan", "--gpu", "list")
    assert "RTX-5090             31  1,792    210    419" in out
    listed = preheat.here.json("plan", "--gpu", "list")["devices"]
    assert listed["T4"]["peaks"]["fp16"] == 65e12
    # Before torch is imported and before a dry run is announced.
    for command in (["plan", "llama-3.2-1b"], ["train", "demo", "--dry-run"]):
        _, error = preheat.here(*command, "--gpu", "RTX-9999", code=2)
        assert error.startswith("error: --gpu: no accelerator 'RTX-9999' in the catalogue; did you mean 'RTX-"), error
        assert len(error.splitlines()) == 1


def test_a_gemma2_is_trained_exported_and_read_back(preheat: Command) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config |= {"num_key_value_heads": 1, "vocab_size": 320, "sliding_window": 8, "final_logit_softcapping": 2.0}
    model = json.dumps({"preset": "gemma-2-2b", "weights": "random", "config": config})
    made = preheat.here.json("train", "r.yaml", "--set", f"model={model}", "--set", "stop.max_steps=6")
    exported = preheat.here.json("export", made["run"])
    assert exported["max_logit_difference"] < 0.05  # bf16 weights
    found = json.loads((preheat.folder / exported["path"] / "config.json").read_text())
    assert (found["model_type"], found["final_logit_softcapping"], found["sliding_window"]) == ("gemma2", 2.0, 8)
    again = preheat.here.json("eval", exported["path"], "--data", "text", "--length", "32")["loss"]
    assert again < 6
