"""Cases of kind E: mixed precision, through Run; the step by itself is tested in efficio_precision."""

import warnings

import pytest
import torch
from torch import nn

import efficio

needs_cpu_scaler = pytest.mark.skipif(
    not hasattr(torch.amp, "GradScaler"), reason="torch scales losses on a CPU from version 2.3 on"
)


@needs_cpu_scaler
@pytest.mark.parametrize(
    ("batches", "steps"), [(6, 4), (2, 2)], ids=["two-groups", "group-longer-than-epoch"]
)
def test_clipping_after_each_backward_of_a_group_clips_once_and_as_without_a_scaler(batches, steps, tmp_path):
    """E03: four batches a group, two epochs; forward in fp32 both times, so that only the scaler differs."""

    def train(precision):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        run = efficio.Run(
            storage=tmp_path / precision, progress=False, precision=precision, grad_accum_steps=4, seed=1
        )
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        norms = []
        for x in run.loop(list(torch.randn(batches, 8, 4)), 2):
            run.backward(model(x).square().mean())
            norms.append(run.clip_grad_norm(0.1))
            run.step()
        return model.weight.detach(), norms, run.step_count

    weight, norms, count = train("fp16")
    expected, plain_norms, plain_count = train("fp32")
    assert (weight - expected).abs().max() <= 1e-6
    assert count == plain_count == steps
    assert [norm is None for norm in norms] == [norm is None for norm in plain_norms]
    taken = [(one, two) for one, two in zip(norms, plain_norms, strict=True) if one is not None]
    assert len(taken) == steps
    assert all(abs(one - two) <= 1e-6 and one > 0.1 for one, two in taken)


@needs_cpu_scaler
def test_a_step_that_overflows_holds_the_scheduler_and_is_counted_and_warns_of_nothing(tmp_path):
    """E06: from scale 8; a later good step is the first of the schedule."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = efficio.Run(storage=tmp_path, progress=False, precision="fp16")
    run.prepare(model, optimizer, scheduler)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, x in enumerate(run.loop([torch.ones(1, 1)] * 16, 1)):
            run.backward(model(x).sum() * (float("inf") if number < 14 else 1.0))
            scale = model.weight.grad.item()
            stepped = run.step()
            seen.append(
                (scale, stepped, run.step_count, scheduler.last_epoch, optimizer.param_groups[0]["lr"])
            )
    assert seen[13] == (float("inf"), False, 0, 0, 0.1)
    assert seen[14] == (4.0, True, 1, 1, 0.05)  # 65536 halved fourteen times
    assert seen[15] == (4.0, True, 2, 2, 0.025)
    assert run.report().skipped_steps == 14


def test_a_model_with_bce_loss_is_told_before_it_trains_in_16_bit(tmp_path, capsys):
    """E07: on the CPU, where it would not fail; with the loss to take instead."""
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), "criterion": nn.BCELoss()})
    run = efficio.Run(storage=tmp_path, progress=False, precision="bf16")
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = capsys.readouterr().out
    assert "BCELoss (criterion) fails in 16 bit on a GPU" in told
    assert "BCEWithLogitsLoss" in told
    assert "float32" in told
