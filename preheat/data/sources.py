"""Sources of documents: the standard library, pairs drawn from it, files and folders, `datasets`."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import os
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.data.chat.template import load_layout_template, special_tokens
from preheat.data.document import Document
from preheat.data.rows.file_readers import (
    describe_missing_path,
    display_path,
    expand_path,
    find_files,
    read_columns,
    read_file,
    suggest_name,
)
from preheat.data.rows.formats import Layout, class_names, detect_layout
from preheat.data.vision_inputs import ImageProcessor
from preheat.errors import DataError, suggest_nearest
from preheat.hardware.connectivity import is_hub_reachable
from preheat.recipe import Data
from preheat.sanitize import shorten
from preheat.storage import StorageError, download_source, is_url

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from transformers import PreTrainedTokenizerFast

    from preheat.core.json_types import JsonObject

__all__ = ["Source", "compute_digest", "hash_files", "open_source", "require_sources"]

BUILT_IN = ("stdlib", "docstrings")
HASHED_WHOLE = 256 * 2**20
"""Bytes up to which a file is hashed completely. Larger ones are identified by size, time and both ends, for speed."""


@dataclass(frozen=True)
class Source:
    """Documents that can be read repeatedly in the same order.

    Attributes:
        description: description for messages and reports.
        layout: layout of its rows.
        key: returns the content hash of the files and of how they are read; a function, since it reads the files.
        rows: returns a lazy iterator over (where, row) from the first row.
        count: number of rows, if known before reading.
        weight: how often its documents are read in an epoch.
        clean: returns the document of a row's number as `data.clean` leaves it; None: as it is.
    """

    description: str
    layout: Layout
    key: Callable[[], str]
    rows: Callable[[], Iterator[tuple[str, object]]]
    count: int | None = None
    weight: float = 1.0
    left: str = ""
    """Description of the files in its folder that are not read."""
    clean: Callable[[int, Document], Document] | None = None

    @property
    def paired(self) -> bool:
        """True if its rows are examples, to be packed whole, and not running text."""
        return self.layout.kind != "text"

    def read(self, start: int = 0) -> Iterator[Document]:
        """Yields the documents from row `start` on."""
        for number, (where, row) in enumerate(itertools.islice(self.rows(), start, None), start):
            document = self.layout.document(row, where)
            yield document if self.clean is None else self.clean(number, document)


@dataclass(frozen=True)
class _Raw:
    """Rows of a source whose layout is not known yet."""

    description: str
    key: Callable[[], str]
    rows: Callable[[Sequence[str] | None], Iterator[tuple[str, object]]]
    names: list[str] | None = None
    """Names of the fields, if known before any row is read."""
    count: int | None = None
    classes: tuple[str, ...] = ()
    """Names of the classes of a `datasets.ClassLabel`."""
    folder: Path = Path()
    """Base of relative paths in rows."""
    left: str = ""


def compute_digest(*parts: object) -> str:
    """Returns a short content hash of values, taken over their `repr`."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def open_source(
    data: Data,
    *,
    validation: bool = False,
    tokenizer: PreTrainedTokenizerFast | None = None,
    layout: Layout | None = None,
    weight: float = 1.0,
    eye: ImageProcessor | None = None,
    knob: str = "",
) -> Source:
    """Opens the source of `data.source`, or with `validation` that of `data.validation`.

    This reads the names of files and the first row, and all labels if there are classes without given names.

    Args:
        tokenizer: tokenizer whose chat template and special tokens are used; None if it is still to be trained.
        layout: layout of the rows, if already known.
        eye: image processor; None for text-only models.
        knob: setting that names the source, for messages; by default the recipe's key.

    Raises:
        DataError: there is no such source, or its rows have no known layout.
    """
    key, name = ("data.validation", str(data.validation)) if validation else ("data.source", str(data.source))
    knob = knob or key
    if name in BUILT_IN:
        raw = _read_stdlib() if name == "stdlib" else _read_docstrings()
        if name == "stdlib" and data.prompt:
            raise DataError(
                "data.prompt: the source stdlib is plain text; remove data.prompt and data.completion, or "
                "use data.source: docstrings"
            )
        # The fields of built-in rows are known; the recipe's own are for other sources.
        data = replace(data, layout="text" if name == "stdlib" else "prompt", columns={}, prompt=None, completion=None)
    elif is_url(name):
        raw = _read_url(knob, name, data)
    else:
        raw = (
            _read_path(knob, expand_path(knob, name), data) if _is_path(knob, name) else _load_dataset(knob, name, data)
        )
    if layout is None:
        layout = _detect_layout(data, raw, tokenizer, eye)
    shown = raw.description
    if data.limit is not None and not validation:
        shown += f"; the first {data.limit:,} documents"
    limit = None if validation else data.limit
    names, known = layout.names(), layout
    return Source(
        shown,
        layout,
        lambda: compute_digest(raw.key(), limit, known.key(), weight),
        lambda: itertools.islice(raw.rows(names), limit),
        raw.count,
        weight,
        raw.left,
    )


