"""A run's adapter as peft's folder, loaded again by peft on the plain base and compared."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import model_card, verify
from preheat.compress.export.held_out_text import held_of
from preheat.compress.special_tokens import Ends, name_ends, require_same_tokens
from preheat.core import Stage
from preheat.errors import RunError
from preheat.inference.load import LoadedModel, load_model
from preheat.models import configs
from preheat.models.generation.config import ends_of, read_generation
from preheat.models.hf import require_decoder_only
from preheat.ops.adapters.moe_lora import adapted_experts
from preheat.ops.adapters.peft_io import BASE
from preheat.ops.adapters.peft_layers import base_of, names_of, own_of
from preheat.ops.grouped_mm import STACKS
from preheat.ops.quantization.fake_quant import unfake_
from preheat.ops.quantization.nf4 import PackedMap, dequantize, quantize, tables
from preheat.run_dir import to_json
from preheat.sanitize import shorten

__all__ = ["write"]

_NF4 = (
    "the adapter was trained on the base in NF4: load the base in 4 bits (bitsandbytes, nf4{}) or write a merged model with --to hf; "
    "on the base as it stands its logits differ by up to {:.2g}"
)
_HALF = "the adapter was trained on the base in {0}: load the base with dtype=torch.{0}; in the precision in which it stands its logits differ by up to {1:.2g}"
_MERGED = 1e-3
"""What merging in fp32 may change, as a share of the largest logit: some kinds' sums nearly cancel."""
_PISSA = "pissa changed its base: written as a plain LoRA of twice the rank for the base as it stands"


def write(run: str | Path, out: str | Path, *, tolerance: float | None = None) -> dict[str, Any]:
    """Writes the adapter of a run's newest whole checkpoint as peft's own folder, without its base.

    Low-rank pairs on experts are written as peft's adapters of parameters. `PeftModel.from_pretrained(base, out)` then gives the run's logits: that is done, and compared. An adapter over NF4 is compared
    on the base's weights as NF4 rounds them, which are those that it was trained on.

    Args:
        tolerance: largest difference of a logit, as a share of the largest logit (at least of 1).

    Returns:
        {path, bytes, base, adapted, read_by, note} and `verify.figures`

    Raises:
        RunError: the run has no adapter, or none that fits a base which others have; `out` stands already; the difference exceeds
            the tolerance.
    """
    import peft
    from transformers import GenerationConfig

    out = Path(out)
    require_new(out, run)
    opened = load_model(run)
    model: Any = opened.build.trained[0]
    require_decoder_only(model, "preheat export --to peft")
    names = names_of(model)
    base = _base(opened, names, run)
    held = held_of(opened, run)
    unfake_(model)  # the adapter is that of the weights before rounding
    accepted = verify.Bound(verify.TOLERANCE[torch.float32] if tolerance is None else tolerance)
    rows = verify.rows(opened.tokenizer, opened.build.model.positions, [])
    pissa = getattr(opened.recipe.techniques.get("lora"), "variant", "") == "pissa"
    half = {} if pissa else _half(model)  # what pissa rounded is no weight of the base
    wanted = verify.logits(model, rows)
    config = copy.deepcopy(model.peft_config["default"])
    values = {name: {key: t.detach().cpu().clone() for key, t in own_of(model.get_submodule(name))} for name in names}
    if pissa:
        for name in names:
            values[name] = _as_lora(
                values[name], opened.build.weights.read(f"{name}.weight"), base_of(model, name).weight, config
            )
        config.init_lora_weights, config.r = True, 2 * config.r
        config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    config.target_modules = _short(names, model)
    pairs = _pairs(model, config)
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    packed = {n.replace(".base_layer", ""): m for n, m in model.named_modules() if isinstance(m, PackedMap)}
    double = any(m.nf4_ranges is not None for m in packed.values())
    written = {
        "base": base,
        "fingerprint": opened.build.weights.fingerprint(),
        "nf4": {"double_quantization": double, "modules": list(packed)} if packed else None,
    }
    read = {
        "dtype": torch.float32,
        "trust_remote_code": configs.runs_code(model.config, opened.recipe.model.trust_remote_code),
    }
    source, notes = str(opened.build.weights.folder), [held.unfinished] if held.unfinished else []
    notes += [_PISSA] if pissa else []
    stated = read_generation(opened.build.weights.folder)[0] or GenerationConfig.from_model_config(model.config)
    ends = name_ends(model, opened)
    settings = model.generation_config
    notes += [*ends.notes, *_ends_unread(ends, ends_of(stated))]
    opened.build.parts.clear()
    del model, packed
    with NewFolder(out) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
        warnings.filterwarnings(
            "ignore", message="Model with `tie_word_embeddings=True`"
        )  # `_merged_otherwise` measures what it means
        # peft looks for these among modules; it takes the rank all the same.
        warnings.filterwarnings("ignore", message=r"The following rank_pattern keys .*experts", category=RuntimeWarning)
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated"
        )  # which peft asks, and transformers renamed
        made: Any = peft.get_peft_model(_loaded(source, base, read), config)
        with torch.no_grad():
            for name, own in values.items():
                for key, target in own_of(made.get_submodule(f"base_model.model.{name}")):
                    target.copy_(own[key])
            _put_pairs(made, pairs)
        made.save_pretrained(folder, save_embedding_layers=False)
        del made
        ends.tokenizer.save_pretrained(folder)
        require_same_tokens(ends.tokenizer, folder)
        settings.save_pretrained(folder)
        (folder / BASE).write_text(to_json(written, indent=1), encoding="utf-8")
        again: Any = peft.PeftModel.from_pretrained(_loaded(source, base, read), folder)
        if half:
            whole = verify.compare(wanted, verify.logits(again.get_base_model(), rows))
            if _as_held(again.get_base_model(), half):
                notes.append(_HALF.format(_name(half), whole.largest))
            else:  # the base stands in that precision already
                half = {}
        if written["nf4"]:
            unrounded = verify.compare(wanted, verify.logits(again.get_base_model(), rows))
            notes.append(_NF4.format(", double quantization" if double else "", unrounded.largest))
            _round(again.get_base_model(), written["nf4"]["modules"], double=double)
        found = verify.compare(wanted, verify.logits(again.get_base_model(), rows), rows)
        verify.refuse_beyond(
            found,
            accepted,
            str(out),
            "if the run held the base in less precision, as with bf16_weights, peft cannot reproduce that: write --to hf",
        )
        made = {
            "path": str(out),
            "bytes": verify.size(folder),
            "base": base,
            "adapted": len(names) + len(pairs),
            "read_by": model_card.version_of("peft"),
            **verify.figures(found, accepted),
            **held.by(again.get_base_model(), found),
        }
        notes += _merged_otherwise(again, wanted, rows)
        made["note"] = "; ".join(notes)
        asked = 'tokenizer("Once upon a time", return_tensors="pt")'
        if ends.chats:
            asked = 'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True)'
        stop = f", stop_strings=[{ends.string!r}], tokenizer=tokenizer" if ends.string else ""
        cut = f".partition({ends.string!r})[0]" if ends.string else ""
        precision = f", dtype={_name(half)!r}" if half else ""
        use = (
            f"import peft, transformers\nbase = transformers.AutoModelForCausalLM.from_pretrained({base!r}{precision})\n"
            'base.generation_config = transformers.GenerationConfig.from_pretrained(".")\nmodel = peft.PeftModel.from_pretrained(base, ".")\n'
            f'tokenizer = transformers.AutoTokenizer.from_pretrained(".")\nids = {asked}\n'
            f'answer = model.generate(**ids, max_new_tokens=64, do_sample=False{stop})[0, ids["input_ids"].shape[1]:]\n'
            f"print(tokenizer.decode(answer, skip_special_tokens=True){cut})"
        )
        model_card.write(folder, run, made, title="adapter for peft", use=use, library="peft")
    return made


