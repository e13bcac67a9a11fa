"""Lazy readers of text, JSONL, JSON, CSV and Parquet files. Every error names the file and the line or row.

`parse_json` limits the depth and the numbers of JSON, and `read_lines` the length of lines, so that hostile or damaged
files end in a one-line error.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from preheat.errors import DataError, suggest_nearest
from preheat.files import BadJson, read_value
from preheat.sanitize import escape_control_characters, quote_value, shorten

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = [
    "LONGEST",
    "ROWS",
    "TEXT",
    "suggest_name",
    "read_columns",
    "expand_path",
    "find_files",
    "describe_json_type",
    "format_names",
    "describe_missing_path",
    "parse_json",
    "read_csv",
    "read_file",
    "read_json",
    "read_jsonl",
    "read_lines",
    "read_parquet",
    "display_path",
]

TEXT = (".txt", ".md", ".py")
ROWS = (".jsonl", ".json", ".parquet", ".csv")

CUT_ABOVE = 64 * 1024
"""Bytes above which a .txt file is cut into documents: a single one could be neither split nor shuffled."""
CUT_AT = 4 * 1024
"""Such a file is cut at the first blank line after this many characters ..."""
CUT_AT_ANY_LINE = 4 * CUT_AT
"""... and at the latest after this many, at the end of a line or within a longer one."""

LONGEST = 16 * 2**20
"""Maximum bytes of a line and characters of a row, enough for the longest books. Tokenizers take a second and more per
million characters of a text, and some scale worse than linearly."""


def describe_json_type(value: object) -> str:
    """Returns the type of a JSON value, for messages.

    Example:
        >>> describe_json_type(None), describe_json_type([1]), describe_json_type("a")
        ('null', 'a list', 'text')
    """
    if value is None:
        return "null"
    return {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
    }.get(type(value), type(value).__name__)


def expand_path(knob: str, name: str | Path) -> Path:
    """Returns the path that a user wrote, with `~` expanded; it need not exist.

    Raises:
        DataError: there is no such home folder, or the path is invalid.
    """
    try:
        # Raises RuntimeError for an unknown user, as in ~nobody/data.
        path = Path(name).expanduser()
        # Only to find paths that the system refuses; a missing path is no error yet.
        path.stat()
    except RuntimeError:
        raise DataError(
            f"{knob} {quote_value(str(name))}: there is no such home folder; write the absolute path"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError) as error:  # too long, no permission, a link to itself; a NUL
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{knob} {quote_value(str(name))}: cannot be accessed ({reason}); name another path") from None
    return path


def describe_missing_path(knob: str, path: Path) -> DataError:
    """Returns the error for a path that does not exist, with the closest name that does."""
    if path.is_symlink():
        return DataError(
            f"{knob} {display_path(path)}: is a link to {display_path(os.readlink(path))}, which does not exist; fix "
            "the link"
        )
    # The closest name in the folder is more helpful than the whole path.
    parent, wanted = path.parent, path.name
    # Climb to the deepest folder that exists: the wrong part of the path is a name in it.
    while not parent.is_dir() and parent != parent.parent:
        parent, wanted = parent.parent, parent.name
    names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))
    known = suggest_name(wanted, names) if names else "it is empty"
    return DataError(
        f"{knob} {display_path(path)}: does not exist; looking for '{display_path(wanted)}' in "
        f"{display_path(parent)}: {known}"
    )


def display_path(path: Path | str) -> str:
    """Returns a path for messages: without control characters, and shortened if very long."""
    text = escape_control_characters(path).replace("\n", "␊").replace("\t", "␉")
    return text if len(text) <= 300 else shorten(text, 300)


def format_names(names: Iterable[object], most: int = 8) -> str:
    """Returns the first names for a message, quoted and shortened, and the number of the others.

    Example:
        >>> format_names(["a", "b"]), format_names(range(12), 2)
        ("'a', 'b'", "'0', '1' and 10 more")
    """
    names = [str(name) for name in names]
    first = ", ".join(quote_value(name, 40) for name in names[:most])
    return first + (f" and {len(names) - most:,} more" if len(names) > most else "")


def suggest_name(word: str, known: Sequence[str]) -> str:
    """Returns `nearest` for names in a user's file, which may be many and long."""
    # Comparing is quadratic in the length of names, and a file may have thousands of fields.
    candidates = [shorten(name, 40) for name in known[:100]]
    near = suggest_nearest(shorten(word, 40), candidates)
    return near if near.startswith("did") else f"known: {format_names(known)}" if known else "there are none here"


