"""Copies of local folders in object storage: a manifest names the files that belong together, and is replaced last.

A manifest gives, for each file of the folder, its size, checksum and object. An object that the present manifest names
is never overwritten: new content gets an object of its own, and the former one is removed when no manifest names it.
A reader, who trusts only what the manifest names, therefore always finds the state of one moment.

The folder `remote/DIGEST` of the cache holds, for each URL, the local folder of a run written there, and `state.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TextIO

from preheat.cache_folder import cache_folder, make_private
from preheat.core.units import format_bytes
from preheat.errors import RunError
from preheat.files import compute_sha256, parse_json, read_bytes, read_record, to_json, to_plain_data, write_atomic
from preheat.run.layout import abbreviate, read_mark
from preheat.sanitize import quote_value, shorten
from preheat.storage import RemoteFolder, StorageError, Unreachable, digest_url

__all__ = [
    "MANIFEST",
    "LostFolder",
    "Manifest",
    "RemoteCopy",
    "RemoteFile",
    "download_file",
    "period_of",
    "read_manifest",
]

MANIFEST = "preheat-manifest.json"
_FORMAT = 1
_PARALLEL = 4
"""Objects that are sent at once: enough for a link of 1 Gbit/s, and few sockets and buffers."""
_SILENT_PERIODS = 3
"""A writer that has not replaced its manifest for so many periods has ended."""
_LEFT_OUT = re.compile(r"lock|.*\.lock|.*\.writing|\.preheat-writing|step-[0-9]+\.aside-[0-9]+")
"""Names that are not copied: locks, what is being written, and checkpoints that --checkpoint moved aside."""

Say = Callable[[str], None]


def period_of(url: str) -> float:
    """Returns the seconds between two uploads of a run's metrics. On the hub, each is a commit, which are limited."""
    return 600.0 if url.startswith("hf://") else 20.0


