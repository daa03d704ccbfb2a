"""The largest batch that fits, and trials that leave no trace."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from efficio_precision import find_batch_size, make_scaler, precision_policy, step_optimizer, without_trace


@pytest.mark.parametrize("start", [1, 8, 64, 500])
@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 9, 15, 100, 499, 4096, 10**6])
def test_the_answer_fits_and_little_more_would(room, start):
    tried = []

    def fits(size):
        tried.append(size)
        if size > room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    found = find_batch_size(fits, start=start, limit=512, headroom=0.0)
    assert found <= min(room, 512)
    assert found == min(room, 512) or found + 8 > room
    assert len(tried) == len(set(tried)) <= 20
    assert found < 8 or found == 512 or found % 8 == 0


def test_there_is_room_for_more_than_the_answer():
    found = find_batch_size(lambda size: size <= 100, headroom=0.25)
    assert found + int(found * 0.25) <= 100
    assert found == 80


def test_nothing_fits():
    with pytest.raises(RuntimeError, match="not even one sample fits into memory \\(1 tried"):
        find_batch_size(lambda size: False)


def test_another_error_is_not_taken_for_too_little_memory():
    def broken(size):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        find_batch_size(broken)


@pytest.mark.parametrize(
    "wrong", [{"start": 0}, {"start": 9, "limit": 8}, {"headroom": 1.0}, {"headroom": -0.1}]
)
def test_arguments_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"start=|headroom="):
        find_batch_size(lambda size: True, **wrong)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
}


def state_of(model, optimizer, scheduler, scaler):
    """All that training moves, as plain values."""
    return (
        [value.tolist() for value in model.state_dict().values()],
        [model.hidden.tolist()],
        [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        [part.training for part in model.modules()],
        repr(optimizer.state_dict()),
        repr(scheduler.state_dict()),
        repr(scaler.state_dict()),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


@pytest.mark.parametrize("ending", ["end", "error"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_trial_leaves_no_trace(kind, trained, ending):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model.register_buffer("hidden", torch.zeros(2), persistent=False)
    model[1].eval()  # frozen on purpose
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    policy = precision_policy(
        "cpu", "fp16" if kind != "lbfgs" and hasattr(torch.amp, "GradScaler") else "fp32"
    )
    scaler = make_scaler(policy, init_scale=4.0, growth_interval=2)

    def train():
        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean() * np.random.rand() * random.random()
            scaler.scale(loss).backward()
            return loss

        closure()
        step_optimizer(optimizer, scaler, closure if kind == "lbfgs" else None)
        scaler.update()
        scheduler.step()

    if trained:
        for _ in range(3):
            train()
    identities = [id(p) for p in model.parameters()]
    held = [
        id(v) for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)
    ]
    before = state_of(model, optimizer, scheduler, scaler)

    def trial():
        with without_trace(model, optimizer, scheduler, scaler):
            model.train()
            model.hidden += 1
            for _ in range(3):
                train()
            assert state_of(model, optimizer, scheduler, scaler) != before
            if ending == "error":
                raise KeyError("stop")

    if ending == "error":
        with pytest.raises(KeyError):
            trial()
    else:
        trial()
    assert state_of(model, optimizer, scheduler, scaler) == before
    assert [id(p) for p in model.parameters()] == identities
    if kind != "lbfgs":  # whose state is made of new tensors in each step
        now = [
            id(v) for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)
        ]
        assert now == held
    train()  # and it goes on


def test_parameters_outside_the_modules_are_put_back_too():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = gradient = torch.ones(2)
    optimizer = torch.optim.SGD([weight], 1.0)
    with without_trace(optimizer):
        optimizer.step()
        weight.grad = None
    assert weight.tolist() == [1, 1]
    assert weight.grad is gradient


def test_what_cannot_be_put_back_is_told():
    with pytest.raises(TypeError, match="dict has no state_dict"), without_trace({}):
        pass
