"""One graphics card as NVIDIA's management library (NVML) knows it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# What CUDA itself takes for "and no device from here on".
_END_OF_DEVICES = ("", "-1", "NoDevFiles")


@dataclass(frozen=True, slots=True)
class GPUSample:
    """What one GPU did at one moment; a figure that could not be had is None.

    Attributes:
        seconds: Time since the sampling began.
        utilization: Fraction of the last moments in which any kernel ran, 0 to 1. It does not say how much of
            the GPU that kernel used.
        memory_used_bytes: Memory in use on the whole device, by all processes.
        memory_total_bytes: Memory of the device.
        power_watts: Power drawn by the card.
        clock_mhz: Clock of the streaming multiprocessors.
        temperature_celsius: Temperature of the chip.
    """

    seconds: float
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    clock_mhz: int | None = None
    temperature_celsius: int | None = None


def visible_devices(text: str | None, count: int) -> tuple[str, ...]:
    """The devices that CUDA shows to a process, in CUDA's order.

    Args:
        text: The value of `CUDA_VISIBLE_DEVICES`, None when it is not set.
        count: Devices in the machine.

    Returns:
        Indices and (beginnings of) UUIDs; like CUDA, up to the first entry that names no device.

    Examples:
        >>> visible_devices(None, 2), visible_devices("1, GPU-5ebe9f43", 2), visible_devices("0,7,1", 2)
        (('0', '1'), ('1', 'GPU-5ebe9f43'), ('0',))
        >>> visible_devices("", 2), visible_devices("-1", 2)
        ((), ())

    Source:
        CUDA C++ Programming Guide, "CUDA environment variables".
    """
    if text is None:
        return tuple(str(index) for index in range(count))
    visible: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry in _END_OF_DEVICES or (entry.isdecimal() and int(entry) >= count):
            break
        visible.append(entry)
    return tuple(visible)


def find_card(nvml: Any, visible: str | None, device: int) -> Any:
    """Finds NVML's handle of a CUDA device.

    NVML counts all cards by their place on the bus; CUDA hides and reorders them by `CUDA_VISIBLE_DEVICES`, and
    puts the fastest first among unequal ones. Once CUDA is running in this process its UUID decides.

    Args:
        nvml: The `pynvml` module, initialised.
        visible: The value of `CUDA_VISIBLE_DEVICES`, None when it is not set.
        device: Index of the device as torch counts.

    Returns:
        The handle, or None when there is no such device.
    """
    count = query(nvml, nvml.nvmlDeviceGetCount)
    if not count:
        return None
    uuid = _running_uuid(device)
    if uuid is not None and (handle := _card_by_uuid(nvml, uuid, count)) is not None:
        return handle
    names = visible_devices(visible, count)
    if device >= len(names):
        return None
    if names[device].isdecimal():
        return query(nvml, nvml.nvmlDeviceGetHandleByIndex, int(names[device]))
    return _card_by_uuid(nvml, names[device], count)


def read_card(nvml: Any, handle: Any, *, device: int, seconds: float) -> GPUSample:
    """Reads all figures of a card, each on its own: one that is refused does not cost the others.

    Args:
        nvml: The `pynvml` module, None without it.
        handle: The card, None when NVML does not know it.
        device: Index of the device as torch counts, for the memory when NVML does not tell it.
        seconds: Time of this sample.
    """
    rates = memory = milliwatts = clock = temperature = None
    if handle is not None:
        rates = query(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = query(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        clock = query(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        temperature = query(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    used_total = _running_memory(device) if memory is None else (int(memory.used), int(memory.total))
    return GPUSample(
        seconds=seconds,
        utilization=None if rates is None else rates.gpu / 100.0,
        memory_used_bytes=used_total and used_total[0],
        memory_total_bytes=used_total and used_total[1],
        power_watts=None if milliwatts is None else milliwatts / 1000.0,
        clock_mhz=clock,
        temperature_celsius=temperature,
    )


def query(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Asks NVML one thing.

    Returns:
        Its answer, or None when the driver, the card or the permissions do not allow one.
    """
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def running_cuda() -> Any:
    """The `torch.cuda` of this process when it is in use already, else None: nothing is imported or started."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return cuda if is_initialized is not None and is_initialized() else None


def _card_by_uuid(nvml: Any, beginning: str, count: int) -> Any:
    if beginning.startswith("MIG-"):
        return query(nvml, nvml.nvmlDeviceGetHandleByUUID, beginning)
    for index in range(count):
        handle = query(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else query(nvml, nvml.nvmlDeviceGetUUID, handle)
        if isinstance(uuid, bytes):  # of the older package of the same name
            uuid = uuid.decode()
        if uuid is not None and uuid.startswith(beginning):
            return handle
    return None


def _running_uuid(device: int) -> str | None:
    cuda = running_cuda()
    if cuda is None or device >= cuda.device_count():
        return None
    uuid = getattr(cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    return str(uuid) if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _running_memory(device: int) -> tuple[int, int] | None:
    cuda = running_cuda()
    if cuda is None:
        return None
    try:
        free, total = cuda.mem_get_info(device)
    except RuntimeError:
        return None
    return total - free, total
