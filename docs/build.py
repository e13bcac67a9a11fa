"""Builds the site (`make docs`) from docs/pages, notebooks, the registry, the recipe schema and benchmarks/results."""

import ast
import base64
import collections.abc
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from preheat.core import Technique, plan, registry, run_records, slots, step_profile
from preheat.core.json_types import INLINE, OMITTED
from preheat.core.schema import Clean
from preheat.models.presets import PRESETS, needs
from preheat.recipe import Recipe, build_json_schema, field_docs
from preheat.run import layout

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BUILD = ROOT / "build" / "docs"
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = DOCS / "figures"
STORED_CHEAT_SHEET = DOCS / "cheat_sheet.md"


def table_row(*cells: object) -> str:
    """A row of a table; a line between words would begin a further cell, which the table does not show."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def settings(cls: type) -> list[str]:
    """A table of a dataclass's fields: default and text."""
    docs = field_docs(cls)
    rows = []
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        rows.append(table_row(f"`{field.name}`", default, " ".join(docs.get(field.name, "").split())))
    return ["| key | default | |", "|---|---|---|", *rows] if rows else ["It has no settings."]


def parts(cls: type[Technique]) -> dict[str, str]:
    """The module's docstring: its title, and what stands behind What, Helps, Hurts and Source."""
    title, _, body = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").partition("\n")
    pieces = re.split(r"(?:^|(?<=\s))(What|Helps|Hurts|Source): ", " ".join(body.split()))
    return {"title": title, **dict(zip(pieces[1::2], map(str.strip, pieces[2::2]), strict=True))}


def functions(cls: type[Technique]) -> list[str]:
    """The plain functions of a technique's module, as they stand in it."""
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
            head = f"def {node.name}({ast.unparse(node.args)})" + (
                f" -> {ast.unparse(node.returns)}" if node.returns else ""
            )
            lines += [
                f"### {node.name}",
                "",
                "```python",
                head,
                "```",
                "",
                *_docstring(ast.get_docstring(node) or ""),
                "",
            ]
    return lines


_SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):")
_ENTRY = re.compile(r" {4}([\w.*]+(?:, [\w.*]+)*):( .*)?")
"""`name: text` or `a, b: text` in a section that lists names; deeper lines continue it."""


def _docstring(text: str) -> list[str]:
    """A Google-style docstring as Markdown: its sections as bold words, its example as code, its names as a list."""
    out: list[str] = []
    section = ""
    for line in inspect.cleandoc(text).splitlines():
        header = _SECTION.fullmatch(line)
        # A line without indentation ends a section.
        if header or (line and not line.startswith(" ")):
            out += ["```", ""] if section == "Example" else []
            section = header[1] if header else ""
        if header:
            out += ["", f"**{section}**", "", *(["```pycon"] if section == "Example" else [])]
        elif section == "Example":
            out.append(line[4:])
        # What a function returns is a sentence, which may have a colon.
        elif section in ("Args", "Attributes", "Raises") and (entry := _ENTRY.fullmatch(line)):
            out.append(f"- `{entry[1]}`:{entry[2] or ''}")
        else:
            out.append(line.strip() if section else line)
    return [*out, "```"] if section == "Example" else out


