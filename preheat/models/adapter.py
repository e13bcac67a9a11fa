"""Hugging Face decoder-only models: configure, build on meta, and find layers, head, norms, attention."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError, nearest
from preheat.models import sizes
from preheat.technique import MaskSpec, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.recipe import Recipe

__all__ = [
    "Anatomy",
    "anatomy",
    "build_on_meta",
    "configure",
    "ends",
    "facts",
    "generate",
    "head",
    "hidden_states",
    "plain_logits",
    "tokenizer_folder",
]

ATTENTION = "preheat"  # the name under which our attention function stands in transformers' own registry
STANDALONE = "preheat-standalone"  # and that of models/attention.py, for models called by their own forward
PATTERN = "preheat_pattern"  # attribute of a layer's attention: kernel -> kernel that sees less (models/attention.py sets it)


def _local_only() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "TRUE")


def tokenizer_folder(recipe: Recipe) -> str | None:
    """The model's own tokenizer, when its folder carries one."""
    path = recipe.model.path
    if path is None:
        return None
    folder = Path(path)
    if folder.is_dir() and not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        return None
    return path


def configure(recipe: Recipe, vocabulary: int | None = None) -> PretrainedConfig:
    """The transformers configuration of the recipe's model.

    Args:
        vocabulary: pieces of the tokenizer. A new model without `model.vocabulary` gets as many rows (rounded up to 64).

    Raises:
        RecipeError: no such model; a key that its configuration does not know; a tokenizer larger than the embedding;
            sequences longer than the model's positions.
    """
    model = recipe.model
    config = _read(model.path, model.trust_remote_code) if model.path else _new(recipe, vocabulary)
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for key, value in model.config.items():
        if key not in known:
            raise RecipeError(f"model.config.{key}: {config.model_type} has no such setting; {nearest(key, sorted(known))}")
        setattr(config, key, value)
    for t in sorted(recipe.techniques.values(), key=lambda t: (t.stage, t.name())):
        try:
            t.configure(config, recipe)
        except ValueError as error:
            raise RecipeError(f"techniques.{t.name()}: {error}") from None
    text = config.get_text_config()
    if model.add_tokens and vocabulary is not None:
        text.vocab_size = max(text.vocab_size, vocabulary)  # some models have rows to spare
    rows = text.vocab_size
    if vocabulary is not None and vocabulary > rows:
        raise RecipeError(
            f"data.tokenizer: has {vocabulary:,} pieces but the model's embedding has {rows:,} rows; "
            + (
                "use the model's own tokenizer"
                if recipe.data.tokenizer or not model.path
                else "name the tokens that it lacks in model.add_tokens"
            )
            + ("" if model.path else f", or set model.vocabulary: {vocabulary}")
        )
    positions = _positions(text)
    if positions and recipe.batch.length > positions:
        raise RecipeError(
            f"batch.length: {recipe.batch.length} is longer than the model's {positions} positions; set batch.length: {positions} or less"
        )
    return config


