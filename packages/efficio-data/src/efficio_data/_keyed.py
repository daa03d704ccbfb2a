"""Keyed stand-ins: what replaces the dataset, the sampler and the worker start of a loader so that each sample has its own key.

They travel to worker processes, so they hold nothing that cannot be pickled but what the user's own objects hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ._generators import find_generators, key_generators
from ._keys import derive_seed, seed_generators

Key = tuple[int, int, Any]
"""(epoch, ordinal in the epoch of the first sample, index or list of indices): what a sampler sends to a worker."""

_OWN = frozenset({"_dataset", "_seed", "_generators", "_epoch"})


class StandIn:
    """Passes reads and writes of attributes on to the dataset it stands for, so that user code in workers finds its own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._generators: tuple[Any, ...] | None = None
        self._epoch: int | None = None

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
        return {"_dataset": self._dataset, "_seed": self._seed, "_generators": None, "_epoch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def _begin(self, epoch: int) -> None:
        """Tell the dataset which epoch it is, in the process that reads it: persistent workers hear of it too."""
        if epoch != self._epoch:
            self._epoch = epoch
            if callable(getattr(self._dataset, "set_epoch", None)):
                self._dataset.set_epoch(epoch)
        if self._generators is None:
            self._generators = find_generators(self._dataset)

    def _key(self, *place: int | str) -> None:
        key = derive_seed(self._seed, *place)
        seed_generators(key)
        if self._generators:
            key_generators(self._generators, key)


class KeyedDataset(StandIn):
    """A map-style dataset whose samples are each built under the key of their ordinal in the epoch.

    The ordinal, not the index: an index that is drawn twice in an epoch gets two augmentations.
    """

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: Key) -> Any:
        epoch, ordinal, index = key
        self._begin(epoch)
        self._key("sample", epoch, ordinal)
        sample = self._dataset[index]
        self._key("batch", epoch, ordinal)  # for the conversion that follows
        return sample

    def __getitems__(self, key: Key) -> list[Any]:
        epoch, first, indices = key
        self._begin(epoch)
        whole = getattr(self._dataset, "__getitems__", None)
        if callable(whole):
            self._key("batch", epoch, first)
            samples = whole(indices)
        else:
            samples = []
            for ordinal, index in enumerate(indices, first):
                self._key("sample", epoch, ordinal)
                samples.append(self._dataset[index])
        self._key("collate", epoch, first)  # collate_fn runs next, in this process
        return samples  # type: ignore[no-any-return]


class KeyedStream(StandIn, IterableDataset[Any]):
    """An iterable dataset that draws each item under a key of its worker and its ordinal there."""

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset, seed)
        object.__setattr__(self, "_next_epoch", 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_next_epoch": self._next_epoch}

    def begin_at(self, epoch: int) -> None:
        """Set the epoch that the next pass is in."""
        object.__setattr__(self, "_next_epoch", epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch: int = self._next_epoch
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        self._begin(epoch)
        self._key("stream", epoch, place)
        items = iter(self._dataset)
        ordinal = 0
        while True:
            self._key("sample", epoch, place, ordinal)
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
            ordinal += 1


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
