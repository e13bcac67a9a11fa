"""Writes a recipe as ms-swift's YAML: `swift pt` for plain text, `swift sft` for conversations, `swift rlhf` for pairs.

Names and defaults are those of ms-swift 4.6 (swift/arguments, swift/trainers/arguments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preheat.errors import RecipeError
from preheat.interop.hf_writing import (
    is_file,
    list_targets,
    write_batch,
    write_fsdp,
    write_kernels,
    write_optimizer,
    write_saving,
    write_schedule,
    write_target_parameters,
)
from preheat.interop.trainer_defaults import Default
from preheat.interop.writing import Draft, Written
from preheat.recipe import Recipe

__all__ = ["VERSION", "write_ms_swift"]

VERSION = "4.6"
_SOURCE = "swift/trainers/arguments.py and swift/arguments"
_DEFAULTS: Mapping[str, Default] = {
    name: Default(value, "", _SOURCE)
    for name, value in {
        "seed": 42,
        "validation": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "schedule": "cosine",
        "epochs": 3.0,
        "checkpointing": True,
        "adapter": "lora",
        "lora_rank": 8,
        "lora_alpha": 32.0,
        "lora_dropout": 0.05,
        "lora_targets": "all-linear",
        "double_quantization": True,
        "train_on": "assistant",
        "half_weights": True,
        "workers": 1,
    }.items()
}
"""ms-swift's defaults of the keys that this file may leave out."""
_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "hinge": "hinge"}
_KINDS = ("orpo", "simpo", "cpo")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_READABLE = ("auto", "text", "messages", "sharegpt", "alpaca", "preference")


def write_ms_swift(recipe: Recipe, folder: Path = Path()) -> Written:
    """Writes a recipe as ms-swift's YAML.

    Args:
        folder: of the file, from where the run is started.

    Raises:
        RecipeError: the recipe has no such form at all.
    """
    draft = Draft(recipe, "ms-swift", _DEFAULTS)
    settings = draft.settings
    layouts = {str(source.get("layout", "auto")) for source in settings.sources}
    command = "rlhf" if settings.preference else "pt" if layouts == {"text"} else "sft"
    if settings.preference:
        _write_preference(draft)
    draft.say("model", "model")
    draft.put("use_hf", True)  # names of Hugging Face's hub, not of ModelScope's
    if Path(str(settings.model)).is_dir():
        draft.note(
            "ms-swift knows a model by its folder's name: if that is not the hub's name, add model_type and template"
        )
    if settings.add_tokens:
        draft.say("new_special_tokens", "add_tokens")
    _write_adapter(draft)
    _write_data(draft, command)
    _write_precision(draft)
    draft.explain("techniques.mixed_precision.frozen", "ms-swift keeps a frozen base in half precision: frozen: auto")
    draft.say("max_length", "length", always=True)
    write_batch(draft)
    draft.agree("pairs")
    write_optimizer(draft)
    if settings.optimizer == "muon":
        draft.say("optimizer", "optimizer", value="muon")
    write_schedule(draft, fraction="warmup_ratio")
    draft.say("gradient_checkpointing", "checkpointing")
    if settings.dft:
        draft.say("enable_dft_loss", "dft")
    write_kernels(draft, "use_liger_kernel")
    write_fsdp(draft)
    write_saving(draft)
    draft.explain("model.weights", "ms-swift draws no new weights; --to axolotl and --to llamafactory can")
    draft.explain("data.template", "ms-swift takes the model's own template")
    devices = f"NPROC_PER_NODE={settings.world} " if settings.world > 1 else ""
    draft.start.append(f"{devices}swift {command} {{file}}")
    return draft.finish()


def _write_preference(draft: Draft) -> None:
    preference = draft.settings.preference
    loss = str(preference["loss"])
    if loss not in (*_LOSSES, *_KINDS):
        known = ", ".join((*_LOSSES, *_KINDS))
        raise RecipeError(f"techniques.preference.loss: {loss}: ms-swift has {known}; use one of these")
    draft.put("rlhf_type", loss if loss in _KINDS else "dpo")
    if loss in _LOSSES:
        draft.put("loss_type", _LOSSES[loss], default=loss == "dpo")
    keys = {"beta": "beta", "label_smoothing": "label_smoothing"}
    keys |= {"gamma": "simpo_gamma"} if loss == "simpo" else {}
    if loss == "simpo":
        draft.put("cpo_alpha", preference.get("nll", 0.0))  # ms-swift's SimPO has a loss on the answers, of weight 1
    written = {"loss": loss} | ({"nll": preference["nll"]} if loss == "simpo" and "nll" in preference else {})
    for ours, theirs in keys.items():
        if ours in preference:
            draft.put(theirs, preference[ours])
            written[ours] = preference[ours]
    if loss == "simpo" and "gamma" not in preference:
        draft.put("simpo_gamma", 0.5)
    draft.said.preference = written


