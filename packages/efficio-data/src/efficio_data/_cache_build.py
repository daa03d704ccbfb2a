"""Build: a cache made in a folder beside the complete one, and published as a whole.

<root>/building holds an unfinished build: plan.json (what it is of), images.u8 and the journal; at its end the other files,
meta.json last. Then all move to <root>, meta.json last again. Every step can be cut off anywhere and done again.
"""

from __future__ import annotations

import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ._cache_file import RowFile, replace_file, sync_folder
from ._cache_info import (
    CRCS,
    IMAGES,
    LABELS,
    MANIFEST,
    META,
    CacheInfo,
    differences,
    format_info,
    format_manifest,
)
from ._cache_journal import Failure, History, Row, append_line, failed_line, parse_journal
from ._cache_lock import Lock
from ._cache_request import FailedImagesError, Request
from ._cache_rows import fill_rows, make_row, old_rows
from ._cache_source import same_source
from ._decode import decoder_name

STAGE, PLAN, JOURNAL = "building", "plan.json", "journal"
_log = logging.getLogger(__name__)


def build_rows(
    root: Path, request: Request, lock: Lock, *, rebuild: bool, on_progress: Callable[[int, int], None] | None
) -> None:
    """Begin or continue a build and publish it.

    Raises:
        FailedImagesError: Files could not be read and `request.on_error` is "raise", or none could. Good rows stay for the next call.
        ValueError: An unfinished build of something else is there, and `rebuild` is false.
        OSError: The disk is full, or failed.
    """
    stage = root / STAGE
    total = len(request.paths)
    history = _open_stage(stage, request, rebuild)
    done = dict(history.rows)
    with RowFile(stage / IMAGES, request.recipe.row_bytes) as rows:
        failed = history.failed
        if failed is None:
            rows.reserve(total)
            _drop_changed(done, rows, request, history)
            with old_rows(root, request) as old:
                failed = fill_rows(
                    rows,
                    done,
                    request,
                    old,
                    journal=stage / JOURNAL,
                    journal_bytes=history.size,
                    lock=lock,
                    on_progress=on_progress,
                )
            _refuse_failed(failed, request)
        if failed:
            if history.failed is None:
                append_line(stage / JOURNAL, (stage / JOURNAL).stat().st_size, failed_line(failed))
            _close_gaps(rows, done, failed, request, lock)
    _write_rest(stage, done, failed, request)
    publish(root)
    _log.info("%s is complete: %d images from %d files", root, total - len(failed), total)


def publish(root: Path) -> None:
    """Move a finished build into place; nothing when there is none. Cut off, it is continued by the next call.

    `meta.json` of the old cache goes first and that of the new one comes last: no mixture ever looks complete.

    Raises:
        OSError: A file cannot be moved, on Windows because somebody has the old one open.
    """
    stage = root / STAGE
    if not (stage / META).exists():
        return
    for name in (PLAN, JOURNAL):
        (stage / name).unlink(missing_ok=True)
    try:
        (root / META).unlink(missing_ok=True)
        sync_folder(root)
        for name in (IMAGES, LABELS, CRCS, MANIFEST):
            if (stage / name).exists():
                os.replace(stage / name, root / name)
        sync_folder(root)
        os.replace(stage / META, root / META)
        sync_folder(root)
    except PermissionError as error:
        text = "the new cache is finished, but cannot replace the old one; close what has that open, then build again"
        raise OSError(error.errno, text, str(root)) from error
    with suppress(OSError):  # a file manager's own files may be in it
        stage.rmdir()


def labels_file(labels: npt.NDArray[np.generic]) -> bytes:
    """Bytes of `labels.npy`."""
    file = io.BytesIO()
    np.save(file, labels, allow_pickle=False)
    return file.getvalue()


