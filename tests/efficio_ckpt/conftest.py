import sys
import tempfile
from pathlib import Path

import pytest

# Tests of one package share a module of strategies; importlib mode puts no folder on the path by itself.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: hundreds of saves wait for no disk there."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def spools(tmp_path_factory, monkeypatch):
    """Spools are made below a folder of the test's, not in the user's home."""
    monkeypatch.setenv("EFFICIO_SPOOL", str(tmp_path_factory.mktemp("spools")))
