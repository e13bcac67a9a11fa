"""Models and runs of others at the command line: where a base moved to, and whose code runs."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from preheat.run.reader import Reader

from ..architectures.tiny import tiny_config
from ..conftest import difference
from .conftest import Command

RECIPE = """\
name: small
model: {path: base}
data: {source: rows.jsonl, validation: 0.2, template: alpaca}
batch: {size: 2, seq_len: 64}
stop: {max_steps: 2}
evaluate: {rows: 2}
hardware: {threads: 1}
techniques: {lora: {rank: 2}}
"""
CODE = """\
import pathlib
pathlib.Path(MARK).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class C(LlamaConfig):
    model_type = "strange"
class M(LlamaForCausalLM):
    config_class = C
"""


@pytest.fixture
def base(preheat: Command, data_folder: Path) -> Path:
    """A folder with a small model, and a recipe that tunes it."""
    path = preheat.folder / "base"
    shutil.copytree(data_folder / "stories260K-hf", path)
    for file in path.rglob("*"):
        file.chmod(0o644)
    rows = [json.dumps({"instruction": f"Say {n}", "output": f"It is {n}."}) for n in range(30)]
    (preheat.folder / "rows.jsonl").write_text("\n".join(rows))
    (preheat.folder / "t.yaml").write_text(RECIPE)
    return path


@pytest.fixture
def report(preheat: Command, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Copies a user's report into the folder and makes its model."""

    def copy(name: str) -> None:
        source = data_folder.parent / "faults" / "reports" / name
        if not (source / "make.py").is_file():
            pytest.skip(f"the report {name} is not beside this clone")
        for file in source.iterdir():
            (preheat.folder / file.name).write_bytes(file.read_bytes())
        monkeypatch.chdir(preheat.folder)
        runpy.run_path("make.py")

    return copy


def test_the_report_on_falcon_ends_in_one_line(preheat: Command, report: Callable[[str], None]) -> None:
    report("falcon-traceback")
    error = preheat.here("train", "recipe.yaml", "--out", "run", code=2)[1]
    assert (
        error.strip()
        .splitlines()[-1]
        .startswith("error: model: falcon: FalconForCausalLM of transformers attends inside")
    )
    assert "Traceback" not in error
    assert not (preheat.folder / "run").exists()


def test_the_report_on_neox_trains_the_model_that_transformers_reads(
    preheat: Command, report: Callable[[str], None]
) -> None:
    from preheat.core import MaskSpec
    from preheat.inference.load import load_model
    from preheat.models import hf
    from preheat.ops.attention.sdpa import reference_attention

    report("neox-head-name")
    assert "embed_out.weight" in load_file(preheat.folder / "model" / "model.safetensors")
    preheat.here("train", "recipe.yaml", "--out", "run")
    assert len(Reader(preheat.folder / "run").metrics()) == 2
    preheat.here("export", "run", "--to", "hf", "--out", "exported")
    tokens = torch.arange(4, 36)[None]
    for folder, ours in (("model", "model"), ("exported", "run")):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model: Any = load_model(Path(ours)).build.trained[0].eval()
        with torch.no_grad():
            hidden = hf.hidden_states(model, tokens, torch.arange(32)[None], MaskSpec(), reference_attention)
            found = {"logits": hf.compute_logits(model, hidden)}
            assert difference(found, {"logits": plain(input_ids=tokens, use_cache=False).logits}) < 1e-5


def test_a_run_opens_from_anywhere_and_finds_its_base(preheat: Command, base: Path) -> None:
    preheat.here("train", "t.yaml", "--out", "run")
    (preheat.folder / "elsewhere").mkdir()
    there = Command(preheat.folder / "elsewhere", Path(preheat.environment["PREHEAT_CACHE"]))
    right = there.here.json("eval", "../run")["loss"]
    (preheat.folder / "models").mkdir()
    base.rename(preheat.folder / "models" / "other")
    error = there.here("eval", "../run", code=1)[1]
    assert f"its base model {base}: no such folder; give its current folder with --base" in error
    assert there.here.json("eval", "../run", "--base", "../models/other")["loss"] == right
    weights = load_file(preheat.folder / "models/other/model.safetensors")
    wrong = shutil.copytree(preheat.folder / "models/other", preheat.folder / "wrong")
    save_file(
        {name: 2 * value for name, value in weights.items()}, wrong / "model.safetensors", metadata={"format": "pt"}
    )
    assert "--base: ../wrong has other weights" in there.here("generate", "../run", "--base", "../wrong", code=2)[1]
    # Found by its weights beside the run, not by its name alone.
    shutil.move(preheat.folder / "models" / "other", preheat.folder / "elsewhere" / "base")
    shutil.move(wrong, base)
    shutil.rmtree(base)
    assert there.here.json("eval", "../run")["loss"] == right


