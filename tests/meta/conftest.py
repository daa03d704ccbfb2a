import os
import sys
import tempfile
from pathlib import Path

import pytest

# Tests of one folder share modules; importlib mode puts no folder on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def nursery():
    """Trainings in processes of their own."""
    if not hasattr(os, "fork"):
        pytest.skip("this platform cannot fork")
    from nursery import Nursery

    opened = Nursery()
    yield opened
    opened.close()


@pytest.fixture
def one_thread():
    """Equal bits need equal numbers of threads; and one is faster for models as small as these."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: a process that is killed loses nothing there either, and no save waits for a disk."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
