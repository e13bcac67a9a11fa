"""Export of a run's adapter to a PEFT folder, reloaded by peft on the plain base and compared."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.held_out_text import choose_held_out_text
from preheat.compress.special_tokens import EndTokens, require_same_tokens, set_end_tokens
from preheat.core import Stage
from preheat.core.export import ExportResult
from preheat.engine.builder import build
from preheat.engine.device import resolve_device
from preheat.errors import RunError
from preheat.files import to_json
from preheat.inference.load import LoadedModel, load_model
from preheat.model_folder import FAULTS, describe_fault
from preheat.models import configs
from preheat.models.generation.config import ends_of, read_generation
from preheat.models.hf import require_decoder_only
from preheat.models.text_part import name_in_text
from preheat.ops.adapters.moe_lora import adapted_experts, view_as_peft
from preheat.ops.adapters.peft_io import BASE
from preheat.ops.adapters.peft_layers import adapter_tensors, base_layer_of, names_of
from preheat.ops.grouped_mm import stacks_of
from preheat.ops.quantization.fake_quant import unfake_
from preheat.ops.quantization.nf4 import PackedMap, build_tables, dequantize, quantize
from preheat.ops.quantization.packed_experts import Nf4Experts
from preheat.recipe import Hardware, Model, Recipe, Stop
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

    from preheat.core.json_types import JsonObject

__all__ = ["write"]

_NF4 = (
    "the adapter was trained on the base in NF4: load the base in 4 bits (bitsandbytes, nf4{}{}) or write a merged "
    "model with --to hf; on the original base its logits differ by up to {:.2g}"
)
_NF4_EXPERTS = ", and experts too, which it leaves as they are if they are one parameter"
_HALF = (
    "the adapter was trained on the base in {0}: load the base with dtype=torch.{0}; in its stored precision its "
    "logits differ by up to {1:.2g}"
)
_STORED = (
    "the adapter was trained on the base in {0}, whose weights were dequantized exactly: load that folder under it; "
    "kernels for {0} round the weights to half precision, which changes logits slightly"
)
_PARTIAL = (
    "transformers dequantizes FP8 in whole blocks only, and a matrix of the base ends within one: it was compared with "
    "peft on the base as preheat reads it, and the code below needs a GPU that computes in FP8"
)
_MERGED = 1e-3
"""Accepted change by merging in fp32, relative to the largest logit; some adapters lose digits by cancellation."""
_PISSA = "pissa changed its base: written as a plain LoRA of twice the rank for the original base"


def write(run: str | Path, out: str | Path, *, tolerance: float | None = None) -> ExportResult:
    """Writes the adapter of a run's newest complete checkpoint as a PEFT folder, without its base.

    LoRA on experts is written as peft's parameter adapters. `PeftModel.from_pretrained(base, out)` must reproduce the
    run's logits, which is checked. An adapter over NF4 is compared on the base's weights as rounded by NF4, on which
    it was trained.

    Args:
        tolerance: maximum logit difference relative to the largest logit (at least 1).

    Raises:
        RunError: the run has no adapter, or its base is not available to others; `out` exists; the difference exceeds
            the tolerance.
    """
    import peft
    from transformers import GenerationConfig

    out = Path(out)
    require_new(out, run)
    opened = load_model(run)
    model: PreTrainedModel = opened.build.trained[0]
    require_decoder_only(model, "preheat export --to peft")
    names = names_of(model)
    stored = opened.build.weights.packed_method
    base = _resolve_base(opened, names, run)
    published = _Published.of(opened, run)
    if stored and published.whole is not None:
        raise RunError(
            f"--to peft: {run}: trained the text part of a {published.whole.config.model_type} whose folder is stored "
            f"in {stored}, which cannot be read back whole; write the merged model with --to hf --dtype bfloat16"
        )
    held_text = choose_held_out_text(opened, run)
    unfake_(model)  # the adapter belongs to the unrounded weights
    accepted = verify.Bound(verify.TOLERANCE[torch.float32] if tolerance is None else tolerance)
    rows = verify.tokenize_samples(opened.tokenizer, opened.build.model.positions, [])
    pissa = getattr(opened.recipe.techniques.get("lora"), "variant", "") == "pissa"
    half = {} if pissa else _find_half_dtypes(model)  # pissa rounds the residual, which is not a weight of the base
    # The reference: the run's logits in memory, before anything is converted.
    wanted = verify.compute_logits(model, rows)
    config = copy.deepcopy(model.peft_config["default"])
    # Copies on the CPU, because the run's model is freed before peft loads the base.
    values = {
        published.name(name): {key: t.detach().cpu().clone() for key, t in adapter_tensors(model.get_submodule(name))}
        for name in names
    }
    if pissa:
        # PiSSA took s B0 A0 out of the base: the exported adapter has to add B A and subtract B0 A0.
        for name in names:
            place = published.name(name)
            values[place] = _convert_to_lora(
                values[place], opened.build.weights.read(f"{name}.weight"), base_layer_of(model, name).weight, config
            )
        # True: peft must not decompose the base again. Twice the rank at the same scale, alpha / r or alpha /
        # sqrt(r).
        config.init_lora_weights, config.r = True, 2 * config.r
        config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    whole = model if published.whole is None else published.whole
    config.target_modules = _shorten_names(list(values), whole)
    _move_expert_targets(config, whole, run)
    pairs = {(published.name(name), stack): pair for (name, stack), pair in _convert_pairs(model, config).items()}
    half = {published.name(name): dtype for name, dtype in half.items()}
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    # Names of modules in the plain base, without the adapter's wrapper. A folder in NF4 is read as it is.
    modules = () if stored else model.named_modules()
    packed = {n.replace(".base_layer", ""): m for n, m in modules if isinstance(m, (PackedMap, Nf4Experts))}
    has_experts = any(isinstance(m, Nf4Experts) for m in packed.values())
    double = any(key.endswith("_ranges") for m in packed.values() for key, _ in m.named_parameters())
    written = {
        "base": base,
        "fingerprint": opened.build.weights.fingerprint(),
        "nf4": {"double_quantization": double, "modules": list(packed)} if packed else None,
    }
    load_options = {
        "dtype": torch.float32,
        "trust_remote_code": configs.is_remote_code(model.config, opened.recipe.model.trust_remote_code),
    }
    # The base is read from the run's folder; the adapter names it as others can find it.
    source, notes = str(opened.build.weights.folder), [held_text.unfinished] if held_text.unfinished else []
    notes += [_PISSA] if pissa else []
    notes += [_STORED.format(stored)] if stored else []
    # peft generates with the base's settings, so an end token that only the adapter's folder names is never read.
    base_generation = read_generation(opened.build.weights.folder)[0] or GenerationConfig.from_model_config(
        model.config
    )
    ends = set_end_tokens(model, opened)
    settings = model.generation_config
    notes += [*ends.notes, *_note_unread_end_tokens(ends, ends_of(base_generation))]
    reader = published.reader
    load_base = functools.partial(_load_base, reader, source, base, load_options)
    is_partial = not stored and opened.build.weights.has_partial_blocks()
    notes += [_PARTIAL] if is_partial else []
    if stored or is_partial:  # transformers reads stored folders with other libraries, and on GPUs
        load_base = functools.partial(_dequantize_base, opened.recipe, source, base)
    # Frees the run's model before peft loads the base again, twice.
    opened.build.parts.clear()
    del model, packed, whole
    with NewFolder(out) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        # `_note_other_merge` measures the effect of tied embeddings on merging.
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
        # peft looks for these among modules only, but applies the rank all the same.
        warnings.filterwarnings("ignore", message=r"The following rank_pattern keys .*experts", category=RuntimeWarning)
        # peft reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        adapted: PeftModel = peft.get_peft_model(load_base(), config)
        with torch.no_grad():
            for name, tensors in values.items():
                for key, target in adapter_tensors(adapted.get_submodule(f"base_model.model.{name}")):
                    target.copy_(tensors[key])
            _put_pairs(adapted, pairs)
        # Without embeddings, which peft would add if the adapter includes them; they belong to the base.
        adapted.save_pretrained(folder, save_embedding_layers=False)
        del adapted
        ends.tokenizer.save_pretrained(folder)
        require_same_tokens(ends.tokenizer, folder)
        settings.save_pretrained(folder)
        (folder / BASE).write_text(to_json(written, indent=1), encoding="utf-8")
        reloaded: PeftModel = peft.PeftModel.from_pretrained(load_base(), folder)
        if half:
            # Before rounding, for the note: the difference that a user sees on the base in its stored precision.
            unrounded_half = verify.compare(wanted, verify.compute_logits(reloaded.get_base_model(), rows))
            if _round_base(reloaded.get_base_model(), half):
                notes.append(_HALF.format(_name_dtype(half), unrounded_half.largest))
            else:  # the base is already stored in that precision
                half = {}
        if written["nf4"]:
            unrounded = verify.compare(wanted, verify.compute_logits(reloaded.get_base_model(), rows))
            details = ", double quantization" if double else "", _NF4_EXPERTS if has_experts else ""
            notes.append(_NF4.format(*details, unrounded.largest))
            rounded = [published.name(name) for name in written["nf4"]["modules"]]
            _round(reloaded.get_base_model(), rounded, double=double)
        difference = verify.compare(wanted, verify.compute_logits(reloaded.get_base_model(), rows), rows)
        verify.refuse_beyond(
            difference,
            accepted,
            str(out),
            "if the run held the base in less precision, as with bf16_weights, peft cannot reproduce that: "
            "write --to hf",
        )
        perplexity = held_text.by(reloaded.get_base_model(), difference)
        # Last, because it merges into the reloaded base in place.
        notes += _note_other_merge(reloaded, wanted, rows)
        summary = ExportResult(
            path=str(out),
            bytes=verify.count_bytes(folder),
            base=base,
            adapted=len(names) + len(pairs),
            read_by=model_card.find_version("peft"),
            **vars(verify.build_comparison(difference, accepted)),
            **vars(perplexity),
            note="; ".join(notes),
        )
        prompt = 'tokenizer("Once upon a time", return_tensors="pt")'
        if ends.chats:
            prompt = (
                'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], '
                'add_generation_prompt=True, return_tensors="pt", return_dict=True)'
            )
        stop = f", stop_strings=[{ends.string!r}], tokenizer=tokenizer" if ends.string else ""
        cut = f".partition({ends.string!r})[0]" if ends.string else ""
        precision = f", dtype={_name_dtype(half)!r}" if half else ""
        use = (
            "import peft, transformers\nbase = "
            f"transformers.{reader}.from_pretrained({base!r}{precision})\n"
            'base.generation_config = transformers.GenerationConfig.from_pretrained(".")\nmodel = '
            'peft.PeftModel.from_pretrained(base, ".")\n'
            f'tokenizer = transformers.AutoTokenizer.from_pretrained(".")\nids = {prompt}\n'
            f'answer = model.generate(**ids, max_new_tokens=64, do_sample=False{stop})[0, ids["input_ids"].shape[1]:]\n'
            f"print(tokenizer.decode(answer, skip_special_tokens=True){cut})"
        )
        model_card.write_export(folder, run, summary, title="adapter for peft", use=use, library="peft")
    return summary


@dataclass(frozen=True)
class _Published:
    """The model that the adapter is for: the published whole, if the run trained its text part.

    Attributes:
        whole: the published model on meta; None if the run trained the model as it is published.
        places: names of its modules and parameters by those in the text part.
    """

    whole: PreTrainedModel | None
    places: Mapping[str, str]

    @classmethod
    def of(cls, opened: LoadedModel, run: str | Path) -> _Published:
        from transformers import AutoModelForImageTextToText

        config = configs.wrapper_config(opened.recipe)
        if config is None:
            return cls(None, {})
        try:
            with torch.device("meta"):
                whole = AutoModelForImageTextToText.from_config(config)
        except (*FAULTS, ImportError) as error:
            raise RunError(
                f"--to peft: {run}: transformers cannot load {config.model_type}, which the adapter would be for, here "
                f"({describe_fault(error, 160)}); write the merged model with --to hf"
            ) from None
        names = [name for name, _ in (*whole.named_modules(), *whole.named_parameters())]
        return cls(whole, {text: name for name in names if (text := name_in_text(name)) is not None})

    @property
    def reader(self) -> str:
        return "AutoModelForCausalLM" if self.whole is None else "AutoModelForImageTextToText"

    def name(self, name: str) -> str:
        return self.places.get(name, name)


def _find_half_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtypes of the base weights that the run holds in half precision, by their names without adapters."""
    dtypes = {name.replace(".base_layer", ""): p.dtype for name, p in model.named_parameters() if not p.requires_grad}
    return {name: dtype for name, dtype in dtypes.items() if dtype in (torch.bfloat16, torch.float16)}


