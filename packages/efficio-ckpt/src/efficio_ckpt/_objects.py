"""Checkpoints in an object store or any other file system that fsspec speaks to."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, BinaryIO, Final, cast

from ._folder import WRITER, is_own
from ._manifest import MANIFEST
from ._storage import FileInfo, without_secrets

logger = logging.getLogger(__name__)

_MAX_LISTINGS: Final = 100
_PROBE: Final = "efficio-write-check"
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class Objects:
    """A prefix of an fsspec file system. One write of an object is atomic there; there is no rename.

    Args:
        system: The fsspec file system.
        root: Path inside it.
        place: What to call it in messages.
        secrets: Texts that are taken out of foreign error messages.
    """

    system: Any = field(repr=False)
    root: str
    place: str
    secrets: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def is_remote(self) -> bool:
        """Whether a network lies between; memory and folders of this machine are none."""
        protocol = self.system.protocol
        return not {"memory", "file", "local"} & {*((protocol,) if isinstance(protocol, str) else protocol)}

    def folders(self) -> list[str]:
        return sorted(self._list(self.root))

    def files(self, folder: str) -> dict[str, FileInfo]:
        return {
            name: FileInfo(int(info.get("size") or 0), _modified(info))
            for name, info in self._list(self._path(folder)).items()
            if info.get("type") != "directory"
        }

    def check_writable(self) -> None:
        """Write a small object and remove it, before there is anything to lose; nothing is done where no network lies between.

        Raises:
            OSError: It was refused, or there is no such bucket.
        """
        if self.is_remote:
            probe = self._path(f"{_PROBE}-{os.urandom(4).hex()}")
            self._put(probe, b"")
            try:
                self._call(self.system.rm_file, probe)
            except OSError as error:
                logger.warning(
                    "what expires in '%s' will stay there, as nothing can be removed: %s", self.place, error
                )

    def begin(self, folder: str, note: bytes) -> None:
        if not self.is_remote:  # an object store has no folders, and some clients would make a bucket
            self._call(self.system.makedirs, self._path(folder), exist_ok=True)
        self._put(self._path(folder, WRITER), note)

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        def upload() -> None:
            with self.system.open(self._path(folder, name), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

        self._call(upload)

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        self._call(self.system.pipe_file, self._path(folder, MANIFEST), manifest)
        # From here on the checkpoint stands, and what fails below is no failure of the save.
        try:
            self._call(self.system.rm_file, self._path(folder, WRITER))
            for name in expired:
                self.remove(name)
        except OSError as error:
            logger.warning("could not clear %s of what is no longer needed: %s", self.place, error)

    def open(self, folder: str, name: str) -> BinaryIO:
        file = self._call(self.system.open, self._path(folder, name), "rb")
        if isinstance(file, io.BytesIO):
            # Files in memory have one position for all of their readers.
            file = io.BytesIO(file.getvalue())
        return cast(BinaryIO, _Guarded(file, self._call))

    def remove(self, folder: str) -> None:
        for name in sorted(self.files(folder), key=lambda name: name != MANIFEST):
            if is_own(name):
                self._call(self.system.rm_file, self._path(folder, name))
        # Object stores have no folders; where there are some, an empty one does no harm.
        with contextlib.suppress(OSError):
            self._call(self.system.rmdir, self._path(folder))

    def free_bytes(self) -> int | None:
        return None

    def _put(self, path: str, data: bytes) -> None:
        try:
            self._call(self.system.pipe_file, path, data)
        except FileNotFoundError:
            bucket = self.root.partition("/")[0]
            raise OSError(
                errno.ENXIO,
                f"{self.place}: there is no bucket '{bucket}', or none for these credentials; make it first",
            ) from None

    def _path(self, *names: str) -> str:
        return "/".join((self.root.rstrip("/"), *names))

    def _list(self, path: str) -> dict[str, dict[str, Any]]:
        self._call(self.system.invalidate_cache)
        entries = self._call(self._entries, path)
        return {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def _entries(self, path: str) -> list[dict[str, Any]]:
        for _ in range(_MAX_LISTINGS if "memory" in self.system.protocol else 0):
            # The dict that memory:// walks through may be changed by another thread.
            with contextlib.suppress(KeyError, RuntimeError):
                return list(self.system.ls(path, detail=True))
        return list(self.system.ls(path, detail=True))

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a client and turn what it raises into an OSError that holds no secret, nor does its chain."""
        try:
            return function(*args, **options)
        except FileNotFoundError:
            problem: OSError = FileNotFoundError(f"{self.place}: not there")
        except Exception as error:  # noqa: BLE001 - each client has error classes of its own
            text = f"{type(error).__name__}: {error}"
            for secret in self.secrets:
                text = text.replace(secret, "***")
            number = getattr(error, "errno", None)
            problem = (
                OSError(number, text, self.place)
                if isinstance(number, int)
                else OSError(f"{self.place}: {text}")
            )
        raise problem


class _Guarded:
    """A file whose reads raise no foreign error."""

    def __init__(self, file: Any, call: Callable[..., Any]) -> None:
        self._file = file
        self._call = call

    def read(self, size: int = -1) -> bytes:
        return bytes(self._call(self._file.read, size))

    def readinto(self, target: memoryview) -> int:
        data = self.read(target.nbytes)
        target[: len(data)] = data
        return len(data)

    def __enter__(self) -> _Guarded:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def open_objects(url: str, *, place: str, options: Mapping[str, Any]) -> Objects:
    """Return the storage of an fsspec URL.

    Args:
        url: With any secrets in it.
        place: The same without them.
        options: For the file system.

    Raises:
        ValueError: The package for the scheme is not installed, or refuses the options.
    """
    from fsspec.core import url_to_fs

    hidden = {url[len(url.partition("://")[0]) + 3 :]} if without_secrets(url) != url else set()
    hidden |= {part for part in _credentials(url) if part}
    hidden |= {text for text in _texts(options) if len(text) > 3}
    try:
        system, root = url_to_fs(url, **options)
    except ImportError as error:
        extra = {"gs": "gcs", "s3": "s3"}.get(place.partition("://")[0])
        command = "" if extra is None else f': pip install "efficio-ckpt[{extra}]"'
        reason = f"storage='{place}' needs a package that is not installed ({error}){command}"
    except Exception as error:  # noqa: BLE001 - each client has error classes of its own
        reason = f"storage='{place}' cannot be opened: {type(error).__name__}"
    else:
        return Objects(system, root, place, frozenset(hidden))
    raise ValueError(reason)


def _credentials(url: str) -> list[str]:
    rest = url.partition("://")[2]
    host, _, query = rest.partition("?")
    user = host.partition("/")[0].rpartition("@")[0]
    return [*user.split(":"), *(pair.partition("=")[2] for pair in query.split("&"))]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _modified(info: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
