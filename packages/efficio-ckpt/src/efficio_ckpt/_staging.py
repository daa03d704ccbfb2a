"""Copies of tensors in one reused buffer, so that training can go on while they are written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from ._deferred import DeferredCopies, Span, is_deferrable
from ._memory import available_bytes
from ._placement import Places
from ._tensor import is_dense
from ._tree import Flat

logger = logging.getLogger(__name__)

# Wide enough for every dtype and for the vector instructions of a copy.
_ALIGNMENT: Final = 64


@dataclass
class Pool:
    """Memory that the copies of one save after the other are made in.

    Args:
        limit: Bytes that the copies may take; None for what the memory has room for.
        places: Where the tensors of the last tree lay.
        buffer: Of bytes; None before the first save.
        layout: `Flat.layout` of the tree whose copies are in it.
        copies: Views of the buffer, one for each source.
        spans: As given to `stage`.
        later: Numbers of the sources that may be copied later.
        is_told: Whether a line was logged of a tree that had no room.
    """

    limit: int | None = None
    places: Places = field(default_factory=Places)
    buffer: Tensor | None = None
    layout: object = None
    copies: tuple[Tensor, ...] = ()
    spans: frozenset[Span] = frozenset()
    later: tuple[int, ...] = ()
    is_told: bool = False


@dataclass(frozen=True)
class Staged:
    """A flattened tree whose tensors are copies; or, where there was no room for these, the live ones.

    Args:
        flat: Its sources lie one after the other in one buffer on the CPU, with the strides that they had where those are dense.
        deferred: Those of the copies on the CPU that are still to be made.
        wait: Returns when the copies from a device are complete.
        is_live: Whether nothing was copied, so that nothing may change before all of it is written.
    """

    flat: Flat
    deferred: DeferredCopies
    wait: Callable[[], None]
    is_live: bool = False


def offsets(sizes: list[int], *, alignment: int = _ALIGNMENT) -> list[int]:
    """Return where each of several pieces begins, and where the last one ends.

    Args:
        sizes: Bytes of each piece.
        alignment: Each begins at a multiple of this.

    Example:
        >>> offsets([1, 64, 65])
        [0, 64, 128, 256]
    """
    return list(accumulate((size + -size % alignment for size in sizes), initial=0))


def is_pinnable(size: int, *, free_bytes: int | None) -> bool:
    """Tell whether a buffer may be of pinned memory, of which torch takes a whole power of two and gives none back.

    Into other memory a GPU copies as well, but the caller waits for it.

    Args:
        size: Bytes of the buffer.
        free_bytes: Free memory of the machine; None where that is not known.

    Example:
        >>> is_pinnable(2**30, free_bytes=2**31), is_pinnable(2**30 + 1, free_bytes=2**31)
        (True, False)
    """
    taken = 1 << max(size - 1, 0).bit_length()
    return free_bytes is None or 2 * taken <= free_bytes


def stage(flat: Flat, pool: Pool, *, spans: frozenset[Span] = frozenset()) -> Staged:
    """Copy the tensors of a flattened tree into a buffer.

    Those on the CPU are copied when this returns, but for some that may be copied later. Those on a CUDA device are copied on a
    stream of their own, for which the current stream waits: whatever is computed next cannot change what is copied.

    Args:
        flat: Read; its tensors may change once the device gets to what is computed next.
        pool: That of an earlier call, whose copies are no longer in use. A buffer that is too small is given up before a larger
            one is made, if nobody else holds it.
        spans: Memory on the CPU that nobody changes before the copies of it are made, from `spans_of`.

    Returns:
        Copies; or, where they would be more than the pool's limit or than the memory has room for, the live tensors.
    """
    devices = {source.device for source in flat.sources if source.device.type == "cuda"}
    if (flat.layout is None or flat.layout is not pool.layout) and not _lay_out(
        flat, pool, pinned=bool(devices)
    ):
        for device in devices:
            torch.cuda.synchronize(device)  # another thread reads them, on another stream
        return Staged(flat, DeferredCopies((), ()), lambda: None, is_live=True)
    if spans != pool.spans or flat.layout is None:
        pool.spans = spans
        pool.later = tuple(n for n, source in enumerate(flat.sources) if is_deferrable(source, spans))
    copies = pool.copies
    events = []
    for device in devices:
        here = torch.cuda.current_stream(device)
        aside = _copy_stream(device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for copy, source in zip(copies, flat.sources, strict=True):
                if source.device == device:
                    copy.copy_(source, non_blocking=True)
                    source.record_stream(aside)
        # The thread that writes sleeps until it is reached; it would spin on a CPU that the loader needs.
        events.append(aside.record_event(torch.cuda.Event(blocking=True)))  # type: ignore[no-untyped-call]
        here.wait_event(events[-1])
    later = set(pool.later)
    for index, (copy, source) in enumerate(zip(copies, flat.sources, strict=True)):
        if index not in later and source.device not in devices:
            copy.copy_(source)

    def wait() -> None:
        for event in events:
            event.synchronize()

    deferred = DeferredCopies(
        [flat.names[index] for index in pool.later],
        [(flat.sources[index], copies[index]) for index in pool.later],
    )
    return Staged(replace(flat, sources=copies), deferred, wait)


def _lay_out(flat: Flat, pool: Pool, *, pinned: bool) -> bool:
    """Give each source a place in the buffer, a larger one where that is needed; False where there is no room for it."""
    sizes = [source.numel() * source.element_size() for source in flat.sources]
    starts = offsets(sizes)
    pool.layout, pool.copies, pool.spans, pool.later = None, (), frozenset(), ()
    buffer, free = pool.buffer, available_bytes()
    wants_other = pinned and buffer is not None and not buffer.is_pinned()
    if buffer is not None and (
        buffer.numel() < starts[-1] or (wants_other and is_pinnable(starts[-1], free_bytes=free))
    ):
        pool.buffer = buffer = None  # before there is another one
    if buffer is None:
        pool.buffer = buffer = _new_buffer(starts[-1], pinned=pinned, free=free, pool=pool)
    if buffer is None:
        return False
    pool.copies = tuple(
        _laid_out_like(source, buffer[start : start + size])
        for start, size, source in zip(starts, sizes, flat.sources, strict=False)
    )
    pool.layout = flat.layout
    return True


def _laid_out_like(source: Tensor, memory: Tensor) -> Tensor:
    """View memory as a tensor of the source's dtype, shape and, where they are dense, strides.

    A copy from a GPU between unlike strides first takes memory there, which a full GPU does not have.
    """
    flat = memory.view(source.dtype)
    if is_dense(source.shape, source.stride()):
        return flat.as_strided(source.shape, source.stride())
    return flat.view(source.shape)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies from a card, one for life: the copies of two saves into one buffer stay in order."""
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def _new_buffer(size: int, *, pinned: bool, free: int | None, pool: Pool) -> Tensor | None:
    """Return memory of so many bytes; None where it would be more than there may be."""
    room = pool.limit
    if room is None and free is not None:
        room = free // 10 * 9  # the training takes more now and then
    problem = "" if room is None or size <= room else f"there may be {room} bytes at most"
    if not problem and pinned and is_pinnable(size, free_bytes=free):
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            logger.warning(
                "no pinned memory for %d bytes, so copies from the GPU will take longer: %s", size, error
            )
    if not problem:
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            problem = str(error)
    if not pool.is_told:
        pool.is_told = True
        logger.warning(
            "no room in memory for a copy of %d bytes, so training waits while it is saved: %s", size, problem
        )
    return None
