"""Checkpoints in a bucket of the Hugging Face Hub; written from the client's signatures, and never run against the service."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from ._client import Client
from ._folder import WRITER, is_own
from ._manifest import MANIFEST, read_manifest, size_problem
from ._repository import Temporary
from ._storage import FileInfo

logger = logging.getLogger(__name__)

_PROBE: Final = "efficio-write-check"


class Bucket:
    """A bucket of the Hub, or a folder in it. It has no history: what is removed is gone, and its room is free.

    A batch of the client is no transaction, so that the manifest goes up in a call of its own, after all data. A bucket that is
    not shown may be hidden from the token; it is never taken for an empty one, and none is made.

    Args:
        name: ``"user/name"``.
        prefix: Folder in it, "" for the whole.
        client: Asks the Hub.
    """

    is_remote = True

    def __init__(self, name: str, prefix: str, client: Client) -> None:
        self._name = name
        self._prefix = prefix
        self._client = client

    def __repr__(self) -> str:
        return f"Bucket({self.place!r})"

    @property
    def place(self) -> str:
        return "/".join(filter(None, ("hf://buckets", self._name, self._prefix)))

    def check_writable(self) -> None:
        """Write a small file and remove it, before there is anything to lose.

        Raises:
            OSError: It was refused, or there is no such bucket.
        """
        probe = self._path(f"{_PROBE}-{os.urandom(4).hex()}")
        self._batch(add=[(b"efficio", probe)])
        self._batch(delete=[probe])

    def folders(self) -> list[str]:
        return sorted(self._look())

    def files(self, folder: str) -> dict[str, FileInfo]:
        found = self._look().get(folder)
        if found is None:
            raise FileNotFoundError(f"{self.place}: there is no {folder}")
        return found

    def begin(self, folder: str, note: bytes) -> None:
        self._batch(add=[(note, self._path(folder, WRITER))])

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        with tempfile.TemporaryDirectory(prefix="efficio-") as spool:
            path = Path(spool, name)
            with open(path, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
            self._batch(add=[(str(path), self._path(folder, name))])

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        sizes = {name: info.size for name, info in self.files(folder).items()}
        if problem := size_problem(read_manifest(manifest, folder=folder), sizes):
            raise OSError(f"{self.place}: not all arrived as it was sent: {folder}/{problem}")
        try:
            self._batch(add=[(manifest, self._path(folder, MANIFEST))])
        except OSError:
            if not self._holds(folder, manifest):
                raise
        # From here on the checkpoint stands, and what fails below is no failure of the save.
        try:
            self._batch(delete=[self._path(folder, WRITER)])
            for name in expired:
                self.remove(name)
        except OSError as error:
            logger.warning("could not clear %s of what is no longer needed: %s", self.place, error)

    def open(self, folder: str, name: str) -> BinaryIO:
        if name not in self.files(folder):
            raise FileNotFoundError(f"{self.place}: there is no {folder}/{name}")
        spool = tempfile.mkdtemp(prefix="efficio-")
        path = Path(spool, name)
        try:
            self._client.ask(
                lambda: self._client.api.download_bucket_files(
                    self._name, [(self._path(folder, name), str(path))], raise_on_missing_files=True
                )
            )
            if not path.is_file():
                raise OSError(errno.EIO, f"{self.place}: the Hub lists {folder}/{name} and does not send it")
            return cast(BinaryIO, Temporary(path, spool))
        except BaseException:
            shutil.rmtree(spool, ignore_errors=True)
            raise

    def remove(self, folder: str) -> None:
        own = [name for name in self.files(folder) if is_own(name)]
        if MANIFEST in own:
            self._batch(delete=[self._path(folder, MANIFEST)])
        rest = [self._path(folder, name) for name in own if name != MANIFEST]
        if rest:
            self._batch(delete=rest)

    def free_bytes(self) -> int | None:
        return None

    def _batch(self, **changes: Any) -> None:
        self._client.ask(lambda: self._client.api.batch_bucket_files(self._name, **changes))

    def _holds(self, folder: str, manifest: bytes) -> bool:
        try:
            with self.open(folder, MANIFEST) as file:
                return file.read() == manifest
        except OSError:
            return False

    def _path(self, *names: str) -> str:
        return "/".join(filter(None, (self._prefix, *names)))

    def _look(self) -> dict[str, dict[str, FileInfo]]:
        """All files two levels below the prefix; which of the paths that begin like it are meant is decided here."""
        found = self._client.ask(
            lambda: list(
                self._client.api.list_bucket_tree(self._name, prefix=self._prefix or None, recursive=True)
            )
        )
        folders: dict[str, dict[str, FileInfo]] = {}
        start = f"{self._prefix}/" if self._prefix else ""
        for entry in found:
            if entry.type != "file" or not entry.path.startswith(start):
                continue
            folder, separator, name = entry.path[len(start) :].partition("/")
            if separator and "/" not in name:
                time = entry.mtime or entry.uploaded_at
                folders.setdefault(folder, {})[name] = FileInfo(
                    entry.size, None if time is None else time.timestamp()
                )
        return folders
