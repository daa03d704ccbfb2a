"""Saving: an attempt in a folder of its own, its manifest last, and then what has expired."""

from __future__ import annotations

import errno
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ._checkpoint import Checkpoint, CheckpointError
from ._json import to_json
from ._manifest import (
    FORMAT,
    MANIFEST,
    MAX_SERIAL,
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    check_metadata,
    folder_name,
    write_manifest,
)
from ._retention import Keep, kept, retention_of
from ._shard import SHARD_BYTES, FileDigest, digested, header, memory_of, shards
from ._storage import Storage, StorageLike, open_storage
from ._survey import Survey, note_of, survey, sweep, this_writer
from ._tree import Flat, Tree, flatten

logger = logging.getLogger(__name__)

Mode = Literal["exact"]

_MODES: Final = ("exact",)
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def expired(found: Survey, *, keep: Keep, run_id: str | None) -> list[str]:
    """Return the folders that a run no longer needs, oldest first.

    Checkpoints of other runs and damaged ones neither count nor expire.

    Args:
        found: What lies in the storage.
        keep: What stays of the run's good checkpoints.
        run_id: Identity of the run.

    Example:
        >>> expired(Survey((), {}, ()), keep=1, run_id=None)
        []
    """
    own = [
        manifest.checkpoint
        for manifest in found.good
        if manifest.checkpoint.run_id == run_id and manifest.checkpoint.name not in found.suspect
    ]
    stay = kept(own, retention_of(keep))
    return [checkpoint.name for checkpoint in reversed(own) if checkpoint.name not in stay]


def save_state(
    storage: StorageLike,
    tree: Tree,
    *,
    step: int,
    mode: Mode = "exact",
    keep: Keep = 2,
    metadata: Mapping[str, Any] | None = None,
    run_id: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Checkpoint:
    """Save a tree; when this returns, it survives a crash of the process and of the machine.

    Nothing that was saved before is overwritten. Afterwards what ``keep`` says of this run's good checkpoints stays; those
    of other runs and damaged ones are never removed.

    Args:
        storage: A path, a URL, or what `open_storage` returned.
        tree: Nested containers of leaves; tensors on any device. It is read during the call.
        step: Optimizer steps done.
        mode: ``"exact"`` keeps every bit.
        keep: How many checkpoints of this run stay, at least 1; or a `Retention`.
        metadata: Kept beside it, of JSON types.
        run_id: Tells runs apart that share a storage.
        shard_bytes: A data file holds at most this many bytes, unless one tensor alone is larger.

    Raises:
        TypeError: Something in the tree or the metadata cannot be stored; the message names it.
        ValueError: An argument is out of range.
        CheckpointError: The storage could not take it. The attempt was removed as far as possible; older checkpoints
            are as they were.
    """
    check_arguments(step=step, mode=mode, keep=keep, run_id=run_id)
    details = check_metadata(metadata or {})
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} is no size; give bytes, at least 1")
    return write_checkpoint(
        open_storage(storage),
        flatten(tree),
        step=step,
        mode=mode,
        keep=keep,
        metadata=details,
        run_id=run_id,
        shard_bytes=shard_bytes,
    )


def check_arguments(*, step: int, mode: str, keep: Keep, run_id: str | None) -> None:
    """Check what every way of saving takes.

    Args:
        step: Optimizer steps.
        mode: How tensors are coded.
        keep: Checkpoints that stay.
        run_id: Identity of the run.

    Raises:
        ValueError: One is out of range.
        TypeError: One is of another type.
    """
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(map(repr, _MODES))}")
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step={step!r} is no int; give a count, at least 0")
    if step < 0 or step >= 10**12:
        raise ValueError(f"step={step} is out of range; give a count, at least 0")
    retention_of(keep)
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"run_id={run_id!r} is no str; give text or None")