def _name_dtype(half: dict[str, torch.dtype]) -> str:
    """Returns bfloat16 or float16."""
    return str(next(iter(half.values()))).removeprefix("torch.")


def _round_base(model: nn.Module, half: dict[str, torch.dtype]) -> bool:
    """Rounds the base's weights to the run's precision, in place; returns True if any changed."""
    changed = False
    with torch.no_grad():
        for name, p in model.named_parameters():
            dtype = half.get(name.replace(".base_layer", ""))
            if dtype is not None:
                # Still stored in fp32, so that both models compute in one precision.
                rounded = p.to(dtype).to(p.dtype)
                changed |= not torch.equal(rounded, p)
                p.copy_(rounded)
    return changed


def _note_unread_end_tokens(ends: EndTokens, base_ends: list[int]) -> list[str]:
    """Returns a note if the base's generation settings, which peft uses, do not end an answer."""
    if ends.end_of_turn is None or ends.end_of_turn in base_ends:
        return []
    token = ends.tokenizer.convert_ids_to_tokens(ends.end_of_turn)
    return [
        f"peft takes the base's generation settings, which do not stop at {token!r}, the end of each answer: set "
        "base.generation_config = transformers.GenerationConfig.from_pretrained(FOLDER) of this folder before the "
        "adapter is added, so that a merged model has it, too"
    ]


