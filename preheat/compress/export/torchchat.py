"""Export to torchchat's layout, for its generate, chat, server, AOTInductor and ExecuTorch.

model.pth uses Meta's names: queries, keys and values of a layer in one matrix, with the two rows of a rotary pair
adjacent, whereas transformers has them half a head apart. params.json contains the sizes, the tokenizer is the Hugging
Face one. torchchat cannot be installed as a package, so the file is verified by a reimplementation of its published
model.py in plain torch (`read`), which shares no code with transformers. Only Llama's blocks are supported: RMSNorm,
gated SiLU, rotary embedding without scaling or with Llama 3.1's. Its tokenizer renders chats with plain jinja2 and
stops at one token; `_settle` adapts it.
Source: https://github.com/pytorch/torchchat (torchchat/model.py, torchchat/cli/convert_hf_checkpoint.py,
tokenizer/hf_tokenizer.py), read 2026-11; its chat was run at a1a7f37 (without its check of torch's version and its
quantization, which need other versions) and gave the same as `preheat generate`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from preheat.compress import model_card
from preheat.compress.atomic_folder import NewFolder, require_new
from preheat.compress.export import verify
from preheat.compress.export.merged_model import Plain, write_plain_model
from preheat.compress.export.plain_jinja import convert_to_jinja
from preheat.core.export import ExportResult
from preheat.data.chat.template import load_template
from preheat.errors import RunError
from preheat.files import to_json
from preheat.model_folder import beginning_tokens, format_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


__all__ = ["read", "write"]

_USE = """\
git clone https://github.com/pytorch/torchchat && cd torchchat    # then, with FOLDER this one:
python3 torchchat.py {verb} --checkpoint-path FOLDER/model.pth --params-path FOLDER/params.json \
--tokenizer-path FOLDER/tokenizer.json --dtype {dtype} --temperature 0{prompt}
"""
_INSTEAD = "use --to hf, gguf, onnx, executorch or aoti"
_PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_ENDS = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
# transformers' maps and norms -> torchchat's: w1 is the gate, w3 the up and w2 the down projection.
_PARTS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(
    run: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    tolerance: float | None = None,
    base: str | None = None,
) -> ExportResult:
    """Writes `out`/model.pth, params.json, tokenizer and a model card.

    Args:
        run: a run, a model's folder, or an adapter's.
        dtype: float32, bfloat16 or float16, of the weights.
        tolerance: maximum logit difference relative to the largest logit; None: `verify.BOUNDS`.
        base: as in `load_model`.

    Raises:
        RunError: blocks that torchchat does not support; the difference exceeds the bound.
    """
    out = Path(out)
    require_new(out, run)
    bound = verify.choose_bound("torchchat", dtype, tolerance)
    with NewFolder(out) as folder:
        with write_plain_model(run, folder, base=base) as model:
            # Fails for unsupported blocks before any weight is converted.
            params = _build_params(model.model.config, model.source)
            params["tokenizer_prepend_bos"] = bool(beginning_tokens(model.tokenizer))
            weights = _convert_weights(model.model, params, model.source)
            torch.save({name: w.to(getattr(torch, dtype)) for name, w in weights.items()}, folder / "model.pth")
            (folder / "params.json").write_text(to_json(params, indent=2) + "\n", encoding="utf-8")
            # `_settle` then changes the copied tokenizer settings.
            model.copy_settings(folder)
            notes = [*model.notes, *_settle(folder, model)]
            # Through the files, so that a wrong name, order or parameter appears as a difference.
            difference = verify.compare(model.reference_logits, read(folder, model.rows), model.rows)
            verify.refuse_beyond(difference, bound, str(out), "use --dtype float32, or raise --tolerance")
            perplexity = model.held_out_text.perplexities(difference, partial(read, folder))
        summary = ExportResult(
            path=str(out),
            bytes=verify.count_bytes(folder, "model.pth"),
            dtype=dtype,
            merged=model.merged,
            read_by="its layout's arithmetic",
            **vars(verify.build_comparison(difference, bound)),
            **vars(perplexity),
            note="; ".join(notes),
        )
        use = _USE.format(
            dtype=dtype,
            verb="chat" if model.chats else "generate",
            prompt="" if model.chats else ' --prompt "Once upon a time"',
        )
        model_card.write_export(
            folder, run, summary, title=f"torchchat checkpoint, {dtype}", use=use, library="torchchat"
        )
    return summary


class TransformerArgs(TypedDict):
    """The contents of params.json."""

    block_size: int
    max_seq_length: int
    vocab_size: int
    n_layers: int
    n_heads: int
    n_local_heads: int
    dim: int
    hidden_dim: int
    rope_base: float
    rope_scaling: NotRequired[dict[str, float]]
    norm_eps: float
    use_hf_tokenizer: bool
    tie_word_embeddings: bool
    tokenizer_prepend_bos: NotRequired[bool]
    attention_bias: NotRequired[bool]
    feed_forward_bias: NotRequired[bool]


def _build_params(config: PretrainedConfig, source: Path) -> TransformerArgs:
    """Returns torchchat's TransformerArgs for a configuration.

    Raises:
        RunError: blocks that torchchat does not support.
    """
    heads, rope = (
        config.num_attention_heads,
        dict(config.rope_parameters or {}) if hasattr(config, "rope_parameters") else None,
    )
    # The first branch makes sure of the fields that the others read.
    problem = ""
    if rope is None or getattr(config, "hidden_act", None) != "silu" or not hasattr(config, "rms_norm_eps"):
        problem = f"{config.model_type} has other blocks"
    elif (getattr(config, "head_dim", None) or config.hidden_size // heads) * heads != config.hidden_size:
        problem = f"its heads of {config.head_dim} are together not as wide as the model ({config.hidden_size})"
    elif rope.get("rope_type", "default") not in ("default", "llama3"):
        problem = f"its rotary positions are scaled by '{rope['rope_type']}', and torchchat has llama3's alone"
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        problem = "only a part of its heads has rotary positions"
    # A window as long as the context has no effect.
    elif (
        (window := getattr(config, "sliding_window", None))
        and getattr(config, "use_sliding_window", True)
        and window < config.max_position_embeddings
    ):
        problem = f"it sees {window:,} tokens back, and torchchat has no windows"
    if problem:
        raise RunError(f"--to torchchat: {source}: {problem}; {_INSTEAD}")
    assert rope is not None
    params: TransformerArgs = {
        "block_size": config.max_position_embeddings,
        "max_seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        # torchchat's name of the key-value heads.
        "n_local_heads": config.num_key_value_heads,
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "rope_base": rope["rope_theta"],
        "norm_eps": config.rms_norm_eps,
        "use_hf_tokenizer": True,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
    }
    if rope.get("rope_type") == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        params["rope_scaling"] = {key: rope[key] for key in keys}
    return params


def _convert_weights(model: PreTrainedModel, params: TransformerArgs, source: Path) -> dict[str, Tensor]:
    """Returns the weights by torchchat's names; records in `params` which blocks have biases.

    If only some maps of a block have biases, the others get zeros, which changes nothing.
    """
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        # torchchat reuses the embedding.
        if name == "lm_head.weight" and params["tie_word_embeddings"]:
            continue
        # "model.layers.3.self_attn.q_proj.bias" -> part "self_attn.q_proj", kind "bias"
        part, _, kind = name.removeprefix("model.layers.").partition(".")[2].rpartition(".")
        if name in _ENDS:
            weights[_ENDS[name]] = weight
        elif name.startswith("model.layers.") and part in _PARTS:
            weights[f"layers.{name.split('.')[2]}.{_PARTS[part]}.{kind}"] = weight
        else:
            raise RunError(f"--to torchchat: {source}: has {name}, which torchchat does not support; {_INSTEAD}")
    for block, maps in (("attention", ("wq", "wk", "wv", "wo")), ("feed_forward", ("w1", "w2", "w3"))):
        # torchchat has one flag for all biases of a block.
        biased = any(f".{block}." in name and name.endswith(".bias") for name in weights)
        if biased:
            params["attention_bias" if block == "attention" else "feed_forward_bias"] = True
            for layer in range(params["n_layers"]):
                for map_name in maps:
                    weight = weights[f"layers.{layer}.{block}.{map_name}.weight"]
                    weights.setdefault(f"layers.{layer}.{block}.{map_name}.bias", weight.new_zeros(len(weight)))
    for layer in range(params["n_layers"]):
        for kind in ("weight", "bias") if params.get("attention_bias") else ("weight",):
            # wqkv is the queries, keys and values one below the other; values are not rotated, so their order stays.
            q, k, v = (weights.pop(f"layers.{layer}.attention.{map_name}.{kind}") for map_name in ("wq", "wk", "wv"))
            interleaved = [_interleave_pairs(q, params["n_heads"]), _interleave_pairs(k, params["n_local_heads"])]
            weights[f"layers.{layer}.attention.wqkv.{kind}"] = torch.cat([*interleaved, v])
    return {name: weight.contiguous() for name, weight in weights.items()}


def _interleave_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorders rows of a head from (first halves, second halves) to (first, second, first, second, ...)."""
    # (heads, 2, size / 2, ...) -> (heads, size / 2, 2, ...)
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _settle(folder: Path, model: Plain) -> list[str]:
    """Sets the fields of tokenizer_config.json that only torchchat reads.

    These are the token that ends an answer, a BOS token, which must be named even if it is never added to a text, and a
    chat template for plain Jinja.

    Returns:
        Notes on missing features of the tokenizer, and on differences in torchchat.
    """
    file, notes, tokenizer = folder / "tokenizer_config.json", [], model.tokenizer
    settings = json.loads(file.read_text(encoding="utf-8"))
    # torchchat stops at the tokenizer's eos_token only.
    if model.end_of_turn is not None:
        settings["eos_token"] = tokenizer.convert_ids_to_tokens(model.end_of_turn)
    ends = [n for n in model.end_tokens if tokenizer.convert_ids_to_tokens(n) != settings.get("eos_token")]
    if ends:
        notes.append(
            f"torchchat stops at {settings.get('eos_token')!r} alone, and preheat generate also at "
            f"{format_names(map(repr, tokenizer.convert_ids_to_tokens(ends)))}"
        )
    if settings.get("bos_token") is None:
        settings["bos_token"] = settings.get("eos_token")
        notes.append(
            "the tokenizer has no begin-of-text token; tokenizer_config.json names the end token instead, because "
            "torchchat requires one, and prompts do not begin with it"
        )
    settings["chat_template"] = text = (
        convert_to_jinja(load_template(None, tokenizer)) if tokenizer.chat_template else None
    )
    if text is None:
        settings["chat_template"] = _PLAIN
        reason = (
            "its chat template needs more than plain Jinja" if tokenizer.chat_template else "it has no chat template"
        )
        notes.append(f"{reason}, and torchchat requires one; one that only joins the messages is written")
    file.write_text(to_json(settings, indent=2) + "\n", encoding="utf-8")
    return notes