def _positions(text: Any) -> int:
    """Positions that a model reaches; 0: not stated. Dynamic rotary scaling goes `factor` times beyond what transformers states."""
    positions = getattr(text, "max_position_embeddings", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    return int(positions * rope["factor"]) if rope.get("rope_type") == "dynamic" else positions


def _read(path: str, trust: bool) -> PretrainedConfig:
    from transformers import AutoConfig

    folder = Path(path)
    if folder.exists() and not (folder / "config.json").is_file():
        raise RecipeError(f"model.path: {path} has no config.json; name a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=folder.exists() or _local_only())
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        if not folder.exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
            raise RecipeError(f"model.path: {path}: no such folder") from None
        raise RecipeError(
            f"model.path: {path}: no such folder, and not to be had from the Hugging Face hub ({first[:160]}); download it where there is a network and name the folder"
            if not folder.exists()
            else f"model.path: {path}: {first[:300]}"
        ) from None


def _new(recipe: Recipe, vocabulary: int | None) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen3Config

    model = recipe.model
    gated = model.family != "gpt2"
    if model.size is None and not (model.layers and model.width and model.heads):
        raise RecipeError("model: state a path, a size (e.g. 15M), or layers, width and heads")
    d = sizes.dial(model.size, gated=gated, shape=model.shape) if model.size else None
    layers, width, heads = (
        (model.layers or (d and d.layers)),
        (model.width or (d and d.width)),
        (model.heads or (d and d.heads)),
    )
    assert layers
    assert width
    assert heads
    if d and model.width and not model.heads:
        heads = max(1, width // (d.width // d.heads))
    feed_forward = model.feed_forward or (
        d.feed_forward if d and not model.width else (round(width * 8 / 3 / 64) * 64 or 64) if gated else 4 * width
    )
    if model.vocabulary is None and vocabulary is None:
        raise RecipeError("model.vocabulary: is needed where no tokenizer decides it")
    rows = model.vocabulary or -(-vocabulary // 64) * 64  # type: ignore[operator]  # a multiple of 64 keeps the head's products fast
    common: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": rows,
        "max_position_embeddings": model.positions or recipe.batch.length,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.tie_embeddings is not None:
        common["tie_word_embeddings"] = model.tie_embeddings
    if model.family == "gpt2":
        if model.kv_heads not in (None, heads):
            raise RecipeError(f"model.kv_heads: {model.kv_heads}: gpt2 has no grouped queries; remove it or use family: llama")
        # Dropout 0: pretraining sees each token about once (GPT-2's 0.1 is for many epochs).
        return GPT2Config(**common, n_inner=feed_forward, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    common |= {"num_key_value_heads": model.kv_heads or heads, "intermediate_size": feed_forward, "head_dim": width // heads}
    return LlamaConfig(**common) if model.family == "llama" else Qwen3Config(**common)


def facts(config: PretrainedConfig) -> ModelFacts:
    """What a technique's `check` may know of the model."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelFacts(
        family=config.model_type,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        positions=_positions(text),
        tied=bool(config.tie_word_embeddings),
        window=getattr(text, "sliding_window", None),
    )


@functools.cache
def _register_attention() -> None:
    """Puts our attention function under its own name into transformers' registry; nothing of theirs is replaced."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    preheat_attention: Callable[..., Tensor] | None = None,
    preheat_mask: MaskSpec | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [rows, heads, length, head_dim] in, [rows, length, heads, head_dim] out."""
    name = type(module).__name__
    assert preheat_attention is not None, f"{name} does not hand keyword arguments to its attention"
    assert preheat_mask is not None
    assert attention_mask is None, f"{name} made a mask of its own"
    if softcap is not None or s_aux is not None:
        raise RecipeError(
            f"model: {name} caps its attention scores or has attention sinks, which preheat's kernels do not do yet"
        )
    if dropout:
        raise RecipeError(f"model: {name} has attention dropout {dropout}; set it to 0 under model.config")
    mask = preheat_mask
    if sliding_window is not None and sliding_window < query.shape[2]:
        mask = replace(mask, window=min(sliding_window, mask.window or sliding_window))
    if (pattern := getattr(module, PATTERN, None)) is not None:
        preheat_attention = pattern(preheat_attention)
    out = preheat_attention(query, key, value, mask, scaling if scaling is not None else query.shape[-1] ** -0.5)
    return out.transpose(1, 2), None


_UNSUPPORTED = {  # configuration keys that change the logits after the head, with their neutral values
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "router_aux_loss_coef": (None, 0.0),
}


def build_on_meta(config: PretrainedConfig, *, trust: bool = False) -> PreTrainedModel:
    """The model with its parameters on the meta device: no memory, no values. Its attention goes through preheat's slots.

    Raises:
        RecipeError: preheat cannot train this kind of model; the message says why.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from preheat.models.surgery import own_rotary

    text = config.get_text_config()
    for key, neutral in _UNSUPPORTED.items():
        if (value := getattr(text, key, None)) not in neutral:
            raise RecipeError(f"model: {config.model_type} has {key} = {value}, which preheat does not handle yet")
    _register_attention()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, trust_remote_code=trust)
    except ValueError as error:
        raise RecipeError(
            f"model: {config.model_type} is no decoder-only model that transformers can build ({str(error).splitlines()[0][:200]})"
        ) from None
    model.config.use_cache = False
    own_rotary(model)
    anatomy(model)  # says plainly when something cannot be found
    return model.train()


@dataclass(frozen=True)
class Anatomy:
    """Where things are in a model.

    Attributes:
        base: the module that gives hidden states.
        embedding: token embedding.
        layers: the transformer layers, in order.
        head: the output projection, [width -> vocabulary].
        norms: every normalisation, by name.
        attentions: one per layer.
    """

    base: nn.Module
    embedding: nn.Module
    layers: nn.ModuleList
    head: nn.Module
    norms: Mapping[str, nn.Module]
    attentions: tuple[nn.Module, ...]


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Finds layers, head, norms and attention in any decoder-only transformers model.

    Raises:
        RecipeError: something cannot be found; the message names it.
    """
    from torch import nn

    kind, count = type(model).__name__, model.config.get_text_config().num_hidden_layers
    base = model.base_model
    if base is model:
        raise RecipeError(f"model: {kind} has no base model under its head, so hidden states cannot be had")
    stacks = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        raise RecipeError(f"model: found no list of {count} layers in {kind}")
    layers = max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:
        raise RecipeError(
            f"model: {kind} has no {'output head' if head is None else 'token embedding'} that transformers can name"
        )
    if getattr(head, "bias", None) is not None:
        raise RecipeError(f"model: the head of {kind} has a bias, which preheat's losses do not handle yet")
    attentions = []
    for layer in layers:
        found = [m for m in layer.children() if type(m).__name__.lower().endswith("attention")]
        if len(found) != 1:
            raise RecipeError(f"model: found {len(found)} attention modules in a layer of {kind}, expected one")
        attentions.append(found[0])
    norms = {name: m for name, m in model.named_modules() if type(m).__name__.lower().endswith("norm")}
    return Anatomy(base, embedding, layers, head, norms, tuple(attentions))


def head(model: PreTrainedModel) -> nn.Module:
    """The output projection, [width -> vocabulary]."""
    return model.get_output_embeddings()


def ends(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The weights of embedding and head, which optimizers made for matrices leave to AdamW."""
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, mask: MaskSpec, attention: Callable[..., Tensor]
) -> Tensor:
    """Last hidden states [rows, length, width], the attention done by `attention(q, k, v, mask, scale)`."""
    if mask.documents is None or all(len(row) == 1 for row in mask.documents):
        positions = positions[:1]  # every row counts alike: the rotary tables are made and read once, not once a row
    return model.base_model(
        input_ids=tokens,
        position_ids=positions,
        use_cache=False,
        preheat_attention=attention,
        preheat_mask=mask,
    ).last_hidden_state


def generate(
    model: PreTrainedModel, tokens: Tensor, *, count: int, temperature: float = 0.0, stop: int | None = None
) -> Tensor:
    """Continues `tokens` [1, n] by up to `count` tokens with transformers' own generation and KV cache.

    Layers with an attention pattern read everything again for each token: patterns are for whole sequences.
    """
    import torch
    from transformers import GenerationConfig

    training, attention = model.training, model.config._attn_implementation
    model.eval()
    patterned = any(hasattr(m, PATTERN) for m in model.modules())
    model.set_attn_implementation(STANDALONE if patterned else "sdpa")
    settings = GenerationConfig(
        max_new_tokens=count,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=None,
        top_p=None,
        use_cache=not patterned,
        eos_token_id=stop,
        pad_token_id=stop if stop is not None else 0,
    )
    try:
        with torch.no_grad():
            return model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def plain_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [rows, length, vocabulary] by transformers' own eager attention, whatever the model is set to; in fp32, or its fp64."""
    import torch

    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens.to(model.device), use_cache=False).logits
            return logits if logits.dtype == torch.float64 else logits.float()
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
