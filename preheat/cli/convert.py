"""The `preheat convert` command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from preheat.cli.options.foreign_options import ForeignOptions
from preheat.cli.options.recipe_argument import load_recipe
from preheat.cli.views.console import Accelerate, DeepSpeed, From, Json, RecipeArgument, Set
from preheat.cli.views.output import say

if TYPE_CHECKING:
    from preheat.interop.targets import Target
    from preheat.interop.writing import LeftOut, Written

__all__ = ["convert"]

_MARK = "# written by preheat convert"


def convert(
    recipe: RecipeArgument,
    to: Annotated[
        Literal["axolotl", "llamafactory", "trl", "ms-swift", "deepspeed", "accelerate", "megatron"],
        typer.Option(
            "--to",
            help="The trainer. deepspeed and accelerate write the file beside a trainer's; megatron writes "
            "a shell script.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE|FOLDER", help="The output; default: standard output."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave out and list what the file cannot say, instead of refusing it.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Number of devices; default: as the recipe or the file says."),
    ] = None,
    set: Set = None,
    from_: From = None,
    deepspeed: DeepSpeed = None,
    accelerate: Accelerate = None,
    json: Json = False,
) -> None:
    """Write a recipe, or another trainer's configuration, as the configuration of another trainer.

    Example: `preheat convert fine-tune --to trl --set model.path=Qwen/Qwen3-0.6B --out trl.yaml`
    """
    from preheat.cli.views.console import build_console, emit
    from preheat.errors import RecipeError
    from preheat.interop.targets import TARGETS

    overrides = [*(set or []), *([] if count is None else [f"parallel.devices={count}"])]
    foreign = ForeignOptions(from_, deepspeed, accelerate)
    source = load_recipe(recipe, "convert", overrides, foreign=foreign, devices=count)
    target = TARGETS[to]
    file = _choose_file(out, target, source.name)
    written = target.write(source, file.parent if file else Path())
    if written.lost and not partial:
        lines = [item.describe() for item in written.lost]
        raise RecipeError("\n".join([*lines, "--partial writes the file without these keys, and lists them"]))
    if written.beside and file is None:
        raise RecipeError(
            f"--out: {target.title} needs {', '.join(written.beside)} beside its file; name a folder: --out FOLDER"
        )
    name = str(file or target.file.format(name=source.name))
    start = [line.replace("{file}", shlex.quote(name)) for line in written.start]
    text = _write(target, written, start, file)
    if json:
        emit(_describe(target, written, start, file) | ({} if file else {"text": text}))
        return
    screen = build_console(error=file is None)
    if file is None:
        say(text, end="")
    else:
        files = [str(file), *(str(file.parent / name) for name in written.beside)]
        screen.print(f"wrote {', '.join(files)} for {target.title} {target.version}", soft_wrap=True)
    _report(screen, written)
    for line in start if file else ():
        screen.print(f"start: {line}", soft_wrap=True)


def _choose_file(out: Path | None, target: Target, name: str) -> Path | None:
    """Returns the file to write; None for standard output."""
    if out is None or (out.suffix and not out.is_dir()):
        return out
    from preheat.errors import RunError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out}: cannot be made ({error.strerror}); name another folder") from None
    return out / target.file.format(name=name)


def _write(target: Target, written: Written, start: Sequence[str], file: Path | None) -> str:
    """Writes the files, if one is named, and returns the text of the first."""
    from preheat.files import write_generated
    from preheat.interop.targets import render

    head = [f"for {target.title} {target.version}; start: {start[-1]}"]
    head += [f"before: {line}" for line in start[:-1]]
    head += [f"not said: {item.describe()}" for item in written.lost]
    text = render(target, written, head)
    if file is None:
        return text
    beside = {file.parent / name: content for name, content in written.beside.items()}
    plain = beside | ({file: text} if target.form == "json" else {})
    _require_new(plain)
    if target.form != "json":
        write_generated(file, text, _MARK)
    for path, content in plain.items():
        _write_plain(path, content)
    return text


def _require_new(files: Mapping[Path, str]) -> None:
    """Raises RunError if one of the files, which have no room for a mark, exists with another text."""
    from preheat.errors import RunError

    for path, text in files.items():
        if path.exists() and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text):
            raise RunError(f"{path}: exists, and has another text; name another file or folder with --out")


def _write_plain(path: Path, text: str) -> None:
    from preheat.files import write_user_file

    write_user_file(path, text)


def _report(screen: object, written: Written) -> None:
    lost = [f"not said: {item.describe()}" for item in written.lost]
    same = [_describe_same(item) for item in written.left_out if item.same_result]
    for line in [*lost, *same, *(f"note: {note}" for note in written.notes)]:
        screen.print(line, soft_wrap=True)  # type: ignore[attr-defined]


def _describe_same(item: LeftOut) -> str:
    return f"without counterpart; same result, more memory or time: {item.describe()}"


def _describe(target: Target, written: Written, start: Sequence[str], file: Path | None) -> dict[str, object]:
    files = [] if file is None else [str(file), *(str(file.parent / name) for name in written.beside)]
    return {
        "to": target.name,
        "version": target.version,
        "files": files,
        "left_out": [asdict(item) for item in written.left_out],
        "notes": list(written.notes),
        "start": list(start),
    }
