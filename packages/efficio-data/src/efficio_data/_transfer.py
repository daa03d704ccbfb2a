"""Transfer: move batches of any structure to a device, ahead of the training where the device can copy by itself."""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

_PLAIN = frozenset({type(None), str, int, float, bool, bytes, torch.Size, torch.dtype, torch.device})


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
    return _moved(batch, device, device.type == "cuda")


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
        else:
            # A map object, as a loop variable would keep the last batch and its file descriptors.
            yield from map(functools.partial(_moved, device=device, non_blocking=False), items)
    finally:
        if callable(close):
            close()


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
                batch = _moved(batch, device, True)
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
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(current)
    return batch


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """The side stream of a card, one for life: the allocator keeps memory for each stream, and a new one an epoch leaks it."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]


def _moved(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    kind = type(batch)
    if kind in _PLAIN:
        return batch
    if kind is torch.Tensor or isinstance(batch, torch.Tensor):
        # From the card it blocks: the host could read the copy before it has arrived.
        return batch.to(device, non_blocking=True) if non_blocking and batch.is_cpu else batch.to(device)
    if kind is tuple or kind is list:
        moved = [_moved(part, device, non_blocking) for part in batch]
        if not any(map(operator.is_not, batch, moved)):
            return batch
        return tuple(moved) if kind is tuple else moved
    return _moved_object(batch, device, non_blocking)


def _moved_object(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    """The rarer containers; each is copied shallowly when one of its parts moves, and returned as it is otherwise."""
    if isinstance(batch, (type, torch.nn.Module)):
        return batch
    if callable(getattr(type(batch), "to", None)):
        # Some (transformers' BatchEncoding, PyG's Data) move themselves in place: the copy takes that.
        movable: Any = batch if isinstance(batch, tuple) else copy.copy(batch)
        return movable.to(device)
    parts = _parts(batch)
    changed = {}
    for key, old in parts:
        new = _moved(old, device, non_blocking)
        if new is not old:
            changed[key] = new
    return _with_parts(batch, changed) if changed else batch


def _parts(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, Mapping):
        return container.items()
    if isinstance(container, (tuple, list)):
        return enumerate(container)
    names = getattr(container, "__dataclass_fields__", ())
    return [(name, getattr(container, name)) for name in names if hasattr(container, name)]


def _with_parts(container: Any, changed: dict[Any, Any]) -> Any:
    """A copy of the container, with its type and whatever else hangs on it, in which some parts are others."""
    if isinstance(container, tuple):
        parts = [changed.get(place, part) for place, part in enumerate(container)]
        return container._make(parts) if hasattr(container, "_make") else type(container)(parts)
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        return type(container)({**container, **changed})  # type: ignore[call-arg]
    copied = copy.copy(container)
    for key, part in changed.items():
        if isinstance(container, (list, MutableMapping)):
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)  # a frozen dataclass, too
    return copied
