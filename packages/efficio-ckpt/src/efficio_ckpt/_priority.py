"""The priority of a thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

_LOWER: Final = 10
"""Steps of niceness: where all CPUs are busy, a thread gets a tenth of one, and all of it where they are not."""


def give_way() -> None:
    """Lower the priority of the calling thread, and of those that it starts from here on, for good.

    What trains keeps its CPUs: a thread of it that waits for a CPU holds up all the others. Without effect outside of Linux, where
    only whole processes have a priority.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _LOWER)