def _note_other_merge(model: PeftModel, wanted: list[Tensor], rows: list[Tensor]) -> list[str]:
    """Returns a note if peft's own merge gives a different model.

    This happens if an adapter on the embedding also affects a head that shares its weight.
    """
    try:
        merged = model.merge_and_unload()
    except (NotImplementedError, ValueError) as error:
        return [f"peft does not merge this adapter ({shorten(str(error), 120)}): preheat export --to hf does"]
    # `merged` is the base itself with changed weights.
    difference = verify.compare(wanted, verify.compute_logits(merged, rows))
    if difference.share() <= _MERGED:
        return []
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    reason = ", since it adds the pair of the embedding twice to the weight that embedding and head share"
    return [
        "peft's merge_and_unload gives another model (logits differ by up to "
        f"{difference.largest:.2g}){reason if embedding.weight is head.weight else ''}: "
        "use the adapter unmerged, or merge by preheat export --to hf"
    ]


def _resolve_base(opened: LoadedModel, names: list[str], run: str | Path) -> str:
    """Returns the base that others can load under the adapter: a hub name, or an absolute path."""
    recipe = opened.recipe
    if opened.step is None:
        raise RunError(f"{run}: is not a run; only the adapter of a run can be written for peft")
    if not names:
        raise RunError(f"{run}: trained no adapter; write the whole model with --to hf")
    if recipe.model.path is None or recipe.model.weights == "random":
        raise RunError(
            f"{run}: its base was newly initialized and is in no folder that peft could load; write the merged model "
            "with --to hf"
        )
    changed = [t.name() for t in recipe.techniques.values() if t.stage == Stage.STRUCTURE]
    if changed:
        raise RunError(
            f"{run}: {changed[0]} changed the base, so the adapter fits no other; write the merged model with --to hf"
        )
    return str(Path(recipe.model.path).resolve()) if Path(recipe.model.path).is_dir() else recipe.model.path


