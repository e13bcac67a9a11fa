"""Pushes an export to a model repository on the Hugging Face hub. Imports no torch.

All files of the folder are sent, except hidden ones and preheat's own record. On disk, an adapter names the folder of
its base by the path that loads it; the files that are sent name it without the path.
"""

from __future__ import annotations

import mmap
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.compress.front_matter import FOLDER_NOTE, hub_name
from preheat.errors import RecipeError, RunError
from preheat.files import parse_json, read_bytes, read_record, read_value, to_json
from preheat.hardware.connectivity import is_hub_reachable
from preheat.sanitize import quote_value, shorten

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

__all__ = [
    "CARD",
    "Push",
    "SentFile",
    "command",
    "is_export",
    "push",
    "require_access",
    "require_format",
    "require_name",
    "write_record",
]

RECORD = "preheat_export.json"
"""The file that marks a folder as an export. It is not sent."""
CARD = "README.md"
_COMPILED = (
    "--push: an AOTInductor package is compiled for this machine's processor and names its folders; push --to hf, and "
    "export that to aoti where it runs"
)
_SETTINGS = (
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "preheat_base.json",
    "tokenizer_config.json",
)
_BASE_KEYS = ("base", "base_model_name_or_path", "_name_or_path", "name_or_path")
"""Keys of these files that may hold the folder of the base model, by peft, transformers and preheat."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The source of an export.

    Attributes:
        title: that of the card: the run, and the format.
        step: of the run; None: made from a folder.
    """

    title: str
    step: int | None = None

    @property
    def commit_message(self) -> str:
        return self.title if self.step is None else f"{self.title}, step {self.step:,}"


@dataclass(frozen=True)
class SentFile:
    """A file of the repository."""

    path: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Push:
    """A push to the hub, or a dry run of one.

    Attributes:
        private: of the repository; of a dry run, as asked for.
        url: of the repository; None: a dry run.
        message: of the commit.
        card: path of the model card on disk.
        bytes: of all files.
        note: what to change in the card; or ''.
    """

    repository: str
    private: bool
    url: str | None
    message: str
    card: str
    files: tuple[SentFile, ...]
    bytes: int
    note: str


def write_record(folder: Path, title: str, step: int | None) -> None:
    """Marks a folder as an export, so that it can be pushed later."""
    (folder / RECORD).write_text(to_json(vars(_Record(title=title, step=step)), indent=1) + "\n", encoding="utf-8")


def is_export(folder: str | Path) -> bool:
    """Returns True for a folder that `preheat export` wrote."""
    return (Path(folder) / RECORD).is_file()


def require_name(repository: str) -> None:
    """Raises RecipeError if the name of a repository is not OWNER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    problem = "it has no owner" if "/" not in repository else ""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        problem = shorten(str(error), 200)
    if problem:
        raise RecipeError(f"--push {quote_value(repository)}: {problem}; write OWNER/NAME, such as --push me/my-model")


def require_format(to: str) -> None:
    """Raises RecipeError for a format that is not for others."""
    if to == "aoti":
        raise RecipeError(_COMPILED)


def require_access() -> None:
    """Raises RunError if nothing can be pushed from here; called before the export is written."""
    from huggingface_hub import constants, get_token

    later = "use --push-dry-run, or export without --push and push the folder later: preheat export FOLDER --push ..."
    if constants.HF_HUB_OFFLINE:
        raise RunError(f"--push: HF_HUB_OFFLINE is set, so nothing can be sent; unset it, {later}")
    if get_token() is None:
        raise RunError("--push: there is no token for the hub; run `hf auth login` or set HF_TOKEN, or " + later)
    if not is_hub_reachable():
        raise RunError(f"--push: {constants.ENDPOINT} cannot be reached; {later}")


def push(folder: str | Path, repository: str, *, private: bool = False, dry_run: bool = False) -> Push:
    """Sends an export to a repository, which is created if necessary.

    Args:
        folder: of the export.
        repository: OWNER/NAME.
        private: create a private repository; False: as the owner's account creates them.
        dry_run: send nothing, and use no network.

    Raises:
        RunError: not an export, a file names a folder of this machine, the repository is public although `private`,
            or the hub cannot be reached or refuses.
    """
    folder = Path(folder)
    record = _read_record(folder)
    with _staged(folder) as staged:
        files = tuple(
            SentFile(file.relative_to(staged).as_posix(), file.stat().st_size)
            for file in sorted(staged.rglob("*"))
            if file.is_file()
        )
        unknown_base = FOLDER_NOTE in (staged / CARD).read_text(encoding="utf-8")
        planned = Push(
            repository=repository,
            private=private,
            url=None,
            message=record.commit_message,
            card=str(folder / CARD),
            files=files,
            bytes=sum(file.bytes for file in files),
            note=f"base_model in {folder / CARD} is the name of a folder; put the hub's name there" * unknown_base,
        )
        return planned if dry_run else _send(staged, planned, command(folder, repository, private))


def _read_record(folder: Path) -> _Record:
    if not is_export(folder):
        raise RunError(f"{folder}: is not an export (it has no {RECORD}); write one with preheat export RUN")
    if not (folder / CARD).is_file():
        raise RunError(f"{folder}: has no {CARD}, the model card; restore it, or export again")
    try:
        return read_record(_Record, parse_json(read_bytes(folder / RECORD)))
    except ValueError as error:
        raise RunError(f"{folder / RECORD}: is damaged ({error}); export again into another folder") from None


def command(folder: Path, repository: str, private: bool = False) -> str:
    """Returns the command that pushes an export on disk."""
    return f"preheat export {shlex.quote(str(folder))} --push {repository}" + " --private" * private


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder with the files as they are sent: links, and texts without paths of this machine."""
    sources = [
        file
        for file in sorted(folder.rglob("*"))
        # A link may lead out of the folder, and hidden files may be a user's .env.
        if file.is_file() and not file.is_symlink() and file.name != RECORD and not _is_hidden(file.relative_to(folder))
    ]
    if any(file.suffix == ".pt2" for file in sources):
        raise RecipeError(_COMPILED)
    texts, bases = {}, dict[str, str]()
    for file in (folder / name for name in _SETTINGS):
        if file not in sources:
            continue
        try:
            # Not `parse_json`: a tokenizer's maximum length may be 1e30.
            values = read_value(read_bytes(file))
        except ValueError as error:
            raise RunError(f"{file}: is damaged ({error}); export again into another folder") from None
        paths = {
            key: value
            for key in _BASE_KEYS
            if isinstance(values, dict) and isinstance(value := values.get(key), str) and Path(value).is_absolute()
        }
        if paths:
            names = {key: hub_name(path) or Path(path).name for key, path in paths.items()}
            bases |= {path: names[key] for key, path in paths.items()}
            texts[file] = to_json(values | names, indent=2) + "\n"
    card = _read_card(folder)
    for path in sorted(bases, key=len, reverse=True):
        card = card.replace(path, bases[path])
    texts[folder / CARD] = card
    with tempfile.TemporaryDirectory(prefix="preheat-push-") as temporary:
        for file in sources:
            target = Path(temporary) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file in texts:
                target.write_text(texts[file], encoding="utf-8")
            else:
                target.symlink_to(file.resolve())
            _require_no_path(target, file)
        yield Path(temporary)


