"""The settings of a training run in terms that all trainers share, and the recipe that follows from them. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.core.schema import Schedule
from preheat.model_folder import read_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from preheat.core.json_types import JsonObject

__all__ = ["OURS", "Settings", "build_values"]


@dataclass
class Settings:
    """The settings of a run by a configuration; handlers of its keys fill it in. Field names are those of `OURS`.

    Attributes:
        home: folder of the file, which relative paths may start from.
        devices: number of devices, if the command states it.
        processes: devices of one node, as a script starts the run, and nodes its nodes.
        micro_batch: sequences (or pairs) per device and micro-batch.
        half_weights: trained weights are in half precision, without fp32 copies.
        frozen: precision of a frozen base under autocast, as in the recipe.
        fp32_rest: what of a base in 4 bits is not quantized (embedding, norms, head) is in fp32, so that hidden states
            are too.
        sources: of the data, in the recipe's terms (source, layout, columns, ...).
        family: architecture of a model that the file describes by its sizes, in place of naming one.
        architecture: sizes of the model, as transformers' configurations spell them.
        global_batch: sequences per step of all devices, if the file states them; accumulation follows from them.
        decay_steps: with schedule wsd, the steps at the end in which the rate falls.
        min_lr: the schedule's final rate, if the file states the rate in place of its ratio.
        deferred_reduction: with sharding, gradients stay whole until the last micro-batch.
        half_reduction: with sharding, gradients are summed in bf16.
        masters: weights are in half precision, with fp32 copies in the optimizer.
        decay_ratio: fraction of the run in which the rate falls, of the schedule `wsd`.
        kept_products: with selective checkpointing, the results of every n-th matmul are kept.
        checkpointed_layers: every n-th layer is checkpointed.
        loss_rows: of a chunked loss, or with loss_parallel, positions of logits in memory at a time; 0: all.
        regather: with sequence_parallel, inputs of blocks are gathered again in the backward pass.
        stages: of a pipeline, per device; None: the schedule's own.
        padding_free: rows of a micro-batch that is not packed stand one after the other, without padding.
        freeze: settings of the technique `freeze`; empty: no weights are frozen.
        lr_scales: pattern of weights' names -> factor on their learning rate.
        pairs: a row of the data is two answers, each a sequence.
    """

    home: Path = Path()
    name: str = "run"
    seed: int = 0
    devices: int | None = None
    processes: int | None = None
    nodes: int = 1
    model: str | None = None
    random_weights: bool = False
    family: str | None = None
    architecture: dict[str, object] = field(default_factory=dict)
    part: str = "auto"
    tokenizer: str | None = None
    add_tokens: list[str] = field(default_factory=list)
    sources: list[dict[str, object]] = field(default_factory=list)
    streaming: bool = False
    template: str | None = None
    train_on: str = "assistant"
    validation: float | str = 0.0
    workers: int = 0
    limit: int | None = None
    packing: bool = False
    padding_free: bool = False
    length: int = 512
    micro_batch: int = 1
    accumulation: int = 1
    global_batch: int | None = None
    pairs: bool = False
    optimizer: str = "adamw_torch_fused"
    learning_rate: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "cosine"
    warmup_ratio: float = 0.0
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.0
    min_lr: float | None = None
    decay_ratio: float | None = None
    decay_steps: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    eval_steps: int | None = None
    save_steps: int | None = None
    save_limit: int | None = None
    adapter: str | None = None
    quantized: bool = False
    quantized_experts: bool = False
    double_quantization: bool = True
    lora_rank: int = 8
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: str | list[str] | None = None
    lora_experts: bool = False
    lora_variant: str = "lora"
    pissa_iterations: int = 0
    precision: str = "bf16"
    half_weights: bool = False
    masters: bool = False
    frozen: str = "auto"
    fp32_rest: bool = False
    checkpointing: bool = False
    checkpointing_mode: str = "full"
    kept_products: int = 1
    checkpointed_layers: int = 1
    activation_offload: bool = False
    attention: bool = True
    compiled: bool = False
    fp8: bool = False
    fp8_recipe: str = "tensorwise"
    gelu: bool = False
    chunked_loss: bool = False
    fused_norm: bool = False
    fused_gate: bool = False
    adapter_kernels: bool = False
    label_smoothing: float = 0.0
    dft: bool = False
    neftune: float | None = None
    freeze: JsonObject = field(default_factory=dict)
    lr_scales: dict[str, float] = field(default_factory=dict)
    preference: dict[str, object] = field(default_factory=dict)
    qat: bool = False
    apollo: bool = False
    shifted_groups: bool = False
    sharding: str | None = None
    offload: bool = False
    deferred_reduction: bool = False
    half_reduction: bool = False
    shard_size: int | None = None
    replicas: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_schedule: str = "1f1b"
    stages: int | None = None
    expert_parallel: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool = False
    regather: bool = False
    loss_parallel: bool = False
    loss_rows: int | None = None

    @property
    def model_parallel(self) -> int:
        """Devices that read the same rows."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def world(self) -> int:
        """Number of devices: of the command, else of the script, else as many as the file's degrees need."""
        if self.devices is None and (self.processes or self.nodes > 1):
            return (self.processes or 1) * self.nodes
        shards = max(self.shard_size or 1, 1) * max(self.replicas, 1)
        experts = self.expert_parallel * (self.expert_tensor or 1) * self.pipeline_parallel
        return self.devices or max(shards * self.model_parallel, experts)

    @property
    def ranks(self) -> int:
        """Devices that read rows of their own."""
        return max(self.world // self.model_parallel, 1)


OURS: Mapping[str, tuple[str, ...]] = {
    "seed": ("seed",),
    "devices": ("parallel.devices",),
    "processes": ("parallel.devices",),
    "nodes": ("parallel.devices",),
    "model": ("model.path",),
    "random_weights": ("model.weights",),
    "family": ("model.family",),
    "architecture": (
        *("model.config", "model.num_layers", "model.hidden_size", "model.num_heads", "model.num_kv_heads"),
        *("model.intermediate_size", "model.num_experts", "model.num_experts_per_tok", "model.vocab_size"),
        *("model.max_positions", "model.tie_embeddings"),
    ),
    "part": ("model.part",),
    "tokenizer": ("data.tokenizer",),
    "add_tokens": ("model.add_tokens",),
    "sources": ("data.source",),
    "sources.layout": ("data.layout", "data.source"),
    "sources.columns": ("data.columns", "data.layout", "data.source"),
    "sources.text": ("data.text", "data.source"),
    "sources.subset": ("data.subset", "data.source"),
    "sources.split": ("data.split", "data.source"),
    "sources.limit": ("data.limit", "data.source"),
    "streaming": ("data.streaming",),
    "template": ("data.template",),
    "train_on": ("data.train_on",),
    "validation": ("data.validation",),
    "workers": ("data.workers",),
    "packing": ("data.packing",),
    "padding_free": ("data.packing",),
    "length": ("batch.seq_len",),
    "micro_batch": ("batch.size",),
    "accumulation": ("techniques.gradient_accumulation", "batch.size"),
    "global_batch": ("batch.size", "techniques.gradient_accumulation"),
    "optimizer": (
        *("techniques.low_bit_adamw", "techniques.adafactor", "techniques.lion", "techniques.muon"),
        "techniques.apollo",
    ),
    "learning_rate": ("optimizer.lr",),
    "betas": ("optimizer.betas",),
    "eps": ("optimizer.eps",),
    "weight_decay": ("optimizer.weight_decay",),
    "max_grad_norm": ("optimizer.max_grad_norm",),
    "schedule": ("schedule.kind", "schedule.min_lr_ratio"),
    "warmup_ratio": ("schedule.warmup_ratio",),
    "warmup_steps": ("schedule.warmup_ratio",),
    "min_lr_ratio": ("schedule.min_lr_ratio",),
    "apollo": ("techniques.apollo",),
    "decay_steps": ("schedule.decay_ratio",),
    "min_lr": ("schedule.min_lr_ratio",),
    "decay_ratio": ("schedule.decay_ratio",),
    "epochs": ("stop.epochs",),
    "max_steps": ("stop.max_steps",),
    "eval_steps": ("evaluate.every",),
    "save_steps": ("checkpoint.every",),
    "save_limit": ("checkpoint.keep",),
    "adapter": ("techniques.lora", "techniques.nf4"),
    "quantized": ("techniques.nf4",),
    "quantized_experts": ("techniques.nf4.experts",),
    "double_quantization": ("techniques.nf4.double_quantization",),
    "lora_rank": ("techniques.lora.rank",),
    "lora_alpha": ("techniques.lora.alpha",),
    "lora_dropout": ("techniques.lora.dropout",),
    "lora_targets": ("techniques.lora.target_modules",),
    "lora_experts": ("techniques.lora.expert_rank",),
    "lora_variant": ("techniques.lora.variant",),
    "pissa_iterations": ("techniques.lora.pissa_iterations",),
    "precision": ("techniques.mixed_precision",),
    "half_weights": ("techniques.mixed_precision",),
    "masters": ("techniques.mixed_precision",),
    "frozen": ("techniques.mixed_precision.frozen",),
    "fp32_rest": ("techniques.mixed_precision.frozen",),
    "checkpointing": ("techniques.activation_checkpointing",),
    "checkpointing_mode": ("techniques.activation_checkpointing.mode",),
    "kept_products": ("techniques.activation_checkpointing.products",),
    "checkpointed_layers": ("techniques.activation_checkpointing.every",),
    "activation_offload": ("techniques.activation_offload",),
    "attention": ("techniques.efficient_attention",),
    "compiled": ("techniques.compile",),
    "fp8": ("techniques.fp8",),
    "fp8_recipe": ("techniques.fp8.recipe",),
    "gelu": ("techniques.feed_forward",),
    "chunked_loss": ("techniques.chunked_loss",),
    "fused_norm": ("techniques.fused_operators.norm",),
    "fused_gate": ("techniques.fused_operators.gate",),
    "adapter_kernels": ("techniques.fused_operators.adapters",),
    "label_smoothing": ("techniques.regularized_loss",),
    "dft": ("techniques.dft",),
    "neftune": ("techniques.neftune",),
    "freeze": ("techniques.freeze",),
    "lr_scales": ("optimizer.groups",),
    "preference": ("techniques.preference",),
    "qat": ("techniques.quantization_aware",),
    "shifted_groups": ("techniques.shifted_groups",),
    "sharding": ("techniques.fsdp", "techniques.zero1"),
    "offload": ("techniques.fsdp.offload",),
    "deferred_reduction": ("techniques.fsdp.reduce",),
    "half_reduction": ("techniques.fsdp.reduce_dtype",),
    "shard_size": ("techniques.fsdp", "parallel.devices"),
    "replicas": ("techniques.fsdp.replicate", "parallel.devices"),
    "tensor_parallel": ("techniques.tensor_parallel", "parallel.devices"),
    "context_parallel": ("techniques.context_parallel", "parallel.devices"),
    "pipeline_parallel": ("techniques.pipeline_parallel", "parallel.devices"),
    "pipeline_schedule": ("techniques.pipeline_parallel.schedule",),
    "stages": ("techniques.pipeline_parallel.stages",),
    "expert_parallel": ("techniques.expert_parallel", "parallel.devices"),
    "expert_tensor": ("techniques.tensor_parallel", "techniques.expert_parallel.degree"),
    "sequence_parallel": ("techniques.tensor_parallel.sequence_parallel",),
    "regather": ("techniques.tensor_parallel.regather",),
    "loss_parallel": ("techniques.tensor_parallel.loss_parallel",),
    "loss_rows": ("techniques.chunked_loss.rows", "techniques.tensor_parallel.rows"),
}
"""Field of `Settings` -> the keys of the recipe that follow from it; of a setting of `sources` the first that is there,
since several sources are one list."""

_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "intermediate_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_embeddings",
}
"""Sizes as transformers' configurations spell them -> the recipe's keys of a new model."""

