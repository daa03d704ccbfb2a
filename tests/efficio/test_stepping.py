"""The step, against the same written by hand, in every combination."""

from itertools import product

import pytest
import torch
from torch import nn

import efficio

has_cpu_scaler = hasattr(torch.amp, "GradScaler")


class Net(nn.Module):
    """With a parameter that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.body(x)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05),
}


def build(kind):
    torch.manual_seed(3)
    first, second = Net(), Net()
    scheduler = None
    if kind == "two":
        optimizers = [OPTIMIZERS["sgd"](first.parameters()), OPTIMIZERS["adamw"](second.parameters())]
    else:
        optimizers = [OPTIMIZERS[kind]([*first.parameters(), *second.parameters()])]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
    return first, second, optimizers, scheduler


def data(batches, *, overflow_at=None):
    torch.manual_seed(1)
    made = [torch.randn(5 + n % 3, 4) for n in range(batches)]
    if overflow_at is not None:
        made[overflow_at] = made[overflow_at] * float("inf")
    return made


def losses_of(first, second, x, count):
    loss = first(x).square().mean() + second(x).square().mean()
    return [loss] if count == 1 else [loss, (first(x) - second(x)).abs().mean()]


def by_hand(kind, batches, *, scaled, clip, group, losses, weighted):
    """The reference: what a careful person writes."""
    first, second, optimizers, scheduler = build(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True) if scaled else None
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    steps = skipped = 0
    for begin in range(0, len(batches), group):
        members = batches[begin : begin + group]
        unit = len(members[0])
        total = sum(len(x) for x in members)
        for x in members:
            for loss in losses_of(first, second, x, losses):
                factor = len(x) / (unit * len(members)) if weighted else 1 / len(members)
                loss = loss * factor if factor != 1.0 else loss
                (scaler.scale(loss) if scaled else loss).backward()
        divisor = total / (unit * len(members))
        if scaled and (clip or (weighted and divisor != 1.0)):
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if weighted and divisor != 1.0:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(divisor)
        if clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        before = scaler.get_scale() if scaled else 0
        for optimizer in optimizers:
            scaler.step(optimizer) if scaled else optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if scaled:
            scaler.update()
        if scaled and scaler.get_scale() < before:
            skipped += 1
        else:
            steps += 1
            scheduler.step()
    weights = [p.tolist() for model in (first, second) for p in model.parameters()]
    return weights, steps, skipped, scheduler.last_epoch


def by_run(folder, kind, batches, *, scaled, clip, group, losses, weighted):
    first, second, optimizers, scheduler = build(kind)
    run = efficio.Run(
        storage=folder, progress=False, precision="fp16" if scaled else "fp32", grad_accum_steps=group, seed=0
    )
    run.prepare(first, second, *optimizers, scheduler)
    if scaled:
        run._stepping.scaler._init_scale = 256.0
    norms = 0
    for x in run.loop(batches, 1):
        for loss in losses_of(first, second, x, losses):
            run.backward(loss, weight=len(x) if weighted else None)
        if clip:
            norms += run.clip_grad_norm(clip) is not None
        run.step()
    assert not clip or norms == -(-len(batches) // group)
    weights = [p.tolist() for model in (first, second) for p in model.parameters()]
    report = run.report()
    return weights, run.step_count, report.skipped_steps, scheduler.last_epoch


COMBINATIONS = list(
    product(
        ("sgd", "adamw", "two"),
        (False, True) if has_cpu_scaler else (False,),
        (None, 0.05),
        (1, 3),
        (1, 2),
        (False, True),
    )
)


@pytest.mark.parametrize(
    ("kind", "scaled", "clip", "group", "losses", "weighted"),
    COMBINATIONS,
    ids=lambda value: str(value),
)
def test_the_step_is_bit_for_bit_the_one_by_hand(kind, scaled, clip, group, losses, weighted, tmp_path):
    """Seven batches, so that the last group of three has one; none is of the size of the one before."""
    options = {"scaled": scaled, "clip": clip, "group": group, "losses": losses, "weighted": weighted}
    assert by_run(tmp_path, kind, data(7), **options) == by_hand(kind, data(7), **options)


@pytest.mark.skipif(not has_cpu_scaler, reason="torch scales losses on a CPU from version 2.3 on")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_skipped_step_is_the_one_by_hand_too(kind, clip, weighted, tmp_path):
    options = {"scaled": True, "clip": clip, "group": 2, "losses": 1, "weighted": weighted}
    batches = data(8, overflow_at=3)
    found, expected = by_run(tmp_path, kind, batches, **options), by_hand(kind, batches, **options)
    assert found == expected
    assert found[1:] == (3, 1, 3)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("sizes", [(10, 6), (1, 30, 7), (5,), (0, 8), (8, 0), (0, 0)], ids=str)
def test_weighted_batches_have_the_gradient_of_all_their_tokens(sizes, tensor, tmp_path):
    """As when all tokens of the group were one batch; a batch without tokens counts for nothing."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    tokens = [torch.randn(size, 4) for size in sizes]
    labels = [torch.randint(3, (size,)) for size in sizes]
    expected = torch.zeros(3, 4)
    if sum(sizes):
        nn.functional.cross_entropy(model(torch.cat(tokens)), torch.cat(labels)).backward()
        expected, model.weight.grad, model.bias.grad = model.weight.grad, None, None
    before = model.weight.detach().clone()
    run = efficio.Run(storage=tmp_path, progress=False, grad_accum_steps=len(sizes))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for number in run.loop(list(range(len(sizes))), 1):
        x, y = tokens[number], labels[number]
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / max(1, len(x))
        run.backward(loss, weight=torch.tensor(len(x)) if tensor else len(x))
        run.clip_grad_norm(float("inf"))
        run.step()
    assert (before - model.weight.detach() - expected).abs().max() < 1e-6


