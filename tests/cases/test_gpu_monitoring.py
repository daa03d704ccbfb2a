"""Cases of kind H: watching the GPU."""

import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import efficio


class NVMLError(Exception):
    pass


def library(refused):
    """A pynvml that refuses one of its calls; what it was asked for is noted."""
    asked = []

    def call(name, answer):
        def answered(*_):
            asked.append(name)
            if name == refused:
                raise NVMLError(name)
            return answer

        return answered

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=call("nvmlInit", None),
        nvmlShutdown=call("nvmlShutdown", None),
        nvmlDeviceGetCount=call("nvmlDeviceGetCount", 1),
        nvmlDeviceGetHandleByIndex=call("nvmlDeviceGetHandleByIndex", object()),
        asked=asked,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory would come from torch")
@pytest.mark.parametrize("refused", [None, "nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_run_goes_on_without_the_library_the_driver_or_the_card(refused, tmp_path, monkeypatch):
    """H03: no GPU in the report, and no thread left."""
    nvml = None if refused is None else library(refused)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    before = set(threading.enumerate())
    model = nn.Linear(1, 1)
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in run.loop([torch.ones(1, 1)] * 5, 1):
        run.backward(model(x).sum())
        run.step()
    assert run.finished
    assert nvml is None or refused in nvml.asked
    report = run.report()
    assert report.gpu is None
    assert "GPU" not in str(report)
    assert [thread.name for thread in set(threading.enumerate()) - before] == []