_LOW_BIT = {"8bit": 8, "4bit": 4}


def build_values(settings: Settings) -> JsonObject:
    """Returns the recipe that follows from the settings, as plain values for `recipe.read_values`."""
    rows = settings.micro_batch * settings.accumulation * settings.ranks * (2 if settings.pairs else 1)
    return {
        "name": re.sub(r"[^\w.-]+", "-", settings.name).strip(".-")[:80] or "run",
        "seed": settings.seed,
        "model": _build_model(settings),
        "data": _build_data(settings),
        "batch": {"size": rows, "seq_len": settings.length},
        "optimizer": {
            "lr": settings.learning_rate,
            "betas": list(settings.betas),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            **(
                {"groups": {name: {"lr_scale": n} for name, n in settings.lr_scales.items()}}
                if settings.lr_scales
                else {}
            ),
            "max_grad_norm": settings.max_grad_norm,
        },
        "schedule": _build_schedule(settings),
        # Steps come first in these trainers: epochs are then not read.
        "stop": {"max_steps": settings.max_steps} if settings.max_steps else {"epochs": settings.epochs},
        "evaluate": {"every": settings.eval_steps} if settings.eval_steps and settings.validation else {},
        "checkpoint": {
            key: value
            for key, value in (("every", settings.save_steps), ("keep", settings.save_limit))
            if value is not None
        },
        **({"parallel": {"devices": settings.world}} if settings.world > 1 else {}),
        "techniques": _build_techniques(settings),
    }