def ablations() -> list[dict[str, Any]]:
    """The committed results of `preheat bench`."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("ablation-*.json"))]


def measured(name: str) -> list[tuple[str, str]]:
    """(what it gave, where) from every committed ablation that this technique is part of."""
    found = []
    for bench in ablations():
        row = next((r for r in bench["rows"] if r["name"] in (f"only {name}", name) and not r["failed"]), None)
        plain = next((r for r in bench["rows"] if r["name"] == "plain" and not r["failed"]), None)
        if row and plain:
            low, high = row["ratio_spread"]
            memory = row["peak_gib"] / plain["peak_gib"]
            gave = f"{row['ratio']:.2f} x the plain speed ({low:.2f} to {high:.2f}), {memory:.0%} of its memory"
            found.append(
                (gave, f"`{bench['name']}`, {bench['machine']['name']}, {bench['machine']['threads']} threads")
            )
    return found


def shipped() -> dict[str, type[Technique]]:
    """The techniques that have a file of their own; the engine registers others when it is used."""
    return {name: cls for name, cls in registry().items() if cls.__module__.startswith("preheat.techniques.")}


def technique_page(name: str, cls: type[Technique]) -> str:
    about = parts(cls)
    facts = f"Stage {cls.stage.name}; numerics {cls.numerics}"
    for word, values in (
        ("owns", cls.owns),
        ("provides", cls.provides),
        ("needs", cls.needs),
        ("conflicts with", cls.conflicts),
    ):
        if values:
            facts += f"; {word} " + ", ".join(f"`{value}`" for value in sorted(map(str, values)))
    lines = [f"# {name}", "", f"*{about['title']}*", ""]
    for word in ("What", "Helps", "Hurts", "Source"):
        lines += [f"**{word}.** {about[word]}", ""]
    lines += [
        facts + ".",
        "",
        "## In a recipe",
        "",
        "```yaml",
        "techniques:",
        f"  {name}: {{}}",
        "```",
        "",
        *settings(cls),
        "",
    ]
    gave = measured(name)
    if gave:
        lines += [
            "## Measured",
            "",
            "| alone, compared with the plain recipe | measured on |",
            "|---|---|",
            *(table_row(a, b) for a, b in gave),
            "",
        ]
    # Tables by hand, with their commands.
    figures = FIGURES / f"{name}.md"
    if figures.exists():
        lines += [figures.read_text(encoding="utf-8"), ""]
    alone = functions(cls)
    if alone:
        lines += ["## In your own loop", "", f"`from preheat.techniques.{name} import ...`", "", *alone]
    return "\n".join(lines)


def stored_cheat_sheet() -> str:
    """The cheat sheet for a code host, which shows docs/cheat_sheet.md: links lead to the techniques' modules."""
    note = "Generated by `make docs` from the docstrings of the techniques.\n\n"
    text = cheat_sheet().partition("# Techniques\n\n")[2]
    return (
        "# Techniques\n\n" + note + re.sub(r"\]\((\w+)\.md\)", r"](../preheat/techniques/\1.py)", text).rstrip() + "\n"
    )


def cheat_sheet() -> str:
    lines = [
        "---",
        "hide: [toc]",
        "---",
        "# Techniques",
        "",
        "Numerics of loss and gradients: `exact` equals the model without the technique up to the order of summation, "
        "`rounding` up to the number format; `different` changes the model or the loss.",
        "",
        "| technique | does | helps | hurts | numerics | measured alone |",
        "|---|---|---|---|---|---|",
    ]
    for name, cls in shipped().items():
        about = parts(cls)
        gave = "; ".join(gave for gave, _ in measured(name)) or "not yet"
        lines.append(
            table_row(
                f"[{name}]({name}.md)",
                about["title"].partition(": ")[2],
                about["Helps"],
                about["Hurts"],
                cls.numerics,
                gave,
            )
        )
    machines = sorted({f"{b['machine']['name']}, {b['machine']['threads']} threads" for b in ablations()})
    return "\n".join(
        [
            *lines,
            "",
            "Measured on: " + ("; ".join(machines) or "nothing yet") + ". On yours: `preheat bench RECIPE --ablate`.",
            "",
            *conflicts(),
        ]
    )


def conflicts() -> list[str]:
    """A table of the techniques that cannot be combined; what depends on settings or models, `check` says in a plan."""
    known = {name: cls() for name, cls in shipped().items()}
    lines = [
        "## Incompatible techniques",
        "",
        "At default settings, two techniques are incompatible if they own the same slot, or if one conflicts with what "
        "the other provides. `make test-pairs` builds all other pairs that a CPU can run, and takes a step.",
        "",
        "| technique | conflicts with |",
        "|---|---|",
    ]
    for name, a in known.items():
        why: dict[str, list[str]] = {}
        for other, b in known.items():
            shared = {f"slot {slot}" for slot in a.claimed() & b.claimed()}
            if other != name and (found := shared | a.conflicts & b.provided() | b.conflicts & a.provided()):
                why.setdefault(", ".join(sorted(map(str, found))), []).append(other)
        if why:
            lines.append(
                table_row(name, "; ".join(f"{', '.join(others)} ({reason})" for reason, others in why.items()))
            )
    return [*lines, ""]