def _shorten_names(names: list[str], model: nn.Module) -> set[str]:
    """Returns the last components of the names if they select the same modules, as usual in peft; else the names."""
    last = {name.rpartition(".")[2] for name in names}
    return (
        last
        if {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last} == set(names)
        else set(names)
    )


def _move_expert_targets(config: LoraConfig, model: PreTrainedModel, run: str | Path) -> None:
    """Moves targets that peft takes for the experts' matrices to `target_parameters`, which it leaves alone. In place.

    In families whose experts had a `gate_proj` each in older versions of transformers, peft understands that name so,
    even if it is that of a shared expert or of a dense block.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    moved: set[str] = set()
    for name in config.target_modules or ():
        alone = copy.copy(config)
        alone.target_modules, alone.rank_pattern, alone.alpha_pattern = {name}, {}, {}
        try:
            convert_peft_config_for_transformers(alone, model, None)
        except ValueError:  # peft would take it for a part of a matrix
            moved.add(name)
        else:
            moved |= set() if name in (alone.target_modules or ()) else {name}
    if not moved:
        return
    if config.use_dora:
        raise RunError(
            f"{run}: peft takes {min(moved)} of a {model.config.model_type} for its experts' matrices, which cannot "
            "have dora; write the merged model with --to hf"
        )
    config.target_modules = set(config.target_modules or ()) - moved or None
    config.target_parameters = sorted({*(config.target_parameters or ()), *(f"{name}.weight" for name in moved)})
    config.lora_dropout = 0.0  # peft has none on parameters, and the adapter is for inference


def _convert_pairs(model: nn.Module, config: LoraConfig) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Returns the LoRA pairs of experts in peft's layout, by module and stack; adds them to `config`, in place."""
    adapted = {id(module) for module in adapted_experts(model)}
    pairs = {}
    for name, module in model.named_modules():
        for stack in stacks_of(module) if id(module) in adapted else ():
            values = {part: view.flatten(1).cpu() for part, view in view_as_peft(module, stack).items()}
            pairs[name, stack] = values["A"], values["B"]
            config.target_parameters = sorted({*(config.target_parameters or ()), f"experts.{stack}"})
            rank = module.get_parameter(f"{stack}_lora_A").shape[1]
            config.rank_pattern = {**config.rank_pattern, rf".*\.experts\.{stack}": rank}
    return pairs


