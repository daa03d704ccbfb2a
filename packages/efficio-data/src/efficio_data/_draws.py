"""Draws: the indices that a sampler gives in one epoch, the same ones whenever they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ._generators import find_generators, key_generators
from ._keys import derive_seed, isolated_generators, seed_generators
from ._order import epoch_order

_CHUNK = 1024  # drawn at once, since saving and restoring the generators costs some 100 us


def epoch_indices(sampler: Any, *, seed: int, epoch: int, start: int = 0) -> Iterator[Any]:
    """The indices of an epoch, from the one with ordinal `start` on.

    A shuffle without replacement is `epoch_order`; sequential order is a range; any other sampler is iterated with all
    generators started from the key of (seed, epoch), so that it repeats itself, and what the sampler draws moves no generator
    outside.

    Args:
        sampler: Any iterable of indices; `set_epoch` is called when it has one.
        seed: The loop's seed.
        epoch: The epoch.
        start: Ordinal of the first index wanted.
    """
    if type(sampler) is SequentialSampler:
        return iter(range(start, len(sampler)))
    if _is_plain_shuffle(sampler):
        return iter(epoch_order(len(sampler), seed=seed, epoch=epoch)[start:].tolist())
    return islice(_keyed(sampler, derive_seed(seed, "sampler", epoch), epoch), start, None)


def epoch_batches(
    batch_sampler: Any, *, seed: int, epoch: int, start: int = 0
) -> Iterator[tuple[int, list[Any]]]:
    """The batches of an epoch from the sample with ordinal `start` on, as (ordinal of the first sample, indices).

    Args:
        batch_sampler: An iterable of lists of indices; torch's own `BatchSampler` is cut anew from its sampler.
        seed: The loop's seed.
        epoch: The epoch.
        start: Samples of the epoch that are already done. Where it falls inside a batch (the batch size was another one), a
            batch sampler of the user's gives the rest of that batch first; torch's own cuts full batches from there.
    """
    if type(batch_sampler) is BatchSampler:
        indices = epoch_indices(batch_sampler.sampler, seed=seed, epoch=epoch, start=start)
        while batch := list(islice(indices, batch_sampler.batch_size)):
            if len(batch) < batch_sampler.batch_size and batch_sampler.drop_last:
                return
            yield start, batch
            start += len(batch)
        return
    first = 0
    for batch in _keyed(batch_sampler, derive_seed(seed, "sampler", epoch), epoch):
        rest = list(batch)[max(0, start - first) :]
        first += len(batch)
        if rest:
            yield first - len(rest), rest


def _is_plain_shuffle(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _keyed(sampler: Any, key: int, epoch: int) -> Iterator[Any]:
    """Iterate a sampler as if it were alone with its generators; lazily, since a sampler may be endless."""
    for part in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
        if part is not None and callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
    owned = find_generators([sampler]) if not isinstance(sampler, (list, tuple, range)) else ()
    indices: Iterator[Any] | None = None
    chunk: deque[Any] = deque()
    number = 0
    while True:
        with isolated_generators():
            # A chunk starts from a key of its own rather than from stored states: the draws are as good, and nothing is kept.
            seed_generators(derive_seed(key, number))
            if indices is None:
                key_generators(owned, key)
                indices = iter(sampler)
            chunk.extend(islice(indices, _CHUNK))
        if not chunk:
            return
        while chunk:
            yield chunk.popleft()
        number += 1
