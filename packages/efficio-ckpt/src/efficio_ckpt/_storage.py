"""Where checkpoints are kept: what every kind of place can do, and how a place is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, Union, runtime_checkable
from urllib.parse import urlsplit

from ._checkpoint import CheckpointError

OBJECT_SCHEMES: Final = ("memory", "gs", "s3", "az", "abfs")
_KNOWN: Final = "a path, file://, hf://, " + ", ".join(f"{scheme}://" for scheme in OBJECT_SCHEMES)
_DRIVE: Final = "/content/drive"


@dataclass(frozen=True)
class FileInfo:
    """A file as a listing shows it.

    Args:
        size: Bytes.
        modified: Unix time in seconds, None where the storage does not say.
    """

    size: int
    modified: float | None


class Storage(Protocol):
    """A place with folders of files, two levels deep: ``<checkpoint>/<file>``.

    Each method raises `OSError` when the place cannot do what is asked; `FileNotFoundError` means that the thing is
    not there, and nothing else does.
    """

    @property
    def place(self) -> str:
        """What to call this place in messages; no secret is in it."""

    def folders(self) -> list[str]:
        """Return the names at the top level; FileNotFoundError when the place does not exist yet."""

    def files(self, folder: str) -> dict[str, FileInfo]:
        """Return the files of a folder."""

    def begin(self, folder: str, note: bytes) -> None:
        """Make a new folder for one attempt, with a note on who is writing."""

    def write(self, folder: str, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a new file; it is durable when this returns."""

    def commit(self, folder: str, manifest: bytes, *, expired: Sequence[str]) -> None:
        """Make a folder count, durably and at once, and then remove the expired ones.

        An error means that the new one is not known to be durable. A folder that cannot be removed is logged.
        """

    def open(self, folder: str, name: str) -> BinaryIO:
        """Open a file for reading from its start, unbuffered."""

    def remove(self, folder: str) -> None:
        """Remove a folder; a crash in the middle leaves it without its manifest."""

    def free_bytes(self) -> int | None:
        """Return how much more can be written, None if it is not known."""


@runtime_checkable
class Guarded(Protocol):
    """A storage that can say before the first save that it will take none."""

    def check_writable(self) -> None:
        """Raise OSError if nothing can be saved there."""


StorageLike = Union[str, "os.PathLike[str]", Storage]


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment.

    Args:
        url: Any text.

    Example:
        >>> without_secrets("s3://key:secret@bucket/run?token=abc")
        's3://bucket/run'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    rest = rest.split("?", 1)[0].split("#", 1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def on_drive(path: str) -> bool:
    """Tell whether an absolute path lies on a mounted Google Drive of Colab.

    Args:
        path: With links resolved.

    Example:
        >>> on_drive("/content/drive/MyDrive/run"), on_drive("/content/driver")
        (True, False)
    """
    return path == _DRIVE or path.startswith(_DRIVE + "/")


def open_storage(
    url: StorageLike,
    *,
    environ: Mapping[str, str] | None = None,
    ismount: Callable[[str], bool] = os.path.ismount,
    **options: Any,
) -> Storage:
    """Return the storage that a path or URL names; nothing is created or read there yet.

    Args:
        url: A path, ``file://…``, ``memory://…``, ``hf://user/repository[/folder]`` and ``hf://buckets/user/name`` where huggingface_hub is installed, or
            ``gs://``, ``s3://``, ``az://``, ``abfs://`` where the fsspec package for it is. A storage is returned as it is.
        environ: Environment variables that tell Colab; the process's by default.
        ismount: Tells whether a path is a mount point.
        **options: Passed to the fsspec file system (credentials, endpoints); for ``hf://`` token, endpoint, private,
            squash_every. They appear in no message.

    Raises:
        TypeError: It is neither text nor a storage.
        ValueError: The scheme is unknown, or lacks its package; or options were given for a path.
        CheckpointError: The path is on Colab's Google Drive, which is not mounted.

    Example:
        >>> open_storage("memory://run").place
        'memory://run'
    """
    if not isinstance(url, (str, os.PathLike)):
        if not callable(getattr(url, "commit", None)):
            raise TypeError(f"storage is a {type(url).__name__} and no place; give {_KNOWN}")
        return url
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"storage={text!r} is no place; give {_KNOWN}")
    scheme, separator, _ = text.partition("://")
    if not separator:
        return _local(text, environ=environ, ismount=ismount, options=options)
    scheme = scheme.lower()
    if scheme == "file":
        from urllib.request import url2pathname

        return _local(url2pathname(urlsplit(text).path), environ=environ, ismount=ismount, options=options)
    if scheme == "hf":
        from ._hub import open_hub

        return open_hub(text, options=options)
    if scheme not in OBJECT_SCHEMES:
        raise ValueError(f"storage='{without_secrets(text)}' has an unknown scheme; choose {_KNOWN}")
    from ._objects import open_objects

    return open_objects(text, place=without_secrets(text), options=options)


def _local(
    path: str,
    *,
    environ: Mapping[str, str] | None,
    ismount: Callable[[str], bool],
    options: Mapping[str, Any],
) -> Storage:
    from ._folder import Folder

    if options:
        raise ValueError(f"storage={path!r} is a path and takes no options; {', '.join(options)} given")
    root = os.path.realpath(Path(path).expanduser())
    drive = on_drive(root)
    variables = os.environ if environ is None else environ
    if drive and any(name.startswith("COLAB_") for name in variables) and not ismount(_DRIVE):
        raise CheckpointError(
            f"storage={path!r}: Google Drive is not mounted, so checkpoints would vanish with this machine; run "
            f"google.colab.drive.mount({_DRIVE!r}) first"
        )
    return Folder(root, drive=drive)
