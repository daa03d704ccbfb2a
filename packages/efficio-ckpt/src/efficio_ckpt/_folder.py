"""Checkpoints in a folder of a local disk or a mounted Google Drive."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from ._manifest import MANIFEST, is_data_file
from ._storage import FileInfo

logger = logging.getLogger(__name__)

WRITER: Final = "WRITER.json"
DAMAGE: Final = "DAMAGE.txt"
EXPIRED: Final = "EXPIRED.json"
PENDING: Final = MANIFEST + ".tmp"

_GATHERED_BYTES: Final = 2**20
_MAX_WRITE_BYTES: Final = 2**28
# What file systems answer that cannot flush a directory; Windows cannot even open one.
_NO_DIRECTORY_SYNC: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF})


def is_own(name: str) -> bool:
    """Tell whether a file in the folder of a checkpoint is one that was written here.

    Args:
        name: Any name.

    Example:
        >>> is_own("WRITER.json"), is_own(".DS_Store")
        (True, False)
    """
    return name in {MANIFEST, PENDING, WRITER, DAMAGE, EXPIRED} or is_data_file(name)


@dataclass(frozen=True)
class Folder:
    """A directory of the operating system.

    Args:
        root: Absolute path; made when it is first written to.
        drive: The path is a mounted Google Drive, where a deleted file goes to a bin that counts against the quota.
    """

    root: str
    drive: bool = False

    @property
    def place(self) -> str:
        return self.root

    def folders(self) -> list[str]:
        return sorted(os.listdir(self.root))  # noqa: PTH208 - names, not paths

    def files(self, folder: str) -> dict[str, FileInfo]:
        infos = {}
        with os.scandir(self._path(folder)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    # A pipe among them would stop its reader for ever.
                    if entry.is_file():
                        info = entry.stat()
                        infos[entry.name] = FileInfo(info.st_size, info.st_mtime)
        return infos

    def add(self, name: str, note: bytes) -> None:
        """Write a small new file beside the checkpoints; FileExistsError if there is one."""
        self._make_root()
        self._write(self._path(name), [memoryview(note)])

    def drop(self, name: str) -> None:
        """Remove a file beside the checkpoints, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._unlink(self._path(name))

    def begin(self, folder: str, note: bytes) -> None:
        self._make_root()
        os.mkdir(self._path(folder))  # noqa: PTH102
        self._write(self._path(folder, WRITER), [memoryview(note)])

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        self._write(self._path(folder, name), chunks)

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        # The names of the data must be durable before the name that vouches for them.
        _sync_directory(self._path(folder))
        _sync_directory(self.root)
        self._write(self._path(folder, PENDING), [memoryview(manifest)])
        os.replace(self._path(folder, PENDING), self._path(folder, MANIFEST))
        _sync_directory(self._path(folder))
        # From here on the checkpoint stands, and what fails below is no failure of the save.
        self._tidy(functools.partial(self._unlink, self._path(folder, WRITER)), folder)
        for name in expired:
            self._tidy(functools.partial(self.remove, name), name)

    def _tidy(self, action: Callable[[], None], folder: str) -> None:
        try:
            action()
        except OSError as error:
            logger.warning("could not clear %s of what is no longer needed: %s", self._path(folder), error)

    def open(self, folder: str, name: str) -> BinaryIO:
        return cast(BinaryIO, open(self._path(folder, name), "rb", buffering=0))

    def remove(self, folder: str) -> None:
        names = self.files(folder)
        if MANIFEST in names:
            # One atomic step ends the checkpoint; what a crash leaves after it is known by the new name.
            os.replace(self._path(folder, MANIFEST), self._path(folder, EXPIRED))
            _sync_directory(self._path(folder))
        own = {name for name in names if is_own(name)} - {MANIFEST} | {EXPIRED}
        for name in sorted(own, key=lambda name: name in {WRITER, EXPIRED}):
            with contextlib.suppress(FileNotFoundError):
                self._unlink(self._path(folder, name))
        try:
            os.rmdir(self._path(folder))  # noqa: PTH106
        except OSError as error:
            # A file of someone else's keeps its folder.
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise

    def free_bytes(self) -> int | None:
        path = Path(self.root)
        try:
            while not path.exists() and path != path.parent:
                path = path.parent
            return shutil.disk_usage(path).free
        except OSError:
            return None

    def _unlink(self, path: str) -> None:
        if self.drive:
            os.truncate(path, 0)
        os.unlink(path)  # noqa: PTH108

    def _path(self, *names: str) -> str:
        return os.path.join(self.root, *names)  # noqa: PTH118

    def _make_root(self) -> None:
        missing = []
        path = Path(self.root)
        while not path.exists():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)  # noqa: PTH102
            _sync_directory(str(directory.parent))
        if not missing:
            # Whoever made it may not have flushed its name; a parent that cannot be read is not ours to flush.
            with contextlib.suppress(OSError):
                _sync_directory(str(path.parent))

    def _write(self, path: str, chunks: Iterable[memoryview]) -> None:
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        )
        file = os.open(path, flags, 0o666)
        try:
            for chunk in _gathered(chunks):
                written = 0
                while written < chunk.nbytes:
                    count = os.write(file, chunk[written : written + _MAX_WRITE_BYTES])
                    if not count:
                        raise OSError(errno.EIO, "nothing could be written", path)
                    written += count
            _sync(file)
        finally:
            os.close(file)


def _gathered(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
    """Join small buffers, so that a tensor of ten numbers is not a write of its own."""
    small = bytearray()
    for chunk in chunks:
        if len(small) + chunk.nbytes <= _GATHERED_BYTES:
            small += chunk
            continue
        if small:
            yield memoryview(small)
            small = bytearray()
        if chunk.nbytes <= _GATHERED_BYTES:
            small += chunk
        else:
            yield chunk
    if small:
        yield memoryview(small)


def _sync(file: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        # fsync on macOS stops at the drive's cache; network disks do not know the stronger call.
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file)


def _sync_directory(path: str) -> None:
    if os.name == "nt":
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(directory)
