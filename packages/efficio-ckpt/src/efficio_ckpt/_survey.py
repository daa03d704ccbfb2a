"""What lies in a storage: good manifests, damaged ones, and attempts that were never committed."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ._checkpoint import CheckpointError
from ._folder import DAMAGE, EXPIRED, WRITER, Folder, is_own
from ._json import from_json
from ._manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, folder_step, read_manifest, size_problem
from ._storage import FileInfo, Storage

logger = logging.getLogger(__name__)

# An attempt whose writer cannot be asked whether it lives is taken for dead after this many seconds without a write.
_STALE_SECONDS: Final = 24 * 3600.0
# One without a note on its writer is being removed, or was made this very moment.
_UNSIGNED_SECONDS: Final = 900.0


@dataclass(frozen=True)
class Survey:
    """The checkpoints of a storage.

    Args:
        good: Those whose manifest is whole and whose files have the right sizes, newest first.
        damaged: Folder to what is wrong, for those that were committed and are not good.
        attempts: Folders without a manifest.
        suspect: Those of the good ones in which an earlier reader found damage and left a note. They are tried again when
            all is read, but retention does not count on them.
    """

    good: tuple[Manifest, ...]
    damaged: dict[str, str]
    attempts: tuple[str, ...]
    suspect: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Writer:
    """Who writes an attempt, so that another process can tell whether it still does.

    Args:
        host: Name of the machine.
        pid: Process.
        born: When the process began, in the system's ticks, since numbers of processes come again; "" if unknown.
    """

    host: str
    pid: int
    born: str


def this_writer() -> Writer:
    """Return what identifies this process."""
    return Writer(socket.gethostname(), os.getpid(), _state_and_birth(os.getpid())[1])


def is_abandoned(
    writer: Writer | None,
    age: float,
    *,
    here: Writer,
    is_running: Callable[[Writer], bool | None],
) -> bool:
    """Tell whether nobody will finish an attempt.

    Args:
        writer: Who began it, None if it does not say.
        age: Seconds since the last write to it.
        here: This process.
        is_running: Tells whether a writer on this machine lives; None if that cannot be known.

    Example:
        >>> here, dead = Writer("a", 1, ""), Writer("a", 2, "")
        >>> is_abandoned(dead, 1.0, here=here, is_running=lambda writer: False)
        True
        >>> is_abandoned(Writer("b", 2, ""), 3600.0, here=here, is_running=lambda writer: False)
        False
    """
    if writer is None:
        return age > _UNSIGNED_SECONDS
    if writer.host == here.host and is_running(writer) is False:
        return True
    return age > _STALE_SECONDS


def is_running(writer: Writer) -> bool | None:
    """Tell whether a process of this machine lives; None where that cannot be asked.

    Args:
        writer: Of this machine.
    """
    if sys.platform == "win32":
        return None  # os.kill(pid, 0) would interrupt the process there
    try:
        os.kill(writer.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    state, born = _state_and_birth(writer.pid)
    # A process that has ended stays in the list until its parent asks for it, which some never do.
    return state not in {"Z", "X"} and (not writer.born or born == writer.born)


def survey(storage: Storage) -> Survey:
    """Read every manifest of a storage.

    Args:
        storage: Not changed.

    Raises:
        FileNotFoundError: The storage does not exist yet.
        CheckpointError: It cannot be read.
    """
    try:
        folders = [name for name in storage.folders() if folder_step(name) is not None]
    except FileNotFoundError:
        raise FileNotFoundError(
            f"storage '{storage.place}' does not exist, so nothing was ever saved there"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"storage '{storage.place}' cannot be read: {error}; nothing was changed; give a folder that can be "
            "read and written"
        ) from error
    good: list[Manifest] = []
    damaged: dict[str, str] = {}
    attempts: list[str] = []
    suspect: set[str] = set()
    for folder in folders:
        try:
            files = _list(storage, folder)
            manifest = _read(storage, folder) if MANIFEST in files else None
            if manifest is None:
                attempts.append(folder)
                continue
            if problem := size_problem(manifest, {name: info.size for name, info in files.items()}):
                raise ValueError(problem)
        except ValueError as error:
            # On a Drive files are emptied before they go, also under a reader that had opened them.
            if is_gone(storage, folder):
                attempts.append(folder)
            else:
                damaged[folder] = f"{folder}/{error}"
            continue
        good.append(manifest)
        if DAMAGE in files:
            suspect.add(folder)
    good.sort(key=lambda manifest: (manifest.serial, manifest.checkpoint.created, manifest.checkpoint.name))
    return Survey(tuple(reversed(good)), damaged, tuple(attempts), frozenset(suspect))


def sweep(storage: Storage, attempts: tuple[str, ...], *, now: float) -> None:
    """Remove the attempts that nobody will finish; what fails is logged.

    Args:
        storage: Cleared of them.
        attempts: Folders without a manifest.
        now: Unix time in seconds.
    """
    here = this_writer()
    for folder in attempts:
        try:
            files = storage.files(folder)
            # An empty folder does no harm, and may be one that was made this very moment.
            if MANIFEST in files or not any(map(is_own, files)):
                continue
            writer = read_writer(storage, folder, WRITER) if WRITER in files else None
            ages = [now - info.modified for info in files.values() if info.modified is not None]
            if EXPIRED in files or is_abandoned(
                writer,
                min(ages, default=0.0),
                here=here,
                is_running=is_running,
            ):
                storage.remove(folder)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            logger.warning("could not remove the unfinished %s of '%s': %s", folder, storage.place, error)


def is_gone(storage: Storage, folder: str) -> bool:
    """Tell whether a checkpoint has been removed, or is being removed.

    Args:
        storage: Where.
        folder: Of a checkpoint that had a manifest.
    """
    try:
        return MANIFEST not in storage.files(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def is_io_damage(error: OSError) -> bool:
    """Tell whether an error says that a file is bad, rather than that the storage cannot be asked.

    Args:
        error: From reading one file.

    Example:
        >>> is_io_damage(OSError(errno.EIO, "")), is_io_damage(OSError(errno.EACCES, ""))
        (True, False)
    """
    return isinstance(error, (FileNotFoundError, IsADirectoryError)) or error.errno in {
        errno.EIO,
        errno.EUCLEAN,
    }


def _list(storage: Storage, folder: str) -> dict[str, FileInfo]:
    try:
        return storage.files(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreadable(storage, folder, "", error) from error


def _read(storage: Storage, folder: str) -> Manifest | None:
    try:
        return _read_once(storage, folder)
    except ValueError:
        # Where a network may have spoiled it on the way, it is read again; what was damaged there is damaged still.
        if isinstance(storage, Folder):
            raise
    return _read_once(storage, folder)


def _read_once(storage: Storage, folder: str) -> Manifest | None:
    try:
        with storage.open(folder, MANIFEST) as file:
            data = b""
            # One read of an unbuffered file may stop short.
            while len(data) <= MAX_MANIFEST_BYTES and (part := file.read(MAX_MANIFEST_BYTES + 1 - len(data))):
                data += part
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(storage, folder, MANIFEST, error) from error
    try:
        return read_manifest(data, folder=folder)
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from error


def _unreadable(storage: Storage, folder: str, name: str, error: OSError) -> Exception:
    if is_io_damage(error):
        return ValueError(f"{name}: it cannot be read: {error}")
    return CheckpointError(f"'{storage.place}': {folder}/{name} cannot be read: {error}; nothing was changed")


def note_damage(storage: Storage, folder: str, damage: str) -> None:
    """Leave a note beside damaged files, so that retention never removes a good checkpoint in favour of them.

    Args:
        storage: A note is added, unless it cannot be written.
        folder: The checkpoint.
        damage: What was found.
    """
    try:
        storage.write(folder, DAMAGE, iter([memoryview(f"{damage}\n".encode())]))
    except OSError as error:
        logger.debug("no note could be left in %s: %s", folder, error)


def read_writer(storage: Storage, folder: str, name: str) -> Writer | None:
    """Return what `note_of` wrote, None if it was torn by the crash that ended its writer.

    Args:
        storage: Where.
        folder: Of the note.
        name: Of the note.

    Raises:
        OSError: It cannot be read.
    """
    with storage.open(folder, name) as file:
        data = file.read(4096)
    try:
        note: dict[str, Any] = from_json(data, max_bytes=4096, max_depth=1)
        return Writer(str(note["host"]), int(note["pid"]), str(note["born"]))
    except (ValueError, LookupError, TypeError):
        return None


def _state_and_birth(pid: int) -> tuple[str, str]:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "", ""
    # The second field is the command in brackets and may hold spaces; the start time is the 22nd.
    fields = status.rpartition(")")[2].split()
    return fields[0], fields[19]


def note_of(writer: Writer) -> bytes:
    """Return the text that says who writes an attempt.

    Args:
        writer: This process.

    Example:
        >>> note_of(Writer("a", 1, "7"))
        b'{"host": "a", "pid": 1, "born": "7"}'
    """
    return json.dumps({"host": writer.host, "pid": writer.pid, "born": writer.born}).encode()