def _build_model(settings: Settings) -> JsonObject:
    if settings.model is None and settings.family is not None:
        sizes = {_SIZES[key]: value for key, value in settings.architecture.items() if key in _SIZES}
        others = {key: value for key, value in settings.architecture.items() if key not in _SIZES}
        return {"family": settings.family, **sizes, **({"config": others} if others else {})}
    # An override names the model of a file without one.
    model: JsonObject = {} if settings.model is None else {"path": settings.model}
    if settings.architecture:
        model["config"] = settings.architecture
    if settings.random_weights:
        model["weights"] = "random"
    if settings.part != "auto":
        model["part"] = settings.part
    if settings.add_tokens:
        model["add_tokens"] = settings.add_tokens
    return model


def _build_data(settings: Settings) -> JsonObject:
    data: JsonObject = {"validation": settings.validation}
    if len(settings.sources) == 1:
        data |= settings.sources[0]
    elif settings.sources:
        data["source"] = settings.sources
    if settings.streaming:
        data["streaming"] = True
    for key in ("template", "tokenizer", "workers"):
        if value := getattr(settings, key):
            data[key] = value
    if settings.train_on != "assistant":
        data["train_on"] = settings.train_on
    # These trainers split plain text at the ends of sequences, and no example; a padded row has one.
    text = all(source.get("layout") == "text" for source in settings.sources)
    data["packing"] = "stream" if settings.packing and text else "whole"
    return data


