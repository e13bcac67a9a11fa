"""Hugging Face decoder-only models: configure, build on meta, and find layers, head, norms, attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.errors import RecipeError, nearest
from preheat.models import configs, experts
from preheat.technique import MaskSpec, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.recipe import Recipe

__all__ = [
    "REFUSED",
    "Anatomy",
    "anatomy",
    "build_on_meta",
    "configure",
    "embedding",
    "ends",
    "facts",
    "head",
    "hidden_states",
    "logits",
    "plain_logits",
    "require_plain_head",
    "softcap",
    "tokenizer_folder",
    "whole",
]

ATTENTION = "preheat"  # the name under which our attention function stands in transformers' own registry
STANDALONE = "preheat-standalone"  # and that of models/attention.py, for models called by their own forward
SOFTCAP = "preheat_softcap"  # attribute of a head whose logits are capped
WHOLE = (
    "preheat_whole"  # attribute of a pipeline's stage: the model that it was cut from, in a tuple (models/stages.py sets it)
)
PATTERN = "preheat_pattern"  # attribute of a layer's attention: kernel -> kernel that sees less (models/attention.py sets it)


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
    from huggingface_hub.errors import StrictDataclassError

    model = recipe.model
    config = configs.of(recipe, vocabulary)
    _refuse(config)
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for key, value in model.config.items():
        if key not in known:
            raise RecipeError(f"model.config.{key}: {config.model_type} has no such setting; {nearest(key, sorted(known))}")
        try:
            setattr(config, key, float(value) if type(value) is int and type(getattr(config, key, None)) is float else value)
        except StrictDataclassError as error:
            raise RecipeError(f"model.config.{key}: {str(error.__cause__ or error).splitlines()[0]}") from None
    kinds = getattr(config, "layer_types", None)  # a list with an entry a layer, which fewer layers leave too long
    if "layer_types" not in model.config and kinds and len(kinds) > config.num_hidden_layers:
        config.layer_types = kinds[: config.num_hidden_layers]
    for t in sorted(recipe.techniques.values(), key=lambda t: (t.stage, t.name())):
        try:
            t.configure(config, recipe)
        except ValueError as error:
            raise RecipeError(f"techniques.{t.name()}: {error}") from None
    configs.refuse_unknown_rotary(config)
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


def facts(config: PretrainedConfig) -> ModelFacts:
    """What a technique's `check` may know of the model."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    count, chosen, width = experts.sizes_of(text)
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
        score_softcap=getattr(text, "attn_logit_softcapping", None),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        experts=count,
        experts_per_token=chosen,
        expert_width=width,
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
    if s_aux is not None:
        raise RecipeError(f"model: {name} has attention sinks, which preheat's kernels do not do yet")
    if softcap is not None:  # bound here, so that a pattern around the kernel need not know
        preheat_attention = functools.partial(preheat_attention, softcap=softcap)
    if dropout:
        raise RecipeError(f"model: {name} has attention dropout {dropout}; set it to 0 under model.config")
    mask = preheat_mask
    if sliding_window is not None:  # kernels see whether it is narrower than the row, of which a device may have a part here
        mask = replace(mask, window=min(sliding_window, mask.window or sliding_window))
    if (pattern := getattr(module, PATTERN, None)) is not None:
        preheat_attention = pattern(preheat_attention)
    out = preheat_attention(query, key, value, mask, scaling if scaling is not None else query.shape[-1] ** -0.5)
    return out.transpose(1, 2), None


_UNSUPPORTED = {  # configuration keys that change logits, loss or masks beyond what preheat computes, with their neutral values
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "router_aux_loss_coef": (None, 0.0),  # but for the families of models/experts.py
    "router_jitter_noise": (None, 0.0),
    "use_bidirectional_attention": (None, False),
}


REFUSED = {  # families whose weights and caches can be planned, and no more
    "bloom": "adds positions to attention's scores (ALiBi), which preheat's kernels do not do",
    "deepseek_v2": "has latent attention and experts that all tokens share, which preheat does not do",
    "deepseek_v3": "has latent attention and a router with a bias, which preheat does not do",
}


def _refuse(config: PretrainedConfig) -> None:
    """Raises for a model of which preheat would compute something else than transformers does."""
    text = config.get_text_config()
    if text.model_type in REFUSED:
        raise RecipeError(
            f"model: {text.model_type} {REFUSED[text.model_type]}, so it cannot be trained here; preheat plan --inference plans to serve it"
        )
    if text is not config:
        raise RecipeError(
            f"model: {config.model_type} is several models in one ({text.model_type} is its text part), and preheat trains text models; name a "
            "text-only checkpoint of the family, or save the text part as a folder of its own"
        )
    for key, neutral in _UNSUPPORTED.items():
        if key == "router_aux_loss_coef" and text.model_type in experts.FAMILIES:
            continue
        if (value := getattr(text, key, None)) not in neutral:
            raise RecipeError(f"model: {config.model_type} has {key} = {value}, which preheat does not handle yet")


