"""Cases of kind G: memory of the GPU and the batch size."""

import pytest
import torch
from torch import nn

import efficio
from efficio_precision import backward, make_scaler, precision_policy


def problem():
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(64, 4), torch.randint(3, (64,))


def whole_gradient(size):
    model, x, y = problem()
    nn.functional.cross_entropy(model(x[:size]), y[:size]).backward()
    return model.weight.grad


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (10, 6), (33, 31)], ids=str)
def test_parts_weighted_by_their_samples_have_the_gradient_of_the_whole(sizes):
    """G04: by hand, with the scale of each part."""
    model, x, y = problem()
    scaler = make_scaler(precision_policy("cpu", "fp32"))
    first = 0
    for size in sizes:
        part = slice(first, first + size)
        backward(nn.functional.cross_entropy(model(x[part]), y[part]), scaler, scale=size / sum(sizes))
        first += size
    assert (model.weight.grad - whole_gradient(first)).abs().max() < 1e-6


def test_four_batches_a_step_train_as_one_of_four_times_the_size(tmp_path):
    """G04: the same steps, learning rates and, within rounding, weights."""

    def train(parts):
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run = efficio.Run(storage=tmp_path / str(parts), progress=False, grad_accum_steps=parts)
        run.prepare(model, optimizer, scheduler)
        rates = []
        batches = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
        for part_x, part_y in run.loop(batches, 3):
            run.backward(nn.functional.cross_entropy(model(part_x), part_y))
            if run.step():
                rates += scheduler.get_last_lr()
        return model.weight.detach(), rates

    (one, rates), (four, other_rates) = train(1), train(4)
    assert (one - four).abs().max() < 1e-6
    assert rates == other_rates == [0.25, 0.125, 0.0625]
