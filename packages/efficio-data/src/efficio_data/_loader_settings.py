"""Loader settings: workers, pinning and prefetching that fit a dataset and a machine, each with its reason."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from . import _worker_facts as observed
from ._generators import find_generators
from ._item_cost import ItemCost, measure_items

# Measured on a 2-core Xeon with torch 2.14 and one worker: handing a batch over takes the worker 0.6 ms and 1.4 GB/s, and the main
# process 0.3 ms and 7 GB/s of it. Workers must save twice that, or they slow the loader down.
_CHEAP_ITEM_SECONDS = 50e-6
_HANDOVER_SECONDS = 0.6e-3
_HANDOVER_BYTES_PER_SECOND = 1.4e9


@dataclass(frozen=True)
class LoaderSettings:
    """How a DataLoader should run.

    Attributes:
        num_workers: Worker processes; 0 builds the batches in the main process.
        pin_memory: Whether batches go to pinned memory, from which a GPU copies beside the computation.
        persistent_workers: Whether workers outlive an epoch.
        prefetch_factor: Batches that each worker makes ahead; None without workers.
        reason: Why, in plain words.
    """

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int | None
    reason: str


def loader_settings(
    *,
    platform: str,
    start_method: str,
    cpu_count: int,
    device_type: str = "cpu",
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    iterable: bool = False,
    in_memory: bool = False,
    owns_generator: bool = False,
    pinnable: bool = True,
    trouble: str = "",
    unpicklable: str = "",
    item_seconds: float | None = None,
    batch_size: int = 1,
    batch_bytes: int = 0,
    batch_count: int | None = None,
    shm_free_bytes: int | None = None,
    max_workers: int = 8,
) -> LoaderSettings:
    """Decide how a DataLoader should run, from facts alone.

    Workers that the user set stay, with a word where they do harm. None are added where they could change what the loader yields,
    or slow it down. `persistent_workers` stays as the user set it: a worker that outlives an epoch does not see what is changed
    on the dataset in the main process meanwhile (another transform, say), and starting two anew costs 30 ms.

    Args:
        platform: As `sys.platform` has it.
        start_method: How worker processes start: `"fork"`, `"spawn"` or `"forkserver"`.
        cpu_count: CPUs that this process may use.
        device_type: Type of the training device, e.g. `"cuda"`.
        num_workers: What the user set, as are the two that follow.
        prefetch_factor: None for torch's own, which is 2.
        persistent_workers: Without workers it is dropped.
        iterable: The dataset is an `IterableDataset`.
        in_memory: The dataset only indexes tensors.
        owns_generator: The dataset holds a random generator that nobody rekeys: each worker would get the same copy.
        pinnable: The batches are on the CPU for certain, in dense tensors.
        trouble: Why no sample could be made in a process like a worker; empty if it could.
        unpicklable: What of the loader cannot be pickled, and why; empty if all can, or nobody looked.
        item_seconds: Seconds that one sample takes in one process; None if unknown.
        batch_size: Samples in a batch.
        batch_bytes: Bytes of a batch's tensors; 0 if unknown.
        batch_count: Batches in an epoch; None if unknown.
        shm_free_bytes: Free shared memory; workers and prefetching fill at most half. None if unknown.
        max_workers: Most workers to add.

    Raises:
        ValueError: The user set workers that cannot start, as a part of the loader cannot be pickled.

    >>> facts = dict(platform="linux", start_method="fork", cpu_count=4, device_type="cuda", batch_size=64)
    >>> loader_settings(**facts, item_seconds=5e-3).num_workers
    4
    >>> loader_settings(**facts, item_seconds=5e-6).reason
    'no workers: a sample takes 5 us, less than handing it over; memory is pinned for the copy to the GPU'
    """
    room = None if shm_free_bytes is None or not batch_bytes else shm_free_bytes // 2 // batch_bytes
    shm = f"batches of {_megabytes(batch_bytes)} in {_megabytes(shm_free_bytes or 0)} of free shared memory"
    harm = _harm(in_memory, item_seconds, batch_size, batch_bytes)
    spare_cpus = cpu_count - (device_type == "cpu")  # a GPU leaves the CPUs to the loader
    if num_workers > 0:
        if start_method != "fork" and unpicklable:
            raise ValueError(
                f"num_workers={num_workers} cannot start on {platform} by {start_method}: {unpicklable}; define it at the top "
                "level of a module, or set num_workers=0"
            )
        workers, why = num_workers, f"{_counted(num_workers, 'worker')} as set by the caller"
        prefetch = prefetch_factor or 2
        if room is not None and workers * prefetch > room:
            prefetch = max(1, min(prefetch, room // workers))
            why += f", {_counted(prefetch, 'batch')} ahead each: {shm}"
            if workers * prefetch > room:
                why += ", where workers may die of a bus error: set fewer, or enlarge it (docker run --shm-size=8g)"
        if harm:
            why += f", though 0 would be faster: {harm}"
    elif refusal := _refusal(
        platform, start_method, spare_cpus, iterable, owns_generator, trouble, item_seconds, harm
    ):
        workers, prefetch, why = 0, 0, f"no workers: {refusal}"
    else:
        workers, prefetch = min(spare_cpus, max_workers), 2
        why = f"a sample takes {_duration(item_seconds or 0.0)}, {_counted(cpu_count, 'CPU')} usable"
        if batch_count is not None and batch_count < workers:
            workers, why = batch_count, f"{why}, {_counted(batch_count, 'batch')} in an epoch"
        if room is not None and room < workers * prefetch:
            prefetch = max(1, min(prefetch, room))
            workers, why = min(workers, room // prefetch), f"{why}, {shm}"
        why = f"{_counted(workers, 'worker')}: {why}"
    pinned = device_type == "cuda" and pinnable
    if pinned:
        why += "; memory is pinned for the copy to the GPU"
    return LoaderSettings(
        workers, pinned, persistent_workers and workers > 0, prefetch if workers else None, why
    )


def _refusal(
    platform: str,
    start_method: str,
    spare_cpus: int,
    iterable: bool,
    owns_generator: bool,
    trouble: str,
    item_seconds: float | None,
    harm: str,
) -> str:
    """Why no workers are added; empty if they may be."""
    if iterable:
        return "an IterableDataset may give every sample once for each worker"
    if not (platform.startswith("linux") and start_method == "fork"):
        return f"on {platform} they start by {start_method}, and a script must be written for that"
    if harm:
        return harm
    if owns_generator:
        return (
            "the dataset owns a random generator, and each worker would draw the same numbers from its copy"
        )
    if trouble:
        return trouble
    if item_seconds is None:
        return "the time of a sample is not known"
    return "" if spare_cpus > 0 else "the training needs the only CPU"


def _harm(in_memory: bool, item_seconds: float | None, batch_size: int, batch_bytes: int) -> str:
    """Why workers would be slower than none; empty if they would not, or if it is not known."""
    if in_memory:
        return "the dataset is in memory"
    if item_seconds is None:
        return ""
    if item_seconds < _CHEAP_ITEM_SECONDS:
        return f"a sample takes {_duration(item_seconds)}, less than handing it over"
    handover = _HANDOVER_SECONDS + batch_bytes / _HANDOVER_BYTES_PER_SECOND
    if item_seconds * batch_size < 2 * handover:
        return (
            f"a batch takes {_duration(item_seconds * batch_size)}, and handing it over {_duration(handover)}"
        )
    return ""


def _counted(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count or 'no'} {noun if count == 1 else plural}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g} MB"


def measure_loader(
    loader: DataLoader[Any],
    *,
    device: torch.device | str | None = None,
    rekeyed: bool = False,
    seconds: float = 1.0,
) -> LoaderSettings:
    """Observe a loader and the machine, and decide how the loader should run there.

    On Linux the first batch of a map-style loader is timed in a forked process: in this one no random generator moves, no file is
    opened and no sampler is begun.

    Args:
        loader: A `DataLoader` or a subclass; it is not changed.
        device: Training device; None for CUDA where it is available, and the CPU otherwise.
        rekeyed: The loader will go through `resumable`, which starts the dataset's own generators from keys: then workers may be
            added beside them.
        seconds: After which no further sample is fetched for timing.

    Raises:
        TypeError: The loader is not a `DataLoader`.
        ValueError: Workers are set but cannot start.
    """
    _check_loader(loader)
    dataset: Any = loader.dataset
    iterable, in_memory = isinstance(dataset, IterableDataset), observed.is_in_memory(dataset)
    start_method = observed.start_method(loader)
    cost, pinnable = ItemCost(), observed.collates_on_cpu(loader)
    if not observed.may_start_processes():
        cost = ItemCost(trouble="this process is a worker itself, and may not start others")
    elif sys.platform.startswith("linux") and not iterable and not (in_memory and not loader.num_workers):
        cost = measure_items(loader, seconds=seconds)
        pinnable = cost.pinnable
    try:
        batch_count = None if iterable else len(loader)
    except TypeError:  # a sampler without a length
        batch_count = None
    return loader_settings(
        platform=sys.platform,
        start_method=start_method,
        cpu_count=observed.cpu_count(),
        device_type=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        iterable=iterable,
        in_memory=in_memory,
        owns_generator=not rekeyed and bool(find_generators(dataset)),
        pinnable=loader.pin_memory or pinnable,
        trouble=cost.trouble,
        unpicklable=observed.unpicklable_part(loader)
        if loader.num_workers and start_method != "fork"
        else "",
        item_seconds=cost.item_seconds,
        batch_size=cost.batch_size,
        batch_bytes=cost.batch_bytes,
        batch_count=batch_count,
        shm_free_bytes=observed.shm_free_bytes(),
    )


def tune_loader(
    loader: DataLoader[Any],
    settings: LoaderSettings | None = None,
    *,
    device: torch.device | str | None = None,
) -> DataLoader[Any]:
    """Give a loader other settings.

    The new loader is a shallow copy of the same class: dataset, sampler, generator, collation and all other options are the same
    objects, and it yields the same, except for random numbers that a dataset draws in a worker (see `resumable`).

    Args:
        loader: A `DataLoader` or a subclass; it is not changed, and a running iterator is not shared.
        settings: From `loader_settings` or `measure_loader`; None measures.
        device: Training device, for measuring.

    Raises:
        TypeError: The loader is not a `DataLoader`.
        ValueError: Workers are set but cannot start.
    """
    _check_loader(loader)
    if settings is None:
        settings = measure_loader(loader, device=device)
    tuned = copy.copy(loader)
    attributes = {
        "num_workers": settings.num_workers,
        "pin_memory": settings.pin_memory,
        "persistent_workers": settings.persistent_workers,
        "prefetch_factor": settings.prefetch_factor,
        "_iterator": None,
    }
    for name, value in attributes.items():
        object.__setattr__(tuned, name, value)  # DataLoader.__setattr__ refuses some of them once it is made
    return tuned


def _check_loader(loader: object) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"loader is a {type(loader).__name__}, expected a torch DataLoader; others run as they are"
        )