def _find_decay_ratio(settings: Settings, longest: float) -> float:
    """Returns the fraction of the run in which a wsd schedule's rate falls; by default after the warmup, `longest`."""
    if settings.decay_steps is not None:
        return settings.decay_steps / settings.max_steps if settings.max_steps else Schedule.decay_ratio
    return longest if settings.decay_ratio is None else settings.decay_ratio


def _build_schedule(settings: Settings) -> JsonObject:
    warmup = settings.warmup_ratio
    if settings.warmup_steps is not None and settings.max_steps:
        warmup = min(settings.warmup_steps / settings.max_steps, 0.99)
    if settings.schedule == "constant":
        return {"kind": "constant", "warmup_ratio": warmup}
    floor = settings.min_lr_ratio
    if settings.min_lr is not None and settings.learning_rate:
        floor = min(settings.min_lr / settings.learning_rate, 0.999)
    if settings.schedule == "wsd":
        decay = _find_decay_ratio(settings, 1 - warmup)
        return {"kind": "wsd", "warmup_ratio": warmup, "decay_ratio": min(decay, 1 - warmup), "min_lr_ratio": floor}
    if settings.schedule == "linear":  # from the end of the warmup to the end of the run
        return {"kind": "wsd", "warmup_ratio": warmup, "decay_ratio": 1 - warmup, "min_lr_ratio": 0.0}
    return {"kind": "cosine", "warmup_ratio": warmup, "min_lr_ratio": floor}