def _read_card(folder: Path) -> str:
    try:
        return (folder / CARD).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RunError(f"{folder / CARD}: is not text in UTF-8; save it as such") from None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _require_no_path(staged: Path, file: Path) -> None:
    """Raises RunError if a file to be sent names the user's home, the current folder, or the one of the export."""
    # A file may contain /root or /tmp for other reasons, for example in a vocabulary.
    folders = {path for path in (Path.home(), Path.cwd(), file.parent.resolve()) if len(path.parts) > 2}
    if not staged.stat().st_size:
        return
    with staged.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for path in sorted(folders):
            if content.find(str(path).encode()) >= 0:
                raise RunError(
                    f"{file}: names the folder {path} of this machine, so nothing was sent; remove that from the file"
                )


def _send(staged: Path, planned: Push, command: str) -> Push:
    """Creates the repository, and sends the staged files as a commit."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    from preheat import __version__

    api, name = HfApi(library_name="preheat", library_version=__version__), planned.repository
    later = f"the export stays; to push it later: {command}"
    try:
        # None: organizations may create private ones by default, which `False` would override.
        url = api.create_repo(name, private=planned.private or None, exist_ok=True)
        private = bool(api.repo_info(name).private)
        if private or not planned.private:
            api.upload_folder(repo_id=name, folder_path=staged, commit_message=planned.message)
    # Also RuntimeError and ValueError, which the client raises for a failed upload of one file and for a card that the
    # hub rejects; errors of the network are HTTPErrors or OSErrors.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, HTTPError | OSError):
            cause = cause.__cause__
        if isinstance(cause, HfHubHTTPError):
            reason = _refusal(cause, name)
        elif isinstance(cause, HTTPError | OSError):
            reason = f"the connection to {constants.ENDPOINT} failed ({type(cause).__name__}: {cause})"
        else:
            reason = str(error)
        # A server or a proxy may repeat the request in its answer.
        reason = shorten(reason.replace(get_token() or "\0", "TOKEN"), 300)
        raise RunError(f"--push {name}: {reason}; {later}") from None
    if planned.private and not private:
        raise RunError(
            f"--push {name}: the repository exists and is public, so nothing was sent; make it private in its settings "
            f"on the hub, or leave out --private; {later}"
        )
    return replace(planned, private=private, url=str(url))


def _refusal(error: HfHubHTTPError, name: str) -> str:
    """Returns why the hub refused a request."""
    status = error.response.status_code
    meanings = {
        401: "the hub does not accept the token; run `hf auth login`, or set HF_TOKEN to a valid one",
        403: f"the token has no right to write to {name}; use a token with write access, or another owner",
        404: f"the hub has no {name} that the token can see",
        409: "another change of the repository was in the way; try again",
    }
    said = f": {error.server_message}" if error.server_message else ""
    return f"{meanings.get(status, 'the hub refused')} ({status}{said})"