def _put_pairs(model: nn.Module, pairs: dict[tuple[str, str], tuple[Tensor, Tensor]]) -> None:
    """Copies pairs into peft's wrappers of the experts' parameters, which are nested."""
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and module.parameter_name != "weight":  # that of a module, filled as such
            lora_a, lora_b = pairs[
                name.removeprefix("base_model.model.").removesuffix(".base_layer"), module.parameter_name
            ]
            module.lora_A["default"].weight.copy_(lora_a)
            module.lora_B["default"].weight.copy_(lora_b)


def _load_base(reader: str, source: str, name: str, read: JsonObject) -> PreTrainedModel:
    """Loads the base, with the adapter's name for it: the path it is read from may differ (a link, the hub's cache)."""
    import transformers

    model: PreTrainedModel = getattr(transformers, reader).from_pretrained(source, **read)
    model.name_or_path = name
    return model


def _dequantize_base(recipe: Recipe, source: str, name: str) -> PreTrainedModel:
    """Loads a base that is stored quantized as a plain model in fp32, on the CPU."""
    plain = Recipe(
        model=Model(path=source, quantized_weights="dequantized", config=recipe.model.config, part=recipe.model.part),
        batch=recipe.batch,
        stop=Stop(max_steps=1),
        hardware=Hardware(device="cpu"),
    )
    model: PreTrainedModel = build(plain, vocabulary=None, device=resolve_device(plain)[0]).trained[0]
    model.set_attn_implementation("eager")  # as transformers loads it, without our own attention
    model.name_or_path = name
    return model


