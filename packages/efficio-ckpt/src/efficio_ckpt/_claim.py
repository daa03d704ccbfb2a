"""Who saves a run into a folder: two processes that train the same run would each remove what the other one saved."""

from __future__ import annotations

import hashlib
import logging
import time

from ._checkpoint import CheckpointError
from ._folder import Folder
from ._survey import Writer, is_running, note_of, read_writer, this_writer

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 5
_MAX_READS = 20
_READ_SECONDS = 0.01


def claim_name(run_id: str, number: int) -> str:
    """Return the file that says who saves a run; the one with the highest number counts.

    Args:
        run_id: Identity of the run, any text.
        number: Rises with each claim.

    Example:
        >>> claim_name("monday", 3)
        'writer-d618fb157a4b382e-00000003.json'
    """
    return f"writer-{hashlib.sha256(run_id.encode('utf-8', 'replace')).hexdigest()[:16]}-{number:08d}.json"


def hold_claim(folder: Folder, run_id: str, *, held: str | None) -> str:
    """Make sure that this process is the one that saves a run, and return its claim.

    Who claims last owns the run, since a process on another machine cannot be asked whether it lives: a run goes on at once
    where the former machine was taken away, and a former process that lives after all is told at its next save. A process of
    this machine that is known to live is never robbed.

    Args:
        folder: Where the run is saved.
        run_id: Identity of the run.
        held: What this returned for the save before; None at the first one.

    Raises:
        CheckpointError: Another process saves the run; the message names it.
        OSError: The folder cannot be read or written.
    """
    here = this_writer()
    for _ in range(_MAX_ATTEMPTS):
        claims = _claims(folder, run_id)
        newest = claims[-1] if claims else None
        owner = _owner(folder, newest) if newest is not None else None
        if newest is not None and (newest == held or owner == here):
            return newest
        if owner is not None and (held is not None or (owner.host == here.host and is_running(owner))):
            since = "took over" if held is not None else "is saving"
            raise CheckpointError(
                f"process {owner.pid} on {owner.host} {since} this run in '{folder.place}', and two would remove each "
                "other's checkpoints; end one of them, or give it another storage"
            )
        number = 1 + (int(newest.rpartition("-")[2].partition(".")[0]) if newest is not None else 0)
        try:
            folder.add(claim_name(run_id, number), note_of(here))
        except FileExistsError:
            continue  # another process was faster, and is to be looked at
        for name in claims:
            folder.drop(name)
        return claim_name(run_id, number)
    raise CheckpointError(f"many processes begin to save this run in '{folder.place}' at once; start one")


def drop_claim(folder: Folder, name: str) -> None:
    """Let others save the run; what fails is logged, since the end of the process does the same.

    Args:
        folder: Where the run was saved.
        name: From `hold_claim`.
    """
    try:
        if _owner(folder, name) == this_writer():
            folder.drop(name)
    except OSError as error:
        logger.debug("could not remove %s of '%s': %s", name, folder.place, error)


def _claims(folder: Folder, run_id: str) -> list[str]:
    prefix = claim_name(run_id, 0)[: -len("00000000.json")]
    try:
        names = folder.folders()
    except FileNotFoundError:
        return []
    return [
        name for name in names if name.startswith(prefix) and name[len(prefix) : -len(".json")].isdecimal()
    ]


def _owner(folder: Folder, name: str) -> Writer | None:
    """Return who made a claim, None if it is gone or was torn by the end of its process."""
    for _ in range(_MAX_READS):
        try:
            owner = read_writer(folder, "", name)
        except FileNotFoundError:
            return None
        if owner is not None:
            return owner
        # It may have been made this very moment, and its text be on its way.
        time.sleep(_READ_SECONDS)
    return None
