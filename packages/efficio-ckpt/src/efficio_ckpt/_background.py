"""A saver for a place: checked, and with a spool in front of it where the place is remote."""

from __future__ import annotations

import os

from ._checkpoint import CheckpointError
from ._retention import Keep
from ._save import Mode, check_arguments
from ._saver import Saver
from ._spool import Spool, spooled
from ._storage import Guarded, StorageLike, open_storage


def background_saver(
    storage: StorageLike,
    *,
    mode: Mode = "exact",
    keep: Keep = 2,
    run_id: str | None = None,
    spool: bool | str | os.PathLike[str] = True,
    copy_bytes: int | None = None,
) -> Saver:
    """Return a saver that writes checkpoints in the background; use it after ``with``, or close it.

    In front of a remote storage is a spool: a save is durable on this machine first, and its upload delays neither training nor
    the next save. When several wait for the network, only the newest goes up. What a former process left in the spool of the run
    is uploaded now. The interpreter does not exit before a save in flight is durable.

    Args:
        storage: A path, a URL, or what `open_storage` or `spooled` returned.
        mode: ``"exact"`` keeps every bit.
        keep: How many checkpoints of this run stay, at least 1; or a `Retention`.
        run_id: Tells runs apart that share a storage.
        spool: Folder of the spool; True for the usual one, False for none: a save is then an upload.
        copy_bytes: What the copy of the state may take in memory; None for what there is room for. A larger state is written
            tensor by tensor while `save` waits.

    Raises:
        ValueError: An argument is out of range, or the storage is unknown.
        CheckpointError: The storage says already that it will take nothing, as the Hub does for a read-only token; or it is
            remote and cannot be asked what it holds.
    """
    check_arguments(step=0, mode=mode, keep=keep, run_id=run_id)
    if copy_bytes is not None and (
        isinstance(copy_bytes, bool) or not isinstance(copy_bytes, int) or copy_bytes < 0
    ):
        raise ValueError(f"copy_bytes={copy_bytes!r} is no size; give bytes, or None")
    place = open_storage(storage)
    if spool is not False and not isinstance(place, Spool):
        place = spooled(place, folder=None if spool is True else spool)
    elif spool is False and isinstance(place, Spool):
        place = place.remote
    target = place.remote if isinstance(place, Spool) else place
    if isinstance(target, Guarded):
        try:
            target.check_writable()
        except OSError as error:
            raise CheckpointError(f"'{target.place}' takes no checkpoints: {error}") from error
    return Saver(place, mode=mode, keep=keep, run_id=run_id, copy_bytes=copy_bytes)
