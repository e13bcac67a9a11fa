"""Adapters: each variant starts as the base, is merged exactly and goes on exactly; NF4 is what was published and what bitsandbytes computes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
import transformers
from peft import __version__ as peft_version
from safetensors.torch import load_file, save_file

from preheat import recipe as recipes
from preheat.core import Build
from preheat.engine import checkpoint
from preheat.engine.builder import build
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import RecipeError
from preheat.models.hf import compute_reference_logits
from preheat.ops.adapters import peft_layers
from preheat.ops.quantization import nf4
from preheat.planning.dry_run import observe
from preheat.planning.request import Request
from preheat.techniques.peft_adapter import METHODS

from ...conftest import DEVICE, tiny, uneven

TOKENS = torch.arange(24)[None] * 7 % 96
VARIANTS = ["lora", "rslora", "dora", "pissa"]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base of each family, its weights large enough that a change of one shows at the logits."""
    root = tmp_path_factory.mktemp("bases")
    common: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96, "initializer_range": 0.1}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(**common, num_hidden_layers=2, num_key_value_heads=2, intermediate_size=64)
    gpt2 = transformers.GPT2Config(
        **common, **ends, num_hidden_layers=2, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
    )
    transformers.LlamaForCausalLM(llama).save_pretrained(root / "llama")
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(root / "gpt2")
    llama.tie_word_embeddings = True
    transformers.LlamaForCausalLM(llama).save_pretrained(root / "tied")
    return {family: root / family for family in ("llama", "gpt2", "tied")}


def made(folder: Path, techniques: str, *more: str) -> Build:
    r = recipes.parse(
        f"model: {{path: {folder}}}\nbatch: {{size: 4, seq_len: 32}}\nstop: {{max_steps: 9}}\ntechniques: {techniques}",
        overrides=list(more),
    )
    return build(r, vocabulary=96, device=DEVICE)


def train(b: Build, steps: int, lr: float = 0.01) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = accumulate_gradients(b, [uneven()])
        losses.append(float(loss.total / loss.weight))
        update(b, lr)
    return losses


def logits(b: Build) -> torch.Tensor:
    return compute_reference_logits(b.trained[0], TOKENS)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_starts_as_the_base_learns_and_is_merged_exactly(
    folders: dict[str, Path], family: str, variant: str
) -> None:
    base = logits(made(folders[family], "{}"))
    b = made(folders[family], f"{{lora: {{variant: {variant}, rank: 4}}}}")
    first = logits(b)
    assert relative(first, base) < 2e-6 if variant == "pissa" else torch.equal(first, base)
    losses = train(b, 6)
    assert losses[-1] < losses[0] - 0.05, losses
    tuned = logits(b)
    assert relative(tuned, base) > 0.02, "something was learnt"
    assert peft_layers.merge(b.trained[0]) == {"llama": 14, "gpt2": 8}[family]
    assert relative(logits(b), tuned) < 1e-5
    assert not any("lora" in name or "base_layer" in name for name, _ in b.trained[0].named_parameters())


