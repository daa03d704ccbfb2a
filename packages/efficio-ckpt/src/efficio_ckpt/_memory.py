"""How much memory the machine, or the container, has left."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_MACHINE: Final = Path("/proc/meminfo")
_CONTAINER: Final = Path("/sys/fs/cgroup")


def available_bytes(machine: Path = _MACHINE, container: Path = _CONTAINER) -> int | None:
    """Return what can be taken without anything being swapped out or killed; None where that is not known.

    Pages that only cache files count as available. In a container its limit counts where that is nearer.

    Args:
        machine: Linux's account of the machine's memory.
        container: Folder of the control group, version 2.
    """
    rooms = [room for room in (_of_machine(machine), _of_container(container)) if room is not None]
    return min(rooms) if rooms else _of_system()


def _of_machine(path: Path) -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _of_container(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max" is no limit
        return None
    return max(0, int(limit) - used + (int(cached[1]) if cached else 0))


def _of_system() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS lacks the name
        return None
