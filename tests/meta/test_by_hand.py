"""The hand-written loop of the examples, which uses the five packages without `Run`, resumes exactly as well."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training import digest

from efficio_ckpt import load_state

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def by_hand():
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("by_hand", EXAMPLES / "by_hand.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ("fashion_mnist", "small_resnet"):
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_loop_by_hand_that_was_stopped_twice_is_the_loop_that_was_not(
    by_hand, one_thread, tmp_path, capsys
):
    whole = by_hand.train(str(tmp_path / "whole"), epochs=2)
    for steps in (7, 20):  # in mid-epoch, and after the last batch of an epoch
        by_hand.train(str(tmp_path / "parts"), epochs=2, stop_after=steps)
        assert load_state(tmp_path / "parts")["step"] == steps
    script = [
        sys.executable,
        str(EXAMPLES / "by_hand.py"),
        "--storage",
        str(tmp_path / "parts"),
        "--epochs",
        "2",
    ]
    done = subprocess.run(
        script, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 40" in done.stdout

    ended = [load_state(tmp_path / name) for name in ("whole", "parts")]

    assert digest(whole.state_dict()) == digest(ended[1]["objects"]["model"])
    assert digest(ended[0]) == digest(ended[1])
