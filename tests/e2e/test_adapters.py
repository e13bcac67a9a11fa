"""An adapter over 4 bits from training to other tools: a really pretrained model, the commands, plain transformers, peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from preheat.inference.load import load_model
from preheat.models.hf import compute_reference_logits
from preheat.ops.quantization import nf4

from .conftest import Command

RECIPE = """\
name: tune
model: {{path: {base}}}
data: {{source: {text}, validation: 0.05, limit: 2000}}
batch: {{size: 8, seq_len: 128}}
optimizer: {{lr: 0.01, weight_decay: 0.0}}
stop: {{max_steps: 12}}
evaluate: {{rows: 8}}
techniques: {{efficient_attention: {{}}, lora: {{rank: 8, embedding_rank: 4}}, nf4: {{}}}}
"""
PROMPT = "Once upon a time"
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return compute_reference_logits(model, ids)


def test_qlora_from_training_to_transformers_and_peft(preheat: Command, data_folder: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    here, base = preheat.folder, preheat.folder / "stories"
    shutil.copytree(data_folder / "stories260K-hf", base)
    base.chmod(0o755)
    (here / "q.yaml").write_text(RECIPE.format(base=base, text=data_folder / "text/tinyshakespeare.txt"))
    preheat("train", "q.yaml")
    run = here / "runs/tune"
    merged = preheat.here.json("export", "runs/tune", "--to", "hf", "--out", "merged")
    assert (merged["merged"], merged["dtype"]) == (36, "float32")
    assert merged["max_logit_difference"] < 1e-4
    said, _ = preheat.here("export", "runs/tune", "--to", "peft", "--out", "alone")
    assert "read back by peft" in said
    assert "trained on the base in NF4" in said

    tokenizer = AutoTokenizer.from_pretrained(here / "merged")
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    wanted = logits(load_model(run).build.trained[0], ids)
    plain = AutoModelForCausalLM.from_pretrained(here / "merged", dtype=torch.float32)
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight
    assert float((logits(plain, ids) - wanted).abs().max()) < 1e-4
    text = tokenizer.decode(
        plain.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
    )
    for model in ("runs/tune", "merged", "alone"):
        assert preheat.here.json("generate", model, "--prompt", PROMPT, "--tokens", "24")["text"] == text, model

    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), here / "alone"
    )
    for name in json.loads((here / "alone/preheat_base.json").read_text())["nf4"]["modules"]:
        weight: Any = model.get_submodule(f"base_model.model.{name}").base_layer.weight.data  # type: ignore[union-attr]
        weight.copy_(nf4.dequantize(nf4.quantize(weight), tuple(weight.shape), torch.float32, nf4.build_tables()))
    assert float((logits(model.get_base_model(), ids) - wanted).abs().max()) < 1e-4

    _, error = preheat.here("export", "runs/tune", "--to", "peft", "--out", "alone", code=1)
    assert "already exists" in error
    _, error = preheat.here(
        "export", "runs/tune", "--out", "half", "--dtype", "bfloat16", "--tolerance", "1e-6", code=1
    )
    assert "nothing was written; use --dtype float32, or raise --tolerance" in error
    base.rename(here / "moved")
    _, error = preheat.here("generate", "alone", code=2)
    assert "its base model is not there" in error
    assert error.count("\n") == 1
    assert (
        preheat.here.json("generate", "alone", "--base", "moved", "--prompt", PROMPT, "--tokens", "24")["text"] == text
    )
    assert sorted(p.name for p in here.iterdir() if p.is_dir()) == ["alone", "merged", "moved", "runs", "text"]
