"""run.verify_resume: says "exact" where it is, and names what differs and where to look where it is not."""

import itertools
import os
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import efficio
from efficio import _verify

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), index / 40) + torch.randn(4) * random.random() * float(
            np.random.rand()
        ), index


class Clocked(Noisy):
    def __getitem__(self, index):
        return torch.full((4,), float(time.perf_counter_ns() % 1000)), index


class Counting(Noisy):
    """Counts what it built, and makes that a part of the sample."""

    def __init__(self):
        self.count = itertools.count()

    def __getitem__(self, index):
        return torch.full((4,), index / 40 + next(self.count)), index


def trainer(dataset=Noisy, *, body=lambda loss, memory: loss, after_prepare=lambda model: None, workers=0):
    def train(run):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
        after_prepare(model)
        memory = itertools.count(1)
        for x, _ in run.loop(DataLoader(dataset(), 5, shuffle=True, num_workers=workers), 3):
            run.backward(body(model(x).square().mean(), memory))
            run.step()

    return train


def verified(tmp_path, train, **options):
    return efficio.Run(storage=tmp_path / "unused", progress=False, **options).verify_resume(train, steps=8)


@pytest.mark.parametrize(
    ("workers", "options"), [(0, {}), (0, {"grad_accum_steps": 3}), (0, {"seed": 5}), (2, {})], ids=str
)
def test_a_training_with_draws_everywhere_is_exact(workers, options, tmp_path, capfd):
    generator = torch.get_rng_state()
    result = verified(tmp_path, trainer(workers=workers), **options)
    assert result.is_exact, result
    assert (result.steps, result.killed_at, result.killed) == (8, 4, True)
    assert 0 < result.resumed_from < 4
    told = capfd.readouterr().out
    assert f"efficio: exact: killed after step 4, resumed from step {result.resumed_from}" in told
    assert told.count("\n") <= 2  # what the sessions say is not shown
    assert torch.equal(torch.get_rng_state(), generator)
    assert not (tmp_path / "unused").exists()


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch scales losses on a CPU from 2.3 on")
def test_steps_that_the_scaler_skips_are_no_difference(tmp_path):
    """The first ones of fp16 overflow: several groups then end at the same step."""
    result = verified(tmp_path, trainer(body=lambda loss, memory: loss * 1e36), precision="fp16")
    assert result.is_exact, result


def test_an_epoch_that_ends_between_two_steps_is_no_difference(tmp_path):
    def train(run):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
        for x in run.loop([torch.ones(1, 1)] * 2, 5):
            run.backward(model(x).mean())
            run.step()

    result = verified(tmp_path, train, scheduler_interval="epoch")
    assert result.is_exact, result


def test_other_batches_after_the_resume_are_found_by_where_they_end(tmp_path):
    def train(run):
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        size = 5 if run.step_count == 0 else 4
        for x, _ in run.loop(DataLoader(Noisy(), size), 3):
            run.backward(model(x).mean())
            run.step()

    result = verified(tmp_path, train)
    assert (result.is_exact, result.differs) == (False, ("batch",))


def test_a_data_set_that_reads_the_clock_is_found(tmp_path):
    result = verified(tmp_path, trainer(Clocked))
    assert (result.is_exact, result.step, result.differs) == (False, 1, ("batch",))
    assert "Two trainings that were not stopped differ already" in str(result)
    assert "the clock" in result.cause


def test_a_data_set_that_counts_is_found_after_the_resume(tmp_path):
    result = verified(tmp_path, trainer(Counting))
    assert (result.is_exact, result.differs) == (False, ("batch",))
    assert result.step == result.resumed_from + 1
    assert "The batches after the resume are others" in str(result)
    assert "a counter of its own" in result.cause


def test_a_body_that_remembers_is_found(tmp_path):
    result = verified(tmp_path, trainer(body=lambda loss, memory: loss * next(memory)))
    assert not result.is_exact
    assert result.step == result.resumed_from + 1
    assert "model.0.weight" in result.differs
    assert "remembers something that is not stored" in result.cause


def test_a_body_that_is_not_repeatable_is_found(tmp_path):
    result = verified(tmp_path, trainer(body=lambda loss, memory: loss * (1 + time.perf_counter_ns() % 1000)))
    assert result.step == 1
    assert "with the same batches" in result.cause


def test_what_is_changed_after_prepare_is_found(tmp_path):
    def change(model):
        with torch.no_grad():
            model[3].bias.fill_(random.random())

    result = verified(tmp_path, trainer(after_prepare=change))
    assert not result.is_exact
    assert "model.3.bias" in result.differs
    assert "model.3.bias" in str(result)


def test_an_error_of_the_training_comes_with_its_place(tmp_path):
    def train(run):
        raise KeyError("labels")

    with pytest.raises(RuntimeError, match=r"(?s)a session of the training failed:.*KeyError: 'labels'"):
        verified(tmp_path, train)


def test_a_training_without_steps_is_told(tmp_path):
    with pytest.raises(ValueError, match="took 0 optimizer steps"):
        verified(tmp_path, lambda run: None)


def test_a_training_that_is_shorter_is_compared_to_its_end(tmp_path):
    def train(run):
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for x in run.loop([torch.ones(1, 1)] * 3, 1):
            run.backward(model(x).mean())
            run.step()

    result = verified(tmp_path, train)
    assert result.is_exact
    assert (result.steps, result.killed_at) == (3, 2)


def test_without_a_fork_it_is_left_and_begun_anew_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(_verify, "can_fork", lambda: False)  # as on a machine whose GPU is in use
    result = verified(tmp_path, trainer())
    assert result.is_exact, result
    assert not result.killed
    assert "exact: left after step 4" in str(result)
    broken = verified(tmp_path, trainer(body=lambda loss, memory: loss * next(memory)))
    assert not broken.is_exact


@pytest.mark.parametrize("steps", [0, 1, 2, 3.5, True])
def test_too_few_steps(steps, tmp_path):
    with pytest.raises(ValueError, match="steps="):
        efficio.Run(storage=tmp_path).verify_resume(lambda run: None, steps=steps)
