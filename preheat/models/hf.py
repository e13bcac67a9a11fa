"""Hugging Face decoder-only models, some with vision: configures them, builds them on meta, and finds their parts."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from preheat.core import Images, MaskSpec, ModelFacts, Problem, ProblemCode, SplitAttention, TechniqueError
from preheat.core.schema import SMALLEST_TOKENIZER
from preheat.errors import RecipeError
from preheat.model_folder import FAULTS, describe_fault
from preheat.models import alibi, configs, encoder_decoder, moe, text_part, vision
from preheat.models.image_attention import attend_image_blocks
from preheat.models.layer_sizes import head_dim, max_over_layers
from preheat.models.module_lookup import (
    SOFTCAP,
    WHOLE,
    Anatomy,
    compute_logits,
    embedding,
    end_weights,
    find_anatomy,
    find_base,
    full_model,
    head,
    require_decoder_only,
    require_plain_head,
    softcap,
)
from preheat.models.presets.preset import NOT_TRAINED
from preheat.models.quantized_folders import packed_method
from preheat.models.reference_logits import compute_reference_logits
from preheat.models.sinks import CHUNK, attend_with_sinks, cut_into_chunks, set_chunks
from preheat.models.tested_versions import warn_of_untested
from preheat.models.token_mixers import (
    ATTENTION,
    count_recurrent_layers,
    find_attentions,
    has_special_mixers,
    keep_within_documents,
    require_document_boundaries,
    require_known_mixers,
)
from preheat.models.torchao_import import silence_torchao

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from preheat.recipe import Recipe

__all__ = [
    "SOFTCAP",
    "WHOLE",
    "Anatomy",
    "find_anatomy",
    "auto_class",
    "build_on_meta",
    "configure",
    "embedding",
    "end_weights",
    "read_facts",
    "head",
    "hidden_states",
    "compute_logits",
    "compute_reference_logits",
    "require_decoder_only",
    "require_plain_head",
    "softcap",
    "full_model",
]

STANDALONE = "preheat-standalone"  # that of models/attention_patch.py, for models called by their own forward
PATTERN = "preheat_pattern"  # attribute of a layer's attention, set by models/attention_patch.py: wraps the kernel


def configure(
    recipe: Recipe, vocabulary: int | None = None, source: PretrainedConfig | None = None
) -> PretrainedConfig:
    """The transformers configuration of the recipe's model.

    Args:
        vocabulary: size of the tokenizer's vocabulary. A new model without `model.vocab_size` gets as many rows
            (rounded up to 64).
        source: what `configs.source_config` gave for this model; it is read when not given.

    Raises:
        RecipeError: no such model; a key that its configuration does not have; a tokenizer larger than the embedding;
            sequences longer than the model's positions.
    """
    model = recipe.model
    # A copy, since one source serves many recipes, and everything below changes the configuration in place.
    config = configs.of(recipe, vocabulary) if source is None else copy.deepcopy(source)
    # Before `model.config`, which may enable dropout again.
    configs.disable_dropout(config)
    _refuse(config)
    configs.apply_changes(config, model.config)
    # In the order of the stages in which the build will apply them; the name makes the order unique.
    for t in sorted(recipe.techniques.values(), key=lambda t: (t.stage, t.name())):
        try:
            config = t.configure(config, recipe) or config
        # Conversions raise ValueError; the problem adds the name of the technique.
        except ValueError as error:
            raise TechniqueError([Problem(t.name(), ProblemCode.BUILD, str(error))]) from None
    # After `model.config` and the techniques, which may have set another rope_type.
    configs.refuse_unknown_rotary(config)
    text = config.get_text_config()  # a technique may have changed the family
    if model.add_tokens and vocabulary is not None:
        text.vocab_size = max(text.vocab_size, vocabulary)  # some models have spare rows
    rows = text.vocab_size
    # A token without a row would index beyond the embedding, which a GPU reports as an opaque device assertion.
    if vocabulary is not None and vocabulary > rows:
        enlarge_hint = (
            ""
            if model.path
            else f", or set model.{'config.vocab_size' if model.preset else 'vocab_size'}: {vocabulary}"
        )
        # Without a tokenizer one is trained, as large as the recipe says.
        if recipe.data.tokenizer is None and configs.find_tokenizer_folder(recipe) is None:
            shrink_hint = (
                f"set data.vocab_size: {rows}" if rows >= SMALLEST_TOKENIZER else "set data.tokenizer to a smaller one"
            )
            raise RecipeError(
                f"data.vocab_size: {vocabulary}: the tokenizer that is trained would have more tokens than the "
                f"model's embedding has rows, {rows:,}; {shrink_hint}{enlarge_hint}"
            )
        raise RecipeError(
            f"data.tokenizer: has {vocabulary:,} tokens but the model's embedding has {rows:,} rows; "
            + (
                "use the model's own tokenizer"
                if recipe.data.tokenizer or not model.path
                else "name the missing tokens in model.add_tokens"
            )
            + enlarge_hint
        )
    positions = _context_length(text)
    if positions and recipe.batch.seq_len > positions:
        raise RecipeError(
            f"batch.seq_len: {recipe.batch.seq_len} is longer than the model's {positions} positions; set "
            f"batch.seq_len: {positions} or less"
        )
    return config


def _context_length(text: PretrainedConfig) -> int:
    """Context length of a model; 0: unknown. Dynamic rotary scaling extends transformers' value by `factor`."""
    if text.model_type in alibi.FAMILIES:  # any length, of which transformers prepares `max_seq_len` for an MPT
        return min(getattr(text, "max_seq_len", alibi.LONGEST), alibi.LONGEST)
    positions = getattr(text, "max_position_embeddings", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    return int(positions * rope["factor"]) if rope.get("rope_type") == "dynamic" else positions


def read_facts(config: PretrainedConfig) -> ModelFacts:
    """The facts about a model that a technique's `check` may use."""
    text = config.get_text_config()
    heads = max_over_layers(text, "num_attention_heads", 0)
    expert_layers = moe.expert_layers(text)
    # Dense models of families with experts state a number of them, too.
    count, chosen, width = moe.sizes_of(text) if expert_layers else (0, 0, 0)
    encoder = config.model_type in encoder_decoder.FAMILIES
    sinks = _has_sinks(config.__class__)
    return ModelFacts(
        family=config.model_type,
        # transformers' `num_hidden_layers` of a T5 counts the encoder's layers only.
        layers=text.num_hidden_layers + (config.num_decoder_layers if encoder else 0),
        width=text.hidden_size,
        heads=heads,
        kv_heads=max_over_layers(text, "num_key_value_heads") or heads,
        head_dim=head_dim(text),
        vocabulary=text.vocab_size,
        positions=_context_length(text),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        window=getattr(text, "sliding_window", None) or None,  # Qwen2-MoE writes 0 for none
        score_softcap=getattr(text, "attn_logit_softcapping", None),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        experts=count,
        experts_per_token=chosen,
        expert_width=width,
        expert_layers=expert_layers,
        balance_loss=count > 0 and moe.coefficient(text) > 0,
        sinks=sinks,
        special_mixers=has_special_mixers(text, sinks),
        recurrent_layers=count_recurrent_layers(text),
        foreign_experts=count > 0 and not moe.has_stacked_experts(text.__class__),
        vision=vision.read_vision(config),
        encoder=encoder,
        alibi_dim=alibi.EXTRA_DIM if text.model_type in alibi.FAMILIES else 0,
        quantized=packed_method(config),
    )


@functools.cache
def _has_sinks(kind: type) -> bool:
    """True if the attention of the models of a configuration class uses sinks, by the code of its modules."""
    _register_attention()  # its import of transformers is a quiet one
    from transformers import AutoModelForCausalLM

    models = AutoModelForCausalLM._model_mapping
    if kind not in models:
        return False
    # No configuration key says it in all families, but the name is in the code of the attention's forward.
    classes = vars(sys.modules[models[kind].__module__]).values()
    forwards = (inspect.unwrap(c.forward) for c in classes if isinstance(c, type) and hasattr(c, "forward"))
    return any("sinks" in f.__code__.co_names for f in forwards if hasattr(f, "__code__"))


@functools.cache
def _register_attention() -> None:
    """Registers our attention function under its own name in transformers; nothing of theirs is replaced."""
    warn_of_untested()
    with silence_torchao():
        from transformers import AttentionInterface

    # It says at each first call that a fused kernel is missing; `missing_kernels` says so where it matters, on a GPU.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    AttentionInterface.register(ATTENTION, _attend)


def _attend(
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
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [rows, heads, length, head_dim] in, [rows, length, heads, head_dim] out."""
    import torch

    name = type(module).__name__
    if preheat_attention is None and getattr(module, "is_causal", True) is False:
        # A tower of squares, whose layers hand nothing on: all patches of a square see each other.
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        ).transpose(1, 2).contiguous(), None
    if preheat_attention is None or preheat_mask is None:
        raise RecipeError(
            f"model: {name} of transformers does not let its layers use preheat's attention kernels, so it {_NO_PLACE}"
        )
    if attention_mask is not None:
        raise RecipeError(f"model: {name} of transformers makes a mask of its own, so it {_NO_PLACE}")
    # Bound here, so that a pattern around the kernel need not handle it.
    if s_aux is not None and isinstance(preheat_attention, SplitAttention):
        preheat_attention, s_aux = functools.partial(preheat_attention, sinks=s_aux), None
    if softcap is not None:
        preheat_attention = functools.partial(preheat_attention, softcap=softcap)
    if dropout:
        raise RecipeError(f"model: {name} has attention dropout {dropout}; set it to 0 under model.config")
    mask = preheat_mask
    if sliding_window is not None:  # kernels compare it with the full row, which context parallelism splits
        mask = replace(mask, window=min(sliding_window, mask.window or sliding_window))
    if (chunk := getattr(module, CHUNK, None)) is not None:
        mask = cut_into_chunks(mask, chunk, query.shape[0], query.shape[2])
    # A pattern wraps the kernel of this layer alone, and sees the layer's final mask.
    if (pattern := getattr(module, PATTERN, None)) is not None:
        preheat_attention = pattern(preheat_attention)
    width = value.shape[-1]
    if lacks := query.shape[-1] - width:
        # MLA values have a smaller head dim than keys; our kernels assume equal dims.
        value = torch.nn.functional.pad(value, (0, lacks))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    blocks, mask = mask.blocks, replace(mask, blocks=None)
    # Of Gemma 4 the tokens of an image see each other in layers with a window alone.
    if blocks is not None and sliding_window is None:
        blocks = None if getattr(module.config, "use_bidirectional_attention", None) == "vision" else blocks
    if s_aux is not None:
        out = attend_with_sinks(preheat_attention, query, key, value, mask, scale, s_aux)
    else:
        out = preheat_attention(query, key, value, mask, scale)
    if blocks is not None and any(blocks):
        out = attend_image_blocks(out, query, key, value, mask, scale, blocks)
    # Contiguous, as transformers' own functions return it: some layers take a view of it.
    return out[..., :width].transpose(1, 2).contiguous(), None


_NO_PLACE = "cannot be trained or evaluated here; preheat plan --inference plans to serve it"


def _require_places(kind: type[PreTrainedModel], family: str) -> None:
    """Raises for a class whose layers have a fixed attention function: packed documents would attend to each other."""
    if not kind._can_set_attn_implementation():
        raise RecipeError(
            f"model: {family}: {kind.__name__} of transformers attends inside its own layers, which preheat's "
            f"kernels cannot replace, so it {_NO_PLACE}"
        )


# Configuration keys that change the computation in ways that preheat does not implement, with their neutral values.
_UNSUPPORTED = {
    "router_jitter_noise": (None, 0.0),
    "use_bidirectional_attention": (None, False, "vision"),  # "vision": among the tokens of an image
}


def _refuse(config: PretrainedConfig) -> None:
    """Raises for a model that preheat would compute differently from transformers."""
    text = config.get_text_config()
    if text.model_type in NOT_TRAINED:
        raise RecipeError(
            f"model: {text.model_type} {NOT_TRAINED[text.model_type]}, so it cannot be trained here; preheat plan "
            "--inference plans to serve it"
        )
    if not config.is_encoder_decoder:
        _require_causal(config)
    if text is not config and config.model_type not in vision.FAMILIES:
        raise RecipeError(
            f"model: {config.model_type} is several models in one ({text.model_type} is its text part), and preheat "
            f"trains text models, with images {', '.join(vision.FAMILIES)}, and the text part of "
            f"{', '.join(text_part.FAMILIES)}; name a "
            "text-only checkpoint of the family, or save the text part as a folder of its own"
        )
    if config.is_encoder_decoder:
        encoder_decoder.refuse(config)
    alibi.refuse_variants(text)
    for key, neutral in _UNSUPPORTED.items():
        if (value := getattr(text, key, None)) not in neutral:
            raise RecipeError(f"model: {config.model_type} has {key} = {value}, which preheat does not handle yet")


def _require_causal(config: PretrainedConfig) -> None:
    """Raises for an architecture without a causal language model: encoders, towers for images or sound, pairs of them.

    Other checks decide about composite models with a text decoder and about a folder's own code.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    family, causal = config.model_type, AutoModelForCausalLM._model_mapping
    if getattr(config, "auto_map", None) or family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return
    text = config.get_text_config()
    # Encoders whose class can also be built as a decoder say so by `is_decoder` (BERT).
    masked = family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and family not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    encodes = masked and getattr(text, "is_decoder", None) is False
    if (type(config) in causal or type(text) in causal) and not encodes:
        return
    other_use = (
        "image classifiers such as MobileNet are compressed: preheat compress FOLDER --recipe edge-vision --data IMAGES"
        if family in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        else "to label texts, the technique classification puts a head on a decoder (llama, qwen3, gpt2)"
    )
    raise RecipeError(
        f"model: {family} of transformers has no causal language model, which is what preheat trains; name a decoder "
        f"(preheat models lists them); {other_use}"
    )


def logit_multiplier(config: PretrainedConfig) -> float:
    """The factor on the logits of a model: Cohere's `logit_scale`, Granite's divisor, Falcon-H1's multiplier."""
    text = config.get_text_config()
    factor = float(getattr(text, "logit_scale", None) or 1.0) * float(getattr(text, "lm_head_multiplier", None) or 1.0)
    return factor / float(getattr(text, "logits_scaling", None) or 1.0)


def auto_class(config: PretrainedConfig) -> str:
    """The name of transformers' class that builds such a model with its output head, and loads its folders."""
    if config.is_encoder_decoder:
        return "AutoModelForSeq2SeqLM"
    return "AutoModelForImageTextToText" if config.model_type in vision.FAMILIES else "AutoModelForCausalLM"


def build_on_meta(config: PretrainedConfig, *, trust: bool = False, as_stored: bool = False) -> PreTrainedModel:
    """Builds the model on the meta device, without memory or values. Its attention goes through preheat's slots.

    Args:
        trust: the recipe asks for the code of the model's folder; only the user can allow it (`preheat.remote_code`).
        as_stored: parameters get the dtype that the configuration names; otherwise fp32, because training in a lower
            precision is a setting of the recipe.

    Raises:
        RecipeError: preheat cannot train this kind of model; the message says why.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from preheat.models.conversions.modules import replace_rotary

    _refuse(config)
    _register_attention()
    # Under our own names, so that a model opened by transformers elsewhere in the process keeps its functions.
    ours = {"experts_implementation": moe.register()} if moe.sizes_of(config.get_text_config())[0] else {}
    dtype = (as_stored and config.get_text_config().dtype) or torch.float32
    # T5 passes a position bias to its attention, which needs another interface.
    attention = encoder_decoder.register() if config.is_encoder_decoder else ATTENTION
    factory = getattr(transformers, auto_class(config))
    if config.model_type in alibi.FAMILIES:
        attention = "eager"  # their layers have no other; `replace_alibi` puts preheat's in its place
    elif not config.is_encoder_decoder and type(config) in (known := factory._model_mapping):
        _require_places(known[type(config)], config.model_type)
    try:
        with torch.device("meta"):
            runs = configs.is_remote_code(config, trust)
            model = factory.from_config(
                config, attn_implementation=attention, trust_remote_code=runs, dtype=dtype, **ours
            )
    except (*FAULTS, StrictDataclassError) as error:
        raise RecipeError(
            f"model: {config.model_type} is not a decoder-only model that transformers can build "
            f"({describe_fault(error, 200)})"
        ) from None
    # A forward pass would otherwise fill a KV cache that training never reads.
    model.config.use_cache = False
    replace_rotary(model)
    alibi.replace_alibi(model)
    vision.replace_deepstack(model)
    for unread in vision.find_unread_parts(model):
        unread.requires_grad_(False)
    if (cap := read_facts(config).logit_softcap) is not None:
        setattr(head(model), SOFTCAP, cap)  # on the head: a classification head in its place has none
    # Packed rows hold several documents, so every layer must be able to keep them apart.
    if not config.is_encoder_decoder:
        layers = list(find_anatomy(model).layers)
        require_known_mixers(model, find_base(model), layers)
        _require_linear_head(model)
        keep_within_documents(layers)
        set_chunks(attention for layer in layers for attention in find_attentions(layer))
    return model.train()


def _require_linear_head(model: PreTrainedModel) -> None:
    """Raises for a model whose logits are more than a linear map of the hidden states: losses use its tensors alone."""
    name, output = type(model).__name__, head(model)
    known = {id(p) for module in (find_base(model), output) for p in module.parameters()}
    if between := [key for key, p in model.named_parameters() if id(p) not in known]:
        raise RecipeError(
            f"model: {name} of transformers has {between[0]} between its hidden states and its head, so it {_NO_PLACE}"
        )
    # The factor is applied to hidden states, where it would leave the bias out.
    if output.bias is not None and logit_multiplier(model.config) != 1.0:
        raise RecipeError(
            f"model: {name} of transformers multiplies the logits of a head with a bias, so it {_NO_PLACE}"
        )


def hidden_states(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor,
    mask: MaskSpec,
    attention: Callable[..., Tensor],
    hidden: Tensor | None = None,
    images: Images | None = None,
) -> Tensor:
    """Last hidden states [rows, length, width], with `attention(q, k, v, mask, scale)` as the kernel.

    Args:
        positions: [rows, length]; [rows, length, 3] for rows with images.
        hidden: hidden states of the previous pipeline stage, in place of the tokens' embeddings.
        images: the images of the rows.
    """
    if model.config.is_encoder_decoder:
        return encoder_decoder.hidden_states(model, tokens, mask, attention)
    if positions.ndim == 3:
        # [3, rows, length]: transformers takes time, height and width of multimodal rotary positions first.
        positions = positions.permute(2, 0, 1)
    elif mask.documents is None or all(len(row) == 1 for row in mask.documents):
        positions = positions[:1]  # the same in every row: compute the rotary tables once
    if images is not None:
        hidden, more = vision.embed_images(model, tokens, images, attention)
    else:
        more = {}
    # The text's layers by themselves: a whole model would look for the images' tokens again.
    run = find_base(model) if vision.find_tower(model) is None else model.get_decoder()
    with require_document_boundaries():
        last = run(
            **({"input_ids": tokens} if hidden is None else {"inputs_embeds": hidden}),
            position_ids=positions,
            use_cache=False,
            preheat_attention=attention,
            preheat_mask=mask,
            **more,
        ).last_hidden_state
    # On the hidden states, so that no loss needs to know of it: such a head is linear, without a bias.
    return last if (factor := logit_multiplier(model.config)) == 1.0 or head(model) is None else last * factor
