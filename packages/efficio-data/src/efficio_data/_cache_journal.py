"""Journal: the rows of an unfinished cache that are on the disk. A line is written only after its rows are."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ._cache_source import Source


class Row(NamedTuple):
    """A row that is on the disk: the crc32 of its pixels, the file that they are from, whether that has 16 bits."""

    crc: int
    source: Source
    deep: bool


class Failure(NamedTuple):
    """A file that gave no row, and why."""

    source: Source
    reason: str


@dataclass(frozen=True)
class History:
    """What a journal tells.

    `rows` by number, `last` the numbers in the newest line, `failed` the decision to leave rows out (None: not decided),
    `size` the bytes of the journal up to the first line that is torn or damaged.
    """

    rows: Mapping[int, Row]
    last: Sequence[int]
    failed: Mapping[int, Failure] | None
    size: int


def parse_journal(data: bytes) -> History:
    """Read the lines of a journal up to the first damaged one.

    >>> row = Row(7, Source(10, 20, "ab"), False)
    >>> line = rows_line({3: row})
    >>> parse_journal(line + line[:9]) == History({3: row}, [3], None, len(line))
    True
    """
    rows: dict[int, Row] = {}
    last: list[int] = []
    failed: dict[int, Failure] | None = None
    size = 0
    for line in data.splitlines(keepends=True):
        text, _, crc = line.rpartition(b"\t")
        if crc != b"%08x\n" % zlib.crc32(text):
            break
        record = json.loads(text)
        if "rows" in record:
            last = [row for row, *_ in record["rows"]]
            rows.update((row, Row(crc, Source(*source), deep)) for row, crc, source, deep in record["rows"])
        else:
            failed = {row: Failure(Source(*source), reason) for row, source, reason in record["failed"]}
        size += len(line)
    return History(rows, last, failed, size)


def rows_line(rows: Mapping[int, Row]) -> bytes:
    """Line that says these rows are on the disk."""
    return _line({"rows": [(row, *entry) for row, entry in rows.items()]})


def failed_line(failed: Mapping[int, Failure]) -> bytes:
    """Line that says these rows are left out, and the others are being moved together."""
    return _line({"failed": [(row, *failure) for row, failure in failed.items()]})


def append_line(path: Path, size: int, line: bytes) -> int:
    """Write a line after the first `size` bytes of a journal and return once it is on the disk.

    Returns:
        The new size.
    """
    with open(path, "r+b" if path.exists() else "w+b") as file:
        file.truncate(size)  # a torn line would hide all that follow
        file.seek(size)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return size + len(line)


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%s\t%08x\n" % (text, zlib.crc32(text))