def test_a_run_from_somebody_else_runs_no_code(preheat: Command, base: Path) -> None:
    mark = preheat.folder / "ran"
    for name in ("configuration_strange", "modeling_strange"):
        (base / f"{name}.py").write_text(CODE.replace("MARK", repr(str(mark))))
    settings = json.loads((base / "config.json").read_text())
    places = {"AutoConfig": "configuration_strange.C", "AutoModelForCausalLM": "modeling_strange.M"}
    (base / "config.json").write_text(json.dumps(settings | {"model_type": "strange", "auto_map": places}))
    (preheat.folder / "t.yaml").write_text(RECIPE.replace("path: base", "path: base, trust_remote_code: true"))
    words = "wants to run its own code ('configuration_strange.C' and 1 more)"
    for command in (
        ("plan", "t.yaml"),
        ("data", "t.yaml"),
        ("train", "t.yaml", "--out", "run"),
        ("train", "t.yaml", "--dry-run"),
    ):
        assert words in preheat.here(*command, code=2)[1]
    assert not mark.exists()
    preheat.here("train", "t.yaml", "--out", "run", "--trust-remote-code")
    assert mark.exists()
    mark.unlink()
    for command in (
        ("eval", "run"),
        ("generate", "run", "--prompt", "a"),
        ("chat", "run"),
        ("export", "run", "--out", "x"),
        ("compress", "run", "--method", "int8", "--out", "x"),
        ("plan", "base"),
        ("plan", "base", "--inference"),
    ):
        assert words in preheat.here(*command, code=2)[1], command
    assert not mark.exists()
    out, _ = preheat.here("export", "run", "--out", "x", "--trust-remote-code")
    assert "contains Python code of the model (configuration_strange.py, modeling_strange.py)" in out
    assert "contains Python code" in (preheat.folder / "x" / "README.md").read_text()


def test_what_a_folder_has_too_many_of_is_a_line(preheat: Command, base: Path) -> None:
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 4}))
    cut = ("train", "t.yaml", "--out", "run", "--set", "model.config.num_hidden_layers=4")  # as the recipe wants
    for command in (("generate", "base", "--prompt", "a", "--tokens", "2"), cut):
        error = preheat.here(*command)[1]
        assert error.count("warning: model.path: ") == 1
        assert "model.layers.4.input_layernorm.weight" in error
    assert "model.layers.4" in (preheat.folder / "run" / "changes.json").read_text()


def test_a_folder_that_contradicts_its_configuration_is_refused_before_the_data(preheat: Command, base: Path) -> None:
    settings = json.loads((base / "config.json").read_text())
    (preheat.folder / "rows.jsonl").unlink()
    for change, words in (
        ({"num_hidden_layers": 4}, "holds 5 layers, but its config.json has num_hidden_layers 4"),
        ({"num_hidden_layers": 6}, "lacks model.layers.5.self_attn.q_proj.weight, "),
        (
            {"intermediate_size": 96},
            "model.layers.0.mlp.gate_proj.weight is (172, 64) in model.safetensors but (96, 64)",
        ),
        ({"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types: has 6 entries for 5 layers"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "is stored quantized (aqlm), which preheat does not read"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.bits: None: preheat reads 2 and 4 and 8",
        ),
    ):
        (base / "config.json").write_text(json.dumps(settings | change))
        for more in ((), ("--dry-run",)):
            error = preheat.here("train", "t.yaml", "--out", "run", *more, code=2)[1]
            assert words in error, change
            assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
    assert not (preheat.folder / "run").exists()


def test_an_adapter_of_a_base_in_fp8_that_ends_within_a_block_is_exported(preheat: Command, base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        value = weights[name]
        blocks = [-(-size // 24) for size in value.shape]
        scales = torch.rand(blocks, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.001
        spread = scales.repeat_interleave(24, 0).repeat_interleave(24, 1)[: value.shape[0], : value.shape[1]]
        weights[name] = (value / spread).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    settings = json.loads((base / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [24, 24], "activation_scheme": "dynamic"}
    (base / "config.json").write_text(json.dumps(settings | {"quantization_config": fp8}))
    preheat.here("train", "t.yaml", "--out", "run")
    printed, _ = preheat.here("export", "run", "--to", "peft")
    assert (
        "a matrix of the base ends within one: it was compared with peft on the base as preheat reads it"
        in " ".join(printed.split())
    )


def test_a_plan_of_packed_weights_names_the_method(preheat: Command, base: Path) -> None:
    settings = json.loads((base / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (base / "config.json").write_text(json.dumps(settings | packed))
    plan = ("plan", str(base), "--gpu", "T4")
    error = preheat.here(*plan, code=2)[1].strip().splitlines()[-1]
    assert error.startswith(
        f"error: {base}: is stored in gptq, and packed weights cannot be trained; use --method lora"
    )
    error = preheat.here(*plan, "--method", "qlora", code=2)[1].strip().splitlines()[-1]
    assert error == f"error: --method qlora: {base} is stored in gptq already; use --method lora"
    # Other adapters are not refused: this folder's weights are not in that format.
    error = preheat.here(*plan, "--set", "techniques.peft_adapter={}", code=2)[1]
    assert "packed weights cannot be trained" not in error


def test_techniques_that_the_model_does_not_take_are_refused_before_the_data(preheat: Command) -> None:
    config = tiny_config("lfm2")
    config.vocab_size = 4096
    config.save_pretrained(preheat.folder / "base")
    (preheat.folder / "t.yaml").write_text(
        "model: {path: base, weights: random}\ndata: {source: gone.jsonl}\nbatch: {size: 2, seq_len: 64}\n"
        "stop: {max_steps: 2}\nparallel: {devices: 2}\n"
    )
    for technique, settings, why in (
        ("tensor_parallel", "{}", "degree: transformers has no tensor parallel plan for lfm2; use fsdp"),
        ("context_parallel", "{kind: ring}", "kind: ring gives each device an early and a late part of a sequence"),
    ):
        error = preheat.here(
            *("train", "t.yaml", "--dry-run", "--gpu", "H100", "--set", f"techniques.{technique}={settings}"), code=2
        )[1]
        assert f"techniques.{technique}: {why}" in error
