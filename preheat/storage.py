"""Folders of object storage (s3://, gs://, az://, hf://) through fsspec, with one-line errors.

fsspec and its backends are imported only for a URL. Credentials, regions and endpoints follow each backend's own rules.
az:// and hf:// have not been tested.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preheat.cache_folder import cache_folder, make_private
from preheat.errors import RecipeError, RunError
from preheat.sanitize import shorten

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "Missing",
    "RemoteFolder",
    "StorageError",
    "Unreachable",
    "digest_url",
    "download_source",
    "is_url",
    "require_scheme",
]


class StorageError(RunError):
    """A remote folder cannot be used: it does not exist, or access is denied."""


class Missing(StorageError):
    """There is no such bucket or folder."""


class Unreachable(StorageError):
    """The storage did not answer, or failed: another attempt may succeed."""


@dataclass(frozen=True)
class _Backend:
    """A kind of storage.

    Attributes:
        module: fsspec's implementation.
        install: the command that installs it.
        errors: modules with exceptions that are no OSErrors -> their names.
        credentials: where the backend looks for them.
    """

    module: str
    install: str
    errors: Mapping[str, tuple[str, ...]]
    credentials: str


_BACKENDS = {
    "s3": _Backend(
        "s3fs",
        "pip install 'preheat[s3]'",
        {"botocore.exceptions": ("BotoCoreError", "ClientError"), "aiohttp": ("ClientError",)},
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role",
    ),
    "gs": _Backend(
        "gcsfs",
        "pip install 'preheat[gs]'",
        {
            "gcsfs.retry": ("HttpError", "ChecksumError", "NonRetryableError"),
            "google.auth.exceptions": ("GoogleAuthError",),
            "aiohttp": ("ClientError",),
        },
        "GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login, or the machine's account",
    ),
    "az": _Backend(
        "adlfs",
        "pip install 'preheat[az]'",
        # adlfs raises ValueError if it finds no account.
        {"azure.core.exceptions": ("AzureError",), "aiohttp": ("ClientError",), "builtins": ("ValueError",)},
        "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ),
    "hf": _Backend("huggingface_hub", "pip install huggingface_hub", {"httpx": ("HTTPError",)}, "HF_TOKEN"),
}
_DENIED = ("NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "DefaultCredentialsError")
"""Names of exceptions about credentials that are no PermissionErrors."""


def is_url(path: str | os.PathLike[str] | None) -> bool:
    """Returns True if a path is the URL of a kind of storage that preheat knows.

    Example:
        >>> is_url("s3://bucket/runs/a"), is_url("runs/a"), is_url("https://host/a")
        (True, False, False)
    """
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme in _BACKENDS


def require_scheme(knob: str, path: str) -> None:
    """Checks that an output path is one of this machine, or a URL that preheat can write to.

    Raises:
        RecipeError: it is another URL.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) and not is_url(path):
        known = ", ".join(f"{scheme}://" for scheme in _BACKENDS)
        raise RecipeError(f"{knob} {shorten(path, 100)}: preheat knows {known}; name one of these, or a folder")


def digest_url(url: str) -> str:
    """Returns a short name of a URL, for its folder in the cache."""
    return hashlib.blake2b(url.rstrip("/").encode(), digest_size=6).hexdigest()


