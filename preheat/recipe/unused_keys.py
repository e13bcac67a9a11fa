"""Rejects keys of a recipe that have no effect because of another key, or warns of them. No torch.

Checks that need the model's configuration, the data or the device are made when these are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from preheat.core import Recipe
from preheat.sanitize import quote_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["RULES", "Rule", "find_contradictory_keys", "non_default_keys", "find_unused_keys"]


@dataclass(frozen=True)
class Rule:
    """A condition under which a key has an effect.

    Attributes:
        key: dotted; `techniques.NAME.KEY` for a key of a technique.
        read: takes the recipe, returns true if the key has an effect.
        why: end of the message: the key's purpose and the fix. Names in braces are filled in from the recipe.
        refuse: reject the recipe, which contradicts itself; else warn, since the key may have been left on purpose.
    """

    key: str
    read: Callable[[Recipe], object]
    why: str
    refuse: bool = False


_READY_MADE = "a model from a path or a preset brings its own"
_BUILT_IN = ("stdlib", "docstrings")
_ONE_TEXT_FORMAT = (".jsonl", ".json", ".csv", ".parquet")
_TEXT_LAYOUTS, _CHAT_LAYOUTS = ("auto", "text", "classes"), ("auto", "alpaca", "sharegpt", "messages")


def _is_new_model(recipe: Recipe) -> bool:
    return not (recipe.model.path or recipe.model.preset)


def _trains_tokenizer(recipe: Recipe) -> bool:
    return recipe.data.tokenizer is None and (_is_new_model(recipe) or recipe.model.weights == "random")


def _find_only_source(recipe: Recipe) -> str | None:
    """Returns the source if the recipe has only one and no other text is read by the same keys; else None."""
    data = recipe.data
    # The keys of fields are also read for validation and forgetting texts, which may need them if the source does not.
    one = isinstance(data.source, str) and not isinstance(data.validation, str) and recipe.evaluate.forgetting is None
    return str(data.source) if one else None


def _has_fields(recipe: Recipe) -> bool:
    """Returns True if the rows may have fields that the recipe names."""
    return _find_only_source(recipe) not in _BUILT_IN


def _is_file(recipe: Recipe) -> bool:
    source = _find_only_source(recipe)
    # By the name alone: a folder or a name of `datasets` has none of these suffixes.
    return source in _BUILT_IN or PurePath(source or "").suffix in (*_ONE_TEXT_FORMAT, ".txt", ".md", ".py")


def _has_source_list(recipe: Recipe) -> bool:
    return not isinstance(recipe.data.source, str)


def _has_held_out_text(recipe: Recipe) -> bool:
    return recipe.data.validation != 0


def _has_step_count(recipe: Recipe) -> bool:
    return bool(recipe.stop.max_steps or recipe.stop.tokens or recipe.stop.epochs)


def _lacks_technique(*techniques: str) -> Callable[[Recipe], bool]:
    return lambda recipe: not any(name in recipe.techniques for name in techniques)


# `Any`: each rule reads the settings of one technique, whose class is not imported here.
def _read_key(technique: str, read: Callable[[Any], object]) -> Callable[[Recipe], object]:
    return lambda recipe: technique not in recipe.techniques or read(recipe.techniques[technique])


def _require_sampling(key: str) -> Rule:
    return Rule(
        f"sample.{key}",
        lambda r: r.sample.is_active,
        "the recipe has no samples; add sample.prompts or sample.rows, or leave it out",
    )


def _require_rows(key: str, read: Callable[[Recipe], object] = lambda r: True) -> Rule:
    return Rule(
        f"data.{key}", lambda r: _has_fields(r) and read(r), "the rows of {source} have a fixed layout; leave it out"
    )


# By section of the recipe. A rule concerns a key only if its value differs from the default.
RULES: tuple[Rule, ...] = (
    # The model: sizes of a new one mean nothing for a loaded one, and the other way round.
    Rule("model.family", _is_new_model, f"{_READY_MADE} family; leave it out"),
    Rule("model.part", lambda r: not _is_new_model(r), "a new model has no parts; leave it out", refuse=True),
    Rule(
        "model.max_positions",
        _is_new_model,
        f"{_READY_MADE} positions; leave it out, or use techniques.rope_scaling",
        refuse=True,
    ),
    Rule(
        "model.max_positions",
        lambda r: r.model.family != "t5",
        "t5 has relative positions of any length; leave it out",
    ),
    Rule(
        "model.vocab_size",
        _is_new_model,
        f"{_READY_MADE} embedding; leave it out, or name new tokens in model.add_tokens",
        refuse=True,
    ),
    Rule(
        "model.tie_embeddings",
        lambda r: _is_new_model(r) or "tied_embeddings" in r.techniques,  # the technique itself rejects the combination
        f"{_READY_MADE} choice; leave it out, or use techniques.tied_embeddings",
        refuse=True,
    ),
    Rule("model.num_experts_per_tok", _is_new_model, f"{_READY_MADE} experts; leave it out", refuse=True),
    Rule(
        "model.size",
        lambda r: not (r.model.num_layers and r.model.hidden_size and r.model.num_heads),
        "num_layers, hidden_size and num_heads determine the size of the model; leave it out, or them",
        refuse=True,
    ),
    Rule(
        "model.quantized_weights",
        lambda r: r.model.path and r.model.weights == "pretrained",
        "only the weights of model.path can be quantized; leave it out",
    ),
    Rule("model.trust_remote_code", lambda r: r.model.path, "only the folder of model.path brings code; leave it out"),
    # The data: fields, layouts and `datasets` names that the source cannot have. A list of sources may have any.
    _require_rows("layout"),
    _require_rows("columns"),
    _require_rows("prompt"),
    _require_rows("completion"),
    _require_rows("text"),
    Rule(
        "data.text",
        lambda r: _has_source_list(r) or r.data.layout in _TEXT_LAYOUTS,
        "rows of the layout {layout} have no such field; leave it out, or use data.columns",
    ),
    Rule(
        "data.prompt",
        lambda r: _has_source_list(r) or r.data.layout in ("auto", "prompt", "preference", "kto"),
        "rows of the layout {layout} have no such field; leave it out, or use data.columns",
    ),
    Rule(
        "data.template",
        lambda r: (
            _has_source_list(r) or (r.data.layout not in ("text", "classes") and _find_only_source(r) != "stdlib")
        ),
        "plain text is not laid out as a chat; leave it out",
    ),
    Rule(
        "data.train_on",
        lambda r: _has_source_list(r) or r.data.template or (r.data.layout in _CHAT_LAYOUTS and _has_fields(r)),
        "it chooses among the turns of conversations, and the rows are not conversations; leave it out",
    ),
    Rule(
        "data.classes",
        lambda r: _has_source_list(r) or (r.data.layout in ("auto", "classes") and _has_fields(r)),
        "rows of the layout {layout} have no classes; use data.layout: classes, or leave it out",
    ),
    Rule(
        "data.subset", lambda r: not _is_file(r), "it is for a `datasets` source, and {source} is not one; leave it out"
    ),
    Rule(
        "data.split", lambda r: not _is_file(r), "it is for a `datasets` source, and {source} is not one; leave it out"
    ),
    # Settings of a tokenizer that is trained, of images, and of files and processes.
    Rule("data.vocab_size", _trains_tokenizer, "there is a tokenizer already, and none is trained; leave it out"),
    Rule("data.image_pixels", lambda r: not _is_new_model(r), "a new model reads only text; leave it out"),
    Rule("data.images", lambda r: not _is_new_model(r), "a new model reads only text; leave it out"),
    Rule(
        "data.text_files",
        lambda r: PurePath(_find_only_source(r) or "").suffix not in _ONE_TEXT_FORMAT and _has_fields(r),
        "it is for .txt files, and {source} is not one; leave it out",
    ),
    Rule("data.prefetch", lambda r: r.data.workers, "it is for loader processes; set data.workers, or leave it out"),
    Rule(
        "optimizer.betas",
        _lacks_technique("adafactor"),
        "adafactor has no moving averages of this kind (it has decay); leave it out",
    ),
    Rule("optimizer.eps", _lacks_technique("adafactor", "lion"), "{optimizer} has no such term; leave it out"),
    Rule(
        "schedule.warmup_ratio",
        _has_step_count,
        "it is a fraction of the run, whose length stop.hours does not determine; add stop.max_steps, or leave it out",
    ),
    Rule(
        "schedule.decay_ratio",
        lambda r: r.schedule.kind == "wsd",
        "it is for schedule.kind: wsd, and this is {schedule}; leave it out",
    ),
    Rule("schedule.min_lr_ratio", lambda r: r.schedule.kind != "constant", "a constant rate never falls; leave it out"),
    # Early stopping and the best checkpoint.
    *(
        Rule(
            key,
            lambda r: r.evaluate.every,
            "it is decided at evaluations during the run, and there are none; set evaluate.every, or leave it out",
            refuse=True,
        )
        for key in ("checkpoint.best", "stop.patience", "stop.min_delta", "stop.target_loss")
    ),
    Rule(
        "checkpoint.rewinds",
        lambda r: r.checkpoint.every,
        "there is no checkpoint to go back to before the end; set checkpoint.every, or leave it out",
        refuse=True,
    ),
    Rule(
        "stop.min_delta",
        lambda r: r.stop.patience or r.checkpoint.best,
        "it is for stop.patience and checkpoint.best; set one of them, or leave it out",
        refuse=True,
    ),
    *(
        Rule(
            f"evaluate.{key}",
            lambda r: _has_held_out_text(r) or r.evaluate.tasks or r.evaluate.forgetting,
            "nothing is held out (data.validation: 0), and no task is named; leave it out",
        )
        for key in ("every", "rows", "micro_batch_size")
    ),
    Rule(
        "evaluate.baselines",
        _has_held_out_text,
        "nothing is held out to compare on (data.validation: 0); leave it out",
        refuse=True,
    ),
    # Generation: keys that mean nothing as long as the run writes no samples.
    *map(
        _require_sampling,
        (
            *("max_new_tokens", "temperature", "repetition_penalty", "stop", "cache", "window", "draft_model"),
            *("prompt_lookup_tokens", "compile"),
        ),
    ),
    # Hardware and parallelism.
    Rule("hardware.segments", lambda r: r.hardware.device != "cpu", "a CPU has no segments of this kind; leave it out"),
    Rule(
        "parallel.zero_stage",
        lambda r: r.parallel.engine == "deepspeed",
        "only engine deepspeed reads it; set parallel.engine: deepspeed, or use techniques.fsdp instead",
        refuse=True,
    ),
    Rule("parallel.timeout", lambda r: r.parallel.devices != 1, "one process waits for no other; leave it out"),
    Rule(
        "techniques.lora.pissa_iterations",
        _read_key("lora", lambda t: t.variant == "pissa"),
        "only variant: pissa decomposes weights; leave it out",
    ),
    *(
        Rule(
            f"techniques.mixed_precision.{key}",
            _read_key("mixed_precision", lambda t: t.mode.startswith("fp16") or t.mode == "auto"),
            "only the fp16 modes scale the loss; leave it out",
        )
        for key in ("loss_scale", "growth_interval")
    ),
    Rule(
        "techniques.preference.gamma",
        _read_key("preference", lambda t: t.loss == "simpo"),
        "only loss: simpo has a margin; leave it out",
    ),
    *(
        Rule(
            f"techniques.preference.{key}",
            _read_key("preference", lambda t: t.loss == "kto"),
            "only loss: kto weighs the two kinds of answers; leave it out",
        )
        for key in ("desirable_weight", "undesirable_weight")
    ),
    Rule(
        "techniques.length_curriculum.root_degree",
        _read_key("length_curriculum", lambda t: t.schedule == "root" and not t.lengths),
        "only schedule: root has one; leave it out",
    ),
    Rule(
        "techniques.length_curriculum.multiple",
        _read_key("length_curriculum", lambda t: not t.lengths),
        "lengths define the stages; leave it out",
    ),
    Rule(
        "techniques.expert_balancing.rate",
        _read_key("expert_balancing", lambda t: t.method == "bias"),
        "only method: bias has one; leave it out",
    ),
    Rule(
        "techniques.distillation.top_k",
        _read_key("distillation", lambda t: t.cache is not None or t.pieces == "common"),
        "only a cache and pieces: common limit the tokens to the likeliest; leave it out",
    ),
    Rule(
        "techniques.chunked_loss.rows",
        _read_key("chunked_loss", lambda t: t.kernel != "liger"),
        "Liger chooses its chunks by itself; leave it out",
    ),
    Rule(
        "techniques.tensor_parallel.rows",
        _read_key("tensor_parallel", lambda t: t.loss_parallel),
        "only loss_parallel computes logits some positions at a time; leave it out",
    ),
)


def _read_defaults(cls: type[DataclassInstance]) -> dict[str, object]:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(cls)
    }


def non_default_keys(recipe: Recipe) -> dict[str, object]:
    """Returns dotted key -> value for all keys that differ from their defaults; a technique has at least its name.

    Example:
        >>> from preheat.recipe import Batch, Recipe, Stop
        >>> non_default_keys(Recipe(batch=Batch(size=8), stop=Stop(max_steps=2)))
        {'batch.size': 8, 'stop.max_steps': 2}
    """
    values: dict[str, object] = {}
    for part in dataclasses.fields(recipe):
        value = getattr(recipe, part.name)
        if part.name == "techniques":
            for name, technique in value.items():
                # A technique is not a default even if all its settings are.
                inner = _non_default_keys(technique, f"techniques.{name}")
                values |= inner or {f"techniques.{name}": {}}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= _non_default_keys(value, part.name)
        elif value != part.default:
            values[part.name] = value
    return values


def _non_default_keys(part: DataclassInstance, name: str) -> dict[str, object]:
    defaults = _read_defaults(type(part))
    return {f"{name}.{key}": value for key, default in defaults.items() if (value := getattr(part, key)) != default}


def _find_unread_keys(recipe: Recipe, *, refuse: bool) -> Iterator[tuple[str, str]]:
    values = non_default_keys(recipe)
    # Several rules may concern one key, but one reason suffices.
    reported: set[str] = set()
    for rule in RULES:
        if rule.refuse == refuse and rule.key in values and rule.key not in reported and not rule.read(recipe):
            reported.add(rule.key)
            why = rule.why.format(
                source=quote_value(recipe.data.source, 60),
                layout="prompt"
                if recipe.data.source == "docstrings"
                else "text"
                if recipe.data.source == "stdlib"
                else recipe.data.layout,
                schedule=recipe.schedule.kind,
                # The only optimizers that a rule names.
                optimizer="adafactor" if "adafactor" in recipe.techniques else "lion",
            )
            yield rule.key, f"{quote_value(values[rule.key], 60)} changes nothing: {why}"


def find_contradictory_keys(recipe: Recipe) -> list[tuple[str, str]]:
    """Returns keys without effect that contradict the recipe, as (key, message)."""
    return list(_find_unread_keys(recipe, refuse=True))


def find_unused_keys(recipe: Recipe) -> list[tuple[str, str]]:
    """Returns keys without effect that may have been left on purpose, as (key, message)."""
    return list(_find_unread_keys(recipe, refuse=False))
