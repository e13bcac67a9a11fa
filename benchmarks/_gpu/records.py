"""Results of `gpu_check.py`: read from earlier runs, put into the order of the next run, and shown as a table.

A result: {case, result: ok, wrong, failed, skipped, cut off or left out, seconds, why, figures, at: UTC time, code: digest of the
code that ran, machine}. Files of earlier releases lack the last three.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _gpu.case import Case

__all__ = ["compute_digest", "order_cases", "find_newest", "read", "summarize_results", "render_table"]

RAN = ("ok", "wrong", "failed")


def compute_digest(sources: Iterable[Path]) -> str:
    """Returns a digest of Python files and of all those in folders."""
    digest = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the results in a file, without a last line that was cut off; none if there is no such file."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def find_newest(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns each case's newest result; cases that were not reached keep an older one."""
    kept: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=_format_time):
        if row["result"] not in ("left out", "cut off") or kept.get(row["case"], row)["result"] in (
            "left out",
            "cut off",
        ):
            kept[row["case"]] = row
    return kept


def order_cases(cases: Sequence[Case], earlier: Iterable[dict[str, Any]], code: str) -> list[Case]:
    """Sorts cases: those that never ran, then those whose code changed or that were skipped, then the others; oldest first."""
    results = find_newest(earlier)

    def rank_case(case: Case) -> tuple[int, str]:
        row = results.get(case.name)
        if row is None or row["result"] in ("left out", "cut off"):
            return 0, ""
        return (2 if row["result"] in RAN and row.get("code") == code else 1), _format_time(row)

    return sorted(cases, key=rank_case)


def summarize_results(rows: Sequence[dict[str, Any]]) -> str:
    """Returns how many cases ended how, in a line."""
    results = [row["result"] for row in rows]
    counts = ", ".join(f"{results.count(result)} {result}" for result in dict.fromkeys(results))
    return f"{len(rows)} cases: {counts or 'none ended'}."


def render_table(part: str, rows: Sequence[dict[str, Any]], command: str) -> str:
    """Returns the results as Markdown, with a table for each machine."""
    lines = []
    for machine, group in itertools.groupby(sorted(rows, key=_format_machine), key=_format_machine):
        results = list(group)
        lines += [f"# {part} on {machine}", "", summarize_results(results), "", f"    {command}", ""]
        lines += ["| case | result | s | figures |", "|---|---|---|---|"]
        for row in results:
            figures = ", ".join(f"{key} {_shorten(value)}" for key, value in row["figures"].items())
            text = "; ".join(filter(None, [row["why"], figures])).replace("|", "\\|")
            lines.append(f"| {row['case']} | {row['result']} | {row['seconds']:.1f} | {text} |")
        lines.append("")
    return "\n".join(lines)


def _format_time(row: dict[str, Any]) -> str:
    return str(row.get("at", ""))


def _format_machine(row: dict[str, Any]) -> str:
    return row.get("machine") or "a machine that was not recorded"


def _shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
