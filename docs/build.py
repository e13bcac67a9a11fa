"""Writes the reference pages into site/: every technique and every recipe key, from the text that stands beside the code. `make docs` runs it."""

import dataclasses
import json
import sys
from pathlib import Path

from preheat.recipe import Recipe, field_docs, json_schema
from preheat.technique import Technique, registry

OUT = Path(__file__).parent.parent / "site"


def settings(cls: type) -> list[str]:
    """A table of a dataclass's fields: default and text."""
    docs = field_docs(cls)
    rows = []
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{field.name}` | {default} | {' '.join(docs.get(field.name, '').split())} |")
    return ["| key | default | |", "|---|---|---|", *rows] if rows else ["It has no settings."]


def technique_page(name: str, cls: type[Technique]) -> str:
    title, _, body = (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n")
    facts = f"Stage {cls.stage.name}; numerics {cls.numerics}"
    if cls.owns:
        facts += "; owns " + ", ".join(f"`{slot}`" for slot in sorted(cls.owns))
    return "\n".join([f"# {name}", "", title, body, "", facts + ".", "", "## Settings", "", *settings(cls), ""])


def recipe_page() -> str:
    lines = ["# Recipe keys", ""]
    nested = {f.name: f.default_factory for f in dataclasses.fields(Recipe) if dataclasses.is_dataclass(f.default_factory)}
    docs = field_docs(Recipe)
    for field in dataclasses.fields(Recipe):
        lines += [f"## {field.name}", "", docs.get(field.name, ""), ""]
        if field.name in nested:
            part = nested[field.name]
            assert isinstance(part, type)
            lines += [(part.__doc__ or "").strip(), "", *settings(part), ""]
    return "\n".join(lines)


def main() -> None:
    pages = {f"techniques/{name}.md": technique_page(name, cls) for name, cls in registry().items()}
    pages["recipe.md"] = recipe_page()
    pages["recipe.schema.json"] = json.dumps(json_schema(), indent=1) + "\n"
    for name, text in pages.items():
        path = OUT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
