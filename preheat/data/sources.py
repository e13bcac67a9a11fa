"""Where documents come from: the standard library, pairs drawn from it, files and folders, `datasets`."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import socket
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat.data.examples import Document
from preheat.data.files import Fields, find_files, missing, read_file
from preheat.errors import DataError, nearest
from preheat.recipe import Data

__all__ = ["Source", "digest", "hub_reachable", "open_source"]

BUILT_IN = ("stdlib", "docstrings")
HASHED_WHOLE = 256 * 2**20
"""A larger file (bytes) is known by its size, time and both ends: reading it all at every start would take too long."""


@dataclass(frozen=True)
class Source:
    """Documents that can be read again and again in the same order.

    Attributes:
        words: what it is, for messages and reports.
        paired: whether its documents have a prompt.
        key: content hash of all that it reads; taken when called, since that reads the files.
        read: the documents, lazily, from the first.
        count: how many, where that is known before reading.
    """

    words: str
    paired: bool
    key: Callable[[], str]
    read: Callable[[], Iterator[Document]]
    count: int | None = None


def digest(*parts: object) -> str:
    """A short content hash of values that print alike when they are alike."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def open_source(data: Data, *, validation: bool = False) -> Source:
    """The source of training documents that `data` names, or with `validation` the one that `data.validation` names.

    Nothing is read yet but names of files.

    Raises:
        DataError: there is no such source.
    """
    knob, name = ("data.validation", str(data.validation)) if validation else ("data.source", data.source)
    fields = Fields(data.text, data.prompt, data.completion)
    if name in BUILT_IN:
        source = _stdlib(fields) if name == "stdlib" else _docstrings()
    else:
        source = _path(knob, Path(name).expanduser(), data, fields) if _is_path(name) else _datasets(knob, name, data, fields)
    if data.limit is None or validation:
        return source
    limit = data.limit
    return Source(
        f"{source.words}; the first {limit:,} documents",
        source.paired,
        lambda: digest(source.key(), limit),
        lambda: itertools.islice(source.read(), limit),
    )


def _is_path(name: str) -> bool:
    """Whether a name means a place on this machine: it stands there, or no `datasets` name looks like it."""
    path = Path(name).expanduser()
    return (
        path.exists()
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or path.suffix in (".txt", ".md", ".py", ".jsonl", ".json", ".parquet", ".csv")
    )


def _path(knob: str, path: Path, data: Data, fields: Fields) -> Source:
    if not path.exists():
        raise missing(knob, path)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_dataset(knob, path, data, fields)
    files, words = find_files(knob, path)
    return Source(
        words,
        fields.paired,
        lambda: _files_key(files),
        lambda: itertools.chain.from_iterable(read_file(f, fields) for f in files),
    )


def _files_key(files: Iterable[Path]) -> str:
    known = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            size = path.stat().st_size
            known.update(f"{path.suffix} {size};".encode())
            with path.open("rb") as file:
                if size <= HASHED_WHOLE:
                    while chunk := file.read(2**20):
                        known.update(chunk)
                else:
                    known.update(str(path.stat().st_mtime_ns).encode() + file.read(2**20))
                    file.seek(-(2**20), 2)
                    known.update(file.read())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    return known.hexdigest()


# --- the standard library -----------------------------------------------------------------------------------------

NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def _stdlib_files() -> list[Path]:
    """The library's .py files in order of name; tests (and their deliberately broken data) and build settings left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        p
        for p in root.rglob("*.py")
        if not NOT_SOURCE & set(p.relative_to(root).parts) and not p.name.startswith("_sysconfigdata")
    )


def _stdlib_texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few old modules are in Latin-1: not the user's files, and not worth a second codec
            continue


def _stdlib(fields: Fields) -> Source:
    if fields.paired:
        raise DataError(
            "data.prompt: the source stdlib is plain text; remove data.prompt and data.completion, or use data.source: docstrings"
        )
    files = _stdlib_files()
    words = f"source of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library: {len(files)} files"
    return Source(words, False, lambda: _files_key(files), lambda: map(Document.of, _stdlib_texts(files)), len(files))


def _docstrings() -> Source:
    """Pairs: what a function is to do, in words, and its head; its body."""
    files = _stdlib_files()
    words = f"docstring -> function pairs from Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    pairs = functools.cache(lambda: list(dict.fromkeys(itertools.chain.from_iterable(map(_pairs, _stdlib_texts(files))))))
    return Source(words, True, lambda: digest("docstrings", 1, _files_key(files)), lambda: iter(pairs()))


def _pairs(text: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(text)
    except SyntaxError:  # templates that are named .py
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node)
        first = node.body[0]
        if not doc or len(node.body) < 2 or first.lineno == node.lineno:
            continue
        asked = " ".join(doc.split("\n\n")[0].split())
        head = textwrap.dedent("".join(lines[node.lineno - 1 : first.lineno - 1]))
        body = textwrap.indent(textwrap.dedent("".join(lines[first.end_lineno : node.end_lineno])).strip("\n"), "    ") + "\n"
        # Long enough to be worth learning, short enough to fit a row.
        if len(asked) >= 20 and len(asked) + len(head) <= 800 and 2 <= body.count("\n") <= 40 and len(body) <= 1600:
            yield Document.of(body, f"# {asked}\n{head}")


# --- datasets -------------------------------------------------------------------------------------------------------


def hub_reachable() -> bool:
    """Whether the Hugging Face hub can be asked. Without this look its client tries again for half a minute."""
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return True  # offline mode answers at once from its cache; a proxy resolves names itself
    address = urllib.parse.urlparse(constants.ENDPOINT)
    try:
        with socket.create_connection(
            (address.hostname or "", address.port or (80 if address.scheme == "http" else 443)), timeout=5
        ):
            return True
    except OSError:
        return False


def _rows(rows: Any, fields: Fields, where: str) -> Iterator[Document]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield fields.document(row, f"{where}: row {number}")
    except OSError as error:  # the network, for a streamed one
        raise DataError(f"{where}: row {number + 1} cannot be read: {_first_line(error)}") from None


def _split(found: Any, data: Data, where: str) -> Any:
    import datasets

    if isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        if data.split not in found:
            raise DataError(
                f"data.split {data.split}: {where} has no such split; {nearest(data.split, [str(k) for k in found])}"
            )
        return found[data.split]
    return found


def _from_dataset(found: Any, data: Data, fields: Fields, where: str) -> Source:
    import datasets

    if found.column_names:
        fields.require(list(found.column_names), where)
        found = found.select_columns(fields.names())  # images and audio beside the text are not decoded
    # `datasets` names a table's content and history by a fingerprint; a streamed one is known by its name alone.
    mark = found._fingerprint if isinstance(found, datasets.Dataset) else ""
    return Source(
        f"dataset {where}, split {data.split}",
        fields.paired,
        lambda: digest(where, data.subset, data.split, mark),
        lambda: _rows(found, fields, where),
    )


def _saved_dataset(knob: str, path: Path, data: Data, fields: Fields) -> Source:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{knob} {path}: not a folder that datasets.save_to_disk wrote: {_first_line(error)}") from None
    return _from_dataset(_split(found, data, str(path)), data, fields, str(path))


def _datasets(knob: str, name: str, data: Data, fields: Fields) -> Source:
    import datasets

    hint = f"; {near}" if (near := nearest(name, BUILT_IN)).startswith("did") else ""
    if not hub_reachable():
        raise DataError(
            f"{knob} {name}: no such file or folder here{hint}, and no network to look for a dataset of that name; "
            "name a file, or a folder written by datasets.save_to_disk (HF_HUB_OFFLINE=1 reads what was downloaded before)"
        )
    try:
        found = datasets.load_dataset(name, data.subset, split=data.split, streaming=data.streaming)
    except (OSError, ValueError) as error:  # not there, no access, no network, no such subset or split
        raise DataError(
            f"{knob} {name}: no file or folder here{hint}, and `datasets` cannot load it: {_first_line(error)}"
        ) from None
    return _from_dataset(found, data, fields, name)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