def recipe_page() -> str:
    lines = ["# Recipe keys", ""]
    nested = {
        f.name: f.default_factory for f in dataclasses.fields(Recipe) if dataclasses.is_dataclass(f.default_factory)
    }
    docs = field_docs(Recipe)
    for field in dataclasses.fields(Recipe):
        lines += [f"## {field.name}", "", docs.get(field.name, ""), ""]
        if field.name in nested:
            part = nested[field.name]
            assert isinstance(part, type)
            lines += [(part.__doc__ or "").strip(), "", *settings(part), ""]
        if field.name == "data":
            lines += ["### data.clean", "", inspect.cleandoc(Clean.__doc__ or ""), "", *settings(Clean), ""]
    return "\n".join(lines)


def models_page() -> str:
    """Every preset: what it is and what it needs."""
    lines = ["# Models", "", (DOCS / "pages" / "models.md").read_text(encoding="utf-8").partition("\n")[2].strip(), ""]
    lines += ["| preset | parameters | active | chat template | on the hub | licence |", "|---|---|---|---|---|---|"]
    for name, p in PRESETS.items():
        active = f"{p.active:,}" if p.active else ""
        lines.append(table_row(f"`{name}`", f"{p.parameters:,}", active, p.template, p.hub, p.licence))
    for name, p in PRESETS.items():
        lines += [
            "",
            f"## {name}",
            "",
            "| | |",
            "|---|---|",
            *(table_row(what, words) for what, words in needs(p).items()),
            *(
                [table_row("training", f"not supported: {p.text['model_type']} {p.not_trained}")]
                if p.not_trained
                else []
            ),
        ]
    return "\n".join(lines)


def run_folder_page() -> str:
    """The files of a run folder, and the keys of their records."""
    lines = [(DOCS / "pages" / "run_folder.md").read_text(encoding="utf-8"), "| file | content |", "|---|---|"]
    files = run_files()
    lines += [table_row(f"`{name}`", text) for name, text in files.items()]
    known: dict[str, type] = {}
    for module in (plan, slots, step_profile, layout, run_records):
        known |= {name: cls for name, cls in vars(module).items() if dataclasses.is_dataclass(cls)}
    waiting: list[type] = []
    shown: set[type] = set()
    for name, text in files.items():
        roots = [known[word] for word in re.findall(r"`(?:[\w.]+\.)?(\w+)`", text) if word in known]
        if run_records.Event in roots:
            roots += sorted(run_records.Event.__subclasses__(), key=lambda event: event.__name__)
        # A plan has a schema and a section of the Python reference.
        roots = [cls for cls in roots if cls is not plan.Plan]
        if roots:
            lines += ["", f"## {name}", ""]
        for cls in roots:
            lines += record_table(cls)
            shown.add(cls)
            waiting += [inner for inner in inner_records(cls) if inner is not plan.Plan]
    lines += ["", "## Parts of records", ""]
    while waiting:
        if (cls := waiting.pop(0)) not in shown:
            shown.add(cls)
            lines += record_table(cls)
            waiting += inner_records(cls)
    return "\n".join(lines)


def run_files() -> dict[str, str]:
    """File of a run folder -> its description, from the docstring of preheat/run/layout.py."""
    files: dict[str, str] = {}
    for block in inspect.cleandoc(layout.__doc__ or "").split("\n\n"):
        if not re.match(r"\S+ {2,}\S", block):
            continue
        name = ""
        for line in block.splitlines():
            # `report.html, report.json` needs no description.
            entry = re.fullmatch(r"(\S+(?:, \S+)*)(?: {2,}(.*))?", line)
            if entry and not line.startswith(" "):
                name = entry[1]
                files[name] = entry[2] or "the report: a page, and its figures"
            else:
                files[name] += " " + line.strip()
    return files


