"""Recipes of training methods (frozen layers, quantized bases, ALiBi, preferences, split experts) for `plan_vs_measured.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from preheat.core.json_types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Case", "list_methods"]

_KERNELS = "efficient_attention: {}, chunked_loss: {}"
_GROUP = 128  # weights of a row that share a scale
_LLAMA: JsonObject = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QUIET = ["stop.max_steps=4", "evaluate={rows: 8}", "checkpoint={}", "sample={}", "batch={size: 8, seq_len: 256}"]


class Case(NamedTuple):
    """A recipe to train."""

    name: str
    settings: list[str]
    processes: int = 1


def list_methods(folder: Path) -> list[Case]:
    """Returns a recipe of each method; configurations, quantized weights and rows are written below the folder."""
    return [
        *_list_frozen(folder),
        *_list_quantized(folder),
        *_list_alibi(folder),
        *_list_objectives(folder),
        *_list_split(folder),
    ]


def _case(name: str, model: Path, techniques: str = "", *more: str, processes: int = 1, random: bool = True) -> Case:
    weights = ", weights: random" if random else ""
    settings = [*_QUIET, f"model={{path: {model}{weights}}}", f"techniques={{{_KERNELS}{techniques}}}", *more]
    return Case(name, settings + ([f"parallel.devices={processes}"] if processes > 1 else []), processes)


def _read_data_folder() -> Path:
    return Path(os.environ["PREHEAT_DATA"])


def _save(folder: Path, kind: str, values: JsonObject) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **values).save_pretrained(folder / kind)
    return folder / kind


def _list_frozen(folder: Path) -> list[Case]:
    model = _save(folder, "llama", _LLAMA)
    return [
        _case("all weights", model),
        _case("last two layers", model, ", freeze: {layers: 2}"),
        _case("head alone", model, ", freeze: {layers: 0, train: [head]}"),
        _case("one more layer each step", model, ", freeze: {layers: 8, gradual: 1}", "stop.max_steps=8"),
        _case(
            "groups and rates by layer",
            model,
            "",
            "optimizer.groups={embeddings: {lr_scale: 0.1, weight_decay: 0}, norms: {lr_scale: 2}}",
            "optimizer.layer_decay=0.9",
        ),
        _case("LoRA+", model, ", lora: {}", "optimizer.groups={lora_B: {lr_scale: 16}}"),
    ]


def _list_quantized(folder: Path) -> list[Case]:
    """LoRA on folders in the formats of the hub, with random weights."""
    return [
        _case(
            f"LoRA on {name}",
            _write_quantized(folder / name, name),
            ", lora: {}",
            "model.quantized_weights=packed",
            f"data.tokenizer={_read_data_folder() / 'stories260K-hf'}",  # of 512 tokens, all of which the model has
            random=False,
        )
        for name in _FORMATS
    ]


def _list_alibi(folder: Path) -> list[Case]:
    bloom = {"n_layer": 8, "hidden_size": 512, "n_head": 8, "vocab_size": 16384, "bos_token_id": 1, "eos_token_id": 2}
    mpt = {"n_layers": 8, "d_model": 512, "n_heads": 8, "vocab_size": 16384, "max_seq_len": 1024}
    return [
        _case("ALiBi (bloom)", _save(folder, "bloom", bloom)),
        _case("ALiBi (mpt)", _save(folder, "mpt", mpt)),
        _case("ALiBi, LoRA (bloom)", folder / "bloom", ", lora: {}"),
    ]


def _list_objectives(folder: Path) -> list[Case]:
    """KTO on the answers of `instruct/dpo_en_demo.json`, liked if they were preferred, and DFT on the demo's text."""
    source = _read_data_folder() / "instruct" / "dpo_en_demo.json"
    answers = [
        {"prompt": row["conversations"][-1]["value"], "completion": row[key]["value"], "label": key == "chosen"}
        for row in json.loads(source.read_text(encoding="utf-8"))
        for key in ("chosen", "rejected")
    ]
    # Longer ones do not fit 512 tokens of a tokenizer that is trained on this little text.
    rows = [row for row in answers if len(row["prompt"]) + len(row["completion"]) < 800]
    file = folder / "kto.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model, data = folder / "llama", (f"data={{source: {file}, layout: kto}}", "batch={size: 4, seq_len: 512}")
    return [
        _case("DFT", model, ", dft: {}"),
        _case("KTO", model, ", preference: {loss: kto}", *data),
        _case("KTO, LoRA", model, ", preference: {loss: kto}, lora: {}", *data),
    ]


