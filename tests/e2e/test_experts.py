"""A dense model upcycled to experts, balanced by a bias, through the commands: trained, resumed, reported, exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from preheat.run.reader import Reader

from .conftest import Command


def test_an_upcycled_model_is_trained_resumed_reported_and_exported(
    preheat: Command, data_folder: Path, tmp_path: Path
) -> None:
    text = (data_folder / "text/tinystories_train_excerpt.txt").read_text()[:200_000]
    parts = re.split(r"\n(?=Once upon a time)", text)
    (tmp_path / "stories.jsonl").write_text("\n".join(json.dumps({"text": part}) for part in parts))
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(
        f"name: upcycled\nmodel: {{path: {data_folder / 'stories260K-hf'}}}\n"
        f"data: {{source: {tmp_path / 'stories.jsonl'}, validation: 0.1, preflight: {{encoding: warn}}}}\n"
        "batch: {size: 8, seq_len: 64}\noptimizer: {lr: 1e-3}\nstop: {max_steps: 12}\nevaluate: {rows: 16}\ncheckpoint: {every: 6}\n"
        "techniques: {upcycling: {num_experts: 4}, expert_balancing: {rate: 0.01}}\n"
    )
    told = "".join(preheat.here("train", str(recipe), "--out", str(run)))
    assert re.search(r"busiest expert x\d\.\d", told)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "expert_loads" in line]
    assert [len(step["expert_loads"]) for step in steps] == [5] * 12
    first = json.loads((run / "before.json").read_text())
    assert first, "a pretrained model is measured before the first step"
    changes = json.loads((run / "changes.json").read_text())
    assert "now a mixtral" in changes["upcycling"][0]["what"]
    # Half of it again, from its checkpoint: the same steps to the last digit.
    half = tmp_path / "half"
    shutil.copytree(run, half)
    shutil.rmtree(half / "checkpoints/step-12")
    preheat.here("train", str(recipe), "--out", str(half), "--resume")
    again = [json.loads(line) for line in (half / "metrics.jsonl").read_text().splitlines()]
    kept = {line["step"]: (line["loss"], line["expert_loads"]) for line in again if "expert_loads" in line}
    assert kept == {line["step"]: (line["loss"], line["expert_loads"]) for line in steps}
    preheat.here("report", str(run))
    assert "Load of experts" in (run / "report.html").read_text()
    made = preheat.here.json("export", str(run), "--to", "hf", "--out", str(tmp_path / "hf"))
    assert "so the folder routes without it" in made["note"]
    assert made["max_logit_difference"] == pytest.approx(0, abs=1e-4)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (loaded.config.model_type, loaded.config.num_local_experts) == ("mixtral", 4)


def test_adapters_on_experts_are_peft_s_and_merge_exactly(preheat: Command, data_folder: Path, tmp_path: Path) -> None:
    from preheat.techniques.upcycling import upcycle

    stories, base, run = data_folder / "stories260K-hf", tmp_path / "base", tmp_path / "run"
    torch.manual_seed(0)
    made: Any = upcycle(transformers.AutoModelForCausalLM.from_pretrained(stories), 4, redrawn=0.3)
    made.save_pretrained(base)
    transformers.AutoTokenizer.from_pretrained(stories).save_pretrained(base)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: pairs\nmodel: {{path: {base}}}\ndata: {{source: text, validation: 0.1}}\nbatch: {{size: 4, seq_len: 64}}\noptimizer: {{lr: 0.01}}\n"
        "stop: {max_steps: 6}\nevaluate: {rows: 4}\ntechniques: {lora: {rank: 8, expert_rank: 4, alpha: 16}}\n"
    )
    preheat.here("train", str(recipe), "--out", str(run))
    told = json.loads((run / "changes.json").read_text())["lora"][0]["what"]
    assert "of rank 8 on 20 attention projections, of rank 4 on each of 4 experts in 5 layers" in told
    for form in ("hf", "peft"):
        made = preheat.here.json("export", str(run), "--to", form, "--out", str(tmp_path / form))
        assert made["max_logit_difference"] < 1e-4, form
    assert made["adapted"] == 20 + 10
    prompt = ("--prompt", "Once upon a time", "--tokens", "16")
    texts = {preheat.here.json("generate", str(tmp_path / model), *prompt)["text"] for model in ("run", "hf", "peft")}
    assert len(texts) == 1, texts
    preheat.here(
        "train", str(recipe), "--set", f"techniques.lora.start={tmp_path}/peft", "--out", str(tmp_path / "more")
    )
    first = [Reader(tmp_path / name).metrics()[0].loss for name in ("run", "more")]
    assert first[1] < first[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    before = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(loaded.model.layers[0].mlp.experts.down_proj, before.model.layers[0].mlp.experts.down_proj)
