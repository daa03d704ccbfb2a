"""The inventory of a storage: its checkpoints by name, the damaged ones as well, and how one of them is removed."""

from __future__ import annotations

from dataclasses import dataclass

from ._checkpoint import Checkpoint, CheckpointError
from ._folder import EXPIRED
from ._manifest import MANIFEST, folder_step
from ._storage import StorageLike, open_storage
from ._survey import survey


@dataclass(frozen=True)
class Inventory:
    """What lies in a storage, as far as it shows without reading the data.

    Args:
        place: What to call the storage in messages.
        checkpoints: Those that look whole, the one that was saved last first.
        damaged: Name of each damaged one to what is wrong: its manifest, the size of a file, or what an earlier reader
            found.
        unfinished: Names of attempts that were never committed. Another process may be writing them.
    """

    place: str
    checkpoints: tuple[Checkpoint, ...]
    damaged: dict[str, str]
    unfinished: tuple[str, ...]


def take_inventory(storage: StorageLike) -> Inventory:
    """Return what lies in a storage; its data are not read.

    Args:
        storage: A path, a URL, or what `open_storage` returned.

    Raises:
        FileNotFoundError: The storage does not exist.
        CheckpointError: It cannot be read.
    """
    place = open_storage(storage)
    found = survey(place)
    noted = {name: f"{name}: it was found damaged when it was read" for name in sorted(found.suspect)}
    whole = [manifest.checkpoint for manifest in found.good if manifest.checkpoint.name not in found.suspect]
    return Inventory(place.place, tuple(whole), {**found.damaged, **noted}, found.attempts)


def remove_checkpoint(storage: StorageLike, name: str) -> None:
    """Remove one checkpoint, good or damaged; its manifest goes first, so that a crash leaves no half of it.

    Whether it is the last one is not asked. An unfinished attempt is refused, since another process may be writing it; the
    next save removes it once its writer is gone.

    Args:
        storage: A path, a URL, or what `open_storage` returned.
        name: Its folder, as `Checkpoint.name` says it.

    Raises:
        ValueError: No checkpoint can have this name.
        FileNotFoundError: There is no checkpoint of this name.
        CheckpointError: It is an unfinished attempt, or it cannot be removed.
    """
    place = open_storage(storage)
    if not isinstance(name, str) or folder_step(name) is None:
        raise ValueError(
            f"name={name!r:.80} is no checkpoint's; give one like 'step-000000012345-0a1b2c3d', as list_checkpoints does"
        )
    try:
        if not place.folders().count(name):
            raise FileNotFoundError(name)
        files = place.files(name)
        # What an interrupted removal has left goes as well.
        if MANIFEST not in files and EXPIRED not in files:
            raise CheckpointError(
                f"{name} of '{place.place}' is an unfinished save and no checkpoint; the next save removes it once its "
                "writer is gone"
            )
        place.remove(name)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {name} in '{place.place}'") from None
    except OSError as error:
        raise CheckpointError(f"could not remove {name} of '{place.place}': {error}") from error
