"""What lies in a repository of the Hub at one commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_CHUNK_BYTES: Final = 2**20


@dataclass(frozen=True)
class Entry:
    """A file as the Hub knows it.

    Args:
        size: Bytes.
        blob: Git's digest of a small file's content; of the pointer to a large one.
        sha256: Digest of a large file's content, None for a small one.
    """

    size: int
    blob: str
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """The folders below a prefix, at one commit.

    Args:
        head: The commit, None in a repository without any.
        folders: Name to the files directly in it.
    """

    head: str | None
    folders: Mapping[str, Mapping[str, Entry]]


def listing_of(head: str | None, files: Iterable[Any], *, prefix: str) -> Listing:
    """Sort the files of a repository into folders.

    Args:
        head: The commit.
        files: What the client lists; folders among them are skipped.
        prefix: Only what lies below it counts; "" for all.

    Example:
        >>> listing_of("c0", [], prefix="a/b")
        Listing(head='c0', folders={})
    """
    folders: dict[str, dict[str, Entry]] = {}
    start = f"{prefix}/" if prefix else ""
    for file in files:
        if not hasattr(file, "blob_id") or not file.path.startswith(start):
            continue
        folder, separator, name = file.path[len(start) :].partition("/")
        if separator and "/" not in name:
            folders.setdefault(folder, {})[name] = Entry(file.size, file.blob_id, sha256_of(file))
    return Listing(head, folders)


def sha256_of(file: Any) -> str | None:
    """Return the digest of a large file, None for a small one.

    Args:
        file: What the client lists.
    """
    lfs = getattr(file, "lfs", None)
    return None if lfs is None else str(lfs.sha256)


def is_content(entry: Entry, data: bytes) -> bool:
    """Tell whether a file of the Hub has this content.

    Args:
        entry: The file.
        data: The content.

    Example:
        >>> is_content(Entry(1, "2e65efe2a145dda7ee51d1741299f848e5bf752e", None), b"a")
        True
    """
    if entry.sha256 is not None:
        return hashlib.sha256(data).hexdigest() == entry.sha256
    return _blob_digest(len(data), [data]) == entry.blob


def is_whole(entry: Entry, path: Path) -> bool:
    """Tell whether a downloaded file is the one of the Hub.

    Args:
        entry: The file there.
        path: The file here.
    """
    size = path.stat().st_size
    if size != entry.size:
        return False
    with open(path, "rb") as file:
        chunks = iter(lambda: file.read(_CHUNK_BYTES), b"")
        if entry.sha256 is None:
            return _blob_digest(size, chunks) == entry.blob
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        return digest.hexdigest() == entry.sha256


def _blob_digest(size: int, chunks: Iterable[bytes]) -> str:
    # Git's choice, and no matter of security.
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