@pytest.mark.parametrize("family", ["llama", "tied", "gpt2"])
def test_a_pair_on_the_embedding_is_one_with_a_tied_head_and_merged_exactly(
    folders: dict[str, Path], family: str
) -> None:
    base = logits(made(folders[family], "{}"))
    alone = "{lora: {target_modules: [c_attn, q_proj], rank: 1, embedding_rank: 3}%s}"
    b, whole = made(folders[family], alone % ", chunked_loss: {rows: 7}"), made(folders[family], alone % "")
    assert torch.equal(logits(b), base)
    up: Any = next(p for name, p in b.parameters() if "lora_embedding_A" in name)
    assert torch.equal(up, torch.zeros_like(up))
    losses = train(b, 6)
    assert losses[-1] < losses[0] - 0.05, losses
    assert losses == pytest.approx(train(whole, 6), rel=1e-5)
    tuned, model = logits(b), b.trained[0]
    with peft_layers.disable_adapters(model):
        assert torch.equal(logits(b), base)
    assert peft_layers.merge(model) == 3
    assert relative(logits(b), tuned) < 1e-5
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    assert (ends[0].weight is ends[1].weight) == (family != "llama")
    assert type(ends[1]) is torch.nn.Linear


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_tied_pair_of_pefts_own_is_taken_over(folders: dict[str, Path], tmp_path: Path) -> None:
    import peft

    names = ["model.embed_tokens", "lm_head"]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "embed_tokens"],
        rank_pattern=dict.fromkeys(names, 2),
        ensure_weight_tying=True,
    )
    model: Any = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folders["tied"]), config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.1)
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        model.save_pretrained(tmp_path / "theirs")
    start = f"start: {tmp_path / 'theirs'}"
    b = made(folders["tied"], f"{{lora: {{target_modules: [q_proj], rank: 3, alpha: 6, embedding_rank: 2, {start}}}}}")
    assert relative(logits(b), compute_reference_logits(model.get_base_model(), TOKENS)) < 1e-6
    with pytest.raises(RecipeError, match="another rank"):
        made(folders["tied"], f"{{lora: {{target_modules: [q_proj], rank: 3, alpha: 6, embedding_rank: 5, {start}}}}}")
    settings = tmp_path / "theirs/adapter_config.json"
    whole = settings.read_text()
    settings.write_text(
        whole.replace('"lm_head": 2', '"lm_hood": 2')
    )  # peft: 6 / 3 at the head then, 6 / 2 at the embedding
    with pytest.raises(RecipeError, match="scales its pair by 2 at lm_head and by 3 at the embedding"):
        made(folders["tied"], f"{{lora: {{target_modules: [q_proj], rank: 3, alpha: 6, embedding_rank: 2, {start}}}}}")
    settings.write_text(whole)
    file = tmp_path / "theirs/adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(RecipeError, match="other values of model"):
        made(folders["tied"], f"{{lora: {{target_modules: [q_proj], rank: 3, alpha: 6, embedding_rank: 2, {start}}}}}")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_small_side_is_scaled_and_added_as_peft_adds_it(bias: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients beside those of peft's own forward pass; in place where no bias makes the base's result a view."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    torch.manual_seed(0)
    holder: Any = torch.nn.Module()
    holder.config, holder.map = {"model_type": "custom"}, torch.nn.Linear(24, 40, bias=bias)
    peft_layers.inject(holder, LoraConfig(r=3, lora_alpha=5, target_modules=["map"]))
    peft_layers.prevent_fp32_cast(holder)
    layer, x, grad = holder.map, torch.randn(2, 7, 24), torch.randn(2, 7, 40)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    results = []
    for forward in (type(layer).forward, Linear.forward):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
            out = forward(layer, given)
        assert (type(out.grad_fn).__name__ == "_AddedBackward") == (forward is not Linear.forward and not bias)
        trained = [given, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        results.append([out, *torch.autograd.grad(out, trained, grad.to(out.dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert relative(ours, theirs) < (2e-6 if dtype == torch.float32 else 8e-3)


def test_results_that_checkpointing_may_keep_are_not_written_over(folders: dict[str, Path]) -> None:
    plain, kept = (
        made(folders["llama"], f"{{lora: {{rank: 4}}{more}}}")
        for more in ("", ", activation_checkpointing: {mode: selective, products: 1}")
    )
    for b in (plain, kept):
        torch.manual_seed(0)
        for name, p in b.parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
        accumulate_gradients(b, [uneven()])
    for (_, a), (_, b) in zip(plain.parameters(), kept.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert relative(b.grad, a.grad) < 1e-5


def test_rslora_scales_by_the_root_of_the_rank(folders: dict[str, Path]) -> None:
    for variant, scale in (("lora", 6 / 9), ("rslora", 6 / 3)):
        b = made(folders["llama"], f"{{lora: {{variant: {variant}, rank: 9, alpha: 6}}}}")
        assert {
            m.scaling["default"]
            for m in b.trained[0].modules()
            if hasattr(m, "scaling") and isinstance(m.scaling, dict)
        } == {scale}  # type: ignore[union-attr]


def test_dora_starts_from_the_lengths_of_the_bases_rows(folders: dict[str, Path]) -> None:
    layer: Any = (
        made(folders["llama"], "{lora: {variant: dora}, mixed_precision: {mode: bf16_weights}}")
        .trained[0]
        .get_submodule("model.layers.1.mlp.up_proj")
    )
    magnitude = layer.lora_magnitude_vector["default"].weight
    assert magnitude.dtype == torch.float32
    assert magnitude.requires_grad
    assert relative(magnitude, layer.base_layer.weight.float().norm(dim=1)) < 1e-6


@pytest.mark.parametrize("iterations", [0, 4])
def test_pissa_takes_the_largest_singular_directions(folders: dict[str, Path], iterations: int) -> None:
    name = "model.layers.0.self_attn.q_proj"
    whole: Any = made(folders["llama"], "{}").trained[0].get_submodule(name).weight
    layer: Any = (
        made(folders["llama"], f"{{lora: {{variant: pissa, rank: 5, pissa_iterations: {iterations}}}}}")
        .trained[0]
        .get_submodule(name)
    )
    values = torch.linalg.svdvals(whole)
    assert relative(torch.linalg.svdvals(layer.get_delta_weight("default"))[:5], values[:5]) < (
        0.1 if iterations else 1e-4
    )
    assert relative(layer.base_layer.weight + layer.get_delta_weight("default"), whole) < 1e-6


def peft(method: str) -> str:
    """Settings that a model this small can bear."""
    return f"{{peft_adapter: {{method: {method}, settings: {SMALL.get(method, '{}')}}}}}"


SMALL = {"miss": "{r: 8}", "randlora": "{r: 4}", "road": "{group_size: 16}", "vera": "{r: 16}"}
ADAPTED = [
    *(f"{{lora: {{variant: {variant}, rank: 4}}}}" for variant in VARIANTS),
    "{lora: {variant: pissa, rank: 4, pissa_iterations: 2}, mixed_precision: {mode: bf16_weights}}",
    "{lora: {rank: 4}, nf4: {}}",
    "{lora: {rank: 4, embedding_rank: 2}, nf4: {}, chunked_loss: {}}",
    "{lora: {rank: 4, embedding_rank: 2}, mixed_precision: {mode: bf16_weights}, chunked_loss: {}}",
    "{lora: {rank: 4, variant: dora}, nf4: {double_quantization: false}, mixed_precision: {mode: bf16_weights}}",
    *(peft(method) for method in METHODS),
]


@pytest.mark.parametrize("techniques", ADAPTED)
def test_on_a_base_from_a_folder_it_goes_on_exactly_without_the_base_in_the_checkpoint(
    folders: dict[str, Path], tmp_path: Path, techniques: str
) -> None:
    a = made(folders["tied"], techniques)
    train(a, 2)
    found = checkpoint.save(a, checkpoint.Progress(step=2), tmp_path, keep=1)
    saved = json.loads((found / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == {
        name for name, _ in a.parameters()
    }
    b = made(folders["tied"], techniques)
    checkpoint.load(b, found)
    assert torch.equal(logits(b), logits(a))
    assert train(a, 2) == train(b, 2)
    merged = logits(a)
    peft_layers.merge(a.trained[0])
    if "bf16" not in techniques:
        assert relative(logits(a), merged) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_each_method_of_peft_starts_as_the_base_learns_and_is_merged_exactly(
    folders: dict[str, Path], method: str
) -> None:
    base = logits(made(folders["llama"], "{}"))
    b = made(folders["llama"], peft(method))
    assert relative(logits(b), base) < 2e-6
    losses = train(b, 8, lr=0.03)
    assert losses[-1] < losses[0] - 0.05, losses
    tuned = logits(b)
    assert relative(tuned, base) > 0.02
    assert peft_layers.merge(b.trained[0]) == 14
    assert relative(logits(b), tuned) < 3e-5  # 1.1e-5 of RandLoRA, on a CPU without AVX512


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ("{peft_adapter: {method: lohaa}}", "did you mean 'loha'"),
        ("{peft_adapter: {method: prompt_tuning}}", "not linear maps"),
        ("{peft_adapter: {method: adalora}}", "schedule"),
        ("{peft_adapter: {method: loha, settings: {rr: 3}}}", "settings.rr: loha has no such setting"),
        ("{peft_adapter: {method: loha, settings: {module_dropout: 0.1}}}", "leave it at 0"),
        ("{peft_adapter: {method: loha, settings: {target_modules: x}}}", "set target_modules"),
        ("{peft_adapter: {method: loha, target_modules: [nowhere]}}", "matches no linear map"),
        ("{peft_adapter: {}, lora: {}}", "cannot go with"),
        ("{nf4: {}}", "needs frozen-base"),
        ("{nf4: {keep: [nowhere]}, lora: {}}", "keep: .* matches no linear map"),
        ("{nf4: {keep: '.*'}, lora: {}}", "leaves no linear map"),
        ("{nf4: {}, lora: {variant: pissa}}", "changes the base's weights"),
        ("{lora: {target_modules: [lm_head]}, chunked_loss: {}}", "it has an adapter"),
        ("{lora: {variant: dora, embedding_rank: 2}}", "embedding_rank: goes with lora and rslora"),
        ("{lora: {variant: pissa, rank: 40}}", "lower the rank"),
    ],
)
def test_what_cannot_serve_is_refused_in_words(folders: dict[str, Path], techniques: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        made(folders["llama"], techniques)


def test_every_method_of_the_installed_peft_is_trained_or_refused_with_its_reason(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import mapping

    installed = {kind.value.lower(): kind for kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
    assert set(METHODS) <= set(installed)
    for method in sorted(set(installed) - set(METHODS)):
        with pytest.raises(RecipeError, match=f"{method}: preheat does not train this method of peft: it ") as refusal:
            made(folders["llama"], f"{{peft_adapter: {{method: {method}}}}}")
        assert "has not been tested" not in str(refusal.value), "state why in peft_adapter._REFUSED"
    # A peft that is newer than preheat, and one that is older.
    registry: dict[Any, Any] = mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    monkeypatch.setitem(registry, type("Kind", (), {"value": "NEWEST"})(), object)
    with pytest.raises(RecipeError, match=f"newest: .* it is new in peft {re.escape(peft_version)}"):
        made(folders["llama"], "{peft_adapter: {method: newest}}")
    monkeypatch.delitem(registry, installed["oft"])
    with pytest.raises(RecipeError, match=f"oft: peft {re.escape(peft_version)} does not have it; pip install"):
        made(folders["llama"], "{peft_adapter: {method: oft}}")


def test_a_method_that_does_not_know_gpt2s_maps_says_so(folders: dict[str, Path]) -> None:
    with pytest.raises(RecipeError, match=r"Conv1D.* is not supported"):
        made(folders["gpt2"], "{peft_adapter: {method: hra}}")


def test_a_tied_head_is_not_adapted(folders: dict[str, Path]) -> None:
    with pytest.raises(RecipeError, match="shares its weight"):
        made(folders["gpt2"], "{lora: {target_modules: [lm_head]}}")


@pytest.mark.usefixtures("torchs_loss")
def test_torchs_loss_would_leave_out_an_adapter_on_a_tied_head(folders: dict[str, Path]) -> None:
    with pytest.raises(RecipeError, match="embedding_rank adds to it"):
        made(folders["tied"], "{lora: {embedding_rank: 2}, chunked_loss: {kernel: torch}}")


# --- NF4 ------------------------------------------------------------------------------------------------------------


def test_the_levels_are_the_published_ones() -> None:
    """arXiv:2305.14314, section 3: quantiles of a normal distribution, 8 at or below zero and 9 at or above, over the largest."""
    edge = (1 - 1 / 30 + 1 - 1 / 32) / 2
    at = NormalDist().inv_cdf
    above = [at(0.5 + (edge - 0.5) * n / 8) for n in range(9)]
    below = [-at(0.5 + (edge - 0.5) * n / 7) for n in range(1, 8)]
    wanted = sorted(v / above[-1] for v in above + below)
    assert torch.allclose(torch.tensor(nf4.LEVELS), torch.tensor(wanted), atol=2e-6)


def _slowly(value: torch.Tensor) -> torch.Tensor:
    """NF4 with double quantization, weight by weight."""
    flat = value.flatten().tolist()
    blocks = [flat[n : n + 64] for n in range(0, len(flat), 64)]
    scales = [max(abs(v) for v in block) for block in blocks]
    mean = sum(scales) / len(scales)
    eight = nf4.dynamic_levels().tolist()
    out: list[float] = []
    for start in range(0, len(blocks), 256):
        largest = max(abs(s - mean) for s in scales[start : start + 256]) or 1.0
        for block, scale in zip(blocks[start : start + 256], scales[start : start + 256], strict=True):
            kept = min(eight, key=lambda level: abs(level - (scale - mean) / largest)) * largest + mean
            out += [min(nf4.LEVELS, key=lambda level: abs(level - v / scale)) * kept for v in block]
    return torch.tensor(out).view(value.shape)


@pytest.mark.parametrize("shape", [(300, 60), (5, 7)])
def test_nf4_is_the_slow_reference(shape: tuple[int, int]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    back = nf4.dequantize(nf4.quantize(value), shape, torch.float32, nf4.build_tables())
    assert relative(back, _slowly(value)) < 1e-6
    assert 0.05 < relative(back, value) < 0.12
    half = nf4.dequantize(nf4.quantize(value), shape, torch.bfloat16, nf4.build_tables())
    assert torch.equal(half, back.to(torch.bfloat16)), "multiplied in fp32, rounded once"
    zeros = torch.zeros(2, 64)
    assert torch.equal(nf4.dequantize(nf4.quantize(zeros), (2, 64), torch.float32, nf4.build_tables()), zeros)


def test_nf4_has_the_very_bits_of_bitsandbytes() -> None:
    """Recorded on a CPU from bitsandbytes 0.50.2: quantize_4bit(value, blocksize=64, quant_type="nf4", compress_statistics=True)."""
    n = torch.arange(96 * 64, dtype=torch.float64)
    value = ((n * 0.37).sin() * (1 + (n / 64).floor() % 7) * (1 + 0.1 * (n * 0.011).cos())).float().view(96, 64)
    packed = nf4.quantize(value)
    assert packed.ranges is not None
    assert _digest(packed.codes) == "09200291ec5d882dc0c82f449fbef47414dab2b36691df595f493984834a29fa"
    assert bytes(packed.scales.tolist()).hex() == (
        "0f23334ac1d8f30e2439b6cbd6e40c2138bfd4e5f00c1c30a4d3e9ff0e202f41c7e0fc0f24365dc3d3ec0d2339becfdc"
        "e70b1f36bbd4e9f70c1d2f56cee8ff0e223244c3dcf80f2438aac7d4e60c2239bfd3e1eb0b1d33b0d4e9fd0d1e2e49cb"
    )
    ranges = torch.tensor([float.fromhex("0x1.d8f16p+1"), float.fromhex("0x1.0010dcp+2")])
    assert torch.allclose(packed.ranges.view(torch.float32), ranges, rtol=1e-6)
    back = nf4.dequantize(packed._replace(ranges=ranges.view(torch.int32)), (96, 64), torch.float32, nf4.build_tables())
    assert _digest(back) == "89941a239ef9abf96ada026631fbaacb23ef1845bc12f90073be0d83b1d31903"


def _digest(t: torch.Tensor) -> str:
    return hashlib.sha256(t.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("kind", [nf4.PackedLinear, nf4.PackedConv1D])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_packed_map_is_the_plain_map_of_its_weight(kind: type, autocast: bool) -> None:
    torch.manual_seed(0)
    plain: Any = torch.nn.Linear(24, 40) if kind is nf4.PackedLinear else transformers.pytorch_utils.Conv1D(40, 24)
    torch.nn.init.normal_(plain.bias)
    assert nf4.pack_([plain]) == 960
    assert type(plain) is kind
    x, y = (torch.randn(2, 5, 24).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    weight = plain.weight.detach() if kind is nf4.PackedLinear else plain.weight.detach().t()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours, theirs = plain(x), torch.nn.functional.linear(y, weight, plain.bias)
    slope = torch.randn_like(ours)
    ours.backward(slope)
    theirs.backward(slope)
    assert ours.dtype == theirs.dtype
    bound = 0.01 if autocast else 1e-6
    assert relative(ours.detach(), theirs.detach()) < bound
    assert relative(x.grad, y.grad) < bound  # type: ignore[arg-type]
    before = plain(x).detach()
    nf4.unpack_(plain)
    assert type(plain) in (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    assert [name for name, _ in (*plain.named_parameters(), *plain.named_buffers())] == ["bias", "weight"]
    assert relative(plain(x).detach(), before) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nf4_rounds_the_folders_weights_and_merges_into_full_ones(folders: dict[str, Path], family: str) -> None:
    plain = made(folders[family], "{}").trained[0]
    b = made(folders[family], "{lora: {rank: 4}, nf4: {keep: [down_proj, mlp.c_proj]}}")
    packed = {
        name.replace(".base_layer", ""): m for name, m in b.trained[0].named_modules() if isinstance(m, nf4.PackedMap)
    }
    assert len(packed) == {"llama": 12, "gpt2": 6}[family]
    for name, module in packed.items():
        value: Any = plain.get_submodule(name).weight
        assert torch.equal(
            module.weight, nf4.dequantize(nf4.quantize(value), tuple(value.shape), torch.float32, nf4.build_tables())
        )
    assert b.trained[0].get_output_embeddings().weight.dtype == torch.float32  # type: ignore[operator]
    losses = train(b, 6)
    assert losses[-1] < losses[0] - 0.05, losses
    tuned = logits(b)
    peft_layers.merge(b.trained[0])
    assert {n: p.shape for n, p in b.trained[0].named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert relative(logits(b), tuned) < 1e-5


def test_merging_unpacks_layers_that_have_no_adapter(folders: dict[str, Path]) -> None:
    b = made(folders["llama"], "{lora: {rank: 4, target_modules: attention}, nf4: {}}")
    adapted = logits(b)
    peft_layers.merge(b.trained[0])
    assert not [m for m in b.trained[0].modules() if isinstance(m, nf4.PackedMap)]
    assert relative(logits(b), adapted) < 1e-5


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_packed_layers_of_another_pipeline_stage_do_not_change_what_is_drawn(
    folders: dict[str, Path], variant: str
) -> None:
    model: Any = made(folders["llama"], f"{{lora: {{rank: 4, variant: {variant}}}, nf4: {{}}}}").trained[0]
    names = peft_layers.names_of(model)
    drawn = []
    for elsewhere in (False, True):
        if elsewhere:
            base = peft_layers.base_layer_of(model, names[0])
            for key in nf4.PackedMap.packed_names:
                base._parameters[key] = torch.nn.Parameter(base._parameters[key].to("meta"), requires_grad=False)
        torch.manual_seed(1)
        peft_layers.draw(model, model.peft_config["default"], names)
        drawn.append([t.clone() for _, t in peft_layers.adapter_tensors(model.get_submodule(names[-1]))])
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "model.layers.2.mlp.gate_proj"), ("gpt2", "transformer.h.0.attn.c_attn")]
)
@pytest.mark.parametrize("adapter", ["lora", "peft_adapter: {method: gralora}, mixed_precision"])
def test_new_weights_in_nf4_are_those_of_the_plain_model_rounded(family: str, name: str, adapter: str) -> None:
    """So that the same recipe with and without NF4 can be compared. A new GPT-2's draws part after its first redrawn projection (`_draw`)."""
    plain: Any = build(tiny(family=family), vocabulary=96, device=DEVICE).trained[0].get_submodule(name)
    model = build(tiny(f"{{{adapter}: {{}}, nf4: {{}}}}", family=family), vocabulary=96, device=DEVICE).trained[0]
    packed: Any = model.get_submodule(name).base_layer
    shape = tuple(plain.weight.shape)
    assert torch.equal(
        packed.weight, nf4.dequantize(nf4.quantize(plain.weight), shape, torch.float32, nf4.build_tables())
    )


def test_the_dry_run_sees_half_a_byte_a_weight() -> None:
    text = "model: {num_layers: 2, hidden_size: 512, num_heads: 4, intermediate_size: 1024, vocab_size: 64}\nbatch: {size: 1, seq_len: 8}\nstop: {max_steps: 1}\n"
    plain, packed = (
        observe(Request(recipes.parse(text + f"techniques: {t}"), DEVICE, vocabulary=64))
        for t in ("{lora: {rank: 1}}", "{lora: {rank: 1}, nf4: {}}")
    )
    weights = 2 * (4 * 512 * 512 + 3 * 512 * 1024)
    saved = plain.categories["forward"]["parameters"] - packed.categories["forward"]["parameters"]
    assert 4 - saved / weights == pytest.approx(0.516, abs=0.002)
    assert (packed.parameters, packed.trained) == (plain.parameters, plain.trained)


def test_under_autocast_adapters_keep_no_copies_of_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:

    recipe = recipes.override(tiny("{lora: {rank: 2}, mixed_precision: {mode: bf16_weights}}", rows=4), "seed=3")

    def numbers() -> tuple[float, list[torch.Tensor], int]:
        made = build(recipe, vocabulary=96, device=DEVICE)
        for n, (_, p) in enumerate(made.parameters()):
            torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(n))
        loss = accumulate_gradients(made, [uneven()])
        kept = observe(Request(recipe, DEVICE, vocabulary=96)).categories["forward"]["activations"]
        return float(loss.total), [p.grad.clone() for _, p in made.parameters() if p.grad is not None], kept

    loss, grads, kept = numbers()
    monkeypatch.setattr(peft_layers, "prevent_fp32_cast", lambda model: None)
    loss_by_peft, grads_by_peft, kept_by_peft = numbers()
    assert loss == loss_by_peft
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_by_peft, strict=True))
    assert kept < 0.95 * kept_by_peft


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated", "ignore:Specified to not save")
@pytest.mark.parametrize("method", ["vera", "randlora"])
def test_projections_that_a_folder_leaves_out_come_from_its_key(
    folders: dict[str, Path], tmp_path: Path, method: str
) -> None:
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[method.upper()]
    for saved in (True, False):
        model = transformers.LlamaForCausalLM.from_pretrained(folders["llama"])
        config = kind(r=4, target_modules=["q_proj"], projection_prng_key=7, save_projection=saved)
        adapted = get_peft_model(model, config)
        torch.manual_seed(3)
        with torch.no_grad():
            for p in adapted.parameters():
                if p.requires_grad:
                    p.normal_(std=0.1)
        adapted.save_pretrained(tmp_path / str(saved))

    def start(saved: bool, key: int) -> Any:
        settings = f"{{r: 4, projection_prng_key: {key}}}"
        folder = f"target_modules: [q_proj], start: {tmp_path / str(saved)}"
        return made(folders["llama"], f"{{peft_adapter: {{method: {method}, settings: {settings}, {folder}}}}}")

    expected = logits(start(True, 7))
    assert relative(expected, logits(made(folders["llama"], "{}"))) > 1e-4
    assert torch.equal(logits(start(True, 0)), expected)
    assert torch.equal(logits(start(False, 7)), expected)
    with pytest.raises(RecipeError, match="has projection_prng_key 7, the recipe 0; change settings"):
        start(False, 0)