class LostFolder(RunError):
    """Another process has begun to write to the remote folder."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a folder in object storage.

    Attributes:
        object: name of the object that holds it, relative to the folder's URL.
    """

    object: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files that an upload has completed.

    Attributes:
        kind: "run" or "export".
        id: of the run.
        writer: of the session that writes it.
        revision: number of times that the manifest was replaced.
        active: the session has not ended.
        files: path relative to the folder -> file; empty before the run has begun.
    """

    kind: str
    id: str
    writer: str
    revision: int
    active: bool
    files: dict[str, RemoteFile]
    format: int = _FORMAT


@dataclass(frozen=True)
class _State:
    """The state of a remote folder, as far as this machine knows it.

    Attributes:
        folder: the local folder.
        writers: the sessions of this machine that wrote it: their last state is the local folder's.
        fetched: writer and revision of the manifest that the local folder was downloaded by.
    """

    folder: str = ""
    writers: tuple[str, ...] = ()
    fetched: tuple[str, int] = ("", 0)


@dataclass
class RemoteCopy:
    """A local folder and its copy at a URL.

    Args:
        url: the remote folder.
        folder: the local folder; by default one in the cache.
        kind: "run" or "export".
    """

    url: str
    folder: Path = Path()
    kind: str = "run"
    period: float = 0.0
    _hashes: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Path -> size, time and checksum, so that unchanged files are not read again."""
    _remote: RemoteFolder | None = None

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self._home = cache_folder() / "remote" / digest_url(self.url)
        default = self._home / PurePosixPath(self.url).name
        self.folder = (default if self.folder == Path() else self.folder).absolute()
        self.period = self.period or period_of(self.url)

    @property
    def remote(self) -> RemoteFolder:
        """The remote folder, which is opened at its first use."""
        if self._remote is None:
            self._remote = RemoteFolder(self.url)
        return self._remote

    # --- what is known here ------------------------------------------------------------------------------------------

    def _read_state(self) -> _State:
        file = self._home / "state.json"
        if not file.exists():
            return _State()
        try:
            state = read_record(_State, parse_json(read_bytes(file)))
        except ValueError as error:
            raise RunError(f"{file}: is damaged ({error}); move {self._home} away, and repeat the command") from None
        # Knowledge of another local folder says nothing about this one.
        return state if state.folder == str(self.folder) else _State()

    def _is_current(self, manifest: Manifest) -> bool:
        """Returns True if the local folder is at least as new as the remote one."""
        state = self._read_state()
        known = manifest.writer in state.writers or (manifest.writer, manifest.revision) == state.fetched
        return known and self.folder.is_dir()

    def _write_state(self, state: _State) -> None:
        try:
            make_private(self._home)
            write_atomic(self._home / "state.json", to_json(to_plain_data(state), indent=1) + "\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"{self._home}: cannot be written ({error.strerror}); free disk space, or set PREHEAT_CACHE to another "
            "folder"
        )

    def _lock(self, name: str) -> TextIO:
        """Returns a locked file; the system releases it when this process ends.

        Raises:
            BlockingIOError: another process of this machine holds it.
            RunError: the cache cannot be written.
        """
        try:
            make_private(self._home)
            lock = (self._home / f"{name}.lock").open("a")
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise
        return lock

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Admits one session of this machine at a time, for as long as the block lasts.

        Raises:
            RunError: another process of this machine writes to the remote folder.
        """
        try:
            lock = self._lock("session")
        except BlockingIOError:
            raise RunError(
                f"{self.url}: another process of this machine is writing there; wait for it or end it, or name another "
                "folder with --out"
            ) from None
        with lock:
            yield

    @contextlib.contextmanager
    def sending(self, say: Say) -> Iterator[None]:
        """Waits until no other process of this machine sends to the remote folder: that of an earlier session may."""
        try:
            lock = self._lock("sending")
        except BlockingIOError:
            say(f"{self.url}: waiting for an earlier session to send the rest")
            lock = (self._home / "sending.lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with lock:
            yield

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_manifest(self) -> Manifest | None:
        """Returns the manifest of the remote folder, or None if it has none.

        Raises:
            StorageError: it cannot be read.
            RunError: it is damaged.
        """
        return read_manifest(self.remote)

    def holds_run(self) -> bool:
        """Returns True if there is a run to resume, at the URL or in its local folder."""
        if (self.folder / "recipe.yaml").exists():
            return True
        manifest = self.read_manifest()
        return manifest is not None and bool(manifest.files)

    def read_recipe(self) -> Path:
        """Returns a local file with the recipe of the run at the URL, without downloading the run.

        Raises:
            RunError: there is no run.
        """
        local = self.folder / "recipe.yaml"
        try:
            manifest = self.read_manifest()
        except Unreachable:
            if local.exists():
                return local
            raise
        if manifest is None or "recipe.yaml" not in manifest.files:
            if local.exists():
                return local
            raise self._no_run()
        content = self.remote.read(manifest.files["recipe.yaml"].object)
        if content is None or hashlib.sha256(content).hexdigest() != manifest.files["recipe.yaml"].sha256:
            raise _describe_altered(self.url, "recipe.yaml")
        file = self._home / "recipe.yaml"
        try:
            make_private(self._home)
            write_atomic(file, content.decode("utf-8", "replace"))
        except OSError as error:
            raise self._unwritable(error) from None
        return file

    def fetch(self, say: Say) -> Path:
        """Makes the local folder that of the remote one, if the latter is newer, and returns it.

        Raises:
            RunError: there is nothing at the URL, or it is damaged.
        """
        try:
            self._lock("session").close()
        except BlockingIOError:
            return self.folder  # a session of this machine is writing it: it is the newest
        with self.sending(say):
            manifest = self.read_manifest()
            if manifest is None or not manifest.files:
                raise StorageError(
                    f"{self.url}: holds nothing that preheat uploaded (no {MANIFEST}); name a run or an export"
                )
            self._update(manifest, say)
        return self.folder

    def _update(self, manifest: Manifest, say: Say) -> None:
        """Downloads the folder of a manifest, unless the local one is as new."""
        if self._is_current(manifest):
            return
        size = sum(file.bytes for file in manifest.files.values())
        say(f"{self.url}: downloading {len(manifest.files)} files ({format_bytes(size)}) into {self.folder}")
        partial = self.folder.with_name(f"{self.folder.name}.writing")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                # list: so that the first error is raised here.
                list(pool.map(lambda item: self._download(item[0], item[1], partial), manifest.files.items()))
            self._carry_over(partial)
            self._make_way(say)
            partial.rename(self.folder)
            self._write_state(_State(str(self.folder), fetched=(manifest.writer, manifest.revision)))
        except OSError as error:
            raise self._unwritable(error) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _carry_over(self, partial: Path) -> None:
        """Copies the record and files of trackers from here; without it they would get the run again as another."""
        for file in (self.folder / "tracking").rglob("*"):
            target = partial / file.relative_to(self.folder)
            if file.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)

    def _make_way(self, say: Say) -> None:
        """Removes a local folder that was only downloaded, and renames one that a session of this machine wrote."""
        state = self._read_state()
        if not self.folder.exists():
            return
        if not state.writers and state.fetched[0]:
            shutil.rmtree(self.folder)
            return
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}.aside-{number}")).exists():
            number += 1
        self.folder.rename(aside)
        say(f"{self.url}: was written elsewhere since; the former local copy is now {aside}")

    def _download(self, path: str, entry: RemoteFile, folder: Path) -> None:
        file, former = folder / path, self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        # Of a run that goes on, most files of an earlier download are the same.
        same = former.is_file() and former.stat().st_size == entry.bytes and compute_sha256(former) == entry.sha256
        if same:
            _link_or_copy(former, file, path)
            return
        download_file(self.remote, path, entry, file)

    def _no_run(self) -> RunError:
        return RunError(f"{self.url}: holds no run to resume; run it without --resume first")

    # --- writing -----------------------------------------------------------------------------------------------------

    def claim(self, *, resume: bool, say: Say, download: bool = True) -> None:
        """Begins a session: checks the remote folder, downloads the run to resume, and makes this process the writer.

        Args:
            download: False: a remote folder that is newer than the local one is an error.

        Raises:
            StorageError: there is no such bucket, no access or no link. Without a link, a run whose local copy is
                there resumes all the same.
            RunError: the folder holds a run or foreign files, or no run to resume, or another process writes there.
        """
        state = self._read_state()
        session = replace(state, folder=str(self.folder), writers=(*state.writers[-20:], uuid.uuid4().hex))
        has_run = (self.folder / "recipe.yaml").exists()
        try:
            manifest = self.check(resume=resume, say=say)
        except Unreachable as error:
            if not (resume and has_run and state.writers):
                raise
            say(f"{error}; the run resumes from {self.folder}")
            self._write_state(session)
            return
        if manifest is not None and manifest.files:
            if not download and not self._is_current(manifest):
                raise RunError(
                    f"{self.url}: holds {_article(manifest.kind)} that was written from elsewhere; name another folder"
                )
            self._update(manifest, say)
        # The state first: a process that ends between the two is still known as a writer of this machine.
        self._write_state(replace(session, fetched=self._read_state().fetched))
        self._replace_manifest(session.writers[-1], manifest, dict(manifest.files) if manifest else {}, active=True)

    def check(self, *, resume: bool, say: Say) -> Manifest | None:
        """Returns the manifest if a session can begin at the URL, and writes nothing.

        Raises:
            RunError: as `claim`.
        """
        has_run = (self.folder / "recipe.yaml").exists()
        manifest = self.read_manifest()
        other = "name another folder with --out"
        if manifest is None and (names := self.remote.list_names()):
            raise RunError(f"{self.url}: holds files that preheat did not write ({abbreviate(names)}); {other}")
        if manifest is not None and manifest.files and manifest.kind != self.kind:
            raise RunError(f"{self.url}: holds {_article(manifest.kind)} of preheat; {other}")
        if manifest is not None and manifest.files and not resume:
            hint = "add --resume to continue it, or " if self.kind == "run" else ""
            raise RunError(f"{self.url}: holds {_article(self.kind)} already; {hint}{other}")
        if resume and not (manifest and manifest.files) and not has_run:
            raise self._no_run()
        if not resume and has_run and self.kind == "run":
            raise RunError(
                f"{self.url}: its local copy {self.folder} holds a run that is not there; add --resume to send and "
                f"continue it, or {other}"
            )
        if manifest is not None and manifest.active and manifest.writer not in self._read_state().writers:
            self._require_silence(manifest, say)
            # It may have ended meanwhile, and sent the rest before.
            if self.read_manifest() != manifest:
                return self.check(resume=resume, say=say)
        return manifest

    def _require_silence(self, manifest: Manifest, say: Say) -> None:
        """Raises RunError if another machine writes to the remote folder: a live one replaces its manifest."""
        wait = _SILENT_PERIODS * self.period
        say(f"{self.url}: its last session has not ended; waiting up to {wait:.0f} s to see whether it still writes")
        end = time.monotonic() + wait
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self.period / 10))
            now = self.read_manifest()
            if now is None or not now.active:
                return
            if (now.writer, now.revision) != (manifest.writer, manifest.revision):
                raise RunError(
                    f"{self.url}: another process is writing there; wait for it or end it, or name another folder with "
                    "--out"
                )

    def is_ready(self) -> bool:
        """Returns True if the local folder has something to upload: a run begins with its recipe."""
        return self.kind != "run" or (self.folder / "recipe.yaml").exists()

    def send(self, *, active: bool) -> int:
        """Uploads what has changed, then the manifest, and returns the bytes of the files.

        Args:
            active: the session goes on. At its end, each object has the name of its file.

        Raises:
            LostFolder: another session has begun to write there.
            StorageError: no access or no link; a later call sends everything.
        """
        sent, files = self._send(active=active)
        if not active and any(entry.object != path for path, entry in files.items()):
            self._send(active=False, rename=True)
        return sent

    def _send(self, *, active: bool, rename: bool = False) -> tuple[int, dict[str, RemoteFile]]:
        """Uploads what has changed, and returns the bytes sent and the files.

        Args:
            rename: upload files again whose objects have other names.
        """
        writers = self._read_state().writers
        manifest = self._require_own(writers)
        known = manifest.files if manifest else {}
        current = {path: entry for path, entry in known.items() if not rename or entry.object == path}
        files, sent = dict(known), 0
        if self.is_ready():
            with self._staged(current) as (files, staged):
                # Never over an object that readers of the present manifest read.
                taken = {entry.object for entry in known.values()}
                for path in staged:
                    if files[path].object in taken:
                        files[path] = replace(files[path], object=f"{path}.{files[path].sha256[:8]}")
                with ThreadPoolExecutor(_PARALLEL) as pool:
                    list(pool.map(lambda item: self.remote.upload(item[1], files[item[0]].object), staged.items()))
                sent = sum(files[path].bytes for path in staged)
                # It may have been claimed during a long upload.
                if staged:
                    manifest = self._require_own(writers)
        self._replace_manifest(writers[-1], manifest, files, active=active)
        for name in {entry.object for entry in known.values()} - {entry.object for entry in files.values()}:
            self.remote.remove(name)
        return sent, files

    def release(self) -> None:
        """Removes the manifest of a session whose run never began."""
        manifest = self._require_own(self._read_state().writers)
        if manifest is not None and not manifest.files:
            self.remote.remove(MANIFEST)

    def _require_own(self, writers: tuple[str, ...]) -> Manifest | None:
        manifest = self.read_manifest()
        # None: the storage was emptied, and everything is sent again.
        if manifest is not None and manifest.writer not in writers:
            raise LostFolder(
                f"{self.url}: another run writes there now, so this one is no longer uploaded; it is in {self.folder}; "
                f"send it elsewhere with: preheat upload {self.folder} URL"
            )
        return manifest

    def _replace_manifest(
        self, writer: str, former: Manifest | None, files: Mapping[str, RemoteFile], *, active: bool
    ) -> None:
        mark = read_mark(self.folder) if self.folder.is_dir() else None
        manifest = Manifest(
            kind=self.kind,
            id=mark.id if mark else former.id if former else "",
            writer=writer,
            revision=former.revision + 1 if former else 1,
            active=active,
            files=dict(sorted(files.items())),
        )
        self.remote.write(MANIFEST, (to_json(to_plain_data(manifest), indent=1) + "\n").encode())

    @contextlib.contextmanager
    def _staged(self, known: Mapping[str, RemoteFile]) -> Iterator[tuple[dict[str, RemoteFile], dict[str, Path]]]:
        """Yields the files of the folder, and links or copies of those that `known` lacks, which nothing changes.

        The run goes on meanwhile: it appends to its metrics, and removes old checkpoints.
        """
        stage = self.folder / "upload.writing"
        shutil.rmtree(stage, ignore_errors=True)  # of a process that was killed
        try:
            files, staged = dict[str, RemoteFile](), dict[str, Path]()
            for path in _list_files(self.folder):
                source, copy = self.folder / path, stage / path
                try:
                    facts = source.stat()
                    size, mtime, digest = self._hashes.get(path, (-1, -1, ""))
                    unchanged = (size, mtime) == (facts.st_size, facts.st_mtime_ns)
                    if unchanged and path in known and known[path].sha256 == digest:
                        files[path] = known[path]
                        continue
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    _link_or_copy(source, copy, path)
                except FileNotFoundError:
                    continue  # removed since it was listed
                facts = copy.stat()
                digest = compute_sha256(copy)
                self._hashes[path] = (facts.st_size, facts.st_mtime_ns, digest)
                if path in known and known[path].sha256 == digest:
                    files[path] = known[path]
                else:
                    files[path], staged[path] = RemoteFile(path, facts.st_size, digest), copy
            _drop_incomplete(self.folder, files, staged)
        except OSError as error:
            shutil.rmtree(stage, ignore_errors=True)
            raise StorageError(f"{stage}: cannot be written ({error.strerror}); free disk space") from None
        try:
            yield files, staged
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def read_manifest(remote: RemoteFolder) -> Manifest | None:
    """Returns the manifest of a remote folder, or None if it has none.

    Raises:
        StorageError: it cannot be read.
        RunError: it is damaged.
    """
    content = remote.read(MANIFEST)
    if content is None:
        return None
    try:
        manifest = read_record(Manifest, parse_json(content))
    except ValueError as error:
        raise RunError(f"{remote.url}/{MANIFEST}: is damaged ({error}); name another folder") from None
    if manifest.format != _FORMAT:
        raise RunError(
            f"{remote.url}/{MANIFEST}: was written in format {manifest.format} by another version of preheat, and "
            f"this one reads {_FORMAT}; use that version"
        )
    for path, file in manifest.files.items():
        # Whoever can write to the storage must not reach files outside of the local folder.
        if not all(map(_is_inside, (path, file.object))):
            raise RunError(f"{remote.url}/{MANIFEST}: names {quote_value(path)}, which is not a file of the folder")
    return manifest


def download_file(remote: RemoteFolder, path: str, entry: RemoteFile, target: Path) -> None:
    """Downloads a file of a manifest.

    Raises:
        StorageError: its object is gone, no access or no link.
        RunError: its content is not that of the manifest.
    """
    remote.download(entry.object, target)
    if target.stat().st_size != entry.bytes or compute_sha256(target) != entry.sha256:
        raise _describe_altered(remote.url, path)


def _describe_altered(url: str, path: str) -> RunError:
    return RunError(
        f"{url}/{path}: was altered since preheat uploaded it (its checksum differs), or is being written; repeat the "
        "command, or restore the object"
    )


def _is_inside(name: str) -> bool:
    """Returns True for the relative path of a file that stays in its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and name.isprintable()


