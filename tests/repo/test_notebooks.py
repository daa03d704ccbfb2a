import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
SECONDS = 300

# In a process of its own: the kernel's client runs an event loop and opens sockets, whose warnings are not ours to mend.
CHILD = """
import sys
import nbformat
from nbclient import NotebookClient
path, folder, seconds = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(
    notebook, timeout=int(seconds), kernel_name="python3", resources={"metadata": {"path": folder}}
).execute()
"""


def run_notebook(path, folder):
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(folder), str(SECONDS)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * SECONDS,
    )


@pytest.mark.slow
@pytest.mark.skipif(not NOTEBOOKS, reason="examples/ holds no notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_runs_in_its_smoke_setting(path, tmp_path, monkeypatch):
    monkeypatch.setenv("EFFICIO_SMOKE", "1")
    done = run_notebook(path, tmp_path)
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.skipif(not NOTEBOOKS, reason="examples/ holds no notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_notebook_is_committed_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_a_cell_that_raises_is_seen(tmp_path):
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "a",
        "metadata": {},
        "outputs": [],
        "source": "import sys\nraise ValueError(sys.prefix)",
    }
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    done = run_notebook(page, tmp_path)
    assert done.returncode != 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert f"ValueError: {sys.prefix}" in plain, "the kernel is not of this environment"
