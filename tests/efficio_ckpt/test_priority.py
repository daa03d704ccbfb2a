"""The thread that writes yields the CPU to those that train."""

import os
import sys
import threading

import pytest
import torch

from efficio_ckpt import background_saver
from efficio_ckpt._folder import Folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")


class Asked(Folder):
    """A folder that notes the niceness of the thread that commits."""

    def commit(self, *arguments, **options):
        seen.append((threading.current_thread(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        super().commit(*arguments, **options)


seen = []


@pytest.mark.parametrize("wait", [False, True])
def test_a_save_in_the_background_is_written_with_low_priority_and_one_that_is_waited_for_is_not(
    quick_path, wait
):
    seen.clear()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with background_saver(Asked(quick_path)) as saver:
        saver.save({"w": torch.ones(3)}, step=1, wait=wait)
    ((thread, niceness),) = seen
    assert thread is not threading.current_thread()
    assert niceness == (own if wait else min(own + 10, 19))
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