def _half(model: nn.Module) -> dict[str, torch.dtype]:
    """The base's weights that the run holds in half precision, by their names without adapters."""
    held = {name.replace(".base_layer", ""): p.dtype for name, p in model.named_parameters() if not p.requires_grad}
    return {name: dtype for name, dtype in held.items() if dtype in (torch.bfloat16, torch.float16)}


def _name(half: dict[str, torch.dtype]) -> str:
    """bfloat16 or float16."""
    return str(next(iter(half.values()))).removeprefix("torch.")


def _as_held(model: nn.Module, half: dict[str, torch.dtype]) -> bool:
    """Rounds the base's weights as the run holds them, in place; whether any changed."""
    changed = False
    with torch.no_grad():
        for name, p in model.named_parameters():
            dtype = half.get(name.replace(".base_layer", ""))
            if dtype is not None:
                rounded = p.to(dtype).to(p.dtype)
                changed |= not torch.equal(rounded, p)
                p.copy_(rounded)
    return changed


def _ends_unread(ends: Ends, stated: list[int]) -> list[str]:
    """Says that the base's own generation settings, which a model of peft's has, do not end an answer."""
    if ends.turn is None or ends.turn in stated:
        return []
    token = ends.tokenizer.convert_ids_to_tokens(ends.turn)
    return [
        f"peft takes the base's generation settings, which do not stop at {token!r}, the end of each answer: set base.generation_config = "
        "transformers.GenerationConfig.from_pretrained(FOLDER) of this folder before the adapter is put on, so that a merged model has it, too"
    ]


def _merged_otherwise(model: Any, wanted: list[Tensor], rows: list[Tensor]) -> list[str]:
    """Says that peft's own merge gives another model, which it does where the pair of an embedding is also that of a head that shares its weight."""
    try:
        merged = model.merge_and_unload()
    except (NotImplementedError, ValueError) as error:
        return [f"peft does not merge this adapter ({shorten(str(error), 120)}): preheat export --to hf does"]
    apart = verify.compare(wanted, verify.logits(merged, rows))
    if apart.share() <= _MERGED:
        return []
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    tied = ", since it adds the pair of the embedding twice to the weight that embedding and head share"
    return [
        f"peft's merge_and_unload gives another model (logits differ by up to {apart.largest:.2g}){tied if embedding.weight is head.weight else ''}: "
        "use the adapter unmerged, or merge by preheat export --to hf"
    ]


