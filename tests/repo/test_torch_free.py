import subprocess
import sys

import pytest


def modules_after(statement):
    code = f"import sys\n{statement}\nprint(*sys.modules, sep='\\n')"
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True, timeout=120
    ).stdout.splitlines()


@pytest.mark.parametrize("module", ["efficio_budget", "efficio_report"])
def test_imports_without_torch(module):
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert "torch" not in loaded
    assert "numpy" not in loaded


@pytest.mark.slow
def test_an_import_of_torch_would_be_seen():
    assert "torch" in modules_after("import torch")
