"""Consistency checks of a recipe that need neither the machine, the data nor the model's configuration. No torch.

Each check yields (key, text) pairs: the dotted key, and a message with the problem and its fix.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from preheat.core import Recipe
from preheat.core.schema import Data, Model, Optimizer, Sample
from preheat.errors import RecipeError, suggest_nearest
from preheat.recipe.unused_keys import find_contradictory_keys
from preheat.sanitize import has_secret, quote_value

__all__ = [
    "MOST_PARAMETERS",
    "check",
    "find_folder_name_problem",
    "find_problems",
    "sample_problems",
    "find_size_problem",
]

MOST_PARAMETERS = 10**15
_MOST_TOKENS = 10**10
"""Tokens per step: torch's sizes overflow above this, and no machine could hold as many."""
_MOST_SCORES = 2**60
"""Attention scores of one layer in a step: their size in bytes still fits 64 bits."""
_OF_A_SOURCE = ("layout", "columns", "text", "prompt", "completion", "subset", "split", "limit", "text_files")
"""Settings that a list of sources may give per source."""


def check(recipe: Recipe) -> None:
    """Raises RecipeError if the recipe contradicts itself; the message names every key.

    Parsing a recipe includes this check; recipes made in Python are checked when they are built.
    """
    if contradictions := find_problems(recipe):
        raise RecipeError("; ".join(f"{key}: {text}" for key, text in contradictions))


def find_problems(recipe: Recipe) -> list[tuple[str, str]]:
    """Returns all contradictions in this recipe as (key, text)."""
    return [
        *_check_model(recipe.model),
        *_check_sizes(recipe),
        *_check_tokens(recipe.model),
        *_check_data(recipe.data),
        *_check_length(recipe),
        *_check_groups(recipe.optimizer),
        *((f"sample.{key}", text) for key, text in sample_problems(recipe.sample)),
        *find_contradictory_keys(recipe),
        *_secrets(recipe),
        *([("name", problem)] if (problem := find_folder_name_problem(recipe.name)) else []),
    ]


