"""Item cost: what one sample of a loader costs, measured in a forked process so that nothing in this one moves."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ._child import ask_child
from ._transfer import leaves


@dataclass(frozen=True)
class ItemCost:
    """What was measured.

    Attributes:
        item_seconds: Seconds that one sample takes in one process, collation included; None when none was made.
        batch_size: Samples in the batch.
        batch_bytes: Bytes of its tensors and arrays.
        trouble: Why nothing could be measured, in plain words; empty when something was, or nothing was tried.
        pinnable: Whether a batch was seen, and its tensors are such as every torch can pin.
    """

    item_seconds: float | None = None
    batch_size: int = 1
    batch_bytes: int = 0
    trouble: str = ""
    pinnable: bool = False


def measure_items(loader: DataLoader[Any], *, seconds: float = 1.0) -> ItemCost:
    """Time the first batch of a map-style loader in a forked process.

    The child is what a worker would be: if samples cannot be made in a forked process, or hang there, this is where it shows. It
    takes its own copy of everything along, so that neither the random generators, nor files that the dataset opens when it is
    first read, nor the sampler's place change in this process. What a dataset does outside the process (prints, counts in a
    file, a download) does happen.

    Args:
        loader: A DataLoader over a map-style dataset; it is not changed.
        seconds: Time after which no further sample is fetched.

    Returns:
        The cost, or the trouble: an exception of the dataset is told there, and comes up again where the loader is read.
    """
    try:
        cost: ItemCost = ask_child(
            functools.partial(time_batch, loader, seconds=seconds, clock=time.perf_counter), seconds=seconds
        )
    except RuntimeError as error:
        return ItemCost(trouble=str(error))
    return cost


def time_batch(loader: DataLoader[Any], *, seconds: float, clock: Callable[[], float]) -> ItemCost:
    """Fetch and collate the first batch of a map-style loader, in this process.

    Args:
        loader: Its sampler is begun and its dataset is read.
        seconds: No further sample is fetched after this time; then what there is is collated, and the bytes are estimated.
        clock: A monotonic clock in seconds.
    """
    batched = loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if batched else loader.sampler
    drawn: Any = next(iter(sampler), None)
    if drawn is None:
        return ItemCost(trouble="the loader has no batches")
    indices = list(drawn) if batched else [drawn]
    dataset: Any = loader.dataset
    whole = getattr(dataset, "__getitems__", None) if batched else None

    def fetch(some: list[Any]) -> list[Any]:
        return list(whole(some)) if whole else [dataset[index] for index in some]

    started = clock()
    items = fetch(
        indices[:1]
    )  # opens, imports and fills what the first sample does; not counted if there are others
    warmed = clock()
    if len(indices) == 1 or warmed - started > seconds:
        made, spent = 1, warmed - started
    elif whole:
        items = fetch(indices)
        made, spent = len(indices), clock() - warmed
    else:
        for index in indices[1:]:
            items.append(dataset[index])
            if clock() - started > seconds:
                break
        made, spent = len(items) - 1, clock() - warmed
    item_seconds = spent / made
    begun = clock()
    batch = loader.collate_fn(items if batched else items[0])
    item_seconds += (clock() - begun) / len(items)
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not all(tensor.is_cpu for tensor in tensors):
        return ItemCost(trouble="its batches are on a device already, which workers cannot share")
    pinnable = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
    batch_bytes = _size_bytes(batch) * len(indices) // len(items)
    return ItemCost(item_seconds, len(indices), batch_bytes, pinnable=pinnable)


def _size_bytes(batch: Any) -> int:
    arrays = (leaf for leaf in leaves(batch) if isinstance(leaf, (torch.Tensor, np.ndarray)))
    return sum(a.nbytes if isinstance(a, np.ndarray) else a.element_size() * a.nelement() for a in arrays)
