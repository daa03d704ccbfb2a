"""Resumable: any loader, able to start at any position and to repeat what it gave there."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader

from ._child import ask_child
from ._draws import epoch_batches, epoch_indices
from ._keyed import CountedCollate, Key, KeyedDataset, KeyedStream, OwnProcessGroup
from ._keys import derive_seed, isolated_generators
from ._position import Position, check_position

_PROBE_SECONDS = 1.0


@runtime_checkable
class Resumable(Protocol):
    """A loader that can start anywhere.

    Those of this package also have `notes`, what is not exact about them in plain words; `epoch_samples`, the samples that an
    epoch draws from (None where that is not known before); and `epoch_state`, what the position at the begin of the next epoch
    holds as its state.
    """

    def iter_from(self, position: Position) -> Iterator[tuple[Any, Position]]:
        """The batches of `position.epoch` from there on, each with the position after it."""
        ...

    def __len__(self) -> int:
        """Batches in a whole epoch; TypeError where that is not known."""
        ...


def resumable(loader: Any, *, seed: int = 0) -> Resumable:
    """Give a loader an order and a randomness that follow from (seed, epoch, ordinal) alone.

    A `DataLoader` is rewired, not rebuilt: a shallow copy keeps its class and its options, while its sampler and its dataset get
    stand-ins. The order of a shuffled epoch is `epoch_order`, other samplers are drawn under a key, and each sample is built
    under the key of its ordinal: torch's default generator, `random`, NumPy's global generator and those that hang on the dataset
    or its transforms are started from it, in whatever process builds the sample. So the stream does not depend on the number of
    workers, nor on where it is entered. Samples before the position are not built.

    A sampler with `state_dict` and `load_state_dict` is loaded with the state that it had when the epoch began, and drawn again; a
    stream of that kind (without workers) or an iterable of batches is loaded with the state at the position, and goes on there.

    In the main process (no workers) the global generators are left as the last sample's key set them; a loop whose body draws
    (dropout, batch augmentation) calls `seed_generators(derive_seed(seed, epoch, samples))` before each body.

    Args:
        loader: A `DataLoader`; a loader with `with_seed` (`GPULoader`) or `iter_from`; or any iterable of batches that can be
            iterated again. It is not changed, but a sampler's or dataset's `set_epoch` is called as epochs begin.
        seed: Seed of this loop.

    Returns:
        A loader whose `iter_from(position)` yields `(batch, position after it)` until the epoch ends, and whose `len()` is the
        number of batches in an epoch.

    Raises:
        TypeError: It cannot be iterated twice (a generator) or not at all.
    """
    if hasattr(loader, "with_seed"):
        return cast(Resumable, loader.with_seed(seed))
    if hasattr(loader, "iter_from"):
        return cast(Resumable, loader)
    if isinstance(loader, DataLoader):
        return _Stream(loader, seed) if _is_iterable(loader) else _Map(loader, seed)
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise TypeError(
            f"loader is a {type(loader).__name__}, expected a DataLoader, a GPULoader or an iterable of batches that can be "
            "iterated once an epoch: pass the loader itself, not iter(loader) or a generator"
        )
    return _Batches(loader)


def _is_iterable(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)


def _rewired(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A shallow copy with other attributes; `DataLoader.__setattr__` refuses some of them, so they go round it."""
    rewired = copy.copy(loader)
    rewired.__dict__.update(
        {
            "_iterator": None,
            "generator": torch.Generator(),
            "worker_init_fn": OwnProcessGroup(loader.worker_init_fn),
            **({"in_order": True} if hasattr(loader, "in_order") else {}),
        },
        **attributes,
    )
    return rewired


