"""A folder of this machine in front of a storage elsewhere: a save is durable here at once, and there when the network lets it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ._folder import DAMAGE, Folder
from ._manifest import MANIFEST, folder_step
from ._storage import FileInfo, Storage, StorageLike, open_storage

VARIABLE: Final = "EFFICIO_SPOOL"


def spool_path(place: str, *, environ: Mapping[str, str], home: str) -> str:
    """Return the folder that stands in front of a storage.

    Args:
        place: What the storage is called.
        environ: Environment variables; ``EFFICIO_SPOOL`` names the folder of all spools.
        home: The user's home.

    Example:
        >>> spool_path("hf://me/run", environ={}, home="/me")
        '/me/.cache/efficio/spool/run-ad5b68678c17'
    """
    root = environ.get(VARIABLE) or f"{environ.get('XDG_CACHE_HOME') or f'{home}/.cache'}/efficio/spool"
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", place.rstrip("/").rpartition("/")[2])[:40]
    digest = hashlib.sha256(place.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{root}/{last}-{digest}"


@dataclass(frozen=True)
class Spool:
    """A remote storage and the folder in front of it, read as one: what is in the folder is taken from there.

    Reading asks the remote storage as well, since another machine may have gone on with the run. Written to as a storage, it is
    the remote one; a saver writes into the folder, and an uploader carries that on.

    Args:
        remote: Where checkpoints go.
        folder: Of this machine.
    """

    remote: Storage
    folder: Folder

    @property
    def place(self) -> str:
        return self.remote.place

    def folders(self) -> list[str]:
        here = self._here()
        try:
            there = self.remote.folders()
        except FileNotFoundError:
            if not here:
                raise
            there = []
        except OSError as error:
            if not here:
                raise
            raise OSError(
                error.errno,
                f"{error}; what this machine saved last lies in '{self.folder.root}', and can be given as the storage if "
                "nothing was saved from elsewhere since",
            ) from error
        return sorted({*here, *there})

    def files(self, folder: str) -> dict[str, FileInfo]:
        return self._home(folder).files(folder)

    def open(self, folder: str, name: str) -> BinaryIO:
        return self._home(folder).open(folder, name)

    def begin(self, folder: str, note: bytes) -> None:
        self.remote.begin(folder, note)

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        # A note on damage belongs where the damage is.
        (self._home(folder) if name == DAMAGE else self.remote).write(folder, name, chunks)

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        self.remote.commit(folder, manifest, expired=expired)

    def remove(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.folder.remove(folder)
        with contextlib.suppress(FileNotFoundError):
            self.remote.remove(folder)

    def free_bytes(self) -> int | None:
        return self.remote.free_bytes()

    def _here(self) -> list[str]:
        try:
            return [name for name in self.folder.folders() if folder_step(name) is not None]
        except FileNotFoundError:
            return []

    def _home(self, folder: str) -> Storage:
        """Where a checkpoint is read from: here if it is whole here as far as is known."""
        try:
            files = self.folder.files(folder)
        except (FileNotFoundError, NotADirectoryError):
            return self.remote
        if MANIFEST in files and DAMAGE not in files:
            return self.folder
        try:
            return self.remote if MANIFEST in self.remote.files(folder) else self.folder
        except FileNotFoundError:
            return self.folder


def spooled(storage: StorageLike, *, folder: str | os.PathLike[str] | None = None) -> Storage:
    """Put a folder of this machine in front of a remote storage; any other storage is returned as it is.

    Give the same object to `load_checkpoint` and to `background_saver`. Nothing is created or read yet.

    Args:
        storage: A URL, or what `open_storage` returned.
        folder: The folder; by default one below ``~/.cache/efficio/spool``, or below the one that the environment variable
            ``EFFICIO_SPOOL`` names.

    Raises:
        ValueError: As for `open_storage`.
    """
    place = open_storage(storage)
    if not is_remote(place):
        return place
    if folder is None:
        folder = spool_path(place.place, environ=os.environ, home=str(Path.home()))
    return Spool(place, Folder(str(Path(folder).expanduser().absolute())))


def is_remote(storage: Storage) -> bool:
    """Tell whether a storage is reached over a network, so that a save may take long or fail for a while.

    Args:
        storage: Any; one that does not say is taken for a local one.
    """
    return bool(getattr(storage, "is_remote", False))


def with_spool(storage: StorageLike) -> Storage:
    """Return a storage for reading, joined with its spool if this machine has one with something in it.

    Args:
        storage: As for `open_storage`.
    """
    place = open_storage(storage)
    joined = spooled(place)
    return joined if isinstance(joined, Spool) and joined._here() else place
