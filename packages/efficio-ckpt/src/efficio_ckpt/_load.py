"""Loading: the newest checkpoint of which every byte is right."""

from __future__ import annotations

import logging
from typing import Any, Final

from torch import Tensor

from ._checkpoint import Checkpoint, CheckpointError
from ._folder import Folder
from ._json import from_json
from ._leaf import MAX_DEPTH
from ._manifest import FORMAT, MAX_STATE_BYTES, STATE, Manifest, folder_step
from ._retention import Keep
from ._save import check_arguments, expired
from ._shard import checked, read_shard
from ._spool import with_spool
from ._storage import Storage, StorageLike, open_storage
from ._survey import Survey, is_gone, is_io_damage, note_damage, survey
from ._tree import Tree, unflatten

logger = logging.getLogger(__name__)

# A level of a tree is up to three of JSON: the node, its list of pairs, the pair.
_MAX_STATE_DEPTH: Final = 3 * MAX_DEPTH + 20
_MAX_RESTARTS: Final = 5


def load_checkpoint(
    storage: StorageLike,
    *,
    step: int | None = None,
    run_id: str | None = None,
) -> tuple[Checkpoint, Tree]:
    """Return the newest good checkpoint and its tree, whose tensors are on the CPU.

    Newest is what was saved last, whatever its step and the clock: a run that went back and saved again continues from
    there. What a saver of this machine could not upload yet counts, too. Every byte is checked before anything is returned. A
    damaged checkpoint is logged and left where it is, with a note beside it if one can be written, and the next older one is
    tried.

    Args:
        storage: A path, a URL, or what `open_storage` returned.
        step: Only checkpoints of this step.
        run_id: Only checkpoints of this run.

    Raises:
        FileNotFoundError: Nothing of the kind was ever committed there.
        CheckpointError: There are checkpoints, but none is good; or the storage cannot be read.
    """
    place = with_spool(storage)
    vanished = True
    attempts: tuple[str, ...] = ()
    for _ in range(_MAX_RESTARTS):
        found = survey(place)
        problems = {
            folder: damage
            for folder, damage in found.damaged.items()
            if step is None or folder_step(folder) == step
        }
        for damage in problems.values():
            logger.warning("'%s': %s; trying the next older checkpoint", place.place, damage)
        chosen = _chosen(found, step=step, run_id=run_id)
        # What looked unfinished may have been committed, and the one before it removed, while this list was made.
        vanished = not chosen and found.attempts != attempts
        attempts = found.attempts
        for manifest in chosen:
            try:
                return manifest.checkpoint, _read_twice(place, manifest)
            except ValueError as error:  # noqa: PERF203 - it goes on to the next
                if is_gone(place, manifest.checkpoint.name):
                    vanished = True
                    break
                _note(place, manifest, error)
                problems[manifest.checkpoint.name] = str(error)
                logger.warning("'%s': %s; trying the next older checkpoint", place.place, error)
        # Another process replaced the checkpoint while it was read: what is newest now was committed before that.
        if not vanished:
            break
    if vanished:
        raise CheckpointError(
            f"the checkpoints in '{place.place}' are replaced faster than they can be read; try again"
        )
    if problems:
        raise CheckpointError(
            f"no checkpoint in '{place.place}' is good: {'; '.join(problems.values())}; give another "
            "storage to begin anew, or bring back good files: nothing was changed there"
        )
    wanted = "".join(
        [f" of step {step}" if step is not None else "", f" of run {run_id!r}" if run_id else ""]
    )
    raise FileNotFoundError(f"no checkpoint{wanted} was ever committed in '{place.place}'")


def load_state(storage: StorageLike, *, step: int | None = None, run_id: str | None = None) -> Tree:
    """Return the tree of the newest good checkpoint; see `load_checkpoint`.

    Args:
        storage: A path, a URL, or what `open_storage` returned.
        step: Only checkpoints of this step.
        run_id: Only checkpoints of this run.

    Raises:
        FileNotFoundError: Nothing of the kind was ever committed there.
        CheckpointError: There are checkpoints, but none is good; or the storage cannot be read.
    """
    return load_checkpoint(storage, step=step, run_id=run_id)[1]


def list_checkpoints(storage: StorageLike) -> list[Checkpoint]:
    """Return the committed checkpoints, the one that was saved last first; their data is not read.

    Args:
        storage: A path, a URL, or what `open_storage` returned. One that does not exist yet has none.

    Raises:
        CheckpointError: The storage cannot be read.
    """
    place = open_storage(storage)
    try:
        found = survey(place)
    except FileNotFoundError:
        return []
    for damage in found.damaged.values():
        logger.warning("'%s': %s", place.place, damage)
    for name in found.suspect:
        logger.warning("'%s': %s was found damaged when it was read", place.place, name)
    return [manifest.checkpoint for manifest in found.good if manifest.checkpoint.name not in found.suspect]