def has_experts(settings: Settings) -> bool:
    """True if the model is known to have experts."""
    from preheat.models import presets
    from preheat.models.moe import COUNTS

    values: JsonObject = dict(settings.architecture)
    if settings.model is not None:
        file = Path(settings.model).expanduser() / "config.json"
        if file.is_file():
            values |= read_object(file, "model.path")
        elif (known := presets.find_variant(settings.model)) is not None:
            values |= presets.find(known).text
    text = values.get("text_config")
    return any(key in part for key in COUNTS for part in (values, text if isinstance(text, dict) else {}))


def _build_techniques(settings: Settings) -> JsonObject:
    techniques: JsonObject = {}
    if settings.attention:
        techniques["efficient_attention"] = {}
    if mode := _choose_precision(settings):
        techniques["mixed_precision"] = {"mode": mode}
        if settings.adapter and settings.quantized and settings.fp32_rest:
            techniques["mixed_precision"] |= {"frozen": "fp32"}
        elif settings.frozen != "auto" and settings.adapter and not settings.quantized:
            techniques["mixed_precision"] |= {"frozen": settings.frozen}
    if settings.adapter == "lora":
        techniques["lora"] = _build_lora(settings)
    if settings.quantized:
        nf4: JsonObject = {} if settings.double_quantization else {"double_quantization": False}
        # bitsandbytes quantizes linear layers, and transformers holds the experts of a layer in one parameter.
        if not settings.quantized_experts and has_experts(settings):
            nf4["experts"] = False
        techniques["nf4"] = nf4
    if settings.checkpointing:
        mode = settings.checkpointing_mode
        checkpointing: JsonObject = {} if mode == "full" else {"mode": mode}
        if mode == "selective" and settings.kept_products > 1:
            checkpointing["products"] = settings.kept_products
        if settings.checkpointed_layers > 1:
            checkpointing["every"] = settings.checkpointed_layers
        techniques["activation_checkpointing"] = checkpointing
    if settings.activation_offload:
        techniques["activation_offload"] = {}
    if settings.accumulation > 1:
        techniques["gradient_accumulation"] = {"steps": settings.accumulation}
    techniques |= _build_optimizer(settings)
    fused = {"norm": settings.fused_norm, "gate": settings.fused_gate, "adapters": settings.adapter_kernels}
    # The compiler fuses them otherwise.
    if any(fused.values()) and not settings.compiled:
        techniques["fused_operators"] = fused
    if settings.preference:
        techniques["preference"] = settings.preference
    if settings.neftune:
        techniques["neftune"] = {"alpha": settings.neftune}
    if settings.freeze:
        techniques["freeze"] = settings.freeze
    if settings.gelu:
        techniques["feed_forward"] = {"activation": "gelu"}
    if settings.fp8:
        techniques["fp8"] = {} if settings.fp8_recipe == "tensorwise" else {"recipe": settings.fp8_recipe}
    if settings.label_smoothing:
        techniques["regularized_loss"] = {"label_smoothing": settings.label_smoothing, "z": 0.0}
    if settings.dft:
        techniques["dft"] = {}
    if settings.chunked_loss:
        techniques["chunked_loss"] = {} if settings.loss_rows is None else {"rows": settings.loss_rows}
    switches = {
        "compile": settings.compiled,
        "quantization_aware": settings.qat,
        "shifted_groups": settings.shifted_groups,
    }
    return techniques | {name: {} for name, on in switches.items() if on} | _build_parallelism(settings)


def _choose_precision(settings: Settings) -> str | None:
    if settings.precision == "fp32":
        return None
    if settings.masters and settings.adapter is None:
        return f"{settings.precision}_master"
    if settings.half_weights and settings.adapter is None:
        return f"{settings.precision}_pure" if settings.precision == "bf16" else "fp16_master"
    return settings.precision


