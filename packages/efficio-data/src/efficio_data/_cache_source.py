"""Source: what an image file was when it was decoded, and whether it still is that."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple


class Source(NamedTuple):
    """Size in bytes, time of the last change and digest of a file; -1, -1 and "" for one that is not there."""

    size: int
    mtime_ns: int
    digest: str


ABSENT = Source(-1, -1, "")


def read_source(path: str) -> tuple[bytes, Source]:
    """Read a whole file.

    Returns:
        Its bytes, and what it is.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())  # before the bytes: a later change then shows as one
        data = file.read()
    return data, Source(stat.st_size, stat.st_mtime_ns, hashlib.blake2b(data, digest_size=16).hexdigest())


def unread_source(path: str) -> Source:
    """What can be said of a file that cannot be read."""
    try:
        stat = Path(path).stat()
    except (OSError, ValueError):  # a path with a zero byte is a ValueError
        return ABSENT
    return Source(stat.st_size, stat.st_mtime_ns, "")


def same_source(path: str, known: Source, check: Literal["stat", "content"]) -> Source | None:
    """Say whether a file is what it was.

    Args:
        path: The file.
        known: What it was.
        check: "stat" reads the file only when its time has changed; "content" always.

    Returns:
        What it is now (its time may have changed with its content the same), or None when it is another.
    """
    now = unread_source(path)
    if now.size != known.size:
        return None
    if now.mtime_ns == known.mtime_ns and (check == "stat" or now == ABSENT):
        return known
    with suppress(OSError):
        _, now = read_source(path)
    return now if now.digest == known.digest else None
