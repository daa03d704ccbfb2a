"""Cases of kind D: the time budget and signals."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import efficio
from efficio_ckpt import list_checkpoints

IMPORT_IN_A_THREAD = """
import signal, threading
names = ("SIGINT", "SIGTERM")
before = [signal.getsignal(getattr(signal, name)) for name in names]
errors = []
def work():
    try:
        import efficio, efficio_budget, efficio_ckpt, efficio_data, efficio_precision, efficio_report
    except BaseException as error:
        errors.append(repr(error))
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert not errors, errors
assert [signal.getsignal(getattr(signal, name)) for name in names] == before
"""


@pytest.mark.slow
def test_efficio_can_be_imported_in_a_thread_and_installs_no_handler():
    """D04: some notebook kernels and web UIs run all code in a thread; the loop in a thread is tested in tests/meta."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_IN_A_THREAD], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def prepared(folder, **options):
    model = nn.Linear(1, 1)
    run = efficio.Run(storage=folder, progress=False, **options)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


def bodies(run, model, clock, seconds, count=200, each=lambda: None):
    """Train with bodies of so many seconds; how many there were."""
    done = 0
    for x in run.loop([torch.ones(1, 1)] * count, 1):
        run.backward(model(x).sum())
        run.step()
        clock.now += seconds
        each()
        done += 1
    return done


def numbers(thing):
    if isinstance(thing, dict):
        return [number for value in thing.values() for number in numbers(value)]
    if isinstance(thing, list):
        return [number for value in thing for number in numbers(value)]
    return [thing] if isinstance(thing, (int, float)) else []


def test_a_jump_of_the_wall_clock_moves_neither_the_stop_nor_the_report(clock, tmp_path, monkeypatch):
    """D08: an hour back and an hour on between steps."""
    run, model = prepared(tmp_path / "steady", budget=100, margin=10, clock=clock)
    expected = bodies(run, model, clock, 1)
    shift, really = [0.0], time.time

    def jump():
        shift[0] = -3600.0 if shift[0] >= 0 else 3600.0

    monkeypatch.setattr(time, "time", lambda: really() + shift[0])
    run, model = prepared(tmp_path / "jumping", budget=100, margin=10, clock=clock)

    assert bodies(run, model, clock, 1, each=jump) == expected
    assert run.report().stopped == "budget"
    assert min(numbers(json.loads(run.report().to_json()))) >= 0
    assert list_checkpoints(tmp_path / "jumping")[0].step == expected


def test_the_loops_of_one_run_share_its_budget(clock, tmp_path):
    """D09: the cell of the loop is run again when 60 of 100 seconds are used, of which ten are kept for the last save."""
    run, model = prepared(tmp_path, budget=100, margin=10, clock=clock)
    assert bodies(run, model, clock, 1, count=60) == 60
    assert 28 <= bodies(run, model, clock, 1) <= 30
    assert run.stopped


def test_each_run_says_until_when_it_goes(clock, tmp_path, capsys):
    """D09: a new run in the same process has its budget from then on, and prints when that ends."""
    for name in ("one", "two"):
        run, model = prepared(tmp_path / name, budget=100, margin=10, clock=clock)
        assert re.search(r"efficio: new run .*, stops at \d\d:\d\d\n", capsys.readouterr().out)
        assert 88 <= bodies(run, model, clock, 1) <= 90
