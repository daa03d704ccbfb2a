import dataclasses

import pytest
import torch

from efficio_precision import Device, Policy, precision_policy

K80 = Device("cuda", "Tesla K80", (3, 7))
P100 = Device("cuda", "Tesla P100-PCIE-16GB", (6, 0))
V100 = Device("cuda", "Tesla V100-SXM2-16GB", (7, 0))
T4 = Device("cuda", "Tesla T4", (7, 5))
GTX1660 = Device("cuda", "NVIDIA GeForce GTX 1660 Ti", (7, 5))
A100 = Device("cuda", "NVIDIA A100-SXM4-40GB", (8, 0), bf16=True)
L4 = Device("cuda", "NVIDIA L4", (8, 9), bf16=True)
H100 = Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0), bf16=True)
B200 = Device("cuda", "NVIDIA B200", (10, 0), bf16=True)
MI250 = Device("cuda", "AMD Instinct MI250X", None, bf16=True)
VEGA = Device("cuda", "AMD Radeon VII", None)
MAX = Device("xpu", "Intel Data Center GPU Max 1550", None, bf16=True)
OLD_XPU = Device("xpu", "Intel Iris Xe", None)
MPS = Device("mps", "Apple arm64", None, bf16=True)
CPU = Device("cpu", "x86_64")


@pytest.fixture(autouse=True)
def _a_torch_that_has_everything(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.14.1"))


#                 device   dtype           scale  chl    tf32
AUTOMATIC = [
    pytest.param(K80, torch.float16, True, False, False, id="K80"),
    pytest.param(P100, torch.float16, True, False, False, id="P100"),
    pytest.param(V100, torch.float16, True, True, False, id="V100"),
    pytest.param(T4, torch.float16, True, True, False, id="T4"),
    pytest.param(GTX1660, torch.float32, False, False, False, id="GTX1660"),
    pytest.param(A100, torch.bfloat16, False, True, True, id="A100"),
    pytest.param(L4, torch.bfloat16, False, True, True, id="L4"),
    pytest.param(H100, torch.bfloat16, False, True, True, id="H100"),
    pytest.param(B200, torch.bfloat16, False, True, True, id="B200"),
    pytest.param(MI250, torch.bfloat16, False, False, False, id="MI250"),
    pytest.param(VEGA, torch.float16, True, False, False, id="VEGA"),
    pytest.param(MAX, torch.bfloat16, False, False, False, id="MAX"),
    pytest.param(OLD_XPU, torch.float16, True, False, False, id="OLD_XPU"),
    pytest.param(MPS, torch.float32, False, False, False, id="MPS"),
    pytest.param(CPU, torch.float32, False, False, False, id="CPU"),
    pytest.param(Device("hpu", "Gaudi"), torch.float32, False, False, False, id="unknown"),
]


@pytest.mark.parametrize(("device", "dtype", "scale_loss", "channels_last", "tf32"), AUTOMATIC)
def test_automatic_policy_of_each_device(device, dtype, scale_loss, channels_last, tf32):
    policy = precision_policy(device)
    assert policy == Policy(device, dtype, scale_loss, channels_last, tf32, policy.reason)
    assert policy.reason.startswith(
        {torch.float32: "fp32: ", torch.float16: "fp16: ", torch.bfloat16: "bf16: "}[dtype]
    )


@pytest.mark.parametrize(("device", "precision", "words"), [
    pytest.param(T4, "bf16", "slow: Tesla T4 (sm_75) only emulates it, fp16 is the faster choice", id="bf16-T4"),
    pytest.param(V100, "bf16", "slow", id="bf16-V100"),
    pytest.param(T4, "fp16", "automatic choice", id="fp16-T4"),
    pytest.param(T4, "fp32", "slower than fp16", id="fp32-T4"),
    pytest.param(A100, "fp32", "slower than bf16", id="fp32-A100"),
    pytest.param(A100, "fp16", "bf16 on NVIDIA A100-SXM4-40GB (sm_80) would not need it", id="fp16-A100"),
    pytest.param(A100, "bf16", "automatic choice", id="bf16-A100"),
    pytest.param(GTX1660, "fp16", "NaN", id="fp16-GTX1660"),
    pytest.param(CPU, "fp32", "automatic choice", id="fp32-CPU"),
    pytest.param(CPU, "fp16", "slow", id="fp16-CPU"),
    pytest.param(CPU, "bf16", "slow", id="bf16-CPU"),
    pytest.param(Device("cpu", "AMX", None, bf16=True), "bf16", "instructions", id="bf16-CPU-AMX"),
    pytest.param(MPS, "bf16", "not measured", id="bf16-MPS"),
])  # fmt: skip
def test_an_asked_precision_is_taken_and_its_price_told(device, precision, words):
    policy = precision_policy(device, precision)
    assert policy.dtype is {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert policy.scale_loss is (precision == "fp16")
    assert policy.reason.startswith(f"{precision} as asked; ")
    assert words in policy.reason


def test_channels_last_needs_tensor_cores():
    assert not precision_policy(GTX1660, "fp16").channels_last
    assert not precision_policy(P100, "fp16").channels_last
    assert precision_policy(T4, "bf16").channels_last


def test_asked_fp32_is_float32_and_not_tf32():
    assert not precision_policy(A100, "fp32").tf32
    assert dataclasses.replace(precision_policy(A100, "fp32"), tf32=True).tf32


def test_an_unknown_precision_names_the_choices():
    with pytest.raises(
        ValueError, match=r"precision='fp8' is not known; choose 'auto', 'fp32', 'fp16' or 'bf16'"
    ):
        precision_policy(CPU, "fp8")


@pytest.mark.parametrize(
    ("device", "precision", "too_old", "enough"),
    [(CPU, "fp16", "2.2.2", "2.3.0"), (MPS, "bf16", "2.5.1", "2.6.0"), (MPS, "fp16", "2.7.1", "2.10.0")],
)
def test_a_torch_without_this_autocast_is_an_error_before_the_first_step(
    monkeypatch, device, precision, too_old, enough
):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(too_old))
    with pytest.raises(ValueError, match=f"needs torch .* or newer, this is {too_old}; choose 'fp32'"):
        precision_policy(device, precision)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(enough))
    assert precision_policy(device, precision).dtype is not torch.float32


def test_a_name_is_detected_first():
    policy = precision_policy("cpu")
    assert policy.device.type == "cpu"
    assert policy.dtype is torch.float32


def test_a_policy_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        precision_policy(CPU).dtype = torch.float16