def prepared(folder, group=1):
    model = nn.Linear(2, 1)
    run = efficio.Run(storage=folder, progress=False, grad_accum_steps=group)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", True, torch.ones(2)], ids=str)
def test_a_weight_that_is_none_is_told(weight, tmp_path):
    run, model = prepared(tmp_path)
    x = next(run.loop([torch.ones(3, 2)], 1))
    with pytest.raises(ValueError, match="weight"):
        run.backward(model(x).mean(), weight=weight)


@pytest.mark.parametrize("order", [(None, 3), (3, None)], ids=str)
def test_weights_come_with_all_losses_of_a_group_or_with_none(order, tmp_path):
    run, model = prepared(tmp_path, group=2)
    batches = run.loop([torch.ones(3, 2)] * 2, 1)
    run.backward(model(next(batches)).mean(), weight=order[0])
    loss = model(next(batches)).mean()
    with pytest.raises(ValueError, match="with a weight and without one"):
        run.backward(loss, weight=order[1])


def test_the_next_group_may_do_otherwise(tmp_path):
    run, model = prepared(tmp_path)
    for number, x in enumerate(run.loop([torch.ones(3, 2)] * 4, 1)):
        before = model.weight.detach().clone()
        run.backward(model(x).mean(), weight=[None, 3, None, 5][number])
        assert run.step()
        assert not torch.equal(model.weight, before)


def test_two_losses_of_one_batch_have_one_weight(tmp_path):
    run, model = prepared(tmp_path)
    x = next(run.loop([torch.ones(3, 2)], 1))
    run.backward(model(x).mean(), weight=3)
    with pytest.raises(ValueError, match="the weights 3 and 4"):
        run.backward(model(x).mean(), weight=4)


