"""Cases of kind I: notebooks and trainers."""

import os
import signal

import pytest
import torch
from torch import nn
from tqdm import tqdm

import efficio


class OwnError(Exception):
    pass


@pytest.mark.parametrize("end", ["exception", "interrupt", "second-interrupt", "exit", "loader"])
def test_the_bar_is_closed_whatever_ends_the_loop_and_the_rerun_shows_few_lines(end, tmp_path, capsys):
    """I01: a bar that stays open makes each update of the next one a new line."""

    def run_cell(end):
        model = nn.Linear(1, 1)
        run = efficio.Run(storage=tmp_path)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
        for number, x in enumerate(run.loop(Batches(at=150 if end == "loader" else None), 1)):
            run.backward(model(x).sum())
            run.step()
            if number == 150 and end == "exception":
                raise OwnError
            if number == 150 and end == "exit":
                raise SystemExit
            if number == 150 and "interrupt" in str(end):
                os.kill(os.getpid(), signal.SIGINT)
                if end == "second-interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
        return run

    with pytest.raises((OwnError, KeyboardInterrupt, SystemExit)):
        run_cell(end)
    assert not tqdm._instances
    first = capsys.readouterr().err
    assert run_cell(None).finished
    assert not tqdm._instances
    second = capsys.readouterr().err
    assert first.endswith("\n")
    for shown in (first, second):
        assert 0 < shown.count("\r") + shown.count("\n") <= 25


class Batches:
    """Three hundred batches, of which one may fail to load."""

    def __init__(self, at):
        self._at = at

    def __len__(self):
        return 300

    def __iter__(self):
        for number in range(300):
            if number == self._at:
                raise OwnError
            yield torch.ones(1, 1)
