"""Files of a cache: rows written in place by many threads, and small files replaced as a whole."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from types import TracebackType

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_CANNOT_RESERVE = tuple(
    getattr(errno, name, errno.EINVAL) for name in ("EOPNOTSUPP", "ENOTSUP", "ENOSYS", "EINVAL")
)


class RowFile:
    """An open file of rows of equal size, read and written by row number from several threads."""

    def __init__(self, path: Path, row_bytes: int) -> None:
        self.path = path
        self._row_bytes = row_bytes
        self._seek = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def reserve(self, rows: int) -> None:
        """Give the file the room for `rows` rows on disk, keeping what it holds.

        A file with holes that is memory-mapped kills its reader with SIGBUS when the disk is full; a reserved one does not.

        Raises:
            OSError: The disk has too little room; the message has the bytes needed and the bytes free.
        """
        needed = rows * self._row_bytes
        try:
            missing = needed - min(needed, _bytes_on_disk(self._descriptor))
            if shutil.disk_usage(self.path.parent).free < missing:
                raise OSError(errno.ENOSPC, "too little room")
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(self._descriptor, 0, needed)
                except OSError as error:
                    if error.errno not in _CANNOT_RESERVE:
                        raise
            os.ftruncate(self._descriptor, needed)
        except OSError as error:
            raise self._named(error, needed) from error

    def write(self, row: int, pixels: memoryview) -> None:
        """Write one row.

        Raises:
            OSError: The disk is full, or failed.
        """
        start = row * self._row_bytes
        left = pixels
        try:
            while left:
                if hasattr(os, "pwrite"):
                    done = os.pwrite(self._descriptor, left, start + len(pixels) - len(left))
                else:
                    with self._seek:
                        os.lseek(self._descriptor, start + len(pixels) - len(left), os.SEEK_SET)
                        done = os.write(self._descriptor, left)
                left = left[done:]
        except OSError as error:
            raise self._named(error, os.fstat(self._descriptor).st_size) from error

    def read(self, row: int) -> bytes:
        """Read one row; what lies past the end of the file is not there."""
        start = row * self._row_bytes
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, self._row_bytes, start)
        with self._seek:
            os.lseek(self._descriptor, start, os.SEEK_SET)
            return os.read(self._descriptor, self._row_bytes)

    def truncate(self, rows: int) -> None:
        """Cut the file to `rows` rows."""
        os.ftruncate(self._descriptor, rows * self._row_bytes)

    def sync(self) -> None:
        """Return once everything written is on the disk."""
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(self._descriptor)

    def _named(self, error: OSError, needed: int) -> OSError:
        if error.errno not in _FULL:
            return OSError(error.errno, error.strerror, str(self.path))
        free = shutil.disk_usage(self.path.parent).free
        text = f"the disk is full: the images need {needed} bytes in all, {free} are free; make room and build again"
        return OSError(error.errno, text, str(self.path))


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole small file so that after a crash it is the old or the new one, never a mixture."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return once renames in a folder are on the disk; nothing where a folder cannot be opened (Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:  # network file systems that cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _bytes_on_disk(descriptor: int) -> int:
    stat = os.fstat(descriptor)
    return int(getattr(stat, "st_blocks", 0)) * 512
