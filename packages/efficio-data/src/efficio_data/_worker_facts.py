"""Worker facts: what decides whether worker processes can run for a loader in this process."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, default_convert


def cpu_count() -> int:
    """CPUs that this process may use; fewer than the machine has in a container or a batch job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_method(loader: DataLoader[Any]) -> str:
    """How the loader's workers start, or would start: `"fork"`, `"spawn"` or `"forkserver"`."""
    import multiprocessing

    if loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    # Asking for the default would fix it for the whole process; the first of all methods is the platform's default.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def may_start_processes() -> bool:
    """False in a process that is a worker itself."""
    import multiprocessing

    return not multiprocessing.current_process().daemon


def shm_free_bytes() -> int | None:
    """Room in /dev/shm, through which workers hand over batches on Linux; None where there is none to ask."""
    try:
        free = os.statvfs("/dev/shm")  # noqa: S108  asked for its room, not written to
    except (AttributeError, OSError):
        return None
    return free.f_bavail * free.f_frsize


def is_in_memory(dataset: Any) -> bool:
    """Whether a dataset, or the one it is a subset of, does nothing but index tensors."""
    return isinstance(_whole(dataset), TensorDataset)


def collates_on_cpu(loader: DataLoader[Any]) -> bool:
    """Whether batches that nobody has seen are on the CPU for certain: torch refuses to pin others, in the middle of an epoch."""
    if loader.num_workers > 0:
        return not holds_cuda(loader.dataset)
    plain = loader.collate_fn in (default_collate, default_convert)
    return is_in_memory(loader.dataset) and plain and not holds_cuda(loader.dataset)


def holds_cuda(dataset: Any) -> bool:
    """Whether tensors among a dataset's attributes, or in tuples, lists and dicts there, are on a GPU."""
    parts = list(getattr(_whole(dataset), "__dict__", {}).values())
    for part in list(parts):
        if isinstance(part, (tuple, list)):
            parts.extend(part[:100])
        elif isinstance(part, dict):
            parts.extend(list(part.values())[:100])
    return any(isinstance(part, torch.Tensor) and part.is_cuda for part in parts)


def _whole(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def unpicklable_part(loader: DataLoader[Any]) -> str:
    """Which part of the loader that a spawned worker is sent cannot be pickled, and why; empty if all can."""
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        if reason := _unpicklable(getattr(loader, name)):
            return f"its {name} cannot be pickled ({reason})"
    return ""


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _unpicklable(value: Any) -> str:
    import pickle

    try:
        pickle.Pickler(_Nowhere()).dump(value)  # only written, and to nowhere: nothing is kept or read back
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return str(error)
    return ""