def require_sources(data: Data) -> None:
    """Checks that the sources of a recipe's data are here, or can be looked up; reads and downloads nothing.

    Raises:
        DataError: a file or folder does not exist, or a name cannot be looked up.
    """
    listed = [data.source] if isinstance(data.source, str) else data.source
    for item in (*listed, *([data.validation] if isinstance(data.validation, str) else [])):
        name = str(item["source"] if isinstance(item, Mapping) else item)
        knob = "data.validation" if item is data.validation else "data.source"
        if name in BUILT_IN or is_url(name):
            continue
        if _is_path(knob, name):
            if not (path := expand_path(knob, name)).exists():
                raise describe_missing_path(knob, path)
        else:
            _require_dataset_name(knob, name)


def _detect_layout(
    data: Data, raw: _Raw, tokenizer: PreTrainedTokenizerFast | None, eye: ImageProcessor | None
) -> Layout:
    """Detects the layout of a source from its first row."""
    # The layout is detected from one row; all others are then read by it, and a row of another layout is reported.
    where, first = next(raw.rows(None), (raw.description, None))
    names = raw.names or ([str(k) for k in first] if isinstance(first, Mapping) else [])
    template, lacking = None, ""
    # First pass, for the kind alone, which decides the default template.
    layout = detect_layout(data, names, first, where)
    try:
        template = load_layout_template(data.template, tokenizer, layout.kind)
    except DataError as error:
        # Without data.template the lack counts only once a row needs a template (`Layout.lacking`).
        if data.template is not None:
            raise
        lacking = f"{raw.description}: the rows are conversations ({layout.description}); {error}"
    special = template.special if template else special_tokens(tokenizer)
    more: JsonObject = {
        "template": template,
        "lacking": lacking,
        "wraps": data.template is not None,
        "special": special,
    }
    more |= {"eye": eye, "folder": raw.folder}
    classes = data.classes or raw.classes
    # Without given names the values of the whole source are the classes, so all labels are read.
    if layout.kind == "classes" and not classes:
        column = layout.columns["label"]
        values = (row.get(column) for _, row in raw.rows([column]) if isinstance(row, Mapping))
        classes = class_names(values, raw.description)
    # Second pass, with all that depends on the kind.
    layout = detect_layout(data, names, first, where, train_on=data.train_on, classes=classes, **more)
    # Declared fields (Parquet, CSV, `datasets`) hold for all rows: a missing one is one error, not one per row.
    if raw.names is not None:
        layout.require(raw.names, raw.description)
    return layout


def _is_path(knob: str, name: str) -> bool:
    """Returns True if a name is a path on this machine: it exists, or does not look like a name of `datasets`."""
    path = expand_path(knob, name)
    return (
        path.exists()
        or path.is_symlink()
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or path.suffix in (".txt", ".md", ".py", ".jsonl", ".json", ".parquet", ".csv")
    )


def _read_path(knob: str, path: Path, data: Data) -> _Raw:
    if not path.exists():
        raise describe_missing_path(knob, path)
    # datasets.save_to_disk writes the first for a dict of splits, the second for a single one.
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _read_saved_dataset(knob, path, data)
    files, description, left = find_files(knob, path)
    uncut = data.text_files == "whole"
    return _Raw(
        description,
        # Cut and uncut files give other documents, so they need other keys.
        lambda: hash_files(files) + (" whole" if uncut else ""),
        lambda columns: itertools.chain.from_iterable(read_file(f, columns, whole=uncut) for f in files),
        read_columns(files[0]),
        folder=path if path.is_dir() else path.parent,
        left=left,
    )