def _list_split(folder: Path) -> list[Case]:
    """Recurrent layers under context parallelism, and experts under tensor, pipeline and expert parallelism."""
    sizes = _LLAMA | {"num_hidden_layers": 4, "head_dim": 64}
    delta = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
    hybrid = ["linear_attention"] * 3 + ["full_attention"]
    qwen = _save(folder, "qwen3_5_text", sizes | delta | {"linear_value_head_dim": 64, "layer_types": hybrid})
    mamba = {"num_heads": 16, "head_dim": 64, "n_groups": 2, "state_size": 64, "expand": 2}
    mamba2 = _save(folder, "mamba2", sizes | mamba)
    lfm2 = _save(folder, "lfm2", sizes | {"layer_types": ["conv"] * 3 + ["full_attention"]})
    jamba = {"mamba_dt_rank": 32, "num_experts": 1, "attn_layer_period": 4, "attn_layer_offset": 3}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    moe = _save(folder, "qwen3_moe", sizes | experts)
    context = ", fsdp: {}, context_parallel: {degree: 2}"
    # Its own loss over a split vocabulary takes the place of chunked_loss.
    tensor = ", tensor_parallel: {degree: 2, loss_parallel: false}"
    pipeline = ", pipeline_parallel: {degree: 2, micro_batches: 4}"
    return [
        _case("context 2: gated delta net", qwen, context, processes=2),
        _case("context 2: Mamba 2", mamba2, context, processes=2),
        _case("context 2: short convolution", lfm2, context, processes=2),
        _case("context 2: Mamba 1", _save(folder, "jamba", sizes | jamba), context, processes=2),
        _case("experts: tensor 2", moe, tensor, processes=2),
        _case("experts: pipeline 2", moe, pipeline, processes=2),
        _case("experts: fsdp 2, expert 2", moe, ", fsdp: {}, expert_parallel: {degree: 2}", processes=2),
        _case(
            "experts: tensor 2, fsdp 2, expert 2",
            moe,
            f"{tensor}, fsdp: {{}}, expert_parallel: {{degree: 2}}",
            processes=4,
        ),
        _case(
            "experts: pipeline 2, fsdp 2, expert 2",
            moe,
            f"{pipeline}, fsdp: {{}}, expert_parallel: {{degree: 2}}",
            processes=4,
        ),
        _case("experts: tensor 2, pipeline 2", moe, tensor + pipeline, processes=4),
    ]


def _draw_words(*shape: int) -> Tensor:
    """Returns int32 words of 4-bit codes."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _draw_scales(*shape: int) -> Tensor:
    return 0.004 * (0.5 + torch.rand(shape))


def _store_gptq(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "qweight": _draw_words(inputs // 8, outputs),
        "qzeros": torch.full((inputs // _GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": _draw_scales(inputs // _GROUP, outputs).half(),
        "g_idx": (torch.arange(inputs) // _GROUP).to(torch.int32),
    }


def _store_awq(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "qweight": _draw_words(inputs, outputs // 8),
        "qzeros": torch.full((inputs // _GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": _draw_scales(inputs // _GROUP, outputs).half(),
    }


def _store_packed(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight_packed": _draw_words(outputs, inputs // 8),
        "weight_scale": _draw_scales(outputs, inputs // _GROUP).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def _store_fp8(outputs: int, inputs: int) -> dict[str, Tensor]:
    return {
        "weight": (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn),
        "weight_scale_inv": 0.1 * _draw_scales(outputs // _GROUP, inputs // _GROUP),
    }


_PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
# Format -> the tensors of a layer, `quantization_config`.
_FORMATS = {
    "GPTQ": (
        _store_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": False},
    ),
    "AWQ": (
        _store_awq,
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True},
    ),
    "compressed-tensors": (
        _store_packed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _PACKED}},
        },
    ),
    "FP8": (
        _store_fp8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [_GROUP, _GROUP],
        },
    ),
}


def _write_quantized(folder: Path, name: str) -> Path:
    """Writes a Llama of random weights whose linear layers are stored in a format of the hub."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    store, settings = _FORMATS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_LLAMA))
    model.config.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        layer = key.removesuffix(".weight")
        if layer.endswith("_proj"):
            tensors |= {f"{layer}.{part}": tensor for part, tensor in store(*value.shape).items()}
        else:
            tensors[key] = value.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    return folder