def verify(storage: StorageLike) -> list[Checkpoint]:
    """Read every byte of every checkpoint, compare all checksums, and return the checkpoints.

    Args:
        storage: A path, a URL, or what `open_storage` returned.

    Raises:
        CheckpointError: One or more are damaged; the message names each.
    """
    place = open_storage(storage)
    try:
        found = survey(place)
    except FileNotFoundError:
        return []
    problems = list(found.damaged.values())
    checkpoints = []
    for manifest in found.good:
        try:
            _read_tree(place, manifest, with_sha256=True)
        except ValueError as error:  # noqa: PERF203 - each is to be named
            if is_gone(place, manifest.checkpoint.name):
                continue
            _note(place, manifest, error)
            problems.append(str(error))
        else:
            checkpoints.append(manifest.checkpoint)
    if problems:
        raise CheckpointError(f"damaged in '{place.place}': {'; '.join(problems)}")
    return checkpoints


def prune(storage: StorageLike, *, keep: Keep) -> list[Checkpoint]:
    """Remove what expires of each run's good checkpoints, and return what was removed.

    Args:
        storage: A path, a URL, or what `open_storage` returned.
        keep: How many of each run stay, at least 1, or a `Retention`. Damaged ones neither count nor go.

    Raises:
        CheckpointError: The storage cannot be read, or one cannot be removed.
    """
    check_arguments(step=0, mode="exact", keep=keep, run_id=None)
    place = open_storage(storage)
    try:
        found = survey(place)
    except FileNotFoundError:
        return []
    checkpoints = {manifest.checkpoint.name: manifest.checkpoint for manifest in found.good}
    removed = []
    for run_id in dict.fromkeys(checkpoint.run_id for checkpoint in checkpoints.values()):
        for name in expired(found, keep=keep, run_id=run_id):
            try:
                place.remove(name)
            except FileNotFoundError:
                continue  # another process was faster
            except OSError as error:
                raise CheckpointError(f"could not remove {name} of '{place.place}': {error}") from error
            removed.append(checkpoints[name])
    return removed


def _chosen(found: Survey, *, step: int | None, run_id: str | None) -> list[Manifest]:
    return [
        manifest
        for manifest in found.good
        if step in {None, manifest.checkpoint.step} and run_id in {None, manifest.checkpoint.run_id}
    ]


def _note(storage: Storage, manifest: Manifest, error: ValueError) -> None:
    # A file that could not be read this time may be whole.
    if not isinstance(error.__cause__, OSError):
        note_damage(storage, manifest.checkpoint.name, str(error))


def _read_twice(storage: Storage, manifest: Manifest) -> Tree:
    """Read and check all files, again where a network may have spoiled them on the way; ValueError names the damaged one."""
    try:
        return _read_tree(storage, manifest, with_sha256=False)
    except ValueError as error:
        if isinstance(storage, Folder) or is_gone(storage, manifest.checkpoint.name):
            raise
        logger.warning("'%s': %s; reading it again", storage.place, error)
    return _read_tree(storage, manifest, with_sha256=False)


def _read_tree(storage: Storage, manifest: Manifest, *, with_sha256: bool) -> Tree:
    """Read and check all files; ValueError names the damaged one."""
    folder = manifest.checkpoint.name
    tensors: dict[str, Tensor] = {}
    state: Any = None
    name = STATE
    try:
        for name, digest in manifest.files.items():
            # The small file is checked by both digests, the large ones by the one that is as fast as a disk.
            both = with_sha256 or name == STATE
            with storage.open(folder, name) as file, checked(file, digest, with_sha256=both) as reader:
                if name == STATE:
                    data = reader.read(digest.size)
                else:
                    shard = read_shard(reader)
            if name == STATE:
                state = from_json(data, max_bytes=MAX_STATE_BYTES, max_depth=_MAX_STATE_DEPTH)
            elif shard.keys() & tensors.keys():
                raise ValueError("it holds a tensor that another file holds as well")
            else:
                tensors.update(shard)
        name = STATE
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError("it is of another format")
        names = state.get("names")
        if not isinstance(names, list) or sorted(map(str, names)) != sorted(tensors):
            raise ValueError("its tensors are not those of the data files")
        return unflatten(state.get("tree"), [tensors[name] for name in names])
    except OSError as error:
        if is_io_damage(error):
            raise ValueError(f"{folder}/{name}: it cannot be read: {error}") from error
        raise CheckpointError(
            f"'{storage.place}': {folder}/{name} cannot be read: {error}; nothing was changed"
        ) from error
    except MemoryError as error:
        raise CheckpointError(
            f"'{storage.place}': {folder}/{name} needs more memory than there is: {error}; nothing was changed"
        ) from error
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{folder}/{name}: {error}") from error