def test_a_loss_after_clipping_is_divided_with_the_rest(tmp_path):
    def train(folder, early):
        torch.manual_seed(0)
        run, model = prepared(folder, group=2)
        for x in run.loop([torch.ones(4, 2), torch.full((2, 2), 0.5)], 1):
            run.backward(model(x).mean(), weight=len(x))
            if early:
                run.clip_grad_norm(float("inf"))
            run.backward(model(x).square().mean(), weight=len(x))
            run.step()
        return model.weight.detach()

    assert torch.allclose(train(tmp_path / "a", True), train(tmp_path / "b", False), atol=1e-7)


# Losses that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 5, 99])
def test_a_loss_that_is_not_finite_is_told_with_its_place(value, at, tmp_path, capsys):
    run, model = prepared(tmp_path)
    for number, x in enumerate(run.loop([torch.ones(3, 2)] * 50, 2)):
        loss = model(x).mean()
        run.backward(loss * value if number == at else loss)
        if number == at:
            model.zero_grad()
        run.step()
    report = run.report()
    epoch, batch = divmod(at, 50)
    told = f"NaN or infinite after step {at}, in the batch behind sample {batch} of epoch {epoch}"
    assert sum(told in note for note in report.notes) == 1
    assert capsys.readouterr().out.count("NaN or infinite") == 1
    assert not any("in all" in note for note in report.notes)


def test_many_losses_that_are_not_finite_are_told_once_and_counted(tmp_path, capsys):
    run, model = prepared(tmp_path)
    for x in run.loop([torch.ones(3, 2)] * 300, 1):
        run.backward(model(x).mean() * float("nan"))
        run.step()
    assert "300 losses were NaN or infinite in all" in run.report().notes
    assert capsys.readouterr().out.count("NaN or infinite after step 0") == 1


def test_finite_losses_say_nothing(tmp_path):
    run, model = prepared(tmp_path)
    for x in run.loop([torch.ones(3, 2)] * 100, 1):
        run.backward(model(x).mean())
        run.step()
    assert not any("NaN" in note for note in run.report().notes)


def test_losses_of_a_device_are_looked_at_together_whatever_their_shapes():
    from efficio._losses import Losses

    told = []
    losses = Losses(tell=told.append)
    values = [
        torch.tensor(1.0),
        torch.tensor([2.0]),
        torch.tensor(float("nan")),
        torch.tensor(float("inf")).double(),
    ]
    for number, value in enumerate(values):
        losses.seen.append((value, number, 2, 10 * number))
    assert losses.not_finite == 0
    losses.look()
    assert losses.not_finite == 2
    assert len(told) == 1
    assert "after step 2, in the batch behind sample 20 of epoch 2" in told[0]
    losses.seen.extend((torch.tensor(float("nan")), 9, 9, 9) for _ in range(3))
    losses.settle()
    assert (losses.not_finite, len(told), losses.seen) == (5, 1, [])


def test_a_batch_that_counts_for_nothing_is_not_reported(tmp_path):
    run, model = prepared(tmp_path, group=2)
    for number, x in enumerate(run.loop([torch.ones(3, 2)] * 2, 1)):
        empty = number == 0
        run.backward(
            model(x[:0] if empty else x).mean(), weight=0 if empty else 3
        )  # the mean of nothing is NaN
        run.step()
    assert torch.isfinite(model.weight).all()
    assert not any("NaN" in note for note in run.report().notes)


def test_an_optimizer_that_steps_twice_in_a_body_is_divided_twice(tmp_path):
    torch.manual_seed(0)
    sizes = (2, 6)
    run, model = prepared(tmp_path, group=len(sizes))
    moved = None
    for number, x in enumerate(run.loop([torch.ones(size, 2) for size in sizes], 1)):
        run.backward(model(x).mean(), weight=len(x))
        run.step()
        if number == 1:
            before = model.weight.detach().clone()
            run.backward(model(x).mean(), weight=len(x))
            run.step()
            moved = before - model.weight.detach()
    # The learning rate is 0.1, the gradient 1, and this batch has 6 of the group's 8 rows.
    assert torch.allclose(moved, torch.full((1, 2), 0.1 * 6 / 8), atol=1e-6)