def find_files(knob: str, path: Path) -> tuple[list[Path], str, str]:
    """Finds the files to read at a path; returns them in a fixed order, and descriptions of these and of files not
    read.

    In a folder, data files often come with metadata (a README, a dataset_infos.json), so one kind is read: .jsonl,
    .parquet and .csv, else .json, else text files.
    """
    if not path.is_dir():
        if not path.is_file():
            raise DataError(
                f"{knob} {display_path(path)}: is {_describe_path_kind(path)}, neither a file nor a folder; name one "
                "of these"
            )
        if path.suffix not in TEXT + ROWS:
            raise DataError(
                f"{knob} {display_path(path)}: preheat reads {', '.join(TEXT + ROWS)}, and no "
                f"'{display_path(path.suffix)}'; rename or convert the file"
            )
        if path.stat().st_size == 0:
            raise DataError(f"{knob} {display_path(path)}: the file is empty")
        return [path], str(path), ""
    every, left = _list_files(knob, path)
    for suffixes in ((".jsonl", ".parquet", ".csv"), (".json",), TEXT):
        chosen = [p for p in every if p.suffix in suffixes]
        # Tables of `datasets` without their index. Files of rows take
        # precedence; .json and text files are only metadata then.
        if ".jsonl" not in suffixes and any(p.suffix == ".arrow" for p in every):
            raise DataError(
                f"{knob} {display_path(path)}: has .arrow files without the state.json that datasets.save_to_disk "
                "writes next to them; it is incomplete: write it again, or as .parquet"
            )
        if chosen:
            left.update(_find_suffix(p) for p in every if p.suffix not in suffixes)
            kinds = ", ".join(sorted({p.suffix for p in chosen}))
            return chosen, f"{path}: {len(chosen)} files ({kinds})", _format_counts(left)
    left.update(map(_find_suffix, every))
    holds = f"; it holds {_format_counts(left)}" if left else ", it is empty"
    raise DataError(
        f"{knob} {display_path(path)}: the folder has no file that preheat reads ({', '.join(TEXT + ROWS)}){holds}"
    )


