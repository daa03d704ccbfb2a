"""Loop: which batches come, when an optimizer step is due, when it saves and when it stops."""

import os
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from efficio import GPULoader, Run
from efficio_ckpt import list_checkpoints


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Slope(nn.Module):
    """One number whose gradient is that of its factor, so that what a step did can be read off it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self):
        return self.weight


def slope_run(folder, **options):
    model = Slope()
    run = Run(storage=folder / "run", progress=False, **options)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return run, model


def train(run, model, batches, stop=None):
    """A step a batch; SIGTERM in one body by number. What came, as lists."""
    seen = []
    for number, batch in enumerate(batches):
        seen.append(batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist())
        if number == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        run.backward(model())
        run.step()
    return seen


def numbers(count=64, batch_size=4, **options):
    return DataLoader(TensorDataset(torch.arange(count)), batch_size, **{"shuffle": True, **options})


@pytest.mark.parametrize("stop", [0, 4, 15, 16, 31])
def test_no_sample_of_a_shuffled_epoch_comes_twice_or_never_after_a_resume(stop, tmp_path):
    whole = train(*(made := slope_run(tmp_path / "whole", seed=0)), made[0].loop(numbers(), 2))
    run, model = slope_run(tmp_path / "parts", seed=0)
    first = train(run, model, run.loop(numbers(), 2), stop)
    assert len(first) == stop + 1
    run, model = slope_run(tmp_path / "parts")

    second = train(run, model, run.loop(numbers(), 2))

    assert first + second == whole
    for epoch in (whole[:16], whole[16:]):
        assert sorted(sum(epoch, [])) == list(range(64))  # noqa: RUF017 - sixteen lists
    assert whole[:16] != whole[16:]


def test_another_seed_is_another_order_and_the_same_seed_the_same(tmp_path):
    def order(folder, seed):
        run, model = slope_run(tmp_path / folder, seed=seed)
        return train(run, model, run.loop(numbers(), 1))

    assert order("a", 1) == order("b", 1) != order("c", 2)


@pytest.mark.parametrize(
    ("count", "accumulated", "steps"), [(7, 4, 4), (3, 4, 2), (8, 4, 4), (5, 1, 10)], ids=str
)
@pytest.mark.parametrize("sized", [True, False], ids=["len", "no-len"])
def test_the_last_shorter_group_of_an_epoch_steps_and_is_averaged_over_its_real_size(
    count, accumulated, steps, sized, tmp_path
):
    batches = [torch.zeros(1)] * count
    loader = batches if sized else Unsized(batches)
    run, model = slope_run(tmp_path, grad_accum_steps=accumulated)
    stepped = []
    for _ in run.loop(loader, 2):
        run.backward(model())
        stepped.append(run.step())

    assert run.step_count == sum(stepped) == steps
    assert model.weight.item() == -float(steps)


class Unsized:
    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def test_clipping_acts_once_a_group_on_the_gradient_of_the_whole_group(tmp_path):
    run, model = slope_run(tmp_path, grad_accum_steps=4)
    norms = []
    for _ in run.loop([torch.zeros(1)] * 6, 1):
        run.backward(3 * model())
        norms.append(run.clip_grad_norm(1.0))
        run.step()

    assert [norm is None for norm in norms] == [True, True, True, False, True, False]
    assert norms[3].item() == norms[5].item() == 3.0
    assert model.weight.item() == pytest.approx(-2.0, abs=2e-6)  # clip_grad_norm_ divides by norm + 1e-6


@pytest.mark.parametrize("accumulated", [1, 3])
def test_each_batch_has_a_randomness_of_its_own_that_the_draws_before_it_do_not_move(accumulated, tmp_path):
    def draws(folder, more):
        run, model = slope_run(tmp_path / folder, seed=5, grad_accum_steps=accumulated)
        drawn = []
        for _ in run.loop(numbers(16), 2):
            drawn.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
            torch.rand(more), np.random.rand(more)
            run.backward(model())
            run.step()
        return drawn

    once, again = draws("once", 0), draws("again", 7)
    assert once == again
    for kind in range(3):
        assert len({drawn[kind] for drawn in once}) == 8


def test_loops_of_other_names_draw_other_numbers_and_other_orders(tmp_path):
    run, model = slope_run(tmp_path, seed=0)
    orders, draws = [], []
    for name in ("one", "two"):
        order = []
        for (batch,) in run.loop(numbers(), 1, name=name):
            order.append(batch.tolist())
            draws.append(torch.rand(1).item())
            run.backward(model())
            run.step()
        orders.append(order)
    assert orders[0] != orders[1]
    assert len(set(draws)) == 32


def test_a_transform_on_the_device_repeats_its_draws_after_a_resume(tmp_path):
    def moved(batch):
        return batch[0] + torch.rand(1, device=batch[0].device), batch[1]

    def loader():
        return GPULoader.from_tensors(torch.zeros(24, 1), torch.arange(24), 4, shuffle=True)

    run, model = slope_run(tmp_path / "whole", seed=3)
    whole = train(run, model, run.loop(loader(), 1, gpu_transform=moved))
    run, model = slope_run(tmp_path / "parts", seed=3)
    parts = train(run, model, run.loop(loader(), 1, gpu_transform=moved), 2)
    run, model = slope_run(tmp_path / "parts")
    parts += train(run, model, run.loop(loader(), 1, gpu_transform=moved))
    assert parts == whole
    assert len({value for batch in whole for (value,) in batch}) == 6


def timed_run(folder, clock, seconds, bodies, **options):
    """Bodies that take so many seconds each; the steps of this session."""
    run, model = slope_run(folder, clock=clock, **options)
    done = 0
    for _ in run.loop([torch.zeros(1)] * bodies, 1):
        run.backward(model())
        run.step()
        clock.now += seconds
        done += 1
        run._session.saver.wait()  # these seconds pass faster than any storage can write
    return run, done


@pytest.mark.parametrize(("seconds", "most"), [(1, 90), (7, 12), (40, 2)])
def test_the_budget_stops_before_a_body_that_would_reach_into_its_margin(seconds, most, tmp_path):
    run, done = timed_run(tmp_path, Clock(), seconds, 200, budget=100, margin=10)

    assert run.stopped
    # What a save has really taken, in milliseconds, may cost the body that would have fitted exactly.
    assert most - 1 <= done <= most
    assert list_checkpoints(tmp_path / "run")[0].step == done


def test_each_session_has_a_budget_of_its_own(tmp_path):
    for session in range(1, 3):
        clock = Clock()
        _, done = timed_run(tmp_path, clock, 1, 200, budget=100, margin=10)
        assert 89 <= done <= 90
        assert abs(list_checkpoints(tmp_path / "run")[0].step - 90 * session) <= session


def test_a_duration_saves_by_the_clock_and_a_number_by_the_steps(tmp_path):
    for folder, save_every in (("time", "10s"), ("steps", 10)):
        timed_run(tmp_path / folder, Clock(), 1, 35, save_every=save_every, keep=9)
        stored = [at.step for at in list_checkpoints(tmp_path / folder / "run")]
        assert stored == [35, 30, 20, 10, 0], folder


def test_no_more_checkpoints_stay_than_were_asked_for(tmp_path):
    timed_run(tmp_path, Clock(), 1, 30, save_every=4, keep=3)
    assert next(at.step for at in list_checkpoints(tmp_path / "run")) == 30
    assert len(list_checkpoints(tmp_path / "run")) == 3


def test_the_bar_of_a_resumed_run_begins_where_the_run_is(tmp_path, capsys):
    for stop in (19, None):
        run, model = slope_run(tmp_path)
        run._shown = True
        train(run, model, run.loop(numbers(), 2), stop)
    shown = capsys.readouterr().err
    assert "epoch 2/2" in shown
    assert "20/32" in shown
    assert "32/32" in shown


def test_nothing_happens_before_the_first_batch_is_asked_for(tmp_path):
    run, _ = slope_run(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    batches = run.loop(numbers(), 2)
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is handler
    next(batches)
    assert (tmp_path / "run").exists()
    batches.close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_epoch_can_be_read_in_the_body_and_steps_are_counted_over_sessions(tmp_path):
    epochs = []
    for stop in (20, None):
        run, model = slope_run(tmp_path)
        for number, _ in enumerate(run.loop(numbers(), 2)):
            epochs.append(run.epoch)
            if number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            run.backward(model())
            run.step()
    assert epochs == [0] * 16 + [1] * 16
    assert run.step_count == 32
    assert run.finished


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="no loss scaling on a CPU before torch 2.3")
def test_a_loop_that_is_left_after_a_skipped_step_does_not_skip_it_twice(tmp_path):
    factors = [torch.tensor(1.0), torch.tensor(float("inf")), torch.tensor(2.0)]

    def go(folder, leave):
        run, model = slope_run(folder, precision="fp16")
        for factor in run.loop(factors, 1):
            run.backward(model() * factor)
            if not run.step() and leave:
                break
        return model.weight.item(), run._stepping.scaler.get_scale(), run.report().skipped_steps

    whole = go(tmp_path / "whole", leave=False)
    go(tmp_path / "parts", leave=True)
    assert go(tmp_path / "parts", leave=False) == whole


def test_an_error_of_the_gpu_is_told_although_nothing_can_be_saved_after_it(tmp_path, monkeypatch):
    run, _ = slope_run(tmp_path)

    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    def train():
        for number, _ in enumerate(run.loop(numbers(), 1)):
            if number == 2:
                monkeypatch.setattr(run._stepping.scaler, "state_dict", broken)
                raise IndexError("the error itself")

    with pytest.raises(IndexError, match="the error itself"):
        train()
    assert "saving there failed: CUDA error" in " ".join(run.report().notes)
