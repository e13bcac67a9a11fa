"""What is exported holds what was trained: read again by plain transformers and by peft, whatever the adapter and the family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from preheat import recipe as recipes
from preheat.compress.export import huggingface
from preheat.compress.export import peft as peft_export
from preheat.data.tokenizer import train_tokenizer
from preheat.engine import checkpoint
from preheat.engine.build import build
from preheat.engine.step import gradients, update
from preheat.errors import DataError, PreheatError, RecipeError, RunError
from preheat.models.adapter import plain_logits
from preheat.ops import nf4
from preheat.technique import Build
from preheat.training.opened import open_model

from ..conftest import DEVICE, uneven

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated", "ignore:fan_in_fan_out is set")

VOCABULARY = 300
TOKENS = torch.arange(24)[None] * 11 % VOCABULARY


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base of each family with its tokenizer; weights large enough that a change of one shows at the logits."""
    root = tmp_path_factory.mktemp("bases")
    words = "the quick brown fox jumps over a lazy dog while seven wizards box with quiet jackdaws at night ".split()
    texts = [(f"{n:032x}", " ".join(words[(n * k) % len(words)] for k in range(1, 90))) for n in range(40)]
    tokenizer = train_tokenizer(texts, vocabulary=VOCABULARY)
    common: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": len(tokenizer), "initializer_range": 0.1}
    common |= {"num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 64}
    gated = {"num_key_value_heads": 2, "intermediate_size": 64}
    still = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    torch.manual_seed(0)
    configs = {
        "llama": transformers.LlamaConfig(**common, **gated),
        "tied": transformers.LlamaConfig(**common, **gated, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**common, **gated, head_dim=8, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(**common, **still),
    }
    for name, config in configs.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in configs}


def text(folder: Path | str, techniques: str, model: str = "") -> str:
    return f"model: {{path: {folder}{model}}}\nbatch: {{size: 4, length: 32}}\noptimizer: {{lr: 0.01}}\nstop: {{steps: 9}}\ntechniques: {techniques}"


def trained(folder: Path, techniques: str, steps: int = 3, model: str = "", *, vocabulary: int = VOCABULARY) -> Build:
    b = build(recipes.parse(text(folder, techniques, model)), vocabulary=vocabulary, device=DEVICE)
    for _ in range(steps):
        gradients(b, [uneven(vocabulary=vocabulary)])
        update(b, 0.02)
    return b


def run_of(b: Build, tokenizer: Any, out: Path) -> Path:
    """A run's folder as training leaves it, in what is read from it again."""
    progress = checkpoint.Progress(step=3, fingerprints={"weights": b.weights.fingerprint()})
    checkpoint.save(b, progress, out / "checkpoints", keep=1)
    tokenizer.save_pretrained(out / "tokenizer")
    (out / "recipe.yaml").write_text(recipes.dump(b.recipe))
    return out


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def made(folder: Path, techniques: str, out: Path) -> tuple[Path, torch.Tensor]:
    b = trained(folder, techniques)
    return run_of(b, tokenizer_of(folder), out), plain_logits(b.trained[0], TOKENS)  # type: ignore[arg-type]


def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


SMALL = {"miss": "{r: 8}", "randlora": "{r: 4}", "road": "{group_size: 16}", "vera": "{r: 16}"}
LORAS = {name: f"{{lora: {{variant: {name}, rank: 4}}}}" for name in ("lora", "rslora", "dora", "pissa")}
QUANTIZED = {
    "qlora": "{lora: {rank: 4}, nf4: {}}",
    "qdora": "{lora: {rank: 4, variant: dora}, nf4: {double_quantization: false, keep: [down_proj]}}",
}
METHODS = ("delora", "gralora", "hira", "hra", "ia3", "loha", "lokr", "miss", "oft", "randlora", "road", "vera")
OTHERS = {name: f"{{peft_adapter: {{method: {name}, settings: {SMALL.get(name, '{}')}}}}}" for name in METHODS}
CASES = [
    *((family, name) for family in ("llama", "qwen3", "gpt2") for name in LORAS),
    *(("tied", name) for name in QUANTIZED),
    ("gpt2", "qlora"),
    *(("llama", name) for name in OTHERS),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_merged_and_alone_give_the_runs_logits(bases: dict[str, Path], tmp_path: Path, family: str, name: str) -> None:
    techniques = (LORAS | QUANTIZED | OTHERS)[name].replace(", keep: [down_proj]", "" if family == "gpt2" else ", keep: [down_proj]")
    run, wanted = made(bases[family], techniques, tmp_path / "run")
    start = plain(bases[family])
    assert furthest(plain_logits(start, TOKENS), wanted) > 0.05, "something was learnt"
    scale = max(1.0, float(wanted.abs().max()))

    loose = 1e-3 if name == "randlora" else 1e-5  # its sums cancel: in fp32 its own forward pass is no better
    merged = huggingface.write(run, tmp_path / "merged", tolerance=loose)
    again = plain(tmp_path / "merged")
    assert type(again) is type(start)
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in start.named_parameters()}
    assert furthest(plain_logits(again, TOKENS), wanted) < loose * scale
    assert merged["max_logit_difference"] < loose * scale
    print(f"DIFF {family} {name} merged {merged['max_logit_difference']:.2g} ", end="")

    alone = peft_export.write(run, tmp_path / "alone")
    model = peft.PeftModel.from_pretrained(start, tmp_path / "alone")
    for module in (model.get_submodule(f"base_model.model.{n}") for n in (json.loads((tmp_path / "alone/preheat_base.json").read_text())["nf4"] or {"modules": []})["modules"]):
        weight: Any = module.base_layer.weight.data  # type: ignore[union-attr]
        weight.copy_(nf4.dequantize(nf4.quantize(weight, double=name == "qlora"), tuple(weight.shape), torch.float32, nf4.tables()))
    assert furthest(plain_logits(model.get_base_model(), TOKENS), wanted) < (1e-4 if name in QUANTIZED else 1e-5) * scale  # type: ignore[arg-type]
    print(f"peft {alone['max_logit_difference']:.2g} of {alone['largest_logit']:.3g}")
    assert ("NF4" in alone["note"]) == (name in QUANTIZED)
    assert not [p.name for p in (tmp_path / "alone").iterdir() if p.name.startswith("model")], "the adapter alone"
