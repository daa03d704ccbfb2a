"""Keyed stand-ins: what replaces the dataset, the sampler and the worker start of a loader so that each sample has its own key.

They travel to worker processes, so they hold nothing that cannot be pickled but what the user's own objects hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from ._generators import find_generators, key_generators
from ._keys import derive_seed, seed_generators

Key = tuple[int, int, Any]
"""(epoch, ordinal in the epoch of the first sample, index or list of indices): what a sampler sends to a worker."""

_OWN = frozenset({"_dataset", "_seed", "_generators", "_epoch", "_roots"})
_PARTS = ("sample", "batch", "collate", "stream")  # places within an epoch that have streams of their own


class StandIn:
    """Passes reads and writes of attributes on to the dataset it stands for, so that user code in workers finds its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._generators: tuple[Any, ...] | None = None
        self._epoch: int | None = None
        self._roots: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # The generators are found anew in each process: a pickled copy would not be the one that the dataset uses.
        return {
            "_dataset": self._dataset,
            "_seed": self._seed,
            "_generators": None,
            "_epoch": None,
            "_roots": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def _begin(self, epoch: int) -> None:
        """Tell the dataset which epoch it is, in the process that reads it: persistent workers hear of it too."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._roots = {part: derive_seed(self._seed, part, epoch) for part in _PARTS}
            if callable(getattr(self._dataset, "set_epoch", None)):
                self._dataset.set_epoch(epoch)
        if self._generators is None:
            self._generators = find_generators(self._dataset)

    def _key(self, part: str, *place: int) -> None:
        key = derive_seed(self._roots[part], *place)
        seed_generators(key)
        if self._generators:
            key_generators(self._generators, key)


class KeyedDataset(StandIn):
    """A map-style dataset whose samples are each built under the key of their ordinal in the epoch.

    The ordinal, not the index: an index that is drawn twice in an epoch gets two augmentations. Where nothing can draw (tensors
    in memory, torch's own collation), nothing is keyed.

    Args:
        dataset: The user's.
        seed: Of the loop.
        collate_fn: The user's; it runs after the samples, in the same process.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Any) -> None:
        super().__init__(dataset, seed)
        object.__setattr__(self, "_draws", not _is_plain(dataset))
        object.__setattr__(self, "_collate_draws", collate_fn not in (default_collate, default_convert))

    @property
    def has_use_for_keys(self) -> bool:
        """Whether anything is keyed, or told its epoch."""
        return self._draws or self._collate_draws or callable(getattr(self._dataset, "set_epoch", None))

    def __getstate__(self) -> dict[str, Any]:
        own = {"_draws": self._draws, "_collate_draws": self._collate_draws}
        return {**super().__getstate__(), **own}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: Key) -> Any:
        epoch, ordinal, index = key
        self._begin(epoch)
        if self._draws:
            self._key("sample", ordinal)
        sample = self._dataset[index]
        if self._collate_draws:
            self._key("collate", ordinal)
        return sample

    def __getitems__(self, key: Key) -> list[Any]:
        epoch, first, indices = key
        self._begin(epoch)
        if _fetches_whole_batches(self._dataset):
            if self._draws:
                self._key("batch", first)
            samples = self._dataset.__getitems__(indices)
        else:
            samples = []
            for ordinal, index in enumerate(indices, first):
                if self._draws:
                    self._key("sample", ordinal)
                samples.append(self._dataset[index])
        if self._collate_draws:
            self._key("collate", first)
        return samples  # type: ignore[no-any-return]


class KeyedStream(StandIn, IterableDataset[Any]):
    """An iterable dataset that draws each item under a key of its worker and its ordinal there."""

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset, seed)
        object.__setattr__(self, "_next_epoch", 0)
        object.__setattr__(self, "_first", 0)
        object.__setattr__(self, "_over", False)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_next_epoch": self._next_epoch,
            "_first": self._first,
            "_over": False,
        }

    @property
    def is_over(self) -> bool:
        """Whether the pass has met the end of the dataset, which may have begun anew by itself."""
        return bool(self._over)

    def begin_at(self, epoch: int, first: int) -> None:
        """Set where the next pass begins: in which epoch, and with which item of it, if the dataset is there already."""
        object.__setattr__(self, "_next_epoch", epoch)
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_over", False)

    def __iter__(self) -> Iterator[Any]:
        epoch: int = self._next_epoch
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        self._begin(epoch)
        self._key("stream", place)
        items = iter(self._dataset)
        ordinal: int = self._first
        while True:
            self._key("sample", place, ordinal)
            try:
                item = next(items)
            except StopIteration:
                object.__setattr__(self, "_over", True)
                return
            yield item
            ordinal += 1


def _fetches_whole_batches(dataset: Any) -> bool:
    """Whether `__getitems__` does more than to ask for one sample after the other, as a `Subset`'s does by itself."""
    # The Subset of torch 2.0 has no `__getitems__`, whatever its dataset has.
    while type(dataset) is Subset and hasattr(Subset, "__getitems__"):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _is_plain(dataset: Any) -> bool:
    """Whether its samples are only read, so that no draw is possible."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in (TensorDataset, list, tuple)


class CountedCollate:
    """Collates as the user's function does, and says how many items went in."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, items: list[Any]) -> tuple[int, Any]:
        return len(items), self._collate_fn(items)


class OwnProcessGroup:
    """Starts a worker in a process group of its own, then runs the user's `worker_init_fn`.

    Ctrl-C and a scheduler's SIGTERM go to the whole group; workers that die of it first would take the training down before it
    has saved. A worker still ends when its parent is gone: torch's own watchdog sees to that.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
