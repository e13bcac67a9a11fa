"""Model card of a compressed model: method, source, data and measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.compress.front_matter import front_matter

if TYPE_CHECKING:
    from preheat.compress.calibration_text import Texts

__all__ = ["write"]


def write(
    row: Mapping[str, Any], *, source: str, texts: Texts, reads: bool, quantized: bool, said: Sequence[str] = ()
) -> str:
    """Returns a card in Markdown.

    Args:
        row: figures of a variant, from `compress.compress`.
        source: the model that was compressed.
        texts: calibration and held-out rows.
        reads: True if the method used the calibration rows.
        quantized: True if the weights are in a format that only preheat reads.
        said: further notes.
    """
    from importlib.metadata import version

    before, after = row["before"], row["after"]
    low, high = after["perplexity_interval"]
    between = f" (95 % of bootstrap resamples: {low:.4f} to {high:.4f})" if low is not None else ""
    settings = ", ".join(f"{key} {value!r}" for key, value in row["settings"].items()) or "none"
    rows = texts.calibration
    calibration = f"{len(rows)} rows of {rows[0].shape[1]} tokens" if reads else "not looked at by this method"
    ratio = after["decode_tokens_per_second"] / before["decode_tokens_per_second"]
    library = "preheat" if quantized else "transformers"
    notes = "".join(f"Note: {note}.\n\n" for note in said)
    front = front_matter(source, library=library, pipeline="text-generation", tags=("compressed", row["method"]))
    return f"""{front.yaml}

# {Path(source).name}, compressed by {row["method"]}

What: {row["what"]}.{" " + row["detail"] + "." if row["detail"] else ""}

From: `{Path(source).name}`, adapters merged, in fp32. Settings: {settings}.

{notes}Calibration: {calibration}. Data: {texts.description}.

| | before | after |
|---|---|---|
| perplexity on held-out text | {before["perplexity"]:.4f} | {after["perplexity"]:.4f} ({row["perplexity_rise"]:+.2%}) |
| loss, nats a token | {before["loss"]:.4f} | {after["loss"]:.4f} |
| weights | {before["bytes"]:,} bytes in bf16 | {after["bytes"]:,} bytes |
| decoding, one row, tokens/s | {before["decode_tokens_per_second"]:.1f} in bf16 | \
{after["decode_tokens_per_second"]:.1f} ({ratio:.2f}x) |
| first token after {after["prompt_tokens"]} tokens, ms | {1e3 * before["first_token_seconds"]:.1f} in bf16 | \
{1e3 * after["first_token_seconds"]:.1f} |

Measured: perplexity over {after["tokens"]:,} held-out tokens in {after["rows"]} rows{between}, before in the \
precision that it was trained in.
Times are medians of turns taken alternately with the same model in bf16, by transformers' own forward with a KV \
cache, on the machine that
wrote this. Logits differ by at most {row["max_logit_difference"]:.3g} (largest {row["largest_logit"]:.3g}), and the \
likeliest token is the
same at {row["top_1_agreement"]:.1%} of the places. What was written was opened again and gave the very logits that \
it gave in memory.

Use: `preheat generate FOLDER --prompt "…"`, `preheat eval FOLDER --data TEXT`. Written by preheat \
{version("preheat")}. {front.left_out}
"""
