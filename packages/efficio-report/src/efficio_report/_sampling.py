"""What the GPU did: a thread that looks at it, and the summary of what it saw."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ._card import GPUSample, find_card, query, read_card, running_cuda

# A driver that hangs must not keep a run from ending; the thread is a daemon.
_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class GPUSummary:
    """What a GPU did over a run; a figure without any sample is None.

    Attributes:
        samples: Number of samples.
        utilization_mean: Mean fraction of the time in which any kernel ran, 0 to 1.
        utilization_max: Its largest value.
        memory_peak_bytes: Most memory in use on the whole device at the time of a sample.
        memory_total_bytes: Memory of the device.
        power_mean_watts: Mean power.
        power_max_watts: Largest power.
        clock_mean_mhz: Mean clock.
        temperature_max_celsius: Highest temperature.
    """

    samples: int
    utilization_mean: float | None = None
    utilization_max: float | None = None
    memory_peak_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_mean_watts: float | None = None
    power_max_watts: float | None = None
    clock_mean_mhz: float | None = None
    temperature_max_celsius: float | None = None


def summarize_gpu(samples: Sequence[GPUSample]) -> GPUSummary | None:
    """Means and peaks over the samples, each over those that have the figure.

    Args:
        samples: In any order.

    Returns:
        None without samples.

    Examples:
        >>> figures = summarize_gpu([GPUSample(0.0, utilization=0.5), GPUSample(1.0, utilization=1.0)])
        >>> figures.utilization_mean, figures.utilization_max, figures.power_mean_watts
        (0.75, 1.0, None)
    """
    if not samples:
        return None
    utilization = [sample.utilization for sample in samples if sample.utilization is not None]
    power = [sample.power_watts for sample in samples if sample.power_watts is not None]
    clock = [sample.clock_mhz for sample in samples if sample.clock_mhz is not None]
    used = [sample.memory_used_bytes for sample in samples if sample.memory_used_bytes is not None]
    total = [sample.memory_total_bytes for sample in samples if sample.memory_total_bytes is not None]
    heat = [sample.temperature_celsius for sample in samples if sample.temperature_celsius is not None]
    return GPUSummary(
        samples=len(samples),
        utilization_mean=_mean(utilization),
        utilization_max=max(utilization, default=None),
        memory_peak_bytes=max(used, default=None),
        memory_total_bytes=max(total, default=None),
        power_mean_watts=_mean(power),
        power_max_watts=max(power, default=None),
        clock_mean_mhz=_mean(clock),
        temperature_max_celsius=max(heat, default=None),
    )


@contextmanager
def sample_gpu(
    samples: list[GPUSample],
    *,
    interval: float = 1.0,
    device: int = 0,
    nvml: Any = None,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Looks at a GPU from time to time while the body runs.

    A daemon thread asks NVML, which costs the training nothing on the GPU. Where NVML is not there, or does not tell
    the memory, `torch.cuda` is asked for it, if this process uses it already. Without any of them there are
    no samples, no thread and no complaint.

    Args:
        samples: The caller's list, to which `GPUSample`s are appended while the body runs.
        interval: Seconds between two samples; the first is taken at once.
        device: Index of the GPU as torch counts, within `CUDA_VISIBLE_DEVICES`.
        nvml: The `pynvml` module or one like it; None imports it.
        environ: Variables for `CUDA_VISIBLE_DEVICES`; None takes those of this process.
        clock: Seconds from any origin, for the time of a sample.

    Raises:
        ValueError: An interval that is no positive time, or a negative device.
    """
    if not 0.0 < interval < math.inf:
        msg = f"interval={interval!r} is not a time between samples; give seconds, for example 1.0"
        raise ValueError(msg)
    if device < 0:
        msg = f"device={device!r} is not the index of a GPU; give 0 for the first"
        raise ValueError(msg)
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    nvml = _opened_nvml(nvml)
    done = threading.Event()
    thread: threading.Thread | None = None
    try:
        handle = None if nvml is None else find_card(nvml, visible, device)
        if handle is not None or running_cuda() is not None:
            thread = threading.Thread(
                target=_sample_until,
                args=(done, samples, interval, device, nvml, handle, visible, clock),
                name="efficio-gpu-samples",
                daemon=True,
            )
            thread.start()
        yield
    finally:
        done.set()
        if thread is not None:
            thread.join(_JOIN_SECONDS)
        if nvml is not None and (thread is None or not thread.is_alive()):
            query(nvml, nvml.nvmlShutdown)


def _sample_until(
    done: threading.Event,
    samples: list[GPUSample],
    interval: float,
    device: int,
    nvml: Any,
    handle: Any,
    visible: str | None,
    clock: Callable[[], float],
) -> None:
    started = clock()
    cuda = running_cuda()
    while True:
        if cuda is None and (cuda := running_cuda()) is not None and nvml is not None:
            # CUDA has started in the meantime and knows for certain which card it is.
            handle = find_card(nvml, visible, device)
        samples.append(read_card(nvml, handle, device=device, seconds=max(0.0, clock() - started)))
        if done.wait(interval):
            return


def _opened_nvml(nvml: Any) -> Any:
    """NVML, initialised, or None where there is no library, no driver or no device."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