def read(folder: Path, rows: list[Tensor]) -> list[Tensor]:
    """Returns the logits [1, length, vocabulary] of rows of tokens [1, length], in fp32, from the files of a folder."""
    params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
    # weights_only: a pickle may run code when it is loaded.
    weights = {name: w.float() for name, w in torch.load(folder / "model.pth", mmap=True, weights_only=True).items()}
    with torch.no_grad():
        return [_compute_logits(row, weights, params) for row in rows]


def _compute_logits(tokens: Tensor, weights: Mapping[str, Tensor], params: TransformerArgs) -> Tensor:
    width, heads, kv_heads = params["dim"], params["n_heads"], params["n_local_heads"]
    size, length = width // heads, tokens.shape[1]

    def apply_norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (width,), weights[name], params["norm_eps"])

    def apply_linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    # (length, size / 2)
    angles = torch.outer(torch.arange(length).float(), _compute_frequencies(size, params))
    rotations = torch.polar(torch.ones_like(angles), angles)[None, :, None]  # [1, length, 1, size / 2]

    def rotate_pairs(x: Tensor) -> Tensor:
        # Neighbouring dimensions as a complex number, times e^(i angle).
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * rotations).flatten(-2)

    # (1, length, width)
    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        at = f"layers.{layer}"
        # (1, length, (heads + 2 kv_heads) size)
        parts = apply_linear(apply_norm(x, f"{at}.attention_norm.weight"), f"{at}.attention.wqkv")
        q, k, v = (
            p.unflatten(-1, (-1, size)) for p in parts.split([heads * size, kv_heads * size, kv_heads * size], -1)
        )
        # (1, heads or kv_heads, length, size)
        q, k, v = (t.transpose(1, 2) for t in (rotate_pairs(q), rotate_pairs(k), v))
        # Key-value heads serve groups of query heads, in order.
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + apply_linear(attended.transpose(1, 2).flatten(-2), f"{at}.attention.wo")
        y, block = apply_norm(x, f"{at}.ffn_norm.weight"), f"{at}.feed_forward"
        # Gated feed-forward: w2(silu(w1 y) * w3 y)
        x = x + apply_linear(
            functional.silu(apply_linear(y, f"{block}.w1")) * apply_linear(y, f"{block}.w3"), f"{block}.w2"
        )
    head = weights["tok_embeddings.weight" if params["tie_word_embeddings"] else "output.weight"]
    return functional.linear(apply_norm(x, "norm.weight"), head)


def _compute_frequencies(size: int, params: TransformerArgs) -> Tensor:
    """Returns radians per position, [size / 2]; Llama 3.1's scaling slows low frequencies, and blends in between."""
    frequencies = 1.0 / params["rope_base"] ** (torch.arange(0, size, 2).float() / size)
    if (scaling := params.get("rope_scaling")) is None:
        return frequencies
    trained, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    # Turns within the trained context decide: above `high` a frequency stays, below `low` it is divided by the
    # factor.
    smooth = ((trained * frequencies / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