def _convert_to_lora(tensors: dict[str, Tensor], weight: Tensor, rest: Tensor, config: LoraConfig) -> dict[str, Tensor]:
    """Converts a trained PiSSA to a LoRA on the original weight W: B A - B0 A0, where s B0 A0 = W - rest.

    W - rest has rank r up to rounding, so slightly more than r random combinations of its columns span it. Computed in
    fp64 and refactored by SVD, since the two products nearly cancel.
    """
    # s in the docstring, as peft scales: alpha / r, or alpha / sqrt(r) with rsLoRA.
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    removed = (weight.double().cpu() - rest.detach().double().cpu()) / scale
    # GPT-2's Conv1D stores its weight as (in, out).
    removed = removed.t() if config.fan_in_fan_out else removed
    # Randomized range finder (Halko et al., arXiv:0909.4061) with 8 extra columns: (in, r + 8).
    mixing = torch.randn(
        removed.shape[1], config.r + 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    span = torch.linalg.qr(removed @ mixing).Q
    # SVD of a matrix of r + 8 rows instead of the whole: span is (out, r + 8).
    left_vectors, values, right_vectors = torch.linalg.svd(span.t() @ removed, full_matrices=False)
    # (out, r) and (r, in)
    b0, a0 = (span @ left_vectors * values)[:, : config.r], right_vectors[: config.r]
    a, b = tensors["lora_A.default.weight"], tensors["lora_B.default.weight"]
    # [B, -B0] = left first and [A; A0]^T = right second, so the change is left (first second^T) right^T,
    left, first = torch.linalg.qr(torch.cat([b.double(), -b0], dim=1))
    # whose SVD needs only the small inner matrix, (2 r, 2 r).
    right, second = torch.linalg.qr(torch.cat([a.double(), a0]).t())
    u, values, v = torch.linalg.svd(first @ second.t(), full_matrices=False)
    v = v.t()
    root = torch.zeros(2 * config.r, dtype=torch.float64)  # a map narrower than 2 r has fewer singular values
    # Each factor gets the square root of the singular values, so that both have similar magnitude in fp32.
    root[: len(values)] = values.sqrt()
    u, v = (torch.nn.functional.pad(t, (0, 2 * config.r - t.shape[1])) for t in (left @ u, right @ v))
    return {
        "lora_A.default.weight": (v * root).t().to(a.dtype).contiguous(),
        "lora_B.default.weight": (u * root).to(b.dtype).contiguous(),
    }


def _round(model: nn.Module, names: list[str], *, double: bool) -> None:
    """Rounds the weights of linear maps and of experts to NF4, in place."""
    with torch.no_grad():
        for name in names:
            module: Any = model.get_submodule(name)
            while hasattr(module, "base_layer"):  # nested for experts
                module = module.base_layer
            for weight in [module.get_parameter(stack) for stack in stacks_of(module)] or [module.weight]:
                # Through the run's own quantizer, so that the base equals the one that the adapter was trained on.
                weight.copy_(
                    dequantize(quantize(weight, double=double), tuple(weight.shape), torch.float32, build_tables())
                )
