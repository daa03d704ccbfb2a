"""The largest batch that a training step has memory for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from ._memory import is_oom

_logger = logging.getLogger(__name__)

_MULTIPLE = 8
"""What the matrix units of GPUs like the sizes to be a multiple of."""


def find_batch_size(
    fits: Callable[[int], object], *, start: int = 8, limit: int = 4096, headroom: float = 0.1
) -> int:
    """Find the largest batch for which there is memory, by trying: doubling first, then halving the interval.

    What `fits` leaves behind is not undone; run it under `without_trace` for that.

    Args:
        fits: Trains one step on a batch of so many samples. It does not fit if this runs out of memory, or returns False.
        start: Samples in the first try.
        limit: The largest answer. Tries are larger by the headroom.
        headroom: The part of a batch for which there must be room beyond the answer: memory gets fragmented, and other
            batches may be longer.

    Returns:
        At most `limit`; a multiple of 8 where it is 8 or more and no limit is reached.

    Raises:
        ValueError: An argument makes no sense.
        RuntimeError: Not even one sample fits.

    Example:
        >>> find_batch_size(lambda size: size <= 100)
        88
    """
    if not 1 <= start <= limit:
        raise ValueError(f"start={start} and limit={limit}, expected 1 <= start <= limit")
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom!r} is no part of a batch; give a number from 0 to below 1")
    tried: dict[int, bool] = {}

    def has_room(size: int) -> bool:
        asked = size + int(size * headroom)
        if asked not in tried:
            tried[asked] = _fits(fits, asked)
            _logger.info("a batch of %d samples %s", asked, "fits" if tried[asked] else "does not fit")
        return tried[asked]

    good, bad, size = 0, limit + 1, start
    while good < size < bad:
        if has_room(size):
            good, size = size, min(size * 2, limit)
        else:
            bad = size
            size = size if good else size // 2
    if good == limit:
        return limit
    unit = _MULTIPLE if good >= _MULTIPLE else 1
    low, high = good // unit, -(-bad // unit)
    while high - low > 1:
        middle = (low + high) // 2
        if has_room(middle * unit):
            low = middle
        else:
            high = middle
    good = low * unit
    if good == 0:
        raise RuntimeError(
            f"not even one sample fits into memory ({min(tried)} tried, with headroom={headroom}): make the model or the samples "
            "smaller, or train in 16 bit"
        )
    return good if good < _MULTIPLE else good - good % _MULTIPLE


def _fits(fits: Callable[[int], object], size: int) -> bool:
    try:
        answer = fits(size)
    except Exception as error:
        if not is_oom(error):
            raise
        answer = False
    # Only here, with the error gone, is what its frames held free.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return answer is not False
