"""Builds the site (`make docs`) from docs/pages, the registry, the recipe's schema and benchmarks/results."""

import ast
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from preheat.core import Technique, registry
from preheat.core.schema import Clean
from preheat.models.presets import PRESETS, needs
from preheat.recipe import Recipe, build_json_schema, field_docs

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BUILD = ROOT / "build" / "docs"
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = DOCS / "figures"


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
        "ablation.md": ablation_page(),
        "evidence.md": evidence_page(),
        "recipe.schema.json": json.dumps(build_json_schema(), indent=1) + "\n",
    }
    for name, text in pages.items():
        path = sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    site = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))
    section = next(entry["Techniques"] for entry in site["nav"] if "Techniques" in entry)
    section[:] = [section[0], *({name: f"techniques/{name}.md"} for name in shipped())]
    site |= {"docs_dir": str(sources), "site_dir": str(target)}
    (sources.parent / "mkdocs.yml").write_text(yaml.safe_dump(site, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", sources.parent / "mkdocs.yml"]
    subprocess.run(command, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    main()