def _read_url(knob: str, url: str, data: Data) -> _Raw:
    """Reads objects of remote storage, which are downloaded into the cache first."""
    try:
        path = download_source(url)
    except StorageError as error:
        raise DataError(f"{knob} {error}") from None
    raw = _read_path(knob, path, data)
    return replace(raw, description=raw.description.replace(str(path), url))


def hash_files(files: Iterable[Path]) -> str:
    """Returns a hash of the content of files."""
    # Content only, no paths: a data set that was moved or copied keeps its cached tokens.
    hasher = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            size = path.stat().st_size
            # The size delimits the files: equal bytes divided into other files give another key.
            hasher.update(f"{path.suffix} {size};".encode())
            with path.open("rb") as file:
                if size <= HASHED_WHOLE:
                    while chunk := file.read(2**20):
                        hasher.update(chunk)
                else:
                    # Time and both ends: a change in the middle moves the time.
                    hasher.update(str(path.stat().st_mtime_ns).encode() + file.read(2**20))
                    file.seek(-(2**20), 2)
                    hasher.update(file.read())
        except OSError as error:
            raise DataError(f"{display_path(path)}: cannot be read ({error.strerror})") from None
    return hasher.hexdigest()


# --- the standard library -----------------------------------------------------------------------------------------

NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def _find_stdlib_files() -> list[Path]:
    """Returns the library's .py files sorted by name, without tests (some deliberately broken) and build settings."""
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        # The installed packages below it may be many times as many files.
        subfolders[:] = [name for name in subfolders if name not in NOT_SOURCE]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files)


