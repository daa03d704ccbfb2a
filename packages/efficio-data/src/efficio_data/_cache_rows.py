"""Rows: made by threads from image files, or taken from the cache that is being replaced."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ._cache_file import RowFile
from ._cache_info import CRCS, IMAGES, MANIFEST, parse_manifest, read_info
from ._cache_journal import Failure, Row, append_line, rows_line
from ._cache_lock import Lock
from ._cache_request import Request
from ._cache_source import read_source, same_source, unread_source
from ._decode import decode_image, decoder_name

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

_GROUP = 64
_PROGRESS_SECONDS = 0.1

OldRows = Callable[[int], "tuple[bytes, Row] | None"]
"""Gives the pixels and the entry of a row that need not be made again, or None."""


def fill_rows(
    rows: RowFile,
    done: dict[int, Row],
    request: Request,
    old: OldRows,
    *,
    journal: Path,
    journal_bytes: int,
    lock: Lock,
    on_progress: Callable[[int, int], None] | None,
) -> dict[int, Failure]:
    """Make every row that is not in `done`, and add it there once it and its line in the journal are on the disk.

    After 64 rows: the pixels are synced, then their line is written, then the journal is synced. A line is never about pixels
    that a power cut can lose.

    Args:
        rows: The open file of rows.
        done: Rows by number; added to.
        request: What to make.
        old: Where rows are to be had without decoding.
        journal: Its path.
        journal_bytes: Its size up to the first torn line.
        lock: Renewed with each line.
        on_progress: Called with (rows done, rows in all), at most ten times a second and at the end.

    Returns:
        The files that could not be read, by row.
    """
    from concurrent.futures import ThreadPoolExecutor

    total = len(request.paths)
    pending = [row for row in range(total) if row not in done]
    failed: dict[int, Failure] = {}
    group: dict[int, Row] = {}
    told = float("-inf")
    with ThreadPoolExecutor(request.workers, "image-cache") as pool:
        results = _in_order(
            pool, lambda row: _make_row(rows, row, request, old), pending, 8 * request.workers
        )
        for place, (row, result) in enumerate(results, 1):
            if isinstance(result, Failure):
                failed[row] = result
            else:
                group[row] = result
            if len(group) == _GROUP or (group and place == len(pending)):
                rows.sync()
                journal_bytes = append_line(journal, journal_bytes, rows_line(group))
                done.update(group)
                group.clear()
                lock.beat()
            if on_progress and (place == len(pending) or time.monotonic() - told >= _PROGRESS_SECONDS):
                on_progress(total - len(pending) + place, total)
                told = time.monotonic()
    return failed


@contextmanager
def old_rows(root: Path, request: Request) -> Iterator[OldRows]:
    """Give access to the rows of the complete cache in `root` whose files, recipe and decoder are the same, and whose bytes are good."""
    places = _places(root, request)
    if not places:
        yield lambda _: None
        return
    with RowFile(root / IMAGES, request.recipe.row_bytes) as images:

        def find(row: int) -> tuple[bytes, Row] | None:
            path = request.paths[row]
            if path not in places:
                return None
            place, entry = places[path]
            source = same_source(path, entry.source, request.check)
            pixels = images.read(place)
            if source is None or zlib.crc32(pixels) != entry.crc:
                return None
            return pixels, entry._replace(source=source)

        yield find


def _places(root: Path, request: Request) -> dict[str, tuple[int, Row]]:
    """Row number and entry of each path in the complete cache; empty when nothing of it can be used."""
    try:
        info = read_info(root)
        manifest = parse_manifest((root / MANIFEST).read_bytes())
        crcs = np.frombuffer((root / CRCS).read_bytes(), "<u4")
    except (OSError, ValueError):
        return {}
    if info.recipe != request.recipe or info.decoder != decoder_name():
        return {}
    if len(manifest) != info.sources or len(crcs) != info.shape[0]:
        return {}
    places: dict[str, tuple[int, Row]] = {}
    for place, (kept, crc) in enumerate(zip(info.kept, crcs, strict=True)):
        path, source, deep = manifest[kept]
        places[path] = (place, Row(int(crc), source, deep))
    return places


def make_row(path: str, request: Request) -> tuple[memoryview, Row] | Failure:
    """Read and decode one file."""
    try:
        data, source = read_source(path)
    except (OSError, ValueError) as error:
        return Failure(unread_source(path), getattr(error, "strerror", None) or str(error))
    try:
        pixels, deep = decode_image(data, request.recipe)
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise of every kind; the caller lists it
        return Failure(source, " ".join(f"{type(error).__name__}: {error}".split()))
    view = np.ascontiguousarray(pixels).data.cast("B")
    return view, Row(zlib.crc32(view), source, deep)


def _make_row(rows: RowFile, row: int, request: Request, old: OldRows) -> Row | Failure:
    made = old(row) or make_row(request.paths[row], request)
    if isinstance(made, Failure):
        return made
    pixels, entry = made
    rows.write(row, memoryview(pixels))
    return entry


def _in_order(
    pool: Executor, function: Callable[[int], Row | Failure], items: Iterable[int], window: int
) -> Iterator[tuple[int, Row | Failure]]:
    """Results in the order of the items, with at most `window` of them under way."""
    waiting: deque[tuple[int, Future[Row | Failure]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) == window:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