def write_checkpoint(
    storage: Storage,
    flat: Flat,
    *,
    step: int,
    mode: str,
    keep: Keep,
    metadata: dict[str, Any],
    run_id: str | None,
    shard_bytes: int = SHARD_BYTES,
    after_serial: int = 0,
    held: Callable[[], frozenset[str]] = frozenset,
    clock: Callable[[], float] = time.time,
) -> Checkpoint:
    """Write and commit a flattened tree, then remove what has expired.

    Args:
        storage: Where.
        flat: The document and its tensors, which are copied to the CPU one by one.
        step: As for `save_state`, like the rest; all were checked.
        mode: How tensors are coded.
        keep: Checkpoints that stay.
        metadata: Of JSON types.
        run_id: Identity of the run.
        shard_bytes: Limit of a data file.
        after_serial: The serial number comes after this one, too.
        held: Returns folders that must not be removed this time.
        clock: Unix time in seconds.

    Raises:
        CheckpointError: The storage could not take it.
        ValueError: The tree without its tensors is too large.
    """
    state = to_json({"format": FORMAT, "names": list(flat.names), "tree": flat.document})
    if len(state) > MAX_STATE_BYTES:
        raise ValueError(
            f"the tree holds {len(state)} bytes beside its tensors, over the limit of {MAX_STATE_BYTES}; store long "
            "lists of numbers as tensors"
        )
    sizes = [source.numel() * source.element_size() for source in flat.sources]
    needed = len(state) + sum(sizes)
    try:
        before = survey(storage)
    except FileNotFoundError:
        before = Survey((), {}, ())
    sweep(storage, before.attempts, now=clock())
    _warn_if_short(
        storage,
        needed=needed,
        missing=retention_of(keep).least + 1 - sum(m.checkpoint.run_id == run_id for m in before.good),
    )
    serial = 1 + max([after_serial, *(manifest.serial for manifest in before.good)])
    if serial >= MAX_SERIAL:
        last = before.good[0].checkpoint.name if before.good else "a checkpoint elsewhere"
        raise CheckpointError(
            f"could not save step {step} to '{storage.place}': {last} says that it is save number {serial - 1}, and none "
            "can come after it; move that folder away"
        )
    folder = folder_name(step, secrets.token_hex(4))
    files: dict[str, FileDigest] = {}
    committing = False

    def put(name: str, chunks: Iterator[Any]) -> None:
        result: list[FileDigest] = []
        storage.write(folder, name, digested(chunks, result))
        (files[name],) = result

    try:
        storage.begin(folder, note_of(this_writer()))
        for number, members in enumerate(shards(sizes, limit=shard_bytes), start=1):
            # Larger items first, so that each tensor is aligned in the file.
            members.sort(key=lambda index: -flat.sources[index].element_size())
            put(f"tensors-{number:05d}.safetensors", _shard_chunks(flat, members))
        put(STATE, iter([state]))
        checkpoint = Checkpoint(
            step=step,
            name=folder,
            mode=mode,
            created=clock(),
            bytes=sum(digest.size for digest in files.values()),
            run_id=run_id,
            metadata=metadata,
        )
        manifest = Manifest(checkpoint, serial, files)
        after = replace(before, good=(manifest, *before.good))
        committing = True
        gone = [name for name in expired(after, keep=keep, run_id=run_id) if name not in held()]
        storage.commit(folder, write_manifest(manifest, writer=_writer()), expired=gone)
    except BaseException as error:
        # Ctrl-C may come when the checkpoint stands already and others have been removed for it.
        if not committing or isinstance(error, OSError) or not is_committed(storage, folder):
            discard(storage, folder)
        if not isinstance(error, (OSError, RuntimeError)) or isinstance(error, CheckpointError):
            raise
        raise _failure(storage, step, error, needed=needed) from error
    return checkpoint


def _shard_chunks(flat: Flat, members: Sequence[int]) -> Iterator[Any]:
    sources = [flat.sources[index] for index in members]
    yield header(
        [(flat.names[index], flat.sources[index].dtype, flat.sources[index].shape) for index in members]
    )
    for source in sources:
        yield memory_of(_on_cpu(source))


def _on_cpu(source: Tensor) -> Tensor:
    return source.to("cpu", memory_format=torch.contiguous_format).contiguous()


def is_committed(storage: Storage, folder: str) -> bool:
    """Tell whether an attempt counts; True as well when that cannot be asked.

    Args:
        storage: Where.
        folder: Of the attempt.
    """
    try:
        return MANIFEST in storage.files(folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def discard(storage: Storage, folder: str) -> None:
    """Remove an attempt that failed; what cannot be removed is logged, and swept away by a later save.

    Args:
        storage: Where.
        folder: Of the attempt.
    """
    try:
        storage.remove(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("could not remove the unfinished %s of '%s': %s", folder, storage.place, error)


def _failure(storage: Storage, step: int, error: Exception, *, needed: int) -> CheckpointError:
    free = storage.free_bytes()
    numbers = f"needed {needed} bytes, free {'unknown' if free is None else free}"
    full = isinstance(error, OSError) and error.errno in _DISK_FULL
    advice = "; make room, or lower keep" if full else ""
    return CheckpointError(
        f"could not save step {step} to '{storage.place}': {error}; {numbers}; older checkpoints are as they were{advice}"
    )


def _warn_if_short(storage: Storage, *, needed: int, missing: int) -> None:
    """Say it when the checkpoints to come will not fit: one more than is kept lies there during a save."""
    free = storage.free_bytes()
    if free is not None and free < max(1, missing) * needed:
        logger.warning(
            "'%s' has %d bytes free; %d more are needed with checkpoints of %d bytes: make room, or lower keep",
            storage.place,
            free,
            max(1, missing) * needed,
            needed,
        )


def _writer() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "pid": str(os.getpid()),
    }