def _build_lora(settings: Settings) -> JsonObject:
    alpha = settings.lora_alpha if settings.lora_alpha is not None else 2 * settings.lora_rank
    lora: JsonObject = {"rank": settings.lora_rank, "alpha": float(alpha), "dropout": settings.lora_dropout}
    if settings.lora_targets is not None:
        lora["target_modules"] = settings.lora_targets
    if settings.lora_experts:
        lora["expert_rank"] = settings.lora_rank
    if settings.lora_variant != "lora":
        lora["variant"] = settings.lora_variant
    if settings.pissa_iterations and settings.lora_variant == "pissa":
        lora["pissa_iterations"] = settings.pissa_iterations
    return lora


def _build_optimizer(settings: Settings) -> JsonObject:
    name = settings.optimizer
    if settings.apollo:
        return {"apollo": {}}
    for family in ("adafactor", "lion", "muon"):
        if family in name:
            return {family: {}}
    bits = next((bits for end, bits in _LOW_BIT.items() if end in name), None)
    return {} if bits is None else {"low_bit_adamw": {"bits": bits}}


def split_experts(settings: Settings, default: int) -> list[str]:
    """Plans each expert's matrices over all devices of the tensor axis, as preheat splits them; returns the difference.

    Experts that are whole there are on as many more devices of expert parallelism, so each holds as much.

    Args:
        default: devices that split the matrices of an expert if the file does not say.
    """
    stated, tensor = settings.expert_tensor or default, settings.tensor_parallel
    unstated, settings.expert_tensor = settings.expert_tensor is None, tensor
    before = settings.expert_parallel
    if stated == tensor or (unstated and before == 1):
        return []
    if before * stated % tensor == 0:
        settings.expert_parallel = before * stated // tensor
    return [
        f"{before} x {stated} devices split the experts and their matrices, planned as {settings.expert_parallel} x "
        f"{tensor}: each expert's matrices are split over the tensor axis"
    ]


def _build_parallelism(settings: Settings) -> JsonObject:
    techniques: JsonObject = {}
    world, ranks = settings.world, settings.ranks
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"):
        if (degree := getattr(settings, name)) > 1:
            techniques[name] = {"degree": degree}
    if "pipeline_parallel" in techniques and settings.pipeline_schedule != "1f1b":
        techniques["pipeline_parallel"] |= {"schedule": settings.pipeline_schedule}
    if "pipeline_parallel" in techniques and settings.stages is not None:
        techniques["pipeline_parallel"] |= {"stages": settings.stages}
    if "tensor_parallel" in techniques:
        # The head's output is gathered in most trainers.
        techniques["tensor_parallel"] |= {
            "loss_parallel": settings.loss_parallel,
            "sequence_parallel": settings.sequence_parallel,
            **({"regather": True} if settings.regather else {}),
            **({"rows": settings.loss_rows} if settings.loss_parallel and settings.loss_rows is not None else {}),
        }
    # One data-parallel rank has nothing to shard, and none to add its gradients to; context parallelism shards weights.
    if world == 1 or (ranks == 1 and settings.context_parallel == 1):
        return techniques
    if settings.sharding in ("full", "gradients"):
        fsdp: JsonObject = {} if settings.sharding == "full" else {"reshard_after_forward": False}
        if settings.precision == "bf16" and not settings.half_weights and settings.adapter is None:
            fsdp["gather"] = "bf16"
        if settings.deferred_reduction and settings.accumulation > 1:
            fsdp["reduce"] = "last"
        if settings.half_reduction:
            fsdp["reduce_dtype"] = "bf16"
        if settings.offload:
            fsdp["offload"] = True
        if settings.replicas > 1:
            fsdp["replicate"] = settings.replicas
        techniques["fsdp"] = fsdp
    else:
        techniques["data_parallel"] = {}
        if settings.sharding == "optimizer":
            techniques["zero1"] = {}
    return techniques
