"""Rows as users' files hold them when something went wrong: about forty by name, and any number drawn by a seed."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

GOOD: list[dict[str, Any]] = [{"instruction": f"Say {n}", "output": f"It is {n}."} for n in range(12)]
TALK: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(12)
]


def lines(rows: list[dict[str, Any]], *bad: str | bytes) -> bytes:
    """JSON lines: the good rows, then the bad ones as they are."""
    made = [json.dumps(row).encode() for row in rows]
    return (
        b"\n".join([*made, *(b if isinstance(b, bytes) else b.encode("utf-8", "surrogatepass") for b in bad)]) + b"\n"
    )


def turn(role: Any, content: Any) -> str:
    return json.dumps({"messages": [{"role": role, "content": content}, {"role": "assistant", "content": "a"}]})


DEEP = '{"a":' * 300 + "1" + "}" * 300
OK = None
"""Of a file that is read."""

VARIANTS: dict[str, tuple[str, bytes, str | None]] = {
    "5,000 digits": ("a.jsonl", lines(GOOD, '{"instruction": "a", "output": ' + "9" * 5000 + "}"), r"a\.jsonl:13: .*digits"),
    "5,000 digits in .json": ("a.json", b'[{"text": ' + b"9" * 5000 + b"}]", r"a\.json: .*digits"),
    "many fields": ("a.jsonl", lines(GOOD, json.dumps({f"f{n}": 1 for n in range(20000)})), r"a\.jsonl:13: no field"),
    "many fields first": ("a.jsonl", lines([], json.dumps({f"f{n}": 1 for n in range(20000)})), r"a\.jsonl:1: no field"),
    "a long name": ("a.jsonl", lines([], json.dumps({"x" * 200_000: 1})), r"a\.jsonl:1: no field"),
    "controls in a name": ("a.jsonl", lines(GOOD, '{"\\u001b[31mred\\u0007": 1}'), r"a\.jsonl:13: no field"),
    "half a surrogate in a name": ("a.jsonl", lines(GOOD, '{"\\ud800": 1}'), r"a\.jsonl:13: no field"),
    "half a surrogate": ("a.jsonl", lines(GOOD, '{"instruction": "\\ud800", "output": "b"}'), r"a\.jsonl:13: .*surrogate"),
    "a list": ("a.jsonl", lines(GOOD, "[1, 2]"), r"a\.jsonl:13: is a list"),
    "null": ("a.jsonl", lines(GOOD, "null"), r"a\.jsonl:13: is null"),
    "NaN": ("a.jsonl", lines(GOOD, '{"instruction": "a", "output": NaN}'), r"a\.jsonl:13: field 'output' is a number"),
    "Infinity": ("a.jsonl", lines(GOOD, '{"instruction": -Infinity, "output": "b"}'), r"a\.jsonl:13: .* is a number"),
    "NUL in JSON": ("a.jsonl", lines(GOOD, '{"instruction": "\x00", "output": "b"}'), r"a\.jsonl:13: byte .* is 0"),
    "an escaped NUL": ("a.jsonl", lines(GOOD, '{"instruction": "a\\u0000b", "output": "b"}'), OK),
    "a BOM": ("a.jsonl", b"\xef\xbb\xbf" + lines(GOOD), OK),
    "UTF-16": ("a.jsonl", lines(GOOD).decode().encode("utf-16"), r"a\.jsonl:1: is text in UTF-16"),
    "Latin-1": ("a.jsonl", lines(GOOD, '{"instruction": "é", "output": "b"}'.encode("latin-1")), r"a\.jsonl:13: byte .* UTF-8"),
    "gzip": ("a.jsonl", gzip.compress(lines(GOOD)), r"a\.jsonl:1: is a gzip file"),
    "Parquet by another name": ("a.jsonl", b"PAR1" + bytes(64), r"a\.jsonl:1: is a Parquet file"),
    "nested deeply": ("a.jsonl", lines(GOOD, DEEP), r"a\.jsonl:13: JSON nested too deeply"),
    "nested very deeply": ("a.jsonl", lines(GOOD, "[" * 100_000), r"a\.jsonl:13: JSON nested too deeply"),
    "named twice": ("a.jsonl", lines(GOOD, '{"instruction": "a", "output": "b", "output": "c"}'), r"13: names the field 'output' twice"),
    "cut": ("a.jsonl", lines(GOOD)[:-9], r"a\.jsonl:12: not JSON"),
    "two objects": ("a.jsonl", lines(GOOD, '{"instruction": "a", "output": "b"} {}'), r"a\.jsonl:13: not JSON: Extra data"),
    "single quotes": ("a.jsonl", lines(GOOD, "{'instruction': 'a'}"), r"a\.jsonl:13: not JSON"),
    "empty text": ("a.jsonl", lines(GOOD, '{"instruction": "a", "output": " "}'), r"a\.jsonl:13: field 'output' is empty"),
    "a history of numbers": ("a.jsonl", lines(GOOD, '{"instruction": "a", "output": "b", "history": 5}'), OK),
    "an unknown role": ("a.jsonl", lines(TALK, turn("robot", "a")), r"a\.jsonl:13: .*has the role 'robot'"),
    "a role that is a list": ("a.jsonl", lines(TALK, turn([1], "a")), r"a\.jsonl:13: .*it is a list, not text"),
    "a role of 5 kB": ("a.jsonl", lines(TALK, turn("r" * 5000, "a")), r"a\.jsonl:13: .*has the role"),
    "content that is an object": ("a.jsonl", lines(TALK, turn("user", {"a": 1})), r"a\.jsonl:13: .*is an object, not text"),
    "content of numbers": ("a.jsonl", lines(TALK, turn("user", [1, 2])), r"a\.jsonl:13: .*a part that is not text"),
    "messages that are text": ("a.jsonl", lines(TALK, '{"messages": "hello"}'), r"a\.jsonl:13: .*is text, not a list of messages"),
    "no messages": ("a.jsonl", lines(TALK, '{"messages": []}'), r"a\.jsonl:13: .*is an empty list"),
    "a tool call that is cut": (
        "a.jsonl",
        lines(TALK, json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]})),
        r"a\.jsonl:13: .*calls a tool with arguments that are not JSON",
    ),
    "an empty .json": ("a.json", b"  \n", r"a\.json|the source is empty|no document"),
    "a .json of a number": ("a.json", b"3", r"a\.json: holds a number"),
    "a CSV with a row too many": ("a.csv", b"instruction,output\na,b\na,b,c\n", r"a\.csv:3: has 3 fields"),
    "a CSV that is cut": ("a.csv", b'instruction,output\na,"b\n', r"a\.csv:\d: not CSV"),
    "a CSV that names twice": ("a.csv", b"text,text\na,b\n", r"a\.csv:1: the first line must name each field once"),
    "a Parquet file that is cut": ("a.parquet", b"PAR1" + bytes(100), r"a\.parquet: not a readable Parquet file"),
    "text that is binary": ("a.txt", bytes(range(256)) * 20, r"a\.txt:1: byte 0 is 0"),
    "nothing": ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
    "blank lines": ("a.jsonl", b"\n \n\n", r"no document left|is empty"),
}  # fmt: skip


def drawn(seed: int) -> tuple[str, bytes]:
    """A file whose good rows were changed in one to three ways: another type, nesting, size, name, or bytes."""
    draw = random.Random(seed)
    rows: list[Any] = [json.loads(json.dumps(row)) for row in draw.choice((GOOD, TALK))]
    values: list[Any] = [
        *(
            None,
            True,
            3,
            -1.5,
            float("nan"),
            float("inf"),
            "",
            " ",
            "\x00",
            "\ud800",
            "\x1b[31m\x07",
            "[/b]",
            "x" * 30_000,
        ),
        *([], {}, [[]], [1, "a"], {"role": "user"}, 10**400, "</s>", "<|im_end|>", "\u202e", "é" * 50, ["a"] * 500),
    ]
    for _ in range(draw.randint(1, 3)):
        row = draw.randrange(len(rows))
        kind = draw.randrange(7)
        if not isinstance(rows[row], dict) or kind == 0:
            rows[row] = draw.choice(values)
            continue
        names = list(rows[row]) or ["a"]
        name = draw.choice(names)
        if kind == 1:
            rows[row][name] = draw.choice(values)
        elif kind == 2:
            rows[row].pop(name, None)
        elif kind == 3:
            rows[row][draw.choice(("input", "history", "system", "tools", "images", "label", "\x1b", "n" * 9000))] = (
                draw.choice(values)
            )
        elif kind == 4:
            inner: Any = draw.choice(values)
            for _ in range(draw.choice((3, 90, 400))):
                inner = [inner] if draw.random() < 0.5 else {"a": inner}
            rows[row][name] = inner
        elif kind == 5 and isinstance(rows[row].get("messages"), list) and rows[row]["messages"]:
            message = draw.choice(rows[row]["messages"])
            if isinstance(message, dict):
                message[draw.choice(("role", "content", "weight", "tool_calls", "images", "name"))] = draw.choice(
                    values
                )
        else:
            rows[row] |= {f"f{n}": n for n in range(draw.choice((1, 3000)))}
    content = b"\n".join(json.dumps(row).encode("utf-8", "surrogatepass") for row in rows) + b"\n"
    if draw.random() < 0.5:
        at = draw.randrange(len(content))
        change = draw.choice((b"", b"\x00", b"\xff", b'"', b"\n", b"\\", b"{", b"\xef\xbb\xbf", b"9" * 5000))
        content = content[:at] + change + content[at + draw.choice((0, 1, 40)) :]
    if draw.random() < 0.1:
        content = draw.choice(
            (gzip.compress(content), content[: len(content) // 2], content.decode(errors="ignore").encode("utf-16"))
        )
    return draw.choice(("a.jsonl",) * 8 + ("a.json", "a.csv", "a.txt", "a.parquet")), content
