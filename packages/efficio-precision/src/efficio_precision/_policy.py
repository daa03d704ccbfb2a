"""Which number format a device should train in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ._device import Device, detect_device

Precision = Literal["auto", "fp32", "fp16", "bf16"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# The first torch whose autocast (and, for fp16, GradScaler) works there; older ones warn and do nothing.
_NEEDS = {
    ("cpu", "fp16"): "2.3",
    ("mps", "fp16"): "2.8",
    ("mps", "bf16"): "2.6",
    ("xpu", "fp16"): "2.5",
    ("xpu", "bf16"): "2.5",
}


@dataclass(frozen=True)
class Policy:
    """How to compute on a device, and why.

    Attributes:
        device: The device it was made for.
        dtype: What autocast computes in: torch.float32, torch.float16 or torch.bfloat16.
        scale_loss: Whether gradients need loss scaling, which fp16 does.
        channels_last: Whether convolutions are faster in that memory format.
        tf32: Whether float32 matrix products may use TF32.
        reason: The choice in plain words, with a warning in it if it is a slow one.
    """

    device: Device
    dtype: torch.dtype
    scale_loss: bool = False
    channels_last: bool = False
    tf32: bool = False
    reason: str = ""


def precision_policy(
    device: Device | str | torch.device | None = None, precision: Precision = "auto"
) -> Policy:
    """Choose the number format for a device.

    Pure for a `Device`. The automatic choice is fp16 with loss scaling on NVIDIA cards before
    Ampere, bf16 on everything that computes it itself, and fp32 on CPU and MPS. A precision that
    is named is taken, and `reason` says what it costs. A named fp32 is real float32: `tuned_backends` keeps TF32 off.

    Args:
        device: A `Device`; a name or None is given to `detect_device` first.
        precision: "auto", "fp32", "fp16" or "bf16".

    Returns:
        The policy. `dataclasses.replace` changes a part of it.

    Raises:
        ValueError: The precision is not known, or this torch is too old for it on that device.
        RuntimeError: The device cannot run a kernel of this torch (see `detect_device`).

    Example:
        >>> t4 = Device("cuda", "Tesla T4", (7, 5))
        >>> policy = precision_policy(t4)
        >>> policy.dtype, policy.scale_loss, policy.channels_last
        (torch.float16, True, True)
        >>> precision_policy(t4, "bf16").reason
        'bf16 as asked; slow: Tesla T4 (sm_75) only emulates it, fp16 is the faster choice'
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision={precision!r} is not known; choose 'auto', 'fp32', 'fp16' or 'bf16'")
    if not isinstance(device, Device):
        device = detect_device(device)
    automatic, why = _automatic(device)
    chosen = automatic if precision == "auto" else precision
    needed = _NEEDS.get((device.type, chosen), "2.0")
    if not torch.__version__ >= needed:
        raise ValueError(
            f"precision={chosen!r} on {device.type} needs torch {needed} or newer,"
            f" this is {torch.__version__}; choose 'fp32'"
        )
    reason = (
        f"{chosen}: {why}"
        if precision == "auto"
        else f"{chosen} as asked; {_price(device, chosen, automatic)}"
    )
    return Policy(
        device=device,
        dtype=_DTYPES[chosen],
        scale_loss=chosen == "fp16",
        channels_last=_at_least(device, (7, 0)) and chosen != "fp32" and not _unreliable_fp16(device),
        tf32=_at_least(device, (8, 0)) and precision != "fp32",
        reason=reason,
    )


def _at_least(device: Device, capability: tuple[int, int]) -> bool:
    return device.type == "cuda" and device.capability is not None and device.capability >= capability


def _unreliable_fp16(device: Device) -> bool:
    # Turing without tensor cores: half-precision convolutions give NaN (pytorch/pytorch#77955).
    return device.capability == (7, 5) and "GTX 16" in device.name


def _label(device: Device) -> str:
    return (
        device.name if device.capability is None else "{} (sm_{}{})".format(device.name, *device.capability)
    )


def _automatic(device: Device) -> tuple[str, str]:
    """The best precision for a device, and why."""
    label = _label(device)
    if device.type == "cpu":
        return "fp32", "16 bits seldom pay on a CPU"
    if device.type == "mps":
        return "fp32", "16 bits on an Apple GPU are for those who ask for them"
    if device.type not in ("cuda", "xpu"):
        return "fp32", f"nothing is known about devices of type {device.type!r}"
    if device.bf16:
        return "bf16", f"{label} computes it natively, and its range needs no loss scaling"
    if _unreliable_fp16(device):
        return "fp32", f"{label} has no tensor cores and is known for NaN in fp16"
    if device.capability is None:
        return "fp16", f"{label} only emulates bf16; the loss is scaled"
    if device.capability >= (7, 0):
        return "fp16", f"{label} has tensor cores for fp16 and only emulates bf16; the loss is scaled"
    return "fp16", f"{label} has no tensor cores: less memory, little speed; the loss is scaled"


def _price(device: Device, chosen: str, automatic: str) -> str:
    """What a precision that was asked for costs on a device."""
    label = _label(device)
    if chosen == "fp32":
        if automatic == "fp32":
            return "the automatic choice here as well"
        return f"slower than {automatic} on {label}"
    if device.type == "cpu":
        if chosen == "bf16" and device.bf16:
            return f"{label} has instructions for it; whether they pay depends on the model"
        return "slow: a CPU gains nothing from it, it only tries out what a GPU would do"
    if chosen == "bf16" and not device.bf16:
        return f"slow: {label} only emulates it, {automatic} is the faster choice"
    if chosen == "fp16" and _unreliable_fp16(device):
        return f"warning: {label} is known for NaN in fp16, fp32 is the safe choice"
    if chosen == "fp16" and device.bf16:
        return f"the loss is scaled; bf16 on {label} would not need it"
    if chosen == automatic:
        return "the automatic choice here as well"
    return f"not measured on {label}"
