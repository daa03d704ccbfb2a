"""Checkpoints in an object store or any other file system that fsspec speaks to."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, BinaryIO, Final, cast

from ._fault import without_tokens
from ._folder import WRITER, is_own
from ._manifest import MANIFEST, Manifest, read_manifest, size_problem
from ._secrets import problem_of, secrets_of
from ._storage import FileInfo

logger = logging.getLogger(__name__)

_MAX_LISTINGS: Final = 100
_BLOCK_BYTES: Final = 2**25
"""What is sent, or asked for, in one request: the memory that a client takes is a few times this."""

_PIECE_BYTES: Final = 2**22
_PROBE: Final = "efficio-write-check"
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")
_PACKAGES: Final = {"gs": "efficio-ckpt[gcs]", "s3": "efficio-ckpt[s3]"}


@dataclass(frozen=True)
class Objects:
    """A prefix of an fsspec file system. One write of an object is atomic there; there is no rename.

    A client that answers "not found" is not believed at once where a network lies between: that answer is a fresh start for a
    run, and a service gives it for a bucket that is not there, or a proxy for anything.

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
                self._drop(probe)
            except OSError as error:
                logger.warning(
                    "what expires in '%s' will stay there, as nothing can be removed: %s", self.place, error
                )

    def begin(self, folder: str, note: bytes) -> None:
        if not self.is_remote:  # an object store has no folders, and some clients would make a bucket
            self._call(self.system.makedirs, self._path(folder), exist_ok=True)
        self._put(self._path(folder, WRITER), note)

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        path = self._path(folder, name)
        pieces = _pieces(chunks)
        # What fits into one request is sent as one, which does no harm when it is sent again.
        first = b"".join(itertools.islice(pieces, _BLOCK_BYTES // _PIECE_BYTES))
        second = next(pieces, None)
        if second is None:
            self._put(path, first)
        else:
            self._call(self._upload, path, itertools.chain([first, second], pieces))

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        self._check_arrived(folder, read_manifest(manifest, folder=folder))
        path = self._path(folder, MANIFEST)
        try:
            self._create(path, manifest)
        except OSError as error:
            # It may have been written and the answer lost; then a client that tries again is told that there is one.
            if not self._holds(path, manifest):
                raise
            logger.info("'%s': the manifest of %s is there, though: %s", self.place, folder, error)
        # From here on the checkpoint stands, and what fails below is no failure of the save.
        try:
            self._drop(self._path(folder, WRITER))
            for name in expired:
                self.remove(name)
        except OSError as error:
            logger.warning("could not clear %s of what is no longer needed: %s", self.place, error)

    def open(self, folder: str, name: str) -> BinaryIO:
        ask = functools.partial(self._ask_for, folder, name)
        file = ask(self.system.open, self._path(folder, name), "rb", **self._blocks())
        if isinstance(file, io.BytesIO):
            # Files in memory have one position for all of their readers.
            file = io.BytesIO(file.getvalue())
        return cast(BinaryIO, _Guarded(file, ask))

    def remove(self, folder: str) -> None:
        for name in sorted(self.files(folder), key=lambda name: name != MANIFEST):
            if is_own(name):
                self._drop(self._path(folder, name))
        if not self.is_remote:  # elsewhere an empty one does no harm
            with contextlib.suppress(OSError):
                self._call(self.system.rmdir, self._path(folder))

    def free_bytes(self) -> int | None:
        return None

    def _blocks(self) -> dict[str, int]:
        return {"block_size": _BLOCK_BYTES} if self.is_remote else {}

    def _upload(self, path: str, pieces: Iterable[bytes]) -> None:
        file = self.system.open(path, "wb", **self._blocks())
        try:
            for piece in pieces:
                file.write(piece)
            file.close()
        except BaseException:
            _abandon(file)
            raise

    def _check_arrived(self, folder: str, manifest: Manifest) -> None:
        """See that all has arrived: where an answer was lost, a client may have sent a part twice."""
        if self.is_remote:
            sizes = {name: info.size for name, info in self.files(folder).items()}
            if problem := size_problem(manifest, sizes):
                raise OSError(f"{self.place}: not all arrived as it was sent: {folder}/{problem}")

    def _put(self, path: str, data: bytes, **options: str) -> None:
        try:
            self._call(self.system.pipe_file, path, data, **options)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _create(self, path: str, data: bytes) -> None:
        """Write an object that nobody has written before, where the client and the service know how."""
        if self.is_remote and "mode" in inspect.signature(self.system.pipe_file).parameters:
            try:
                return self._put(path, data, mode="create")
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
        return self._put(path, data)

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            self._call(self.system.invalidate_cache)
            return bool(self._call(self.system.cat_file, path) == data)
        except OSError:
            return False

    def _drop(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # a former try, or another process, was faster
            self._call(self.system.rm_file, path)

    def _path(self, *names: str) -> str:
        return "/".join((self.root.rstrip("/"), *names))

    def _list(self, path: str) -> dict[str, dict[str, Any]]:
        self._call(self.system.invalidate_cache)
        try:
            entries = self._call(self._entries, path)
        except FileNotFoundError:
            self._check_absent(path)
            raise
        return {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def _entries(self, path: str) -> list[dict[str, Any]]:
        for _ in range(_MAX_LISTINGS if "memory" in self.system.protocol else 0):
            # The dict that memory:// walks through may be changed by another thread.
            with contextlib.suppress(KeyError, RuntimeError):
                return list(self.system.ls(path, detail=True))
        return list(self.system.ls(path, detail=True))

    def _check_absent(self, path: str) -> None:
        """Ask in another way whether nothing is there; for that, an existing bucket gives an empty list and no error."""
        if not self.is_remote:
            return
        try:
            found = self._call(self.system.find, path)
        except FileNotFoundError:
            raise self._no_bucket() from None
        if found:
            raise OSError(
                f"{self.place}: the service shows nothing in '{path}', and when asked again it does"
            )

    def _ask_for(
        self, folder: str, name: str, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Call the client to read a file."""
        try:
            return self._call(function, *args, **options)
        except FileNotFoundError:
            if self.is_remote and name in self.files(folder):
                raise OSError(
                    f"{self.place}: the service lists {folder}/{name} and says that it is not there"
                ) from None
            raise

    def _no_bucket(self) -> OSError:
        bucket = self.root.strip("/").partition("/")[0]
        return OSError(
            errno.ENXIO,
            f"{self.place}: there is no bucket '{bucket}', or none for these credentials; make it first",
        )

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a client and turn what it raises into an OSError that holds no secret, nor does its chain."""
        try:
            return function(*args, **options)
        except FileNotFoundError:
            problem: OSError = FileNotFoundError(f"{self.place}: not there")
        except Exception as error:  # noqa: BLE001 - each client has error classes of its own
            problem = problem_of(error, place=self.place, secrets=self.secrets)
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

    secrets = secrets_of(url, options=options, environ=os.environ)
    try:
        system, root = url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(url.partition("://")[0].lower())
        command = "" if package is None else f': pip install "{package}"'
        text = without_tokens(str(error), secrets)
        reason = f"storage='{place}' needs a package that is not installed ({text}){command}"
    except Exception as error:  # noqa: BLE001 - each client has error classes of its own
        text = without_tokens(f"{type(error).__name__}: {error}", secrets)
        reason = f"storage='{place}' cannot be opened: {text}"
    else:
        return Objects(system, root, place, secrets)
    raise ValueError(reason)


def _pieces(chunks: Iterable[memoryview]) -> Iterator[bytes]:
    """Cut and join buffers into pieces of one size, since a client copies whatever it is given at once."""
    piece = bytearray()
    for chunk in chunks:
        start = 0
        while start < chunk.nbytes:
            part = chunk[start : start + _PIECE_BYTES - len(piece)]
            piece += part
            start += part.nbytes
            if len(piece) == _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


def _abandon(file: Any) -> None:
    """Let go of an upload; left alone, a client would complete it when the file is forgotten."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        file.closed = True


def _modified(info: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return None