def _base(opened: LoadedModel, names: list[str], run: str | Path) -> str:
    """What others can load under the adapter: a hub's name, or a folder's whole path."""
    recipe = opened.recipe
    if opened.step is None:
        raise RunError(f"{run}: is no run; only the adapter of a run is written for peft")
    if not names:
        raise RunError(f"{run}: trained no adapter; write the whole model with --to hf")
    if recipe.model.path is None or recipe.model.weights == "random":
        raise RunError(
            f"{run}: its base was drawn new and stands in no folder that peft could load; write the merged model with --to hf"
        )
    changed = [t.name() for t in recipe.techniques.values() if t.stage == Stage.STRUCTURE]
    if changed:
        raise RunError(
            f"{run}: {changed[0]} changed the base, so the adapter fits no other; write the merged model with --to hf"
        )
    return str(Path(recipe.model.path).resolve()) if Path(recipe.model.path).is_dir() else recipe.model.path


def _short(names: list[str], model: nn.Module) -> set[str]:
    """Last parts of the names where these say it all, as peft's users write them; else the names."""
    last = {name.rpartition(".")[2] for name in names}
    return (
        last
        if {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last} == set(names)
        else set(names)
    )


def _pairs(model: nn.Module, config: Any) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """The pairs of experts, by module and stack, as peft lays them out; `config` is told of them, in place."""
    held = {id(module) for module in adapted_experts(model)}
    found = {}
    for name, module in model.named_modules():
        for stack in STACKS if id(module) in held else ():
            first, second = (module.get_parameter(f"{stack}_lora_{part}").detach().cpu() for part in "AB")
            # [experts, rank, in] -> [experts * rank, in]; [experts, out, rank] -> [out, rank * experts]
            found[name, stack] = first.flatten(0, 1), second.permute(1, 2, 0).flatten(1)
            config.target_parameters = sorted({*(config.target_parameters or ()), f"experts.{stack}"})
            config.rank_pattern = {**config.rank_pattern, rf".*\.experts\.{stack}": first.shape[1]}
    return found


def _put_pairs(made: nn.Module, pairs: dict[tuple[str, str], tuple[Tensor, Tensor]]) -> None:
    """Copies pairs into peft's wrappers of the experts' stacks, which lie one in another."""
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in made.named_modules():
        if isinstance(module, ParamWrapper):
            first, second = pairs[
                name.removeprefix("base_model.model.").removesuffix(".base_layer"), module.parameter_name
            ]
            module.lora_A["default"].weight.copy_(first)
            module.lora_B["default"].weight.copy_(second)


def _loaded(source: str, name: str, read: dict[str, Any]) -> Any:
    """The base, under the name that the adapter gives it: the path it was read from may be another (a link, the hub's cache)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, **read)
    model.name_or_path = name
    return model


def _as_lora(own: dict[str, Tensor], whole: Tensor, rest: Tensor, config: Any) -> dict[str, Tensor]:
    """A trained PiSSA as an addition to the whole weight W: B A - B0 A0, where s B0 A0 = W - rest is what was taken out of it.

    W - rest has rank r but for rounding, so that a few more than r random mixtures of its columns span it. In fp64, and factored
    anew by singular values, since the two products nearly cancel.
    """
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    taken = (whole.double().cpu() - rest.detach().double().cpu()) / scale
    taken = taken.t() if config.fan_in_fan_out else taken
    mixing = torch.randn(taken.shape[1], config.r + 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    span = torch.linalg.qr(taken @ mixing).Q
    turn, values, across = torch.linalg.svd(span.t() @ taken, full_matrices=False)
    b0, a0 = (span @ turn * values)[:, : config.r], across[: config.r]
    a, b = own["lora_A.default.weight"], own["lora_B.default.weight"]
    left, first = torch.linalg.qr(torch.cat([b.double(), -b0], dim=1))
    right, second = torch.linalg.qr(torch.cat([a.double(), a0]).t())
    u, values, v = torch.linalg.svd(first @ second.t(), full_matrices=False)
    v = v.t()
    root = torch.zeros(2 * config.r, dtype=torch.float64)  # a map narrower than 2 r has fewer directions
    root[: len(values)] = values.sqrt()
    u, v = (torch.nn.functional.pad(t, (0, 2 * config.r - t.shape[1])) for t in (left @ u, right @ v))
    return {
        "lora_A.default.weight": (v * root).t().to(a.dtype).contiguous(),
        "lora_B.default.weight": (u * root).to(b.dtype).contiguous(),
    }


def _round(model: nn.Module, names: list[str], *, double: bool) -> None:
    """Gives linear maps the values that NF4 leaves of theirs, in place."""
    with torch.no_grad():
        for name in names:
            module: Any = model.get_submodule(name)
            weight = getattr(module, "base_layer", module).weight
            weight.copy_(dequantize(quantize(weight, double=double), tuple(weight.shape), torch.float32, tables()))