def record_table(cls: type) -> list[str]:
    """A heading, the description and the keys of a record."""
    summary, _, _ = inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:")
    hints = typing.get_type_hints(cls, include_extras=True)
    texts = {**field_docs(cls), **attributes(cls)}
    lines = [f"### {cls.__name__}", "", summary, "", "| key | type | |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        marks = getattr(hints[field.name], "__metadata__", ())
        text = texts.get(field.name, "")
        if field.name == "kind" and not field.init:
            text = f"`{field.default}`" if field.default else "one of the kinds below"
        elif "MEMORY_KEYS" in text:
            text = layout.MEMORY_KEYS[field.name]
        # Entries of such a field are keys of the record itself.
        key = f"further keys ({field.name})" if INLINE in marks else f"`{field.name}`"
        kind = type_text(hints[field.name])
        lines.append(table_row(key, f"{kind}; may be missing" if OMITTED in marks else kind, text))
    # JSON has null in place of both.
    return [re.sub(r"\b(None|NaN)\b", "null", line) for line in [*lines, ""]]


def attributes(cls: type) -> dict[str, str]:
    """Attribute -> its text in the docstrings of a record and the records that it extends."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        names: list[str] = []
        for line in inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].splitlines():
            if entry := _ENTRY.fullmatch(line):
                names = entry[1].split(", ")
                texts |= dict.fromkeys(names, (entry[2] or "").strip())
            elif line.startswith(" " * 8):
                texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
            else:
                break
    return texts


_JSON_TYPES = {float: "number", int: "integer", str: "text", bool: "true or false", type(None): "null", Any: "any"}


def type_text(hint: Any) -> str:
    """A type as JSON: `Mapping[str, float]` is an object of numbers."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        # A key that is left out is never null.
        kinds = [
            kind for kind in typing.get_args(inner[0]) or inner[:1] if kind is not type(None) or OMITTED not in inner
        ]
        nullable = any(type(mark).__name__ == "_NullIsNaN" for mark in inner[1:])
        base = inner[0] if typing.get_origin(inner[0]) not in (typing.Union, types.UnionType) else None
        text = type_text(base) if base is not None else " or ".join(map(type_text, kinds))
        return f"{text} or null" if nullable and "null" not in text else text
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(type_text, inner)))
    if origin in (list, tuple, collections.abc.Sequence):
        kinds = [kind for kind in inner if kind is not Ellipsis]
        return "list of " + " and ".join(dict.fromkeys(map(type_text, kinds)))
    if origin in (dict, collections.abc.Mapping):
        return f"object of {type_text(inner[1])}"
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return "text" if isinstance(hint, type) and issubclass(hint, str) else _JSON_TYPES[hint]


def inner_records(cls: type) -> list[type]:
    """The records that the fields of a record hold."""

    def walk(hint: Any) -> Iterator[type]:
        # Marks of a type are dataclasses too, but no types.
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield hint
        for inner in typing.get_args(hint):
            yield from walk(inner)

    hints = typing.get_type_hints(cls, include_extras=True)
    return [inner for field in dataclasses.fields(cls) for inner in walk(hints[field.name])]


