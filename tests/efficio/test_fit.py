"""What is told about prepared objects before anything is trained."""

import pytest
import torch
from torch import nn

import efficio
from efficio._fit import number_notes, try_layout
from efficio_precision import Device, Policy, is_channels_last

FP16 = Policy(Device("cpu", "a CPU", None), torch.float16, scale_loss=True)
FP32 = Policy(Device("cpu", "a CPU", None), torch.float32, channels_last=True)


@pytest.mark.parametrize(
    ("model", "policy", "words"),
    [
        (nn.Linear(1, 1), FP16, None),
        (nn.Linear(1, 1).half(), FP16, "float16 parameters (weight): the loss scaler cannot unscale"),
        (nn.Linear(1, 1).half(), FP32, "float16 parameters (weight): small updates are rounded away"),
        (nn.Linear(1, 1).bfloat16(), FP32, "bfloat16 parameters (weight): updates smaller than 1/256"),
        (nn.Linear(1, 1, dtype=torch.complex64), FP16, "complex parameters (weight)"),
        (nn.Linear(1, 1, dtype=torch.complex64), FP32, None),
        (nn.Linear(1, 1).half().requires_grad_(False), FP16, None),
    ],
)
def test_number_formats_that_do_not_go_together(model, policy, words):
    notes = number_notes({"model": model}, policy)
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_it_is_told_before_training(tmp_path, capsys):
    run = efficio.Run(storage=tmp_path, progress=False)
    model = nn.Linear(1, 1).bfloat16()
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert "model holds bfloat16 parameters" in capsys.readouterr().out


class Flattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x):
        return self.conv(x).view(x.shape[0], -1)


@pytest.mark.parametrize("fails", [True, False])
def test_a_converted_model_is_tried_with_the_first_images(fails):
    model = (Flattens() if fails else nn.Sequential(nn.Conv2d(3, 16, 3))).to(
        memory_format=torch.channels_last
    )
    models = [model]
    assert try_layout(models, torch.zeros(4), FP32) == []
    assert models == [model]  # no images yet
    notes = try_layout(models, (torch.zeros(2, 3, 8, 8), torch.zeros(2)), FP32)
    assert notes == (["Flattens does not run in channels_last and stays contiguous"] if fails else [])
    assert is_channels_last(model) is not fails
    assert models == []


def test_a_loop_tries_it_and_trains_on(tmp_path, capsys, monkeypatch):
    run = efficio.Run(storage=tmp_path, progress=False, seed=0)
    monkeypatch.setattr(run, "policy", FP32)  # as on a GPU that gains by it
    model = Flattens()
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert is_channels_last(model)
    for x in run.loop([torch.randn(2, 3, 8, 8)] * 2, 1):
        run.backward(model(x).mean())
        run.step()
    assert run.step_count == 2
    assert "Flattens does not run in channels_last and stays contiguous" in capsys.readouterr().out
