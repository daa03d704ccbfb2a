"""Groups: the batches whose gradients one optimizer step takes together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")


def grouped(batches: Iterable[_Item], size: int) -> Iterator[tuple[_Item, int, int]]:
    """Cut an epoch into accumulation groups, and say with each batch where in its group it is.

    The size of a group must be known at its first batch, as each loss is divided by it. So up to `size - 1` batches are fetched
    ahead, and the last group of the epoch has the size that it really has, whether the epoch's length is known or not.

    Args:
        batches: The batches of one epoch.
        size: Batches in a group, 1 or more.

    Yields:
        (batch, place in the group from 0, batches in this group).

    >>> list(grouped("abcde", 2))
    [('a', 0, 2), ('b', 1, 2), ('c', 0, 2), ('d', 1, 2), ('e', 0, 1)]
    """
    if size < 1:
        raise ValueError(f"size={size}, expected 1 or more batches in a group")
    source = iter(batches)
    if size == 1:
        for batch in source:
            yield batch, 0, 1
        return
    ahead: deque[_Item] = deque(islice(source, size))
    while ahead:
        here = len(ahead)  # `size`, but for the last group
        for place in range(here):
            batch = ahead.popleft()
            ahead.extend(islice(source, 1))
            yield batch, place, here