def _secrets(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Finds passwords and tokens in all texts of a recipe: its run folder and its trackers would keep them."""
    if isinstance(value, str) and has_secret(value):
        fix = (
            "leave it out, and put it into the environment (such as HF_TOKEN, AWS_SECRET_ACCESS_KEY) or the service's "
            "own file"
        )
        yield key, f"{quote_value(value, 60)}: holds a password or token, which the run's folder would keep; {fix}"
    elif isinstance(value, str):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _secrets(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _secrets(inner, key)


def _check_model(model: Model) -> Iterator[tuple[str, str]]:
    """Checks the origin of a model and its sizes."""
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "num_experts")
    explicit = [key for key in sizes if getattr(model, key) is not None]
    # A model has one origin: a path, a preset, a size, or explicit sizes.
    origin = "path" if model.path else "preset" if model.preset else None
    # Sizes in the recipe would contradict those of the loaded model.
    if origin and (model.size or explicit):
        extra = "size" if model.size else explicit[0]
        fix = f"remove {extra} (--set 'model={{{origin}: ...}}' does)"
        yield f"model.{origin}", f"a model from a {origin} brings its sizes; {fix}"
    if model.shape != "balanced" and (model.size is None or explicit):
        extra = explicit[0] if explicit else "num_layers"
        yield "model.shape", f"{model.shape} is for model.size alone; remove it, or state a size and no {extra}"
    if model.size is not None and (text := find_size_problem(model.size)):
        yield "model.size", text
    # The defaults of a new model with experts.
    experts, chosen = model.num_experts or 8, model.num_experts_per_tok or 2
    if model.family not in ("qwen3_moe", "mixtral") and (given := model.num_experts or model.num_experts_per_tok):
        yield "model.num_experts", f"{given}: {model.family} has no experts; use family: qwen3_moe or mixtral"
    elif chosen > experts:
        yield "model.num_experts_per_tok", f"{chosen} is more than the {experts} experts; lower it"
    # Each key-value head serves an equal number of query heads.
    if model.num_heads and model.num_kv_heads and model.num_heads % model.num_kv_heads:
        yield "model.num_kv_heads", f"{model.num_kv_heads} does not divide num_heads {model.num_heads}"
    if model.hidden_size and model.num_heads and model.hidden_size % model.num_heads:
        yield "model.hidden_size", f"{model.hidden_size} is not a multiple of num_heads {model.num_heads}"


def _check_sizes(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Rejects sizes that would overflow before the memory prediction could reject them."""
    model, batch = recipe.model, recipe.batch
    width = model.hidden_size or 1
    # Weights of a layer: 4 width^2 for attention, 3 width x intermediate per expert for the feed-forward.
    of_layer = width * (4 * width + 3 * (model.intermediate_size or 1) * (model.num_experts or 1))
    parameters = (model.num_layers or 1) * of_layer + (model.vocab_size or 1) * width
    if parameters > MOST_PARAMETERS:
        text = f"these sizes make a model of {parameters:.1e} parameters, more than {MOST_PARAMETERS:.0e}; lower them"
        yield "model", text
    # rows x heads x tokens^2; 256 heads if their number is not stated.
    scores = batch.size * (model.num_heads or 256) * batch.seq_len**2
    # One message for both: fewer tokens also mean fewer scores.
    if (tokens := batch.size * batch.seq_len) > _MOST_TOKENS:
        yield (
            "batch",
            f"size times seq_len is {tokens:.1e} tokens a step, more than {_MOST_TOKENS:.0e}; lower one of them",
        )
    elif scores > _MOST_SCORES:
        text = f"attention among sequences of {batch.seq_len:,} tokens has {scores:.1e} scores a layer"
        yield "batch.seq_len", f"{text}, more than can be counted; lower it"


def _check_groups(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Checks the settings of groups of weights; which weights they match is known with the model."""
    for pattern, settings in optimizer.groups.items():
        if not settings:
            yield "optimizer.groups", f"{quote_value(pattern)} has no settings; give lr_scale or weight_decay"
        for name, value in settings.items():
            if name not in ("lr_scale", "weight_decay"):
                text = suggest_nearest(name, ["lr_scale", "weight_decay"])
                yield "optimizer.groups", f"{quote_value(pattern)} has the unknown setting {quote_value(name)}; {text}"
            elif not 0 <= value < math.inf or (name == "lr_scale" and value == 0):
                fix = "; to leave these weights as they are, use techniques.freeze" if value == 0 else ""
                yield "optimizer.groups", f"{quote_value(pattern)}: {name} {value:g} must be above 0{fix}"


def _check_tokens(model: Model) -> Iterator[tuple[str, str]]:
    """Checks the tokens that are added to the tokenizer."""
    tokens = model.add_tokens
    if tokens and not model.path:
        text = "is for a model from a path; a new model's tokenizer is trained or named by data.tokenizer"
        yield "model.add_tokens", text
    if len(set(tokens)) < len(tokens) or not all(token.strip() for token in tokens):
        yield "model.add_tokens", f"{quote_value(list(tokens))} has one that is empty or repeated; write each once"


def _check_data(data: Data) -> Iterator[tuple[str, str]]:
    """Checks the data sources and how they are read."""
    if (data.prompt is None) != (data.completion is None):
        yield "data.prompt", "prompt and completion go together; state both or neither"
    for number, part in enumerate(() if isinstance(data.source, str) else data.source):
        if not isinstance(part, str):
            yield from _check_source(f"data.source.{number}", part)
    if not data.source:
        yield "data.source", "is empty; name a file, a folder or a dataset"
    if data.overlong == "refuse" and data.streaming:
        yield "data.overlong", "refuse needs all documents read beforehand; set data.streaming: false"
    if data.clean.get("duplicates") == "near" and data.streaming:
        yield "data.clean.duplicates", "near compares rows read beforehand; use exact, or set data.streaming: false"
    # A number is a fraction, a text a path or a built-in source.
    if isinstance(data.validation, float | int) and not 0 <= data.validation < 1:
        yield "data.validation", f"{data.validation} is not a fraction in [0, 1); use a fraction or a path"


def _check_source(key: str, part: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Checks one source of a list."""
    known = ("source", "weight", *_OF_A_SOURCE)
    weight = part.get("weight", 1)
    yield from (
        (f"{key}.{name}", f"unknown key; {suggest_nearest(str(name), list(known))}")
        for name in part
        if name not in known
    )
    if not isinstance(part.get("source"), str):
        yield f"{key}.source", f"names a file, a folder or a dataset, got {quote_value(part.get('source'))}"
    # Sources of a list are plain mappings, which pydantic does not check.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 100:
        yield f"{key}.weight", f"must be a number above 0 and at most 100, got {quote_value(weight)}"


def _check_length(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Checks the length of the run and the settings that depend on it."""
    stop, streaming = recipe.stop, recipe.data.streaming
    # An epoch of a stream ends at an unknown step, so the schedule could not be planned.
    if streaming and stop.epochs:
        text = "a streamed source has no known length; use stop.max_steps or stop.tokens, or data.streaming: false"
        yield "stop.epochs", text
    if not (stop.max_steps or stop.tokens or stop.epochs or stop.hours):
        yield "stop", "no stopping condition; set max_steps, tokens, epochs or hours"
    # The schedule's decay needs the number of steps, which a time limit does not determine.
    if stop.hours and not (stop.max_steps or stop.tokens or stop.epochs) and recipe.schedule.kind != "constant":
        text = f"schedule {recipe.schedule.kind} needs a length in steps, tokens or epochs"
        yield "stop.hours", f"{text}; add one (hours still ends the run early) or use schedule.kind: constant"
    if recipe.evaluate.baselines and streaming:
        text = "counts the training sequences, and those of a stream are not known in advance"
        yield "evaluate.baselines", f"{text}; set it to false, or data.streaming: false"


def sample_problems(sample: Sample) -> list[tuple[str, str]]:
    """Returns contradictions in the settings of generation as (key, text)."""
    return [*_check_sampling(sample), *_check_speculation(sample), *_check_prompts(sample)]


def _check_sampling(sample: Sample) -> Iterator[tuple[str, str]]:
    # The values that filter nothing.
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if sample.temperature == 0 and (value := getattr(sample, name)) != neutral:
            text = f"{value:g} filters sampled tokens, and temperature 0 does not sample; set a temperature, e.g. 0.8"
            yield name, text
    # `True` alone: `auto` may decide against compiling.
    if sample.compile is True and sample.cache not in ("auto", "static"):
        yield "compile", f"needs a cache that does not grow, and this one is {sample.cache}; leave cache out"
    if "" in sample.stop:
        yield "stop", "an empty string would end every text at once; remove it"


def _check_speculation(sample: Sample) -> Iterator[tuple[str, str]]:
    # Compared with the default of the dataclass, which is a class attribute.
    if sample.draft_model is None and sample.draft_tokens != type(sample).draft_tokens:
        text = "there is no draft model to propose them; name one (draft_model), or leave it out"
        yield "draft_tokens", f"{sample.draft_tokens} changes nothing: {text}"
    if not sample.speculates:
        return
    name = "draft_model" if sample.draft_model is not None else "prompt_lookup_tokens"
    if sample.draft_model is not None and sample.prompt_lookup_tokens is not None:
        yield "prompt_lookup_tokens", "proposes tokens, and so does the draft model; leave one of them out"
    if sample.temperature > 0:
        yield name, "proposes tokens for greedy decoding, and a temperature samples; set temperature 0"
    if sample.compile is True:
        yield "compile", f"decodes one token at a time, and {name} reads several; leave one of them out"
    elif sample.cache == "static":
        yield "cache", f"static cannot forget proposals that were wrong; use dynamic or int8, or leave {name} out"


def _check_prompts(sample: Sample) -> Iterator[tuple[str, str]]:
    for number, prompt in enumerate(sample.prompts, 1):
        if not isinstance(prompt, str) and (text := _find_chat_problem(prompt)):
            yield "prompts", f"prompt {number}: {text}"


def _find_chat_problem(messages: tuple[Mapping[str, object], ...]) -> str | None:
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return f"{quote_value(dict(message))} is not a message; write {{role: user, content: ...}}"
    if not messages or messages[-1]["role"] == "assistant":
        return "a chat to answer ends with the user's message"
    return None


def find_size_problem(size: str) -> str | None:
    """Returns the problem of a parameter count such as 15M, or None."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMB])", size)
    if not match:
        return f"{quote_value(size)} is not a size; write it like 15M or 1.1B"
    if not 1 <= float(match[1]) * {"K": 1e3, "M": 1e6, "B": 1e9}[match[2]] <= MOST_PARAMETERS:
        return f"{quote_value(size)} must be from 1 to {MOST_PARAMETERS:.0e} parameters"
    return None


def find_folder_name_problem(name: str) -> str | None:
    """Returns why a name cannot be a run's folder (hidden, leads elsewhere, too long for a file system), or None.

    Example:
        >>> find_folder_name_problem("demo"), find_folder_name_problem("..")
        (None, "'..' must be letters, digits, '.', '_' or '-', not begin with '.', and be at most 100 bytes long")
    """
    if re.fullmatch(r"[\w-][\w.-]*", name) and len(name.encode()) <= 100:
        return None
    rule = "must be letters, digits, '.', '_' or '-', not begin with '.', and be at most 100 bytes long"
    return f"{quote_value(name)} {rule}"