def _iterate_stdlib(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in files:
        try:
            yield str(path), path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a few old modules are in Latin-1


def _read_stdlib() -> _Raw:
    files = _find_stdlib_files()
    description = (
        f"source of Python {sys.version_info.major}.{sys.version_info.minor}'s standard library: {len(files)} files"
    )
    return _Raw(description, lambda: hash_files(files), lambda _: _iterate_stdlib(files), count=len(files))


def _read_docstrings() -> _Raw:
    """Returns prompt-completion pairs: a function's docstring and signature, and its body."""
    files = _find_stdlib_files()
    description = (
        f"docstring -> function pairs from Python {sys.version_info.major}.{sys.version_info.minor}'s standard library"
    )
    # The sources are parsed when the first row is read, and once although rows are read several times.
    every = functools.cache(
        lambda: list(
            dict.fromkeys(itertools.chain.from_iterable(_iterate_docstrings(t) for _, t in _iterate_stdlib(files)))
        )
    )
    return _Raw(
        description,
        # 1 is the version of `_iterate_docstrings`.
        lambda: compute_digest("docstrings", 1, hash_files(files)),
        lambda _: ((f"pair {n}", pair) for n, pair in enumerate(every(), 1)),
        ["prompt", "completion"],
    )


def _iterate_docstrings(text: str) -> Iterator[Document]:
    try:
        with warnings.catch_warnings():
            # The library has strings with invalid escapes, of which the parser warns.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(text)
    except SyntaxError:  # templates with the suffix .py
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = ast.get_docstring(node)
        first = node.body[0]
        # The docstring needs code after it, on lines of its own.
        if not doc or len(node.body) < 2 or first.lineno == node.lineno:
            continue
        # The first paragraph, on one line.
        task = " ".join(doc.split("\n\n")[0].split())
        # From `def` to the docstring; `lineno` leaves decorators out.
        head = textwrap.dedent("".join(lines[node.lineno - 1 : first.lineno - 1]))
        body = (
            # Indented anew, so that methods and nested functions look like functions of a module.
            textwrap.indent(textwrap.dedent("".join(lines[first.end_lineno : node.end_lineno])).strip("\n"), "    ")
            + "\n"
        )
        # Long enough to be worth learning, short enough to fit a row.
        if len(task) >= 20 and len(task) + len(head) <= 800 and 2 <= body.count("\n") <= 40 and len(body) <= 1600:
            yield Document.of(body, f"# {task}\n{head}")


# --- datasets -------------------------------------------------------------------------------------------------------


def _dataset_errors() -> tuple[type[BaseException], ...]:
    """Returns what `datasets` and Arrow raise for damaged data sets, other formats, and network failures."""
    import datasets
    import pyarrow

    kinds = (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
    return (*kinds, datasets.exceptions.DatasetsError, pyarrow.ArrowException)


def _iterate_rows(rows: Iterable[object], where: str) -> Iterator[tuple[str, object]]:
    number, read = 0, iter(rows)
    # Not `for`: an error raised by the iterator belongs to the row that it did not yield.
    while True:
        try:
            row = next(read)
        except StopIteration:
            return
        except _dataset_errors() as error:
            raise DataError(f"{where}: row {number + 1} cannot be read: {_first_error_line(error)}") from None
        number += 1
        yield f"{where}: row {number}", row


def _split(
    dataset: Dataset | DatasetDict | IterableDataset | IterableDatasetDict, data: Data, where: str
) -> Dataset | IterableDataset:
    import datasets

    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        if data.split not in dataset:
            raise DataError(
                f"data.split {data.split}: {where} has no such split; "
                f"{suggest_name(data.split, [str(k) for k in dataset])}"
            )
        return dataset[data.split]
    return dataset


def _read_dataset(dataset: Dataset | IterableDataset, data: Data, where: str) -> _Raw:
    import datasets

    names: list[str] | None = list(dataset.column_names) if dataset.column_names else None

    def iterate_rows(columns: Sequence[str] | None) -> Iterator[tuple[str, object]]:
        # Unused columns, such as images and audio, are not decoded.
        chosen = (
            dataset.select_columns([n for n in names if n in columns]) if names and columns is not None else dataset
        )
        return _iterate_rows(chosen, where)

    # The fingerprint of `datasets` covers a table's content and history; a streamed one has only its name.
    mark = dataset._fingerprint if isinstance(dataset, datasets.Dataset) else ""
    # A ClassLabel stores numbers and knows their names.
    label = (dataset.features or {}).get(data.columns.get("label", "label"))
    classes = tuple(label.names) if isinstance(label, datasets.ClassLabel) else ()
    description = f"dataset {where}, split {data.split}"
    return _Raw(
        description, lambda: compute_digest(where, data.subset, data.split, mark), iterate_rows, names, classes=classes
    )


def _read_saved_dataset(knob: str, path: Path, data: Data) -> _Raw:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except _dataset_errors() as error:
        raise DataError(
            f"{knob} {display_path(path)}: not a complete folder of datasets.save_to_disk: {_first_error_line(error)}; "
            "write it again"
        ) from None
    return _read_dataset(_split(dataset, data, display_path(path)), data, display_path(path))


def _is_format(name: str) -> bool:
    """Returns True if `datasets` takes the name for a file format (text, json, csv, ...) and not for a dataset."""
    from datasets import packaged_modules

    known: Mapping[str, object] = packaged_modules._PACKAGED_DATASETS_MODULES
    return name in known


def _require_dataset_name(knob: str, name: str) -> str:
    """Raises DataError for a name that cannot be looked up; returns the closest built-in one, for other messages."""
    if _is_format(name):  # `datasets` would read the working directory
        raise DataError(
            f"{knob} {name}: no such file or folder here, and {name} is a format, not a dataset; name a file or a "
            "folder"
        )
    # `nearest` lists all names if none is close, which would be no hint here.
    hint = f"; {near}" if (near := suggest_nearest(name, BUILT_IN)).startswith("did") else ""
    if not is_hub_reachable():
        raise DataError(
            f"{knob} {name}: no such file or folder here{hint}, and no network to look for a dataset of that name; "
            "name a file, or a folder written by datasets.save_to_disk (HF_HUB_OFFLINE=1 reads what was "
            "downloaded before)"
        )
    return hint


def _load_dataset(knob: str, name: str, data: Data) -> _Raw:
    import datasets

    hint = _require_dataset_name(knob, name)
    try:
        dataset = datasets.load_dataset(name, data.subset, split=data.split, streaming=data.streaming)
    except (OSError, ValueError) as error:  # not there, no access, no network, no such subset or split
        raise DataError(
            f"{knob} {name}: no file or folder here{hint}, and `datasets` cannot load it: {_first_error_line(error)}"
        ) from None
    return _read_dataset(dataset, data, name)


def _first_error_line(error: BaseException) -> str:
    return shorten((str(error).strip() or type(error).__name__).splitlines()[0], 300)