class RemoteFolder:
    """A folder of object storage.

    Args:
        url: such as s3://bucket/runs/a.

    Attributes:
        root: its path in the storage, as fsspec writes it.

    Raises:
        RecipeError: the URL names no bucket and folder, or its backend is not installed.
        StorageError: there are no credentials.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        # "s3://" has lost its slashes.
        scheme, _, rest = self.url.partition(":")
        rest = rest.strip("/")
        if "/" not in rest:
            raise RecipeError(f"{scheme}://{rest}: names no folder; write {scheme}://BUCKET/FOLDER")
        self._backend = _BACKENDS[scheme]
        self._fs, self.root = self._open()

    def _open(self) -> tuple[AbstractFileSystem, str]:
        import importlib

        import fsspec

        try:
            importlib.import_module(self._backend.module)
        except ImportError:
            raise RecipeError(
                f"{self.url}: needs {self._backend.module}, which is not installed: {self._backend.install}"
            ) from None
        # Loaded once, so that no import happens while an error is handled.
        self._errors: tuple[type[Exception], ...] = (OSError, *self._list_errors())
        try:
            # Listings change while a run is uploaded, also by other machines; and credentials may have changed since
            # another instance was made.
            fs, root = fsspec.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except self._errors as error:
            raise self._explain(error, self.url) from None
        return fs, root

    def _list_errors(self) -> tuple[type[Exception], ...]:
        import importlib

        classes: list[type[Exception]] = []
        for module, names in self._backend.errors.items():
            classes += [getattr(importlib.import_module(module), name) for name in names]
        return tuple(classes)

    def _explain(self, error: BaseException, url: str) -> StorageError:
        """Returns an error of the backend as ours."""
        reason = shorten((str(error).strip() or type(error).__name__).splitlines()[0], 200)
        if isinstance(error, FileNotFoundError):
            return Missing(f"{url}: does not exist ({reason}); create the bucket, or name another")
        if isinstance(error, PermissionError) or type(error).__name__ in _DENIED:
            return StorageError(f"{url}: access denied ({reason}); check {self._backend.credentials}")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return StorageError(f"{url}: cannot be stored here ({reason}); free disk space, or set PREHEAT_CACHE")
        return Unreachable(f"{url}: cannot be reached ({reason})")

    @contextlib.contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise self._explain(error, f"{self.url}/{name}".rstrip("/")) from None

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object, or None if there is none of that name."""
        with self._explained(name):
            try:
                content: bytes = self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes an object whole: readers see the former one or this one."""
        with self._explained(name):
            self._fs.pipe_file(self._path(name), content)

    def upload(self, file: Path, name: str) -> None:
        with self._explained(name):
            self._fs.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        with self._explained(name):
            self._fs.get_file(self._path(name), str(file))

    def remove(self, name: str) -> None:
        """Removes an object, if there is one of that name."""
        with self._explained(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def list_names(self) -> list[str]:
        """Returns the names of all objects in the folder, relative to it.

        Raises:
            StorageError: there is no such bucket.
        """
        with self._explained():
            paths = self._fs.find(self.root)
        # Consoles of storage mark folders by empty objects whose names end so.
        return sorted(path.removeprefix(f"{self.root}/") for path in paths if path.rstrip("/") != self.root)

    def open_folder(self, name: str) -> RemoteFolder:
        """Returns a folder in this one, by the same connection."""
        folder = copy.copy(self)
        folder.url, folder.root = f"{self.url}/{name}", self._path(name)
        return folder

    def list_folder(self) -> tuple[list[str], dict[str, str]]:
        """Returns the names of the folders in this one, and of its objects with a tag that changes with the content.

        Raises:
            Missing: it does not exist.
            StorageError: no access or no link.
        """
        folders, files = [], {}
        with self._explained():
            for facts in self._fs.ls(self.root, detail=True):
                path = facts["name"].rstrip("/")
                name = path.rpartition("/")[2]
                # A marker of the folder itself, as in `list_names`; and a name must not lead out of a local copy.
                if path == self.root or name in ("", ".", ".."):
                    continue
                if facts["type"] == "directory":
                    folders.append(name)
                else:
                    files[name] = _identify(facts)
        return sorted(folders), files

    def list_source(self) -> dict[str, dict[str, Any]]:
        """Returns the objects that a URL of data names: of an object, of a folder, or of a pattern with * -> facts."""
        with self._explained():
            if "*" in self.root:
                return dict(self._fs.glob(self.root, detail=True))
            if self._fs.isfile(self.root):
                return {self.root: self._fs.info(self.root)}
            return dict(self._fs.find(self.root, detail=True))

    def get(self, path: str, file: Path) -> None:
        """Downloads an object by its path in the storage."""
        with self._explained():
            self._fs.get_file(path, str(file))

    def read_modified(self, path: str) -> datetime:
        with self._explained():
            time: datetime = self._fs.modified(path)
        return time


def _identify(facts: Mapping[str, Any]) -> str:
    """Returns the content tag of an object, under whichever name the backend gives it, or its size and time."""
    tags = [str(facts[key]) for key in ("ETag", "etag", "md5Hash", "blob_id", "xet_hash") if facts.get(key)]
    times = [str(facts[key]) for key in ("LastModified", "last_modified", "updated", "mtime") if facts.get(key)]
    return "|".join([str(facts.get("size")), *(tags or times)])


def download_source(url: str) -> Path:
    """Returns a local copy of the data at a URL: an object, a folder, or a pattern with * for objects.

    It is kept in the cache under the tags of its objects, so that data that changed is downloaded again.

    Raises:
        RecipeError: the backend is not installed.
        StorageError: there is no such data, no access, or no link.
    """
    remote = RemoteFolder(url)
    objects = {path: facts for path, facts in remote.list_source().items() if facts.get("type", "file") == "file"}
    # As in `RemoteFolder.list_names`.
    objects = {path: facts for path, facts in sorted(objects.items()) if not path.endswith("/")}
    if not objects:
        raise StorageError(f"{url}: does not exist, or holds no files; name an object, a folder or a pattern")
    base = os.path.commonpath([os.path.dirname(path) for path in objects])
    names = {path: path.removeprefix(f"{base}/") for path in objects}
    if bad := next((name for name in names.values() if ".." in Path(name).parts), None):
        raise StorageError(f"{url}: {shorten(bad, 100)} is not the name of a file; name other objects")
    tags = hashlib.blake2b(repr([(names[p], _identify(f)) for p, f in objects.items()]).encode(), digest_size=8)
    folder = cache_folder() / "data" / digest_url(url) / tags.hexdigest()
    if not folder.is_dir():
        try:
            _download_objects(remote, names, folder)
        except OSError as error:
            raise StorageError(
                f"{url}: cannot be stored in {folder} ({error.strerror}); free disk space, or set PREHEAT_CACHE"
            ) from None
    # One object is a file of its name, everything else a folder.
    return folder / names[remote.root] if remote.root in names else folder


def _download_objects(remote: RemoteFolder, names: Mapping[str, str], folder: Path) -> None:
    """Downloads objects into a folder, which gets its name when it is complete."""
    make_private(folder.parent)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".writing"))
    try:
        for path, name in names.items():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            remote.get(path, file)
            # The fingerprint of a large file holds its time, which must be the same on every machine.
            time = remote.read_modified(path).timestamp()
            os.utime(file, (time, time))
        # Another process may have downloaded the same: its copy is as good.
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