def _article(kind: str) -> str:
    """Returns the kind with its article, for messages."""
    return f"an {kind}" if kind == "export" else f"a {shorten(kind, 40)}"


def _list_files(folder: Path) -> list[str]:
    """Returns the files to copy, relative to the folder: checkpoints first, so that the metrics are as new as these."""
    paths = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _LEFT_OUT.fullmatch(name)]
        at = Path(place)
        paths += [
            (at / name).relative_to(folder).as_posix()
            for name in names
            if not _LEFT_OUT.fullmatch(name) and not (at / name).is_symlink() and (at / name).is_file()
        ]
    return sorted(paths, key=lambda path: (not path.startswith("checkpoints/step-"), path))


def _link_or_copy(source: Path, copy: Path, path: str) -> None:
    """Keeps the content of a file: by a link if nothing writes into it, as checkpoints, and otherwise by a copy."""
    if path.startswith("checkpoints/step-"):
        try:
            os.link(source, copy)
            return
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            pass
    shutil.copy2(source, copy)


def _drop_incomplete(folder: Path, files: dict[str, RemoteFile], staged: dict[str, Path]) -> None:
    """Drops checkpoints that were removed while they were listed, and the name of the best one if it is not listed."""
    for step in {path.split("/")[1] for path in files if path.startswith("checkpoints/step-")}:
        prefix = f"checkpoints/{step}/"
        manifest = staged.get(f"{prefix}manifest.json", folder / prefix / "manifest.json")
        try:
            names = [*parse_json(manifest.read_bytes()), "manifest.json"]
        except (FileNotFoundError, ValueError):
            names = [""]
        if not all(f"{prefix}{name}" in files for name in names):
            for path in [path for path in files if path.startswith(prefix)]:
                del files[path]
                staged.pop(path, None)
    best = staged.get("checkpoints/best")
    if best is not None and f"checkpoints/{best.read_text().strip()}/manifest.json" not in files:
        del files["checkpoints/best"], staged["checkpoints/best"]