def _write_adapter(draft: Draft) -> None:
    settings = draft.settings
    draft.say("tuner_type", "adapter", value="full" if settings.adapter is None else "lora", always=True)
    if settings.adapter is None:
        return
    draft.say("lora_rank", "lora_rank", always=True)
    draft.say("lora_alpha", "lora_alpha", always=True)
    draft.say("lora_dropout", "lora_dropout")
    targets = list_targets(settings)
    if isinstance(settings.lora_targets, str) and targets != ["all-linear"]:
        draft.say("target_regex", "lora_targets", value=targets[0])
    else:
        draft.say("target_modules", "lora_targets", value=targets)
    write_target_parameters(draft, "target_parameters")
    if settings.lora_variant in ("rslora", "dora"):
        draft.say(f"use_{settings.lora_variant}", "lora_variant", value=True)
    elif settings.lora_variant == "pissa":
        steps = settings.pissa_iterations
        draft.say(
            "init_weights", "lora_variant", "pissa_iterations", value=f"pissa_niter_{steps}" if steps else "pissa"
        )
    if settings.quantized:
        draft.say("quant_method", "quantized", value="bnb")
        draft.put("quant_bits", 4)
        draft.say("bnb_4bit_use_double_quant", "double_quantization")


def _write_data(draft: Draft, command: str) -> None:
    settings, names = draft.settings, []
    written: list[dict[str, object]] = []
    for source in settings.sources:
        layout = str(source.get("layout", "auto"))
        if layout not in _READABLE:
            draft.refuse_layout(source, f"ms-swift reads {', '.join(_READABLE[1:])}")
        source_keys: dict[str, object] = {key: source[key] for key in ("source", "layout", "limit") if key in source}
        name = str(source["source"])
        if not is_file(name) and "subset" in source:
            name, source_keys["subset"] = f"{name}:{source['subset']}", source["subset"]
        names.append(f"{name}#{source['limit']}" if "limit" in source else name)
        written.append(source_keys)
    draft.put("dataset", names)
    draft.said.sources = written
    _write_columns(draft)
    if settings.streaming:
        draft.say("streaming", "streaming")
    if isinstance(settings.validation, float):
        draft.say("split_dataset_ratio", "validation")
    else:
        draft.put("val_dataset", [settings.validation])
        draft.agree("validation")
    if settings.train_on != "assistant" and command == "sft":
        draft.say("loss_scale", "train_on", value={"all": "all", "last": "last_round"}[settings.train_on])
    if not settings.preference:
        draft.say("packing", "packing", always=settings.packing)
        if settings.packing:
            draft.put("attn_impl", "flash_attn")  # packing needs it
            if command == "pt":
                draft.put("truncation_strategy", "split")  # the rest of a long text is trained on too
                draft.note("data.packing: no key of the file tells the command; read it with --from ms-swift-pt")
    if not settings.attention and not settings.packing:
        draft.say("attn_impl", "attention", value="eager")


def _write_columns(draft: Draft) -> None:
    """Writes the names of columns, of which ms-swift has one mapping for all datasets."""
    names = {"prompt": "query", "chosen": "response", "rejected": "rejected_response"}
    fields = {field: field for field in names} if draft.settings.preference else {}
    mappings = [source.get("columns") or {} for source in draft.settings.sources]
    first = mappings[0]
    assert isinstance(first, dict)
    if first and all(mapping == first for mapping in mappings):
        draft.put("columns", {column: names.get(field, field) for field, column in (fields | first).items()})
        for source in draft.said.sources:
            source["columns"] = first
    elif fields and not any(mappings):
        draft.put("columns", {column: names[column] for column in fields})


def _write_precision(draft: Draft) -> None:
    settings = draft.settings
    dtype = _DTYPES[settings.precision]
    if settings.precision == "bf16" and not settings.half_weights and settings.adapter is None:
        # Weights in fp32 under autocast.
        draft.say("torch_dtype", "half_weights", value="float32")
        draft.say("bf16", "precision", value=True)
    else:
        draft.say("torch_dtype", "precision", value=dtype, always=True)
        if settings.precision == "fp32":
            draft.put("fp16", False)  # ms-swift computes in fp16 with weights in fp32
        if settings.precision == "bf16":
            draft.agree("half_weights")
        elif settings.precision == "fp16":
            draft.said.half_weights = False
