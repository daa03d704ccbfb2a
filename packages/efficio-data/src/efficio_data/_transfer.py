"""Transfer: move batches of any structure to a device, ahead of the training where the device can copy by itself."""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ._position import Position


def leaves(batch: Any) -> Iterator[Any]:
    """What a batch is made of, in order: everything that is not a tuple, a list, a mapping or a dataclass.

    Args:
        batch: Nested containers, as `to_device` takes them; only read.

    >>> list(leaves({"x": (1, 2), "y": ["z"]}))
    [1, 2, 'z']
    """
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from leaves(part)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from leaves(part)
    elif not isinstance(batch, type) and hasattr(batch, "__dataclass_fields__"):
        for name in batch.__dataclass_fields__:
            yield from leaves(getattr(batch, name))
    else:
        yield batch


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Move every tensor of a batch to a device.

    Tensors, tuples, lists, named tuples, mappings (`dict` and what derives from it, `UserDict`), dataclasses and objects with a
    `.to(device)` of their own (`PackedSequence`, a tokenizer's `BatchEncoding`) are followed to any depth and keep their types
    and keys; anything else is passed on. The input is not modified, and what is on the device already comes back as it is, its
    containers included. To CUDA the copy does not block: from pinned memory it runs beside the host, so pinned tensors must not
    be overwritten before it is done.

    Args:
        batch: Nested containers of tensors of any shape and dtype.
        device: Where to, e.g. `"cuda"` or `torch.device("cpu")`.

    Returns:
        A batch of the same structure.

    >>> to_device({"x": torch.zeros(2), "name": "a"}, "meta")
    {'x': tensor(..., device='meta', size=(2,)), 'name': 'a'}
    """
    if not isinstance(device, torch.device):
        device = torch.device(device)
    return _moved(batch, device, device.type)


def prefetch(
    batches: Iterable[Any], device: torch.device | str, *, depth: int = 2
) -> Generator[Any, None, None]:
    """Yield the batches on a device; on CUDA, copy the next ones while the current one is computed with.

    The copies run on one side stream, which the process keeps for the device: it waits for the stream that is current when a
    batch is asked for, and that stream waits for the copy of the batch it is given. Other devices get each batch moved as it is
    asked for, none ahead. Pinned memory (`pin_memory=True`) is what lets a copy run beside the computation.

    No batch is kept once it was given out. Whatever the iterable raises comes after the batches that it gave before, and closing
    this generator closes the iterable's iterator, too.

    Args:
        batches: Anything that can be iterated; parts that are not tensors pass through, so `(batch, position)` is a batch.
        device: Where to.
        depth: Batches that may be pulled and copied beyond the one given out; used on CUDA only.

    Raises:
        ValueError: `depth` is less than 1.
    """
    if depth < 1:
        raise ValueError(f"depth={depth} leaves nothing to copy ahead; expected 1 or more")
    moving = _moving(batches, torch.device(device), depth)
    next(moving)  # up to its first, empty yield: from here on close() reaches its finally clause
    return moving


def _moving(batches: Iterable[Any], device: torch.device, depth: int) -> Generator[Any, None, None]:
    close = getattr(batches, "close", None) if isinstance(batches, Iterator) else None
    try:
        yield None
        items = iter(batches)
        close = getattr(items, "close", None)
        if device.type == "cuda":
            yield from _copied_ahead(items, device, depth)
        elif device.type == "cpu" and not _has_accelerator():
            yield from items  # where all tensors are on the CPU, none has to be looked at
        else:
            # A map object, as a loop variable would keep the last batch and its file descriptors.
            yield from map(functools.partial(_moved, device=device, device_type=device.type), items)
    finally:
        if callable(close):
            close()


def _has_accelerator() -> bool:
    return (
        any(getattr(torch, kind).is_available() for kind in ("cuda", "xpu") if hasattr(torch, kind))
        or torch.backends.mps.is_available()
    )


def _copied_ahead(items: Iterator[Any], device: torch.device, depth: int) -> Generator[Any, None, None]:
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    side = _copy_stream(index)
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()
    end: Exception | None = None
    while True:
        current = torch.cuda.current_stream(device)
        while end is None and len(waiting) <= depth:
            try:
                batch = next(items)
            except Exception as error:  # noqa: BLE001  kept until the batches before it are given out
                end = error
                break
            # The side stream reuses memory that the current one has read: opaque objects cannot be recorded on it.
            side.wait_stream(current)
            with torch.cuda.stream(side):
                batch = _moved(batch, device, "cuda")
                waiting.append((batch, side.record_event()))
            del batch
        if not waiting:
            if isinstance(end, StopIteration):
                return
            raise end  # type: ignore[misc]
        yield _handed_over(waiting, current)


def _handed_over(waiting: deque[tuple[Any, torch.cuda.Event]], current: torch.cuda.Stream) -> Any:
    """The oldest batch, safe to use on the current stream. A function of its own, so that the generator keeps no batch."""
    batch, copied = waiting.popleft()
    current.wait_event(copied)
    for leaf in leaves(batch):
        # Sparse and nested tensors cannot be recorded; the waiting of the side stream protects them, as it does opaque objects.
        if (
            isinstance(leaf, torch.Tensor)
            and leaf.is_cuda
            and leaf.layout is torch.strided
            and not leaf.is_nested
        ):
            leaf.record_stream(current)
    return batch


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """The side stream of a card, one for life: the allocator keeps memory for each stream, and a new one an epoch leaks it."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]


def _moved(batch: Any, device: torch.device, device_type: str) -> Any:
    kind: Any = type(batch)
    return _mover(kind)(batch, device, device_type)


@functools.lru_cache(maxsize=256)  # a batch is looked at in every step, its types stay the same
def _mover(kind: type) -> Callable[[Any, torch.device, str], Any]:
    """Which of the functions below moves objects of this type."""
    if issubclass(kind, torch.Tensor):
        return _moved_tensor
    if kind is tuple or kind is list:
        return _moved_list
    if issubclass(kind, (type, torch.nn.Module, Position)):
        return _unmoved
    if callable(getattr(kind, "to", None)):
        return _moved_by_itself
    if issubclass(kind, (tuple, list, Mapping)):
        return _moved_container
    return _moved_dataclass if hasattr(kind, "__dataclass_fields__") else _unmoved


def _unmoved(batch: Any, _: torch.device, __: str) -> Any:
    return batch


def _moved_tensor(tensor: Any, device: torch.device, device_type: str) -> Any:
    if not tensor.is_cpu:
        return tensor.to(
            device
        )  # from the card it blocks: the host could read the copy before it has arrived
    return tensor if device_type == "cpu" else tensor.to(device, non_blocking=device_type == "cuda")


def _moved_list(batch: Any, device: torch.device, device_type: str) -> Any:
    moved = [_moved(part, device, device_type) for part in batch]
    if not any(map(operator.is_not, batch, moved)):
        return batch
    return tuple(moved) if type(batch) is tuple else moved


def _moved_by_itself(batch: Any, device: torch.device, _: str) -> Any:
    # Some (transformers' BatchEncoding, PyG's Data) move themselves in place: a copy takes that.
    movable: Any = batch if isinstance(batch, tuple) else copy.copy(batch)
    return movable.to(device)


def _moved_container(batch: Any, device: torch.device, device_type: str) -> Any:
    """A copy that keeps its type and whatever else hangs on it; the container itself if nothing in it moves."""
    changed = {}
    for key, old in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        new = _moved(old, device, device_type)
        if new is not old:
            changed[key] = new
    if not changed:
        return batch
    if isinstance(batch, tuple):
        parts = [changed.get(place, part) for place, part in enumerate(batch)]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)({**batch, **changed})  # type: ignore[call-arg]
    copied: Any = copy.copy(batch)
    for key, new in changed.items():
        copied[key] = new
    return copied


def _moved_dataclass(batch: Any, device: torch.device, device_type: str) -> Any:
    copied = batch
    for name in batch.__dataclass_fields__:
        old = getattr(batch, name, None)
        new = _moved(old, device, device_type)
        if new is not old:
            copied = copy.copy(batch) if copied is batch else copied
            object.__setattr__(copied, name, new)  # a frozen one, too
    return copied
