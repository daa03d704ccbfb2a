"""Policies and scalers that need no GPU."""

import pytest
import torch

from efficio_precision import Device, Policy, make_scaler


@pytest.fixture
def fp32():
    return Policy(Device("cpu", "test CPU"), torch.float32)


@pytest.fixture
def fp16():
    """A policy that scales the loss on the CPU."""
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("torch scales losses on a CPU from version 2.3 on")
    return Policy(Device("cpu", "test CPU"), torch.float16, scale_loss=True)


@pytest.fixture
def t4():
    return Device("cuda", "Tesla T4", (7, 5))


@pytest.fixture
def scaler(fp16):
    return make_scaler(fp16, init_scale=1024.0)


@pytest.fixture
def no_scaler(fp32):
    return make_scaler(fp32)