class _Keys:
    """Stands for the sampler or batch sampler: sends keys to the workers and notes how many samples each batch has.

    Args:
        loader: Its sampler is read.
        seed: Of the loop.
        bare: Send the indices alone, to a dataset that has no use for keys.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, bare: bool) -> None:
        self._bare = bare
        self._batched = loader.batch_sampler is not None
        self._sampler = loader.batch_sampler if self._batched else loader.sampler
        self._seed = seed
        self._position = Position()
        self._sizes: deque[int] = deque()

    def begin_at(self, position: Position) -> deque[int]:
        """Set where the next pass starts; returns the queue in which that pass notes the size of each batch."""
        self._position = position
        self._sizes = deque()
        return self._sizes

    def __iter__(self) -> Iterator[Any]:
        keys = self._pass(self._position.epoch, self._position.samples, self._sizes)
        return map(itemgetter(2), keys) if self._bare else keys

    def _pass(self, epoch: int, start: int, sizes: deque[int]) -> Iterator[Key]:
        if self._batched:
            for first, indices in epoch_batches(self._sampler, seed=self._seed, epoch=epoch, start=start):
                sizes.append(len(indices))
                yield epoch, first, indices
            return
        # Without automatic batching an "index" may be a list of them, and counts for as many samples.
        first = 0
        for index in epoch_indices(self._sampler, seed=self._seed, epoch=epoch):
            size = len(index) if isinstance(index, (list, tuple)) else 1
            if first >= start:
                sizes.append(size)
                yield epoch, first, index
            first += size

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    @property
    def stateful(self) -> Any:
        """The sampler or batch sampler that has a state of its own; None if neither has."""
        for part in (self._sampler, getattr(self._sampler, "sampler", None)):
            if part is not None and has_state(part):
                return part
        return None

    @property
    def samples(self) -> int | None:
        indices: Any = self._sampler
        if type(indices) is BatchSampler:
            indices = indices.sampler
        elif self._batched:
            return None
        return len(indices) if hasattr(indices, "__len__") else None


class _Map:
    """A DataLoader over a map-style dataset."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._seed = seed
        dataset = KeyedDataset(loader.dataset, seed, loader.collate_fn)
        self._keys = _Keys(loader, seed, bare=not dataset.has_use_for_keys)
        self._dataset = dataset if dataset.has_use_for_keys else loader.dataset
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._loader = _rewired(loader, dataset=self._dataset, **{replaced: self._keys})
        self._stateful = self._keys.stateful
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._keys)

    def epoch_state(self) -> Any:
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    @property
    def epoch_samples(self) -> int | None:
        return self._keys.samples

    def iter_from(self, position: Position) -> Iterator[tuple[Any, Position]]:
        check_position(position)
        sizes = self._keys.begin_at(position)
        cast(torch.Generator, self._loader.generator).manual_seed(
            derive_seed(self._seed, "worker", position.epoch)
        )
        epoch, samples = position.epoch, position.samples
        if self._stateful is not None and position.state is not None:
            self._stateful.load_state_dict(copy.deepcopy(position.state))
        state = self.epoch_state()  # before anything of this epoch is drawn
        for batch in self._loader:
            samples += sizes.popleft()
            yield batch, Position(epoch, samples, state)

    def repeats(self) -> bool:
        """Build the first sample of epoch 0 twice under one key, and compare: False if its randomness is out of reach.

        With workers it is built in a forked process, as a worker would do, so that a file that the dataset opens when it is first
        read is not shared with the workers to come. True where that cannot be tried.
        """
        if not isinstance(self._dataset, KeyedDataset):
            return True
        if not self._loader.num_workers:
            return self._first_repeats()
        if not sys.platform.startswith("linux"):
            return True
        try:
            return bool(ask_child(self._first_repeats, seconds=_PROBE_SECONDS))
        except RuntimeError:
            return True  # the trouble comes up again where the loader is read

    def _first_repeats(self) -> bool:
        with isolated_generators():
            first_key = next(iter(self._keys), None)
            if first_key is None:
                return True
            epoch, first, index = first_key
            if self._loader.batch_sampler is not None:
                index = index[0]
            one, two = (self._dataset[epoch, first, index] for _ in range(2))
        return _same(one, two)


