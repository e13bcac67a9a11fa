"""Checks for silent faults of the data. Each has a name, counts its rows, and blocks training or warns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from preheat.errors import DataError, RecipeError, suggest_nearest
from preheat.sanitize import shorten

__all__ = ["CHECKS", "Check", "Findings", "Verdict", "judge", "merge_findings", "refuse_unknown"]

SHOWN = 5
"""Maximum number of rows that a finding names."""


LONGEST = 420
"""Maximum length of a finding's message in characters."""


class Check(NamedTuple):
    """A check of the data.

    Attributes:
        what: description of the fault.
        fix: advice for the user.
        above: fraction of rows above which the check blocks; below it warns.
        drops: with a warning only, the rows are left out, since they cannot be trained on.
    """

    what: str
    fix: str
    above: float = 0.0
    drops: bool = False


CHECKS = {
    "fields": Check(
        "fields that are missing, empty or of another kind than the layout says", "fix the rows", drops=True
    ),
    "roles": Check(
        "conversations whose roles do not alternate, begin wrongly, or end without an answer", "fix the conversations"
    ),
    "encoding": Check(
        "text in a broken encoding: half surrogates, replacement characters, UTF-8 read as Latin-1",
        "decode the source with the right encoding",
        0.01,
    ),
    "special_tokens": Check(
        "special tokens of the tokenizer within the text, which end turns too early",
        "remove them from the text",
        0.01,
    ),
    "equal_answers": Check("a preferred answer that equals the rejected one", "remove the pairs", drops=True),
    "template": Check(
        "rows that the chat template does not render, or whose answers it leaves out",
        "use another data.template",
        drops=True,
    ),
    "template_end": Check(
        "a chat template without a special token at the end of the assistant's turn, so that the model "
        "never learns to stop",
        "use data.template: alpaca, which ends turns with the tokenizer's end of text, or (without an "
        "adapter) give it the template's tokens by model.add_tokens; if the next role's mark ends turns (GLM), "
        "add the model's generation_config.json, which names it",
    ),
    "open_turn": Check(
        "a chat template that always adds a generation prompt, so that each row ends in an open turn",
        "write the generation prompt under {% if add_generation_prompt %} in the template, or use another "
        "data.template",
    ),
    # A fraction of 1 never blocks: the check only warns.
    "generation_prompt": Check(
        "the tokens before an answer differ between training and generation",
        "make the template's generation prompt the beginning of a rendered answer",
        1.0,
    ),
    # As above: the check only warns.
    "earlier_turns": Check(
        "trained turns of which a longer conversation leaves out a part that the model generates, such as reasoning",
        "set data.train_on: last, or mark the assistant's text in a template that keeps it",
        1.0,
    ),
    "untrained": Check("rows without a single token to train on", "remove them, or change data.train_on", drops=True),
    "images": Check(
        "images that are missing, corrupt or of a size that is not read; more images than image placeholders, or fewer",
        "fix the rows",
        drops=True,
    ),
    "masked": Check("no token of all rows is trained on", "change data.train_on or data.template"),
    "end_token": Check(
        "no token that ends a text or turn is ever trained on, so that the model never learns to stop",
        "change data.template",
    ),
    "pad_is_end": Check(
        "padding and end of text are one token, and it is never trained on",
        "give the tokenizer a padding token of its own",
    ),
    "unknown_tokens": Check(
        "text that the tokenizer has no tokens for", "use a tokenizer of the text's language, or of bytes", 0.01
    ),
    "embedding": Check("tokens beyond the model's embedding", "use the model's own tokenizer"),
    "truncated": Check(
        "examples longer than batch.seq_len, whose answers are cut or have no room",
        "raise batch.seq_len or shorten the rows",
        0.10,
    ),
    "validation": Check(
        "validation rows that are in the training data too", "remove them from one of the two", drops=True
    ),
    "near_validation": Check(
        "validation rows that equal training rows except for case, punctuation and spaces",
        "remove them from one of the two",
        0.05,
    ),
}


def refuse_unknown(settings: Mapping[str, str]) -> None:
    """Raises RecipeError for settings of unknown checks."""
    for name in settings:
        if name not in CHECKS:
            raise RecipeError(f"data.preflight.{name}: unknown check; {suggest_nearest(name, list(CHECKS))}")
    # An index beyond the embedding is an error on a CPU, and on a GPU an assertion that breaks its context.
    if settings.get("embedding") == "warn":
        raise RecipeError("data.preflight.embedding: cannot be a warning: the step that reads such a token would fail")


