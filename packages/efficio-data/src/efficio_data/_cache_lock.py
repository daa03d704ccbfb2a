"""Lock: one builder at a time in a folder, also when an earlier one was killed, here or on another machine."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_SILENT_SECONDS = 600.0


class Lock:
    """A held lock. `beat` says that its holder lives, and notices when the lock was lost."""

    def __init__(self, path: Path, token: bytes, now: Callable[[], float]) -> None:
        self._path = path
        self._token = token
        self._now = now

    def beat(self) -> None:
        """Renew the time by which builders on other machines judge.

        Raises:
            RuntimeError: Another builder has taken the lock over.
        """
        if _read(self._path) != self._token:
            raise RuntimeError(
                f"{self._path} was taken over by another builder; let it finish, then build again"
            )
        os.utime(self._path, (self._now(), self._now()))


@contextmanager
def hold_lock(path: Path, *, now: Callable[[], float] = time.time) -> Iterator[Lock]:
    """Hold a lock file with the process and host in it; it is removed on leaving.

    A lock whose process is dead is taken over. The life of a process on another host cannot be seen: its lock counts as left
    behind after ten minutes without a `beat`.

    Args:
        path: The lock file.
        now: Seconds since the epoch, as file times are.

    Raises:
        RuntimeError: Another builder holds the lock.
    """
    token = json.dumps(
        {"pid": os.getpid(), "host": _host(), "started": _started(os.getpid()), "at": now()}
    ).encode()
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            _clear_stale(path, now())
            continue
        with open(descriptor, "wb") as file:
            file.write(token)
        break
    lock = Lock(path, token, now)
    try:
        yield lock
    finally:
        if _read(path) == token:
            path.unlink()


def _clear_stale(path: Path, now: float) -> None:
    """Remove a lock that was left behind, or raise."""
    holder = _read(path)
    if holder is None:
        return
    try:
        silent = now - path.stat().st_mtime
    except FileNotFoundError:
        return
    if _is_held(holder, silent):
        raise RuntimeError(
            f"{path} is held by another builder ({holder.decode(errors='replace') or 'just starting'}); "
            "wait for it, or delete the file when that process is gone"
        )
    aside = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return
    if _read(aside) == holder:
        _log.warning("took over %s, left behind by %s", path, holder.decode(errors="replace"))
        aside.unlink()
        return
    with suppress(OSError):  # two took over at once, and the other was first: it gets its lock back
        os.replace(aside, path)
    raise RuntimeError(f"{path} is held by another builder that has just started; wait for it")


def _is_held(holder: bytes, silent: float) -> bool:
    try:
        record = json.loads(holder)
        pid, host, started = int(record["pid"]), record["host"], record["started"]
    except (ValueError, KeyError, TypeError):  # cut off while it was written: a moment ago, or by a crash
        return silent < 10.0
    if host != _host():
        return silent < _SILENT_SECONDS
    return _is_alive(pid) and _started(pid) == started


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # there, os.kill(pid, 0) sends Ctrl-C
        import ctypes

        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)
        if not handle:
            return False
        code = ctypes.c_ulong()
        ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
        ctypes.windll.kernel32.CloseHandle(handle)
        return code.value == 259
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks, so that a reused pid is another process; None where it is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _host() -> str:
    import socket

    return socket.gethostname()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