def _open_stage(stage: Path, request: Request, rebuild: bool) -> History:
    """Continue the build that was begun, or begin."""
    plan = request.plan()
    try:
        old = json.loads((stage / PLAN).read_bytes())
        history = parse_journal((stage / JOURNAL).read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        old, history = None, parse_journal(b"")
    changed = differences(old, plan) if old is not None else []
    if changed and history.rows and not rebuild:
        raise ValueError(
            f"{stage} holds an unfinished build of something else ({'; '.join(changed)}); "
            "pass rebuild=True to begin anew, or ask for the same again to finish it"
        )
    if old is not None and not changed:
        if _is_usable(stage / IMAGES, history, request):
            return history
        _log.warning("%s cannot be continued and is begun anew", stage)
    stage.mkdir(exist_ok=True)
    for name in (PLAN, JOURNAL, IMAGES, LABELS, CRCS, MANIFEST):
        (stage / name).unlink(missing_ok=True)
    (stage / IMAGES).touch()
    (stage / JOURNAL).touch()
    replace_file(stage / PLAN, json.dumps(plan, indent=1).encode())
    sync_folder(stage.parent)
    return parse_journal(b"")


def _is_usable(images: Path, history: History, request: Request) -> bool:
    """Say whether the build that the journal tells of can be continued."""
    if history.failed is not None:  # rows are being moved: none can be made again, as its place may be taken
        known = {row: entry.source for row, entry in history.rows.items()}
        known.update((row, failure.source) for row, failure in history.failed.items())
        same = (same_source(request.paths[row], source, request.check) for row, source in known.items())
        return images.exists() and None not in same
    if not history.rows:
        return images.exists()
    # Rows past the end of a file that was cut would be read as black ones.
    return images.exists() and images.stat().st_size == len(request.paths) * request.recipe.row_bytes


def _drop_changed(done: dict[int, Row], rows: RowFile, request: Request, history: History) -> None:
    """Keep of the journal's rows those whose files are what they were."""
    for row in history.last:
        if (
            zlib.crc32(rows.read(row)) != done[row].crc
        ):  # a disk that lies about syncing loses the newest rows
            del done[row]
    for row, entry in list(done.items()):
        source = same_source(request.paths[row], entry.source, request.check)
        if source is None:
            del done[row]
        else:
            done[row] = entry._replace(source=source)


def _refuse_failed(failed: Mapping[int, Failure], request: Request) -> None:
    if not failed:
        return
    listed = [(request.paths[row], failure.reason) for row, failure in failed.items()]
    if len(failed) == len(request.paths):
        raise FailedImagesError(listed, "none is left; check the paths")
    if request.on_error == "raise":
        raise FailedImagesError(
            listed,
            "mend them and build again (the other rows are kept), or pass on_error='skip' to leave them out",
        )
    for path, reason in listed:
        _log.warning("left out %s: %s", path, reason)


def _close_gaps(
    rows: RowFile, done: Mapping[int, Row], failed: Mapping[int, Failure], request: Request, lock: Lock
) -> None:
    """Move the rows that follow a failed one down, in place.

    Cut off, it is begun again: a place that already has the row that belongs there is told by its crc32. Only a power cut
    between two syncs can lose a row; its file is then decoded once more.
    """
    kept = [row for row in range(len(request.paths)) if row not in failed]
    for place in range(min(failed), len(kept)):
        row = kept[place]
        if zlib.crc32(rows.read(place)) != done[row].crc:
            pixels = rows.read(row)
            if zlib.crc32(pixels) != done[row].crc:
                made = make_row(request.paths[row], request)
                if isinstance(made, Failure) or made[1].crc != done[row].crc:
                    raise ValueError(
                        f"{request.paths[row]} has changed while the cache was finished; delete {rows.path.parent} and build again"
                    )
                pixels = bytes(made[0])
            rows.write(place, memoryview(pixels))
        if place % 64 == 0:
            rows.sync()
            lock.beat()
    rows.sync()
    rows.truncate(len(kept))
    rows.sync()


def _write_rest(
    stage: Path, done: Mapping[int, Row], failed: Mapping[int, Failure], request: Request
) -> None:
    """Write all the other files of a cache, `meta.json` last."""
    kept = [row for row in range(len(request.paths)) if row not in failed]
    labels = labels_file(request.labels[kept])
    places = sorted(failed)
    info = CacheInfo(
        recipe=request.recipe,
        sources=len(request.paths),
        failed=tuple((request.paths[row], failed[row].reason) for row in places),
        failed_rows=tuple(places),
        bit16=sum(done[row].deep for row in kept),
        decoder=decoder_name(),
        labels_crc=zlib.crc32(labels),
    )
    entries = [
        (*failed[row][:1], False) if row in failed else done[row][1:] for row in range(len(request.paths))
    ]
    if info.bit16:
        _log.info("%d files have 16 bits a channel; %d became 255", info.bit16, request.recipe.bit16_max)
    replace_file(stage / CRCS, np.array([done[row].crc for row in kept], "<u4").tobytes())
    replace_file(stage / LABELS, labels)
    replace_file(stage / MANIFEST, format_manifest(request.paths, entries))
    replace_file(stage / META, format_info(info))