def _list_files(knob: str, folder: Path) -> tuple[list[Path], Counter[str]]:
    """Returns the non-empty files under a folder, sorted, and counts of the others (hidden, empty, special)."""
    files, left = list[Path](), Counter[str]()

    def raise_unreadable(error: OSError) -> NoReturn:
        raise DataError(f"{knob} {display_path(error.filename)}: cannot be read ({error.strerror or error})") from None

    for place, folders, names in os.walk(folder, onerror=raise_unreadable):
        at = Path(place)
        left["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
        # os.walk does not follow them, so that a link to a parent cannot loop.
        left["links to folders"] += sum((at / name).is_symlink() for name in folders if not name.startswith("."))
        # In place, since os.walk descends into the folders that remain in this very list.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (at / name for name in names if not name.startswith(".")):
            if not file.is_file():
                left[f"{_describe_path_kind(file).partition(' ')[2]}"] += 1
            elif file.stat().st_size == 0 and file.suffix in TEXT + ROWS:
                left[f"empty {file.suffix}"] += 1
            else:
                files.append(file)
    # Sorted, since the file system's order differs between machines. The plus drops counts of 0.
    return sorted(files), +left


def _describe_path_kind(path: Path) -> str:
    """Returns the kind of a path that is neither a file nor a folder."""
    if path.is_symlink() and not path.exists():
        return "a link to nothing"
    # Opening a pipe or a device may wait forever, so these are never read.
    mode = path.stat().st_mode
    known = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return known.get(stat.S_IFMT(mode), "a special file")


def _find_suffix(path: Path) -> str:
    return display_path(path.suffix) if path.suffix else "without suffix"


def _format_counts(left: Counter[str]) -> str:
    """Returns counts as text, the largest first: '3 .txt, 1 hidden'."""
    parts = [f"{count:,} {what}" for what, count in sorted(left.items(), key=lambda pair: (-pair[1], pair[0]))]
    return ", ".join(parts[:8]) + (f" and {sum(sorted(left.values())[:-8]):,} others" if len(parts) > 8 else "")


def read_columns(path: Path) -> list[str] | None:
    """Returns the fields of a file whose format declares them before the rows (Parquet, CSV); else None."""
    try:
        if path.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            try:
                return list(pyarrow.parquet.read_schema(path).names)
            except (pyarrow.ArrowException, UnicodeDecodeError) as error:
                raise DataError(f"{display_path(path)}: not a readable Parquet file: {_first_line_of(error)}") from None
        # (line, names, values) of the first row.
        return next(read_csv(path), (0, [], []))[1] if path.suffix == ".csv" else None
    except OSError as error:
        raise _describe_unread(path, error) from None


def _describe_unread(path: Path, error: OSError) -> DataError:
    return DataError(f"{display_path(path)}: cannot be read ({error.strerror or _first_line_of(error)})")


def _first_line_of(error: BaseException) -> str:
    return shorten((str(error).strip() or type(error).__name__).splitlines()[0], 200)


def read_file(
    path: Path, columns: Sequence[str] | None = None, *, whole: bool = False, keyed: bool = False
) -> Iterator[tuple[str, object]]:
    """Yields (where, row) of a file; a row is an object with fields, or the text of a file without rows.

    Args:
        columns: columns to read, if the format can skip others.
        whole: read a long .txt file as one document.
        keyed: a .json file may also hold an object of objects, whose keys become the field `key` of the rows.
    """
    try:
        if path.suffix == ".txt" and not whole and path.stat().st_size > CUT_ABOVE:
            yield from _cut(path)
        elif path.suffix in TEXT:
            yield display_path(path), "".join(line for _, line in read_lines(path, longest=None))
        elif path.suffix == ".jsonl":
            yield from read_jsonl(path)
        elif path.suffix == ".json":
            yield from _iterate_json(path, keyed)
        elif path.suffix == ".csv":
            for number, names, values in read_csv(path):
                if len(values) != len(names):
                    raise DataError(
                        f"{display_path(path)}:{number}: has {len(values):,} fields where the first line names "
                        f"{len(names):,}; quote commas and line ends"
                    )
                yield f"{display_path(path)}:{number}", dict(zip(names, values, strict=True))
        else:
            yield from read_parquet(path, columns)
    except OSError as error:
        raise _describe_unread(path, error) from None


OTHER_FORMATS = {
    b"\x1f\x8b": ("a gzip file", "unpack it"),
    b"PK\x03\x04": ("a zip file", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("a Zstandard file", "unpack it"),
    b"\xfd7zXZ": ("an xz file", "unpack it"),
    b"BZh": ("a bzip2 file", "unpack it"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"ARROW1": ("an Arrow file", "write it as .parquet"),
    b"\xff\xfe": ("text in UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it to UTF-8"),
}
"""First bytes of formats whose files often have a wrong suffix -> (format, advice)."""


def read_lines(path: Path, *, longest: int | None = LONGEST) -> Iterator[tuple[int, str]]:
    """Yields (number, line) with line ends, decoded from UTF-8, without a byte order mark.

    Raises:
        DataError: a line is not text in UTF-8, or has more than `longest` bytes.
        OSError: the file cannot be opened or read.
    """
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(_iterate_raw_lines(file, longest), 1):
            where = f"{display_path(path)}:{number}"
            # A compressed or binary file with a text suffix: say what it is, not which byte is wrong.
            if number == 1 and (what := next((w for mark, w in OTHER_FORMATS.items() if raw.startswith(mark)), None)):
                raise DataError(f"{where}: is {what[0]}, not text in UTF-8; {what[1]}")
            # `_iterate_raw_lines` reads one byte more than allowed, so a longer line is found without reading it all.
            if longest is not None and len(raw) > longest:
                raise DataError(
                    f"{where}: the line has more than {longest // 2**20:,} MiB, and a row at most that; "
                    "cut it into several rows"
                )
            if b"\0" in raw:
                raise DataError(f"{where}: byte {offset + raw.index(0):,} is 0: a binary file, not text")
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = raw[error.start]
                raise DataError(
                    f"{where}: byte {offset + error.start:,} (0x{bad:02x}) is not text in UTF-8; convert "
                    "the file or leave it out"
                ) from None
            offset += len(raw)
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def _iterate_raw_lines(file: BinaryIO, longest: int | None) -> Iterator[bytes]:
    limit = -1 if longest is None else longest + 1
    while raw := file.readline(limit):
        yield raw


def parse_json(text: str, where: str, *, lines: bool = False, hint: str = "") -> Any:
    """Parses JSON by `read_value`; errors name the file and the row.

    Args:
        where: file and row, for messages.
        lines: `where` is the file of a text with several lines: errors add the line.
        hint: advice after the message for text that is not JSON.

    Raises:
        DataError: in place of BadJson.
    """
    try:
        return read_value(text, once=True)
    except BadJson as error:
        at = f"{where}:{error.line}" if lines and error.line else where
        raise DataError(f"{at}: {error.message}{hint if error.line else ''}") from None


def _cut(path: Path) -> Iterator[tuple[str, str]]:
    """Cuts a long text into documents of a few KB whose concatenation is the text."""
    parts: list[str] = []
    size = first = 0
    for number, line in read_lines(path, longest=None):
        # One pass for usual lines; a file of a single line is cut within it.
        for start in range(0, len(line), CUT_AT_ANY_LINE):
            if not parts:
                first = number
            piece = line[start : start + CUT_AT_ANY_LINE]
            parts.append(piece)
            size += len(piece)
            if size >= CUT_AT_ANY_LINE or (size >= CUT_AT and not line.strip()):
                yield f"{display_path(path)}:{first}", "".join(parts)
                parts, size = [], 0
    if parts:
        yield f"{display_path(path)}:{first}", "".join(parts)


def read_jsonl(path: Path) -> Iterator[tuple[str, object]]:
    """Yields (where, value) of each line that is not blank."""
    for number, line in read_lines(path):
        if line.strip():
            where = f"{display_path(path)}:{number}"
            yield where, parse_json(line.rstrip(), where)


def read_json(path: Path) -> Any:
    """Returns the content of a .json file; an empty list for a blank file."""
    # A .json file is often a single line, so the limit on lines does not apply.
    text = "".join(line for _, line in read_lines(path, longest=None))
    if not text.strip():
        return []
    return parse_json(text, display_path(path), lines=True, hint=" (a file of one object a line is named .jsonl)")


def _iterate_json(path: Path, keyed: bool) -> Iterator[tuple[str, object]]:
    rows = read_json(path)
    if keyed and isinstance(rows, dict):
        # An object of objects, such as PubMedQA's files: the key identifies the row.
        rows = [{"key": key, **row} if isinstance(row, dict) else row for key, row in rows.items()]
    if not isinstance(rows, list):
        of_objects = " or an object of them" if keyed else ""
        raise DataError(
            f"{display_path(path)}: holds {describe_json_type(rows)}; a .json file must hold a list of "
            f"objects{of_objects}"
        )
    for number, row in enumerate(rows, 1):
        yield f"{display_path(path)}: row {number}", row


def read_csv(path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yields (line, names, values) of each row; a quoted value may span several lines."""
    import csv

    csv.field_size_limit(2**31 - 1)  # process-wide; the default of 128 KiB is too short for documents
    # strict: without it, an unclosed quote swallows the rest of the file as one value.
    reader = csv.reader((line for _, line in read_lines(path)), strict=True)
    names: list[str] = []
    try:
        for values in reader:
            if not values:
                continue
            # The first line that is not blank names the fields.
            if not names:
                names = values
                if len(set(names)) < len(names) or not all(name.strip() for name in names):
                    raise DataError(
                        f"{display_path(path)}:1: the first line must name each field once, has {format_names(names)}"
                    )
                continue
            yield reader.line_num, names, values
    except csv.Error as error:
        raise DataError(f"{display_path(path)}:{reader.line_num}: not CSV: {error}") from None


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, object]]:
    """Yields (where, row) of each row, restricted to `columns` if given."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # Columns that are not read are not decoded.
            known = [name for name in file.schema_arrow.names if columns is None or name in columns]
            # In batches, since row groups may have gigabytes when decoded.
            for batch in file.iter_batches(batch_size=1024, columns=known):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{display_path(path)}: row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        # The row after the last one that was read; before any row, the file itself is at fault.
        where = f"{display_path(path)}: row {number + 1}" if number else display_path(path)
        raise DataError(f"{where}: not a readable Parquet file: {_first_line_of(error)}") from None
