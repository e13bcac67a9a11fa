"""Adapters on quantized folders of the hub: their weights are those of a slow reference, and training is that of peft."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from preheat import recipe as recipes
from preheat.core import Build, MaskSpec, Phase
from preheat.engine import checkpoint
from preheat.engine.builder import build, require_model
from preheat.engine.step import accumulate_gradients, update
from preheat.errors import PreheatError
from preheat.models import configs, hf
from preheat.models.hf import compute_reference_logits
from preheat.ops.adapters import peft_layers
from preheat.ops.adapters.peft_layers import count_parameters
from preheat.ops.attention.sdpa import reference_attention
from preheat.ops.quantization import stored
from preheat.ops.quantization.nf4 import LEVELS, dynamic_levels
from preheat.ops.quantization.packed import FrozenPackedMap
from preheat.ops.quantization.stored import Form, StoredLinear, Tensors, dequantize, pack_codes, unpack_codes
from preheat.planning.dry_run import observe
from preheat.planning.request import Request

from ...conftest import DEVICE, difference, uneven

TOKENS = torch.arange(24)[None] * 7 % 96
GROUP = 16
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


class Stored(NamedTuple):
    """A layer's tensors in the files, and the weight that they mean, computed weight by weight."""

    tensors: dict[str, Tensor]
    weight: Tensor


