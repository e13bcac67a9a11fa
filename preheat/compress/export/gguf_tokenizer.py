"""GGUF metadata of a fast tokenizer: tokens, their types, scores or merges, and the pre-tokenizer.

llama.cpp has two kinds of byte-pair encoding. `gpt2` works on bytes spelled in 256 characters: it needs the merges,
and the name of the pre-tokenizer, which is compiled into llama.cpp. `llama` (SentencePiece's) works on characters with
byte fallback: it joins the neighbours whose union has the highest score, so a token's score is minus the rank of its
merge.
Source: the GGUF specification (ggml's docs/gguf.md) and llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from preheat.errors import RunError
from preheat.model_folder import beginning_tokens

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject

__all__ = ["add_vocabulary", "assign_end_tokens", "build_pre_tokenizer", "compute_scores"]

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = "gpt-2"  # the pattern that ByteLevel has built in
_PRE_TOKENIZERS = {
    # (patterns of a tokenizer.json, True if words of the vocabulary are not merged) -> llama.cpp's name
    ((_GPT2,), False): "gpt-2",
    ((r"\p{N}", _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    (_DEEPSEEK3, False): "deepseek-v3",
}
_SPACE = "▁"


def add_vocabulary(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, rows: int, ends: list[int], turn: int | None = None
) -> None:
    """Adds a tokenizer's metadata to a `gguf.GGUFWriter`.

    Args:
        tokenizer: transformers' fast tokenizer.
        rows: number of rows of the model's embedding; rows without a token are written as unused.
        ends: tokens that end a text.
        turn: the token that ends an answer, if the model was trained on chats.

    Raises:
        RunError: a tokenizer that llama.cpp does not support.
    """
    from gguf import GGUFValueType, TokenType

    serialized = json.loads(tokenizer.backend_tokenizer.to_str())
    model = serialized["model"]
    # llama.cpp's other models (Unigram, WordPiece) need other metadata.
    if model["type"] != "BPE":
        raise RunError(
            f"--to gguf: its tokenizer is of kind {model['type']}, and only BPE is supported; use --to hf and "
            "llama.cpp's converter"
        )
    # Embeddings are often padded to a multiple, so some rows have no token.
    tokens, kinds = [f"[PAD{n}]" for n in range(rows)], [TokenType.UNUSED] * rows
    for token, n in model["vocab"].items():
        tokens[n], kinds[n] = token, TokenType.NORMAL
    byte_fallback = model["byte_fallback"]
    if byte_fallback:
        for n, token in enumerate(tokens):
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                kinds[n] = TokenType.BYTE
    # After the vocabulary, because added tokens may be part of it.
    for added in serialized["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    # tokenizers writes a merge as a string or as a pair, depending on its version.
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    # `add_token_merges` would skip an empty list.
    lines = [" ".join(merge) for merge in merges]
    # Gemma 4's characters are joined by merges, in llama.cpp as well.
    if byte_fallback and writer.arch == "gemma4":
        writer.add_tokenizer_model("gemma4")
        writer.add_key_value("tokenizer.ggml.merges", lines, GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
        writer.add_add_space_prefix(_has_prefix_space(serialized))
    # SentencePiece's BPE, as of Llama 2 and Mistral.
    elif byte_fallback:
        if tokenizer.unk_token_id is not None and model["unk_token"] == tokenizer.unk_token:
            kinds[tokenizer.unk_token_id] = TokenType.UNKNOWN
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(compute_scores(tokens, merges, [kind == TokenType.NORMAL for kind in kinds]))
        writer.add_add_space_prefix(_has_prefix_space(serialized))
    # Byte-level BPE, as of GPT-2, Llama 3 and Qwen.
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_find_rule(serialized))
        writer.add_key_value("tokenizer.ggml.merges", lines, GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_marks(writer, tokenizer, ends, turn)


def assign_end_tokens(eos: int, ends: list[int], turn: int | None) -> tuple[int | None, int | None, list[int]]:
    """Assigns the end tokens other than `eos`: end of turn, end of message, and those without a GGUF key.

    llama.cpp stops at `eos` and the first two.

    Example:
        >>> assign_end_tokens(7, [7, 0, 5, 6], turn=7), assign_end_tokens(0, [0], None)
        ((7, 0, [5, 6]), (None, None, []))
    """
    others = [n for n in ends if n not in (eos, turn)]
    # Without chats the next end token takes the field, so that llama.cpp stops there too.
    eot = turn if turn is not None else others.pop(0) if others else None
    return eot, others[0] if others else None, others[1:]


def _add_marks(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, ends: list[int], turn: int | None) -> None:
    """Adds the special tokens, the flags for adding BOS and EOS, and the chat template."""
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    eot, eom, _ = assign_end_tokens(tokenizer.eos_token_id, ends, turn)
    if eot is not None:
        writer.add_eot_token_id(eot)
    if eom is not None:
        writer.add_eom_token_id(eom)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    # The tokenizer's behaviour decides: flags in its files may be ignored.
    encoded = tokenizer.encode("a")
    writer.add_add_bos_token(bool(beginning_tokens(tokenizer)))
    writer.add_add_eos_token(encoded[-1] == tokenizer.eos_token_id)
    if tokenizer.chat_template:
        template = tokenizer.chat_template
        # Several named templates: gguf expects a list.
        if isinstance(template, dict):
            template = [{"name": name, "template": text} for name, text in template.items()]
        writer.add_chat_template(template)


def compute_scores(tokens: list[str], merges: list[list[str]], normal: list[bool]) -> list[float]:
    """Returns minus the rank of the first merge of each normal token; those without a merge rank last, others get 0.

    Example:
        >>> compute_scores(["<s>", "a", "b", "ab"], [["a", "b"]], [False, True, True, True])
        [0.0, -2.0, -3.0, 0.0]
    """
    ranks: dict[str, int] = {}
    for rank, (a, b) in enumerate(merges):
        # Several merges may give one token; the first is the one that BPE applies.
        ranks.setdefault(a + b, rank)
    # + 0.0 turns -0.0 into 0.0.
    return [-float(ranks.get(token, len(merges) + n)) + 0.0 if normal[n] else 0.0 for n, token in enumerate(tokens)]


def _list_steps(step: JsonObject | None, inner: str) -> list[JsonObject]:
    """Returns the steps of a normalizer or pre-tokenizer; sequences are flattened."""
    if step is None:
        return []
    return [part for one in step[inner] for part in _list_steps(one, inner)] if step["type"] == "Sequence" else [step]


def build_pre_tokenizer(name: str) -> PreTokenizer:
    """Builds the pre-tokenizer that llama.cpp has under a name, of those that `add_vocabulary` writes.

    Example:
        >>> [word for word, _ in build_pre_tokenizer("smollm").pre_tokenize_str("a 12")]
        ['a', 'Ġ', '1', '2']
    """
    from tokenizers import Regex, pre_tokenizers

    patterns = next(patterns for (patterns, _), known in _PRE_TOKENIZERS.items() if known == name)
    steps: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns if pattern != _GPT2
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_GPT2 in patterns))
    return pre_tokenizers.Sequence(steps)


def _has_prefix_space(serialized: JsonObject) -> bool:
    """Returns True if the tokenizer adds a space before the text."""
    parts = _list_steps(serialized["normalizer"], "normalizers") + _list_steps(
        serialized["pre_tokenizer"], "pretokenizers"
    )
    # Metaspace, or a normalizer that prepends or inserts the character.
    spaces = [
        part for part in parts if part["type"] == "Metaspace" or _SPACE in (part.get("content"), part.get("prepend"))
    ]
    if not spaces:
        raise RunError(
            "--to gguf: its tokenizer falls back on bytes but does not write spaces as ▁, which llama.cpp "
            "has no name for"
        )
    return any(
        part["type"] == "Prepend" or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in spaces
    )


def _find_rule(serialized: JsonObject) -> str:
    """Returns llama.cpp's name of a byte-level tokenizer's pre-tokenizer."""
    parts = _list_steps(serialized["pre_tokenizer"], "pretokenizers")
    patterns = tuple(pattern for part in parts if (pattern := _find_pattern(part)) is not None)
    ignores = bool(serialized["model"].get("ignore_merges"))
    # The merges of most vocabularies also build its whole words; the tokens of texts are compared later.
    name = _PRE_TOKENIZERS.get((patterns, ignores)) or _PRE_TOKENIZERS.get((patterns, not ignores))
    if name is None or [part["type"] for part in parts].count("ByteLevel") != 1:
        raise RunError(
            "--to gguf: how its tokenizer splits text into words "
            f"({', '.join(part['type'] for part in parts) or 'nothing'}) is none of "
            f"{', '.join(sorted(_PRE_TOKENIZERS.values()))}, which are supported; use --to hf and llama.cpp's "
            "converter"
        )
    return name


def _find_pattern(part: JsonObject) -> str | None:
    """Returns the pattern by which a step splits text: '' if llama.cpp has none like it, None if it does not split."""
    if part["type"] == "ByteLevel":
        # llama.cpp adds no space before a text.
        return "" if part["add_prefix_space"] else _GPT2 if part["use_regex"] else None
    if part["type"] == "Digits" and part["individual_digits"]:
        return r"\p{N}"
    if part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
        return str(part["pattern"].get("Regex", ""))
    return ""
