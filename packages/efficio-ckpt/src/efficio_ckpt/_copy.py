"""A copy of a checkpoint in another storage, every byte of it checked on the way."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

from ._checkpoint import Checkpoint, CheckpointError
from ._manifest import MAX_SERIAL, Manifest, folder_name, folder_step, write_manifest
from ._retention import Keep
from ._save import discard, expired, is_committed
from ._shard import checked
from ._storage import Storage, StorageLike, open_storage
from ._survey import Survey, is_io_damage, note_damage, note_of, survey, sweep, this_writer

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 2**24
_MAX_RESTARTS: Final = 5


def copy_checkpoint(
    source: StorageLike,
    target: StorageLike,
    *,
    step: int | None = None,
    run_id: str | None = None,
) -> Checkpoint:
    """Copy the newest good checkpoint, and return the copy; a run goes on from it as from the original.

    Both checksums of every file are compared before the copy counts. It has a name of its own and the same step, run, time,
    metadata and data; in its storage it is the one that was saved last. Nothing is overwritten or removed there. A damaged
    checkpoint is treated as by `load_checkpoint`. A few pieces of 16 MB are in memory at a time.

    Args:
        source: A path, a URL, or what `open_storage` returned.
        target: Likewise. It may hold other checkpoints.
        step: Only checkpoints of this step.
        run_id: Only checkpoints of this run.

    Raises:
        FileNotFoundError: Nothing of the kind was ever committed in the source.
        FileExistsError: The target holds a copy already; the message names it.
        CheckpointError: There are checkpoints, but none is good; the source cannot be read; or the target could not take it,
            and what was there is as it was.
    """
    origin, place = open_storage(source), open_storage(target)
    for _ in range(_MAX_RESTARTS):
        found = survey(origin)
        problems = [
            damage for folder, damage in found.damaged.items() if step is None or folder_step(folder) == step
        ]
        for damage in problems:
            logger.warning("'%s': %s; trying the next older checkpoint", origin.place, damage)
        chosen = [
            manifest
            for manifest in found.good
            if step in {None, manifest.checkpoint.step} and run_id in {None, manifest.checkpoint.run_id}
        ]
        for manifest in chosen:
            try:
                return _copy(origin, manifest, place)
            except ValueError as error:  # noqa: PERF203 - it goes on to the next
                if not is_committed(origin, manifest.checkpoint.name):
                    break
                if not isinstance(error.__cause__, OSError):
                    note_damage(origin, manifest.checkpoint.name, str(error))
                problems.append(str(error))
                logger.warning("'%s': %s; trying the next older checkpoint", origin.place, error)
        else:
            if problems:
                raise CheckpointError(f"no checkpoint in '{origin.place}' is good: {'; '.join(problems)}")
            wanted = "".join(
                [f" of step {step}" if step is not None else "", f" of run {run_id!r}" if run_id else ""]
            )
            raise FileNotFoundError(f"no checkpoint{wanted} was ever committed in '{origin.place}'")
        # Its own run replaced it while it was read: what is newest now was committed before that.
    raise CheckpointError(
        f"the checkpoints in '{origin.place}' are replaced faster than they can be read; try again"
    )


def _copy(origin: Storage, manifest: Manifest, place: Storage) -> Checkpoint:
    """Copy one checkpoint; ValueError names the file of the original that is damaged."""
    original = manifest.checkpoint
    try:
        before = survey(place)
    except FileNotFoundError:
        before = Survey((), {}, ())
    for there in before.good:
        name = there.checkpoint.name
        same = there.files == manifest.files and replace(there.checkpoint, name=original.name) == original
        if same and name not in before.suspect:
            raise FileExistsError(f"'{place.place}' holds this checkpoint already, as {name}")
    sweep(place, before.attempts, now=time.time())
    serial = 1 + max((there.serial for there in before.good), default=0)
    if serial >= MAX_SERIAL:
        raise CheckpointError(
            f"'{place.place}' holds save number {serial - 1}, and none can come after it; give another target"
        )
    copy = Manifest(
        replace(original, name=folder_name(original.step, secrets.token_hex(4))), serial, manifest.files
    )
    _transfer(origin, manifest, place, copy, expired=())
    return copy.checkpoint


def send_checkpoint(origin: Storage, manifest: Manifest, place: Storage, *, keep: Keep) -> None:
    """Copy a checkpoint as it is, under its own name and number, and remove what expires by that; again if it is there already.

    Args:
        origin: Where it lies.
        manifest: Of the checkpoint.
        place: Where it is to lie as well.
        keep: How many checkpoints of its run stay there, or a `Retention`.

    Raises:
        ValueError: The original is damaged; the message names the file.
        CheckpointError: The place could not take it, and what was there is as it was; or one of them cannot be read.
    """
    try:
        before = survey(place)
    except FileNotFoundError:
        before = Survey((), {}, ())
    if any(there.checkpoint.name == manifest.checkpoint.name for there in before.good):
        return
    if manifest.checkpoint.name in before.attempts:
        discard(place, manifest.checkpoint.name)  # nobody else has this name: it was cut off here
    sweep(place, tuple(set(before.attempts) - {manifest.checkpoint.name}), now=time.time())
    newest_first = sorted((manifest, *before.good), key=lambda entry: -entry.serial)
    after = replace(before, good=tuple(newest_first))
    gone = expired(after, keep=keep, run_id=manifest.checkpoint.run_id)
    _transfer(
        origin, manifest, place, manifest, expired=[name for name in gone if name != manifest.checkpoint.name]
    )


def _transfer(
    origin: Storage, manifest: Manifest, place: Storage, copy: Manifest, *, expired: Sequence[str]
) -> None:
    """Write the files of one manifest as those of another; ValueError names the file of the original that is damaged."""
    original, folder = manifest.checkpoint, copy.checkpoint.name
    faults: list[Exception] = []
    committing = False
    try:
        place.begin(folder, note_of(this_writer()))
        for name in manifest.files:
            with contextlib.closing(_pieces(origin, manifest, name, faults)) as pieces:
                place.write(folder, name, pieces)
        committing = True
        place.commit(folder, write_manifest(copy, writer=manifest.writer), expired=expired)
    except BaseException as error:
        if not committing or isinstance(error, OSError) or not is_committed(place, folder):
            discard(place, folder)
        # The target may have made an error of its own of the one that came from the source.
        if faults:
            raise faults[0] from faults[0].__cause__
        if not isinstance(error, (OSError, ValueError)):
            raise
        free = place.free_bytes()
        raise CheckpointError(
            f"could not copy {original.name} to '{place.place}': {error}; needed {original.bytes} bytes, free "
            f"{'unknown' if free is None else free}; what was there is as it was"
        ) from error


def _pieces(
    origin: Storage, manifest: Manifest, name: str, faults: list[Exception]
) -> Generator[memoryview, None, None]:
    """Yield the bytes of a file, and raise after the last of them unless both checksums are right."""
    folder = manifest.checkpoint.name
    try:
        with (
            origin.open(folder, name) as file,
            checked(file, manifest.files[name], with_sha256=True) as reader,
        ):
            while reader.left:
                piece = memoryview(bytearray(min(reader.left, _CHUNK_BYTES)))
                reader.read_into(piece)
                yield piece
    except ValueError as error:
        faults.append(ValueError(f"{folder}/{name}: {error}"))
        raise
    except OSError as error:
        text = f"{folder}/{name}{':' if is_io_damage(error) else ''} "
        fault: Exception = (
            ValueError(f"{text}it cannot be read: {error}")
            if is_io_damage(error)
            else CheckpointError(
                f"'{origin.place}': {text}cannot be read: {error}; nothing was changed there"
            )
        )
        fault.__cause__ = error
        faults.append(fault)
        raise