class Finding(TypedDict):
    """How often a check failed, of how many (None: of all rows read), and the first [where, message] pairs."""

    count: int
    of: int | None
    rows: list[list[str]]


@dataclass
class Findings:
    """Findings of the checks, by check."""

    by_check: dict[str, Finding] = field(default_factory=dict)

    def add(self, check: str, where: str, message: str, count: int = 1, of: int | None = None) -> None:
        """Adds a finding. `of` is the total that `count` refers to, by default `judge`'s number of rows."""
        assert check in CHECKS, check
        message = shorten(message, LONGEST)  # it may quote names and values of the row
        entry = self.by_check.setdefault(check, {"count": 0, "of": of, "rows": []})
        entry["count"] += count
        # Only samples are kept: a corpus may have millions of such rows, and findings are stored in the journal.
        if len(entry["rows"]) < SHOWN:
            entry["rows"].append([where, message])


def merge_findings(one: Mapping[str, Finding], other: Mapping[str, Finding]) -> dict[str, Finding]:
    """Merges two sets of findings about the same rows: counts add up, and at most `SHOWN` samples stay per check."""
    # Copies: both arguments may be part of the journal.
    total = {name: entry.copy() for name, entry in one.items()}
    for name, entry in other.items():
        if name in total:
            rows = [*total[name]["rows"], *entry["rows"]][:SHOWN]
            total[name] = {"count": total[name]["count"] + entry["count"], "of": entry["of"], "rows": rows}
        else:
            total[name] = entry.copy()
    return total


class Verdict(NamedTuple):
    """Messages of findings that block training, and of those that only warn."""

    blocked: list[str]
    warnings: list[str]

    def refuse(self) -> None:
        """Raises DataError with one line per blocking finding, if there is one."""
        if self.blocked:
            raise DataError("\n".join(self.blocked))


def judge(found: Mapping[str, Finding], settings: Mapping[str, str], rows: int) -> Verdict:
    """Divides findings into errors and warnings by a recipe's `data.preflight`.

    Args:
        found: `Findings.by_check`.
        settings: check -> block or warn.
        rows: number of rows read.

    Example:
        >>> findings = Findings()
        >>> findings.add("equal_answers", "a.jsonl:3", "'chosen' and 'rejected' are equal")
        >>> judge(findings.by_check, {}, rows=20).blocked[0][:56]
        "a.jsonl:3: 'chosen' and 'rejected' are equal (check equa"
    """
    blocked, warned = [], []
    for name in (n for n in CHECKS if n in found):
        check, entry = CHECKS[name], found[name]
        if name == "template_end" and (found["template"]["count"] if "template" in found else 0) >= rows:
            continue  # a template that renders no row also ends no turn: report one fault
        # Findings of rows are counted against all rows that were read.
        count, of = entry["count"], entry["of"] or rows
        # Without a tolerated fraction a single row blocks.
        below = count <= check.above * of if check.above else False
        setting = settings.get(name, "block")
        line = _format_finding(name, check, entry["rows"], count, of)
        if below or setting == "warn":
            left = "; such rows are left out" if check.drops else ""
            warned.append(f"{line}{left}")
        else:
            lets = "leaves such rows out" if check.drops else "lets it pass"
            blocked.append(f"{line}; {check.fix}, or data.preflight.{name}: warn {lets}")
    return Verdict(blocked, warned)


def _format_finding(name: str, check: Check, rows: Sequence[Sequence[str]], count: int, of: int) -> str:
    (where, message), *others = rows
    also = f", also {', '.join(_shorten_location(w, where) for w, _ in others)}" if others else ""
    more = " ..." if count > len(rows) and others else ""
    share = f"{count:,} of {of:,}" if of > 1 or count > 1 else ""
    inside = "; ".join(part for part in (f"check {name}", share + also + more) if part)
    return f"{where}: {message} ({inside})"


def _shorten_location(where: str, first: str) -> str:
    """Returns a location without its file if that is the file of `first`."""
    # Locations are `FILE: row N` or `FILE:LINE`.
    for mark in (": row ", ":"):
        file, separator, row = where.rpartition(mark)
        if separator and first.startswith(file + mark):
            return row
    return where
