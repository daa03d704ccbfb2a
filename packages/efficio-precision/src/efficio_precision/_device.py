"""What the accelerator is and which formats it computes without emulation."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.mps  # before torch 2.1 it is no attribute until it is imported

# AMD reports capabilities of its own that look like NVIDIA's, so it is told by its architecture name.
_AMD_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


@dataclass(frozen=True)
class Device:
    """One device, as far as a number format depends on it.

    Attributes:
        type: torch's name of the kind: "cuda" (ROCm too), "xpu", "mps" or "cpu".
        name: The name by which it is sold.
        capability: CUDA compute capability, (7, 5) for a T4; None for everything that is not NVIDIA.
        bf16: Whether it computes bf16 itself. An emulated bf16 is False.
        memory_bytes: Its memory; for a CPU the memory of the machine; None when that cannot be read.
    """

    type: str
    name: str
    capability: tuple[int, int] | None = None
    bf16: bool = False
    memory_bytes: int | None = None


def detect_device(name: str | torch.device | None = None) -> Device:
    """Look at the device that training would use, and run one kernel on it.

    The kernel matters: a GPU that this torch was not built for answers every question, is given
    memory, and fails at its first operation.

    Args:
        name: "cuda", "cuda:1", "xpu", "mps" or "cpu". None takes the first of these that is there.

    Returns:
        The device. Its index is not part of it: "cuda" alone is the current device.

    Raises:
        ValueError: The name is not a device that this package knows.
        RuntimeError: The device is not there, or it cannot run a kernel of this torch.
    """
    device = torch.device(_first_available()) if name is None else _parse(name)
    if device.type == "cpu":
        return _cpu()
    if not _available(device.type):
        raise RuntimeError(
            f"device {str(device)!r} was asked for, but this torch {torch.__version__} sees none;"
            " switch the accelerator on, install a torch built for it, or choose 'cpu'"
        )
    found = {"cuda": _cuda, "xpu": _xpu, "mps": _mps}[device.type](device)
    _run_one_kernel(device, found)
    return found


def _parse(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known; choose 'cuda', 'xpu', 'mps' or 'cpu'") from error
    if device.type not in ("cuda", "xpu", "mps", "cpu"):
        raise ValueError(f"device {name!r} is not supported; choose 'cuda', 'xpu', 'mps' or 'cpu'")
    return device


def _available(kind: str) -> bool:
    if kind == "cuda":
        return torch.cuda.is_available()
    if kind == "xpu":
        return hasattr(torch, "xpu") and torch.xpu.is_available()
    return torch.backends.mps.is_available()


def _first_available() -> str:
    return next((kind for kind in ("cuda", "xpu", "mps") if _available(kind)), "cpu")


def _index(device: torch.device, count: int, current: int) -> int:
    index = current if device.index is None else device.index
    if index >= count:
        raise RuntimeError(
            f"device {str(device)!r} was asked for, but there are {count}; the last is {count - 1}"
        )
    return index


def _cuda(device: torch.device) -> Device:
    index = _index(device, torch.cuda.device_count(), torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        bf16 = properties.gcnArchName.startswith(_AMD_BF16)
        return Device("cuda", properties.name, None, bf16, properties.total_memory)
    capability = (properties.major, properties.minor)
    # torch.cuda.is_bf16_supported() is True on a T4, which emulates bf16 and is slow with it.
    return Device("cuda", properties.name, capability, capability >= (8, 0), properties.total_memory)


def _xpu(device: torch.device) -> Device:
    index = _index(device, torch.xpu.device_count(), torch.xpu.current_device())
    properties = torch.xpu.get_device_properties(index)
    bf16 = bool(getattr(properties, "has_bfloat16_conversions", False))
    return Device("xpu", properties.name, None, bf16, properties.total_memory)


def _mps(device: torch.device) -> Device:
    _index(device, 1, 0)
    recommended = getattr(torch.mps, "recommended_max_memory", None)
    # Metal has bf16 from macOS 14 on; before torch 2.6 autocast there refuses it.
    newer = getattr(torch.backends.mps, "is_macos_or_newer", None)
    bf16 = torch.__version__ >= "2.6" and newer is not None and bool(newer(14, 0))
    return Device("mps", f"Apple {platform.machine()}", None, bf16, recommended() if recommended else None)


def _cpu() -> Device:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.11 on
    bf16 = bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
    return Device(
        "cpu", capabilities.get("cpu_name") or platform.machine() or "CPU", None, bf16, _cpu_memory_bytes()
    )


def _cpu_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, other systems lack the names
        return None


def _run_one_kernel(device: torch.device, found: Device) -> None:
    try:
        torch.ones(8, device=device).add_(1).sum().item()
    except RuntimeError as error:
        if not any(words in str(error) for words in ("no kernel image", "invalid device function")):
            raise RuntimeError(
                f"{found.name} is there, but its first operation failed ({_first_line(error)});"
                " restart the session, free the device, or choose 'cpu'"
            ) from error
        architecture = _architecture(device, found)
        built = ", ".join(torch.cuda.get_arch_list()) or "no architecture"
        raise RuntimeError(
            f"{found.name} ({architecture}) cannot run torch {torch.__version__}, which is built for {built};"
            f" choose another GPU (on Kaggle: T4 x2), a torch built for {architecture}, or 'cpu'"
        ) from error


def _architecture(device: torch.device, found: Device) -> str:
    if found.capability is not None:
        return "sm_{}{}".format(*found.capability)
    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "its architecture"))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