def ablation_page() -> str:
    lines = [(DOCS / "pages" / "ablation.md").read_text(encoding="utf-8")]
    for bench in ablations():
        lines += [
            f"## {bench['name']}",
            "",
            f"{bench['machine']['name']}, {bench['machine']['threads']} threads; "
            f"{bench['repeats']} turns of {bench['steps']} steps.",
            "",
            f"`{bench['command']}`",
            "",
        ]
        lines += [f"- {verdict['message']}" for verdict in bench["verdicts"]]
        lines += [
            "",
            "| contender | tokens/s | relative to plain (min to max) | peak, MiB | start-up, s | loss | cosine |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in bench["rows"]:
            if row["failed"]:
                lines.append(table_row(row["name"], row["failed"], *[""] * 5))
                continue
            cosine = "-" if row["gradient_cosine"] is None else f"{row['gradient_cosine']:.6f}"
            lines.append(
                f"| {row['name']} | {row['tokens_per_second']:,.0f} "
                f"| {row['ratio']:.2f} ({row['ratio_spread'][0]:.2f} to {row['ratio_spread'][1]:.2f}) "
                f"| {row['peak_gib'] * 1024:.0f} | {row['startup_seconds']:.1f} | {row['loss']:.3f} | {cosine} |"
            )
        lines.append("")
    return "\n".join(lines)


def evidence_page() -> str:
    """Every committed table, one below the other."""
    lines = ["# Evidence", "", (RESULTS / "README.md").read_text(encoding="utf-8").partition("\n")[2]]
    for path in sorted(RESULTS.glob("*.md")):
        if path.name != "README.md":
            lines += ["", re.sub(r"^#", "##", path.read_text(encoding="utf-8"), flags=re.MULTILINE)]
    return "\n".join(lines)


def notebook_page(path: Path, pictures: Path) -> str:
    """The Markdown of a notebook with its stored outputs; writes its plots into the folder `pictures`."""
    lines = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        lines += [source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```", ""]
        for n, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{number}-{n}.png"
                (pictures / name).write_bytes(base64.b64decode("".join(data["image/png"])))
                lines += [f"![Plot of cell {number}]({name})", ""]
            elif "text/html" in data:
                lines += [f"<div>{''.join(data['text/html'])}</div>", ""]
            else:
                lines += [f"```text\n{''.join(data['text/plain']).rstrip()}\n```", ""]
    return "\n".join(lines)


def rewrite_link(link: str) -> str:
    """The link of the site for a link of docs/pages, which names the file of the repository so that code hosts find it.

    >>> rewrite_link("../../preheat/techniques/lora.py"), rewrite_link("../ui-run.png")
    ('techniques/lora.md', 'ui-run.png')
    """
    file = (DOCS / "pages" / link).resolve()
    if not file.exists():
        raise SystemExit(f"docs/pages: {link} does not exist")
    if file.suffix == ".png":
        return file.name
    path = file.relative_to(ROOT).as_posix()
    pages = {
        "docs/cheat_sheet.md": "techniques/index.md",
        "benchmarks/results/README.md": "evidence.md",
        "preheat/core/schema.py": "recipe.md",
    }
    folder = {"preheat/techniques": "techniques", "notebooks": "notebooks"}.get(
        file.parent.relative_to(ROOT).as_posix()
    )
    if path not in pages and folder is None:
        raise SystemExit(f"docs/pages: {link} has no page of the site; name it in rewrite_link")
    return pages.get(path, f"{folder}/{file.stem}.md")


def rewrite_links(text: str) -> str:
    return re.sub(r"(?<=\]\()\.\./[^)\s#]+", lambda match: rewrite_link(match[0]), text)


def main(sources: Path = BUILD, target: Path = ROOT / "site") -> None:
    """Writes the pages into `sources` and the site into `target`; what was there is replaced."""
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(DOCS / "pages", sources)
    for picture in (*DOCS.glob("*.png"), *RESULTS.glob("*.png")):
        shutil.copy(picture, sources)
    pages = {f"techniques/{name}.md": technique_page(name, cls) for name, cls in shipped().items()}
    pages |= {
        "techniques/index.md": cheat_sheet(),
        "models.md": models_page(),
        "recipe.md": recipe_page(),
        "run_folder.md": run_folder_page(),
        "ablation.md": ablation_page(),
        "evidence.md": evidence_page(),
        "recipe.schema.json": json.dumps(build_json_schema(), indent=1) + "\n",
    }
    (sources / "notebooks").mkdir()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{notebook.stem}.md"] = notebook_page(notebook, sources / "notebooks")
    for name, text in pages.items():
        path = sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in (sources / page.name for page in (DOCS / "pages").glob("*.md")):
        path.write_text(rewrite_links(path.read_text(encoding="utf-8")), encoding="utf-8")
    site = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    section = next(entry["Techniques"] for entry in site["nav"] if "Techniques" in entry)
    section[:] = [section[0], *({name: f"techniques/{name}.md"} for name in shipped())]
    python = next(entry["mkdocstrings"] for entry in site["plugins"] if "mkdocstrings" in entry)["handlers"]["python"]
    python["paths"] = [str(ROOT)]
    python["options"]["extensions"] = [str(DOCS / "docstrings.py")]
    site |= {"docs_dir": str(sources), "site_dir": str(target)}
    (sources.parent / "mkdocs.yml").write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", sources.parent / "mkdocs.yml"]
    subprocess.run(command, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    STORED_CHEAT_SHEET.write_text(stored_cheat_sheet(), encoding="utf-8")
    main()