class _Stream:
    """A DataLoader over an iterable dataset: it cannot be entered in the middle, so it is read from the start and dropped."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._seed = seed
        self._dataset = KeyedStream(loader.dataset, seed)
        self._counted = loader.batch_sampler is not None
        attributes: dict[str, Any] = {"dataset": self._dataset}
        if self._counted:
            attributes["collate_fn"] = CountedCollate(loader.collate_fn)
        # A worker that outlives the epoch never hears which one begins.
        self._loader = _rewired(loader, persistent_workers=False, **attributes)
        self._length = loader
        self.epoch_samples: int | None = None
        self._stateful = has_state(loader.dataset) and not loader.num_workers
        self.notes: tuple[str, ...] = ()
        if not self._stateful:
            self.notes = (
                "an iterable dataset is read from the start of its epoch after a resume, and its order depends on num_workers: "
                f"keep num_workers={loader.num_workers}",
            )

    def __len__(self) -> int:
        return len(self._length)

    def iter_from(self, position: Position) -> Iterator[tuple[Any, Position]]:
        check_position(position)
        goes_on = self._stateful and position.state is not None
        samples = position.samples if goes_on else 0
        if goes_on:
            if position.state["is_over"]:
                return
            self._dataset.load_state_dict(copy.deepcopy(position.state["dataset"]))
        self._dataset.begin_at(position.epoch, samples)
        cast(torch.Generator, self._loader.generator).manual_seed(
            derive_seed(self._seed, "worker", position.epoch)
        )
        for batch in self._loader:
            size, items = batch if self._counted else (1, batch)
            samples += size
            if samples > position.samples:
                yield items, Position(position.epoch, samples, self._state())

    def _state(self) -> Any:
        """Where the dataset is. A last batch that is short has met its end, and then its own word may be of the next epoch."""
        if not self._stateful:
            return None
        return {"is_over": self._dataset.is_over, "dataset": copy.deepcopy(self._dataset.state_dict())}


class _Batches:
    """A plain iterable of ready-made batches, in its own order; one batch counts as one sample."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._stateful = has_state(batches)
        self.notes: tuple[str, ...] = ()
        if not isinstance(batches, (list, tuple)) and not self._stateful:
            self.notes = (
                f"a {type(batches).__name__} is taken as it is: it must give the same batches whenever an epoch is resumed, and "
                "randomness inside it is not keyed",
            )

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    @property
    def epoch_samples(self) -> int | None:
        return len(self) if hasattr(self._batches, "__len__") else None

    def iter_from(self, position: Position) -> Iterator[tuple[Any, Position]]:
        if callable(getattr(self._batches, "set_epoch", None)):
            self._batches.set_epoch(position.epoch)  # type: ignore[attr-defined]
        check_position(position)
        batches: Any = self._batches
        goes_on = self._stateful and position.state is not None
        if goes_on:
            batches.load_state_dict(copy.deepcopy(position.state))
        rest = iter(batches) if goes_on else islice(batches, position.samples, None)
        for samples, batch in enumerate(rest, position.samples + 1):
            state = copy.deepcopy(batches.state_dict()) if self._stateful else None
            yield batch, Position(position.epoch, samples, state)


def has_state(thing: Any) -> bool:
    """Whether an object says where it is and can be put there: it has `state_dict` and `load_state_dict`."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _same(one: Any, two: Any) -> bool:
    """Whether two samples are equal as far as their tensors, arrays, numbers and texts go; unknown objects count as equal."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.shape == two.shape and _same_bits(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return isinstance(two, (list, tuple)) and len(one) == len(two) and all(map(_same, one, two))
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        return hasattr(two, "tobytes") and bool(one.tobytes() == two.tobytes())
    if isinstance(one, (int, float, str, bytes)):
        return bool(one == two) or one != one
    return True


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    both_nan = (one != one) & (two != two)
    return bool(((one == two) | both_nan).all())