def to_words(rows: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """[n, m] codes -> int32 [n, ceil(m / codes per word)], by Python's integers: position p of a word has code order[p]."""
    each = 32 // bits
    words = []
    for row in rows.tolist():
        row += [0] * (-len(row) % each)
        groups = [row[start : start + each] for start in range(0, len(row), each)]
        values = [sum(group[(order or range(each))[p]] << bits * p for p in range(each)) for group in groups]
        words.append([value - (1 << 32) if value >> 31 else value for value in values])
    return torch.tensor(words, dtype=torch.int32)


def mean(codes: Tensor, zeros: Tensor, scales: Tensor, group: Callable[[int], int]) -> Tensor:
    """(code - zero) scale of each weight; zeros and scales are [out, groups]."""
    outputs, inputs = codes.shape
    return torch.tensor(
        [
            [(int(codes[o, i]) - int(zeros[o, group(i)])) * float(scales[o, group(i)]) for i in range(inputs)]
            for o in range(outputs)
        ]
    )


def draw(shape: tuple[int, int], bits: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], zeros and scales [out, groups]."""
    outputs, inputs = shape
    codes, zeros = (torch.randint(1 << bits, (outputs, n)) for n in (inputs, inputs // columns))
    scales = (0.5 + torch.rand(outputs, inputs // columns)) * 0.3 / (1 << bits)
    return codes, zeros, scales.to(dtype)


def gptq(bits: int, *, ordered: bool = False, version: int = 1, whole: bool = False) -> Callable[..., Stored]:
    def store(shape: tuple[int, int]) -> Stored:
        columns = shape[1] if whole else GROUP
        codes, zeros, scales = draw(shape, bits, columns, torch.float16)
        index = torch.arange(shape[1]) // columns
        if ordered:
            index = index[torch.randperm(shape[1])]
        # The first format stores zero points less 1, modulo the range.
        written = zeros if version == 2 else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": to_words(codes, bits).t().contiguous(),
            "qzeros": to_words(written.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": index.to(torch.int32),
        }
        return Stored(tensors, mean(codes, zeros, scales, lambda i: int(index[i])))

    return store


def awq(shape: tuple[int, int]) -> Stored:
    codes, zeros, scales = draw(shape, 4, GROUP, torch.float16)
    tensors = {
        "qweight": to_words(codes.t(), 4, AWQ),
        "qzeros": to_words(zeros.t(), 4, AWQ),
        "scales": scales.t().contiguous(),
    }
    return Stored(tensors, mean(codes, zeros, scales, lambda i: i // GROUP))


def pack_quantized(
    bits: int, *, symmetric: bool = True, whole: bool = False, ordered: bool = False
) -> Callable[..., Stored]:
    """compressed-tensors' pack-quantized."""

    def store(shape: tuple[int, int]) -> Stored:
        columns = shape[1] if whole else GROUP
        codes, zeros, scales = draw(shape, bits, columns, torch.bfloat16)
        zeros = torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros
        index = (torch.arange(shape[1]) // columns)[torch.randperm(shape[1]) if ordered else slice(None)]
        tensors = {
            "weight_packed": to_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
            **({} if symmetric else {"weight_zero_point": to_words(zeros.t(), bits).t().contiguous()}),
            **({"weight_g_idx": index.to(torch.int32)} if ordered else {}),
        }
        return Stored(tensors, mean(codes, zeros, scales, lambda i: int(index[i])))

    return store


def integers(*, symmetric: bool = True, ordered: bool = False) -> Callable[..., Stored]:
    """compressed-tensors' int-quantized: a scale per row, or with `ordered` per group."""

    def store(shape: tuple[int, int]) -> Stored:
        columns = GROUP if ordered else shape[1]
        codes, zeros, scales = draw(shape, 8, columns, torch.bfloat16)
        zeros = torch.full_like(zeros, 128) if symmetric else zeros
        index = (torch.arange(shape[1]) // columns)[torch.randperm(shape[1]) if ordered else slice(None)]
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        if ordered:
            tensors["weight_g_idx"] = index.to(torch.int32)
        return Stored(tensors, mean(codes, zeros, scales, lambda i: int(index[i])))

    return store


def floats(rows: int, columns: int, scale: str, dtype: torch.dtype = torch.float32) -> Callable[..., Stored]:
    """float8 with a scale per block; 0: all. One scale is stored as a number."""

    def store(shape: tuple[int, int]) -> Stored:
        block = rows or shape[0], columns or shape[1]
        weight = (torch.randn(shape) * 50).to(torch.float8_e4m3fn)
        scales = (torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) * 0.004 + 0.001).to(dtype)
        full = torch.tensor(
            [
                [float(weight[o, i].float()) * float(scales[o // block[0], i // block[1]]) for i in range(shape[1])]
                for o in range(shape[0])
            ]
        )
        return Stored({"weight": weight, scale: scales if scales.numel() > 1 else scales.reshape(())}, full)

    return store


def nf4(*, double: bool, storage: torch.dtype = torch.uint8) -> Callable[..., Stored]:
    """bitsandbytes' NF4 in blocks of 64, of which `nf4.dynamic_levels` and LEVELS are published constants."""

    def store(shape: tuple[int, int]) -> Stored:
        count = shape[0] * shape[1]
        codes = torch.randint(16, (count,))
        scales, ranges, offset = torch.randint(256, (count // 64,)), torch.rand(1) * 0.05, 0.25
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        tensors = {
            "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).view(storage)[:, None],
            "weight.quant_map": torch.tensor(LEVELS),
        }
        levels = [float(level) for level in dynamic_levels()]
        each = [levels[int(scale)] * float(ranges) + offset for scale in scales]
        if double:
            tensors |= {"weight.absmax": scales.to(torch.uint8), "weight.nested_absmax": ranges}
            tensors |= {"weight.nested_quant_map": dynamic_levels()}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = torch.tensor(each)
        tensors[NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        values = [LEVELS[int(code)] * each[n // 64] for n, code in enumerate(codes)]
        return Stored(tensors, torch.tensor(values).view(shape))

    return store


def int8_rows(shape: tuple[int, int]) -> Stored:
    """bitsandbytes' LLM.int8: the largest magnitude of each row."""
    codes, largest = torch.randint(-127, 128, shape), torch.rand(shape[0]) * 0.3 + 0.1
    full = [[int(code) * float(most) / 127 for code in row] for row, most in zip(codes, largest, strict=True)]
    tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Stored(tensors, torch.tensor(full))


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
BITSANDBYTES: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.up_proj"],
}


def group(layout: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\.up_proj"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
FOLDERS: dict[str, tuple[Callable[..., Stored], dict[str, Any]]] = {
    "gptq": (gptq(4), GPTQ),
    "gptq_act": (gptq(4, ordered=True), GPTQ | {"desc_act": True}),
    "gptq_8": (gptq(8), GPTQ | {"bits": 8}),
    "gptq_2_whole": (gptq(2, whole=True), GPTQ | {"bits": 2, "group_size": -1}),
    "gptq_v2": (gptq(4, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq_v2_format": (gptq(4, version=2), GPTQ | {"format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "int4": (pack_quantized(4), group("pack-quantized")),
    "int4_zeros": (pack_quantized(4, symmetric=False), group("pack-quantized", symmetric=False)),
    "int4_order": (pack_quantized(4, ordered=True), group("pack-quantized", actorder="group")),
    "int8_words": (pack_quantized(8, whole=True), group("pack-quantized", **CHANNEL)),
    "int8": (integers(), group("int-quantized", **CHANNEL)),
    "int8_order": (integers(ordered=True), group("int-quantized", num_bits=8, actorder="dynamic")),
    "int8_zeros": (integers(symmetric=False), group("int-quantized", symmetric=False, **CHANNEL)),
    "float8": (
        floats(1, 0, "weight_scale", torch.bfloat16),
        group("float-quantized", **CHANNEL | {"type": "float"}),
    ),
    "float8_tensor": (
        floats(0, 0, "weight_scale", torch.bfloat16),
        group("float-quantized", **CHANNEL | {"type": "float", "strategy": "tensor"}),
    ),
    "float8_block": (
        floats(24, 24, "weight_scale"),
        group("float-quantized", **CHANNEL | {"type": "float", "strategy": "block", "block_structure": [24, 24]}),
    ),
    "nf4": (nf4(double=True), BITSANDBYTES),
    "nf4_plain": (
        nf4(double=False, storage=torch.bfloat16),
        BITSANDBYTES | {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    "int8_rows": (int8_rows, BITSANDBYTES | {"load_in_4bit": False, "load_in_8bit": True}),
    "fp8": (floats(24, 24, "weight_scale_inv"), FP8 | {"weight_block_size": [24, 24]}),
    "fp8_tensor": (floats(0, 0, "weight_scale_inv"), FP8 | {"weight_block_size": None}),
}


def write(path: Path, name: str, **changes: Any) -> dict[str, Tensor]:
    """Writes a small quantized folder; returns the full weights that it means. One layer is not quantized."""
    torch.manual_seed(0)
    store, settings = FOLDERS[name]
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=96, initializer_range=0.1, attention_bias=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    model.save_pretrained(path)
    full = load_file(path / "model.safetensors")
    files: dict[str, Tensor] = {}
    for key, value in full.items():
        layer = key.removesuffix(".weight")
        if layer.endswith("_proj") and layer != "model.layers.1.mlp.up_proj":
            tensors, full[key] = store(tuple(value.shape))
            files |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
        else:
            files[key] = value
    save_file(files, path / "model.safetensors", {"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = settings | changes
    (path / "config.json").write_text(json.dumps(values))
    return full


def opened(path: Path, techniques: str = "{lora: {rank: 4}}", *more: str, reading: bool = False) -> Build:
    recipe = recipes.parse(
        f"model: {{path: {path}}}\nbatch: {{size: 4, seq_len: 32}}\nstop: {{max_steps: 9}}\ntechniques: {techniques}",
        overrides=list(more),
    )
    return build(recipe, vocabulary=96, device=DEVICE, reading=reading)


def packed(name: str) -> tuple[str, ...]:
    """FP8 folders stay packed only if the recipe says so."""
    return ("model.quantized_weights=packed",) if name.startswith("fp8") else ()


def full_weights(build_: Build) -> dict[str, Tensor]:
    return {
        name.replace(".base_layer", "") + ".weight": module.weight.detach()
        for name, module in build_.trained[0].named_modules()
        if isinstance(module, torch.nn.Linear) and "lora" not in name
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_the_weights_of_the_slow_reference(name: str, tmp_path: Path) -> None:
    full = write(tmp_path, name)
    b = opened(tmp_path, "{lora: {rank: 4}}", *packed(name))
    layers = [m for m in b.trained[0].modules() if isinstance(m, FrozenPackedMap)]
    assert len(layers) == 13
    assert all(not p.is_floating_point() for m in layers for key, p in m.named_parameters() if key != "bias")
    weights = full_weights(b)
    assert weights.keys() == {key for key in full if "proj.weight" in key or key == "lm_head.weight"}
    assert difference(weights, {key: full[key] for key in weights}) < 1e-7
    # The blocks of "fp8" end beyond its matrices, as those of DeepSeek-V3's kv_a_proj_with_mqa do.
    b = opened(tmp_path, "{}", "model.quantized_weights=dequantized")
    assert difference(full_weights(b), {key: full[key] for key in weights}) < 1e-7
    assert not [m for m in b.trained[0].modules() if isinstance(m, FrozenPackedMap)]
    assert [str(note) for note in b.weights.notes if "not used" in note] == []


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["gptq_act", "awq", "int4_zeros", "int8", "float8_block", "fp8", "nf4"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_training_is_that_of_peft_on_the_dequantized_base(name: str, variant: str, tmp_path: Path) -> None:
    full = write(tmp_path, name)
    b = opened(tmp_path, f"{{lora: {{rank: 4, variant: {variant}}}}}", *packed(name))
    assert "linear maps stay in" in str(b.changes["quantized_weights"][0])
    ours: Any = b.trained[0]
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("quantization_config")
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    base.load_state_dict(full)
    theirs: Any = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", use_dora=variant == "dora")
    )
    mine, other = (
        {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
        for model in (ours, theirs)
    )
    assert mine.keys() == other.keys()
    for key, p in mine.items():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.1)
        if "magnitude" in key:  # the norms of the rows of the base
            assert torch.allclose(p, other[key], rtol=1e-5)
        other[key].data.copy_(p.data)
    places = torch.arange(TOKENS.shape[1])[None]
    hidden = hf.hidden_states(ours, TOKENS, places, MaskSpec(), reference_attention)
    losses = [
        torch.nn.functional.cross_entropy(logits[0, :-1], TOKENS[0, 1:])
        for logits in (hf.compute_logits(ours, hidden), theirs(input_ids=TOKENS, use_cache=False).logits)
    ]
    for loss in losses:
        loss.backward()
    assert abs(float(losses[0].detach() - losses[1].detach())) < 1e-5
    assert difference({k: p.grad for k, p in mine.items()}, {k: p.grad for k, p in other.items()}) < 1e-3


def train(b: Build, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = accumulate_gradients(b, [uneven()])
        losses.append(float(loss.total / loss.weight))
        update(b, 0.01)
    return losses


TRAINED = [
    ("gptq_act", "{lora: {rank: 4}}"),
    ("awq", "{lora: {rank: 4, variant: dora}, activation_checkpointing: {}, fused_operators: {}, chunked_loss: {}}"),
    ("int4", "{lora: {rank: 4, embedding_rank: 2}, mixed_precision: {mode: bf16_weights}}"),
    ("float8", "{peft_adapter: {method: loha}, mixed_precision: {mode: bf16}}"),
    ("nf4", "{lora: {rank: 4}, fused_operators: {}, mixed_precision: {mode: bf16}}"),
    ("int8_rows", "{lora: {rank: 4}}"),
    ("nf4_plain", "{lora: {rank: 4}}"),
]


@pytest.mark.parametrize(("name", "techniques"), TRAINED)
def test_it_goes_on_exactly_and_is_merged_into_the_dequantized_base(name: str, techniques: str, tmp_path: Path) -> None:
    write(tmp_path / "base", name)
    a = opened(tmp_path / "base", techniques)
    weights, total = full_weights(a), count_parameters(a.trained[0])
    losses = train(a, 3)
    assert losses[-1] < losses[0]
    folder = checkpoint.save(a, checkpoint.Progress(step=3), tmp_path / "checkpoints", keep=1)
    b = opened(tmp_path / "base", techniques)
    checkpoint.load(b, folder)
    assert train(a, 2) == train(b, 2)
    assert difference(full_weights(a), weights) == 0
    assert total == count_parameters(
        opened(tmp_path / "base", techniques, "model.quantized_weights=dequantized").trained[0]
    )
    model: Any = a.trained[0]
    adapted = compute_reference_logits(model, TOKENS)
    peft_layers.merge(model)
    assert not [module for module in model.modules() if isinstance(module, StoredLinear)]
    if "bf16" not in techniques:
        assert difference({"": compute_reference_logits(model, TOKENS)}, {"": adapted}) < 1e-5


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_packed_as_they_are_unpacked(bits: int) -> None:
    codes = torch.randint(1 << bits, (3, 13), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, -(-13 * bits // 8))
    assert torch.equal(unpack_codes(packed, bits, 13), codes)


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_the_values_do_not_depend_on_the_chunks_which_may_cut_blocks(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Form((10, 6), 8, True, rows, 4, False, False, torch.float32)
    tensors = Tensors(torch.randn(10, 6).to(torch.float8_e4m3fn).view(torch.uint8), torch.rand(form.blocks))
    whole = dequantize(tensors, form, torch.float32)
    monkeypatch.setattr(stored, "_CHUNK", 12)  # two rows
    assert torch.equal(dequantize(tensors, form, torch.float32), whole)


def test_a_plan_counts_the_packed_weights(tmp_path: Path) -> None:
    """Of the folder, and of its config.json alone as on the hub."""
    write(tmp_path, "int4")
    recipe = f"model: {{path: {tmp_path}}}\nbatch: {{size: 4, seq_len: 32}}\nstop: {{max_steps: 9}}\ntechniques: {{lora: {{}}}}"

    def plan(*more: str) -> Any:
        return observe(Request(recipes.parse(recipe, overrides=list(more)), DEVICE, vocabulary=96))

    plain, packed_plan = plan("model.quantized_weights=dequantized"), plan()
    resident = sum(p.nbytes for p in opened(tmp_path, "{lora: {}}").trained[0].parameters())
    (tmp_path / "model.safetensors").unlink()
    alone = plan()
    assert alone.parameters == packed_plan.parameters == plain.parameters
    sizes = [seen.categories[Phase.LOAD]["parameters"] for seen in (plain, packed_plan, alone)]
    weights = 16_384  # of the 13 packed layers
    assert sizes[0] - sizes[1] == weights * (4 - (1 / 2 + 2 / GROUP))
    assert sizes[1] == sizes[2]
    assert resident <= sizes[1] < resident + 1_000  # besides the tables of rotary embedding
    assert packed_plan.peak[Phase.FORWARD] < plain.peak[Phase.FORWARD]


@pytest.mark.parametrize(
    ("name", "techniques", "more", "message"),
    [
        ("gptq", "{}", "", "is stored in gptq, and packed weights cannot be trained; add techniques.lora, or set model.quantized_weights"),
        ("gptq", "{lora: {variant: pissa}}", "", "changes the base's weights, which are quantized"),
        ("gptq", "{lora: {}, nf4: {}}", "", "nf4: cannot go with weights that stay packed in gptq; leave it out, or set"),
        ("fp8", "{}", "packed", "is stored in fp8, and packed weights cannot be trained"),
    ],
)  # fmt: skip
def test_a_recipe_that_does_not_fit_the_folder_is_refused(
    name: str, techniques: str, more: str, message: str, tmp_path: Path
) -> None:
    write(tmp_path, name)
    with pytest.raises(PreheatError, match=re.escape(message)) as caught:
        opened(tmp_path, techniques, *([f"model.quantized_weights={more}"] if more else []))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "quantization_config.bits: 3: preheat reads 2 and 4 and 8; name the original model"),
        ("gptq", {"group_size": 0}, "quantization_config.group_size: 0: must be a positive number"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "quantization_config.dynamic"),
        ("gptq", {"bits": 8}, "its files do not fit the quantization_config"),
        ("gptq_act", {"desc_act": False}, "g_idx reorders the inputs, and desc_act says that they are in order"),
        ("int4_order", group("pack-quantized"), "weight_g_idx reorders the inputs, and actorder says that they are in order"),
        ("awq", {"version": "gemv"}, "quantization_config.version: 'gemv': preheat reads gemm"),
        ("awq", {"version": None, "format": "gemv"}, "quantization_config.format: 'gemv': preheat reads gemm"),
        ("int4", {"format": "nvfp4-pack-quantized"}, "quantization_config.format: 'nvfp4-pack-quantized'"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format: 'sparse-24-bitmask'"),
        ("int4", {"config_groups": {}}, "quantization_config.config_groups: {}: no group has weights"),
        ("int4", {"ignore": ["re:("]}, "quantization_config.ignore: '(': is not a regular expression"),
        *(
            ("gptq", {"quant_method": kind}, f"is stored quantized ({kind}), which preheat does not read (it reads awq, bitsandbytes, compressed-tensors, fp8, gptq, mxfp4); name")
            for kind in ("aqlm", "exl2", "gguf", "hqq")
        ),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type: 'fp4': preheat reads nf4; name the original"),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit: False: load_in_4bit or load_in_8bit must be true"),
        ("nf4", {"bnb_4bit_use_double_quant": False}, "weight.absmax is in uint8; its files do not fit"),
        ("nf4_plain", {"bnb_4bit_use_double_quant": True}, "weight.absmax is in float32; its files do not fit"),
        ("int8_rows", {"load_in_4bit": True}, "down_proj.SCB is quantized"),
    ],
)  # fmt: skip
def test_what_a_folder_cannot_be_read_for_is_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(PreheatError, match=re.escape(message)) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("choice", ["packed", "dequantized"])
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq_8", {"bits": 4}, "codes (32, 32) for (32, 16)"),
        ("int8_words", group("pack-quantized", num_bits=4, strategy="channel"), "weight_packed has 8 words per row"),
        ("int8", group("int-quantized", num_bits=8), "scales (32, 1) for (32, 2)"),
    ],
)
def test_files_of_another_format_than_their_configuration_are_refused(
    name: str, changes: dict[str, Any], message: str, choice: str, tmp_path: Path
) -> None:
    write(tmp_path, name, **changes)
    with pytest.raises(PreheatError, match=re.escape(message)):
        opened(tmp_path, "{lora: {rank: 4}}", f"model.quantized_weights={choice}")


@pytest.mark.parametrize("name", ["gptq", "awq", "int4"])
def test_plain_weights_in_a_folder_marked_as_quantized_are_refused(name: str, tmp_path: Path) -> None:
    save_file(write(tmp_path, name), tmp_path / "model.safetensors", {"format": "pt"})
    recipe = recipes.parse(f"model: {{path: {tmp_path}}}\nstop: {{max_steps: 1}}\ntechniques: {{lora: {{}}}}")
    with pytest.raises(PreheatError, match="its files hold plain weights; delete quantization_config from it"):
        require_model(recipe, configs.source_config(recipe))


def test_a_quantization_without_its_method_is_named(tmp_path: Path) -> None:
    write(tmp_path, "gptq", quant_method=None)
    with pytest.raises(PreheatError, match="quant_method: must be a name such as gptq, got None;"):
        opened(tmp_path)


def test_a_layer_of_another_shape_or_without_a_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, "int4_zeros")
    weights = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.self_attn.k_proj"
    recipe = recipes.parse(
        f"model: {{path: {tmp_path}}}\nstop: {{max_steps: 1}}\ntechniques: {{lora: {{}}}}\nbatch: {{seq_len: 16}}"
    )
    require_model(recipe, configs.source_config(recipe))
    for changed, message in (
        ({key: value for key, value in weights.items() if key != f"{layer}.weight_zero_point"}, "weight_zero_point is missing"),
        (weights | {f"{layer}.weight_scale": weights[f"{layer}.weight_scale"][:, :1].contiguous()}, r"scales \(16, 1\) for \(16, 2\)"),
        ({key: value for key, value in weights.items() if key != f"{layer}.weight_packed"}, f"{layer}.weight_scale is quantized"),
    ):  # fmt: skip
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(PreheatError, match=message):
            opened(tmp_path)


def test_quantized_experts_are_refused_and_fp8_experts_are_dequantized(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=96,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    for name in ("gptq", "fp8_tensor"):
        path, (store, settings) = tmp_path / name, FOLDERS[name]
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
        files: dict[str, Tensor] = {}
        experts = 0
        for key, value in load_file(path / "model.safetensors").items():
            layer = key.removesuffix(".weight")
            experts += "experts" in key
            stored = store(tuple(value.shape)).tensors if layer.endswith("_proj") else None
            files |= {key: value} if stored is None else {f"{layer}.{part}": t for part, t in stored.items()}
        assert experts == 6
        save_file(files, path / "model.safetensors", {"format": "pt"})
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))
    with pytest.raises(
        PreheatError, match=r"experts\.0\.\w+\.qweight is quantized, and .* but experts in one matrix only in MXFP4"
    ):
        opened(tmp_path / "gptq")
    b = opened(tmp_path / "fp8_tensor", "{lora: {rank: 4}}", "model.quantized_weights=packed")
    assert len([m for m in b.trained[0].modules() if isinstance(m, StoredLinear)]) == 4
    plain = opened(tmp_path / "fp8_tensor", "{}")
    logits = [compute_reference_logits(x.trained[0], TOKENS) for x in (b, plain)]  # type: ignore[arg-type]
    assert difference({"": logits[0]}, {"": logits[1]}) < 1e-5