def build_on_meta(config: PretrainedConfig, *, trust: bool = False, as_stored: bool = False) -> PreTrainedModel:
    """The model with its parameters on the meta device: no memory, no values. Its attention goes through preheat's slots.

    Args:
        as_stored: parameters have the dtype that the configuration names; fp32 otherwise, whatever it names: what is trained in less says so
            in its recipe.

    Raises:
        RecipeError: preheat cannot train this kind of model; the message says why.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from preheat.models.surgery import own_rotary

    _refuse(config)
    _register_attention()
    ours = {"experts_implementation": experts.register()} if experts.sizes_of(config)[0] else {}
    dtype = (as_stored and config.get_text_config().dtype) or torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, trust_remote_code=trust, dtype=dtype, **ours
            )
    except ValueError as error:
        raise RecipeError(
            f"model: {config.model_type} is no decoder-only model that transformers can build ({str(error).splitlines()[0][:200]})"
        ) from None
    model.config.use_cache = False
    own_rotary(model)
    if (cap := facts(config).logit_softcap) is not None:
        setattr(head(model), SOFTCAP, cap)  # on the head: another one put in its place (over classes) has none
    anatomy(model)  # says plainly when something cannot be found
    return model.train()


@dataclass(frozen=True)
class Anatomy:
    """Where things are in a model.

    Attributes:
        base: the module that gives hidden states.
        embedding: token embedding.
        layers: the transformer layers, in order; of a pipeline's stage its own.
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
    if whole(model) is not model:
        from preheat.models.stages import Elsewhere

        layers = nn.ModuleList(layer for layer in layers if not isinstance(layer, Elsewhere))
    elif head is None or embedding is None:
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
    """The output projection, [width -> vocabulary]; None in a stage of a pipeline that is not the last."""
    return model.get_output_embeddings()


def embedding(model: PreTrainedModel) -> nn.Module:
    """The token embedding; None in a stage of a pipeline that has none."""
    return model.get_input_embeddings()


def whole(model: PreTrainedModel) -> PreTrainedModel:
    """The model that a stage of a pipeline was cut from, of which other stages' modules stay on meta; any other model itself."""
    return getattr(model, WHOLE, (model,))[0]


def softcap(model: PreTrainedModel) -> float | None:
    """The cap on the logits that the head gives, which are then cap * tanh(logits / cap) (Gemma 2); None: they are as they are."""
    found: Any = head(model)
    base = found.get_base_layer() if hasattr(found, "get_base_layer") else found  # under an adapter
    return getattr(base, SOFTCAP, None)


def logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the model says of hidden states [..., width]: fp32 [..., vocabulary], all of them in memory at once."""
    made, cap = head(model)(hidden).float(), softcap(model)
    return made if cap is None else (made / cap).tanh() * cap


def require_plain_head(model: PreTrainedModel, who: str) -> None:
    """Raises RecipeError where the head carries an adapter, which what reads its weight alone would leave out without a word."""
    if hasattr(head(model), "get_base_layer"):
        raise RecipeError(
            f"techniques.{who}: makes logits from the head's weight alone, and an adapter stands on it; take the head out of the adapter's targets, or leave {who} out"
        )


def ends(model: PreTrainedModel) -> tuple[Tensor, ...]:
    """The weights of embedding and head, which optimizers made for matrices leave to AdamW; of a pipeline's stage what it has of them."""
    held: list[Any] = [module for module in (embedding(model), head(model)) if module is not None]
    return tuple(module.weight for module in held)


def hidden_states(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    mask: MaskSpec,
    attention: Callable[..., Tensor],
    hidden: Tensor | None = None,
) -> Tensor:
    """Last hidden states [rows, length, width], the attention done by `attention(q, k, v, mask, scale)`.

    Args:
        hidden: of the stage of a pipeline before this one, in place of the tokens' embeddings.
    """
    if mask.documents is None or all(len(row) == 1 for row in mask.documents):
        positions = positions[:1]  # every row counts alike: the rotary tables are made and read once, not once a row
    return model.base_model(
        **({"input_ids": tokens} if hidden is None else {"inputs_embeds": hidden}),
        position_ids=positions,
        use_cache=False,
        preheat_attention=attention,
        preheat_mask=mask,
    ).last_hidden_state


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
