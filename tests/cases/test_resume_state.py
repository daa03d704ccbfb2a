"""Cases of kind B: model, optimizer, scheduler, scaler and generators after a resume."""

import copy

import pytest
import torch
from torch import nn

import efficio
from efficio_ckpt import load_state, put_snapshot, rng_state, set_rng_state, take_snapshot


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_generator_state_that_was_moved_to_the_gpu_is_taken_back():
    """B08: what `map_location="cuda"` makes of the state of the CPU's generator."""
    state = rng_state()
    expected = torch.rand(5)
    state["torch"] = state["torch"].cuda()
    set_rng_state(state)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("step", [7, torch.tensor(7.0)], ids=["int", "tensor"])
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}], ids=["fused", "capturable"])
def test_step_counters_of_fused_and_capturable_adam_go_to_the_device_of_the_parameter(options, step):
    """B12: 'meta' stands for the GPU, where only the place can be asked; default Adam is tested in efficio_ckpt."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    snapshot = take_snapshot({"layer": layer, "optimizer": optimizer})
    for state in snapshot["optimizer"]["state"].values():
        state["step"] = step
    there = copy.deepcopy(layer).to("meta")
    again = torch.optim.Adam(there.parameters())
    for group in again.param_groups:  # how it computes is the live optimizer's, not the checkpoint's
        group.update({"fused": None, "foreach": None, "capturable": False} | options)

    put_snapshot(snapshot, {"layer": there, "optimizer": again})

    for state in again.state.values():
        assert (state["step"].device.type, state["step"].dtype) == ("meta", torch.float32)
        assert state["exp_avg"].device.type == "meta"


@pytest.mark.parametrize("step", [7, torch.tensor(7.0)], ids=["int", "tensor"])
def test_a_fused_adam_goes_on_from_a_counter_of_any_kind(step):
    """B12: on a CPU the fused kernel runs as well, so that the value can be seen."""
    layer = nn.Linear(2, 2)
    try:
        optimizer, again = (torch.optim.Adam(layer.parameters(), fused=True) for _ in range(2))
    except RuntimeError:
        pytest.skip("torch has fused optimizers for a CPU from version 2.4 on")
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    snapshot = take_snapshot({"layer": layer, "optimizer": optimizer})
    for state in snapshot["optimizer"]["state"].values():
        state["step"] = step
    put_snapshot(snapshot, {"layer": layer, "optimizer": again})
    again.step()
    assert [float(state["step"]) for state in again.state.values()] == [8.0, 8.0]


def session(storage, precision, bodies, *, overflow=()):
    """Train a slope of 1 for so many bodies of a loop; the loss scale of each, read off the gradient, and the run."""
    weight = nn.Linear(1, 1, bias=False)
    run = efficio.Run(storage=storage, progress=False, precision=precision)
    run.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.0))
    scales = []
    for number, x in enumerate(run.loop([torch.ones(1, 1)] * 20, 1)):
        run.backward(weight(x).sum())
        scales.append(weight.weight.grad.item())
        if number in overflow:
            weight.weight.grad.fill_(float("inf"))
        run.step()
        if number + 1 == bodies:
            run.stop()
    return scales, run


needs_cpu_scaler = pytest.mark.skipif(
    not hasattr(torch.amp, "GradScaler"), reason="torch scales losses on a CPU from version 2.3 on"
)


@needs_cpu_scaler
def test_the_loss_scale_is_carried_through_a_session_that_does_not_scale(tmp_path):
    """B14: fp16, a session on a CPU, fp16 again: 1024 is 1024 in the third, found from 65536 by six overflows."""
    scales, _ = session(tmp_path, "fp16", 7, overflow=range(6))
    assert scales[-1] == 1024.0
    scales, _ = session(tmp_path, "fp32", 3)
    assert scales == [1.0] * 3
    scales, _ = session(tmp_path, "fp16", 1)
    assert scales == [1024.0]


@needs_cpu_scaler
def test_fp16_goes_on_from_a_checkpoint_of_a_session_that_never_scaled(tmp_path):
    """B14: with a fresh scale, and without an error from an empty state."""
    session(tmp_path, "fp32", 3)
    scales, run = session(tmp_path, "fp16", 2)
    assert scales == [65536.0] * 2
    assert run.step_count == 5


@needs_cpu_scaler
def test_the_report_says_that_the_loss_scale_starts_afresh(tmp_path):
    """B14: one line in the report."""
    session(tmp_path, "fp32", 3)
    _, run = session(tmp_path, "fp16", 2)
    assert any("scale" in note for note in run.report().notes)


@needs_cpu_scaler
def test_clipping_before_any_backward_of_a_resumed_run_says_what_is_missing(tmp_path):
    """B15: a RuntimeError that says to call backward, not an assertion about the scaler's inside."""
    session(tmp_path, "fp16", 2)
    weight = nn.Linear(1, 1, bias=False)
    run = efficio.Run(storage=tmp_path, progress=False, precision="fp16")
    run.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.0))
    next(run.loop([torch.ones(1, 1)] * 20, 1))
    with pytest.raises(RuntimeError, match="call backward"):
        run.clip_grad_norm(1.0)


class Swapped:
    """Averaged weights in the model for a while, as people write it."""

    def __init__(self, model, average):
        self.model, self.average = model, average

    def __enter__(self):
        self.raw = self.model.weight.detach().clone()
        with torch.no_grad():
            self.model.weight.copy_(self.average)

    def __exit__(self, *_):
        with torch.no_grad():
            self.model.weight.copy_(self.raw)


AVERAGE = torch.full((1, 1), 77.0)


@pytest.mark.parametrize("asked", ["by-time", "by-hand"])
def test_a_save_that_falls_into_a_validation_stores_the_raw_weights(asked, clock, tmp_path):
    """B17: averaged weights are in the model while a save becomes due, or is asked for, in the validation."""
    model = nn.Linear(1, 1, bias=False)
    run = efficio.Run(storage=tmp_path, progress=False, save_every="10m", clock=clock)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    raw = {}
    for number, x in enumerate(run.loop([torch.ones(1, 1)] * 5, 1)):
        run.backward(model(x).sum())
        run.step()
        raw[run.step_count] = model.weight.detach().clone()
        if number == 2:
            with run.evaluate_mode(), Swapped(model, AVERAGE):
                assert torch.equal(model.weight, AVERAGE)
                if asked == "by-time":
                    clock.now += 3600
                else:
                    run.save()
        elif number == 3:
            run.stop()
    assert run.report().saves >= 3  # the first, the one in question and the last
    stored = load_state(tmp_path, step=3)
    assert torch.equal(stored["objects"]["model"]["weight"], raw[3])


def test_a_save_within_a_validation_after_the_loop_stores_the_raw_weights(tmp_path):
    """B17: outside a loop the save waits for the validation to end, too."""
    model = nn.Linear(1, 1, bias=False)
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in run.loop([torch.ones(1, 1)] * 3, 1):
        run.backward(model(x).sum())
        run.step()
    raw = model.weight.detach().clone()
    with run.evaluate_mode(), Swapped(model, AVERAGE):
        run.save()
    assert torch.equal(load_state(tmp_path)["objects"]["model"]["weight"], raw)
