"""Samplers, streams and iterables that say where they are: their word is used."""

import copy
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from efficio_data import Position, resumable

SIZE = 23


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, torch.rand(1).item()


class Remembering(Sampler):
    """An order that depends on what the sampler was through, and draws from the global generator as well."""

    def __init__(self, size=SIZE):
        self.size = size
        self.turns = 0

    def __len__(self):
        return self.size

    def __iter__(self):
        shift, self.turns = 7 * self.turns + 1, self.turns + 1
        order = torch.randperm(self.size).tolist()
        return iter([(index + shift) % self.size for index in order])

    def state_dict(self):
        return {"turns": self.turns}

    def load_state_dict(self, state):
        self.turns = state["turns"]


class Batches(BatchSampler):
    """The state is that of the sampler inside."""


class RememberingBatches(Remembering):
    def __iter__(self):
        indices = list(super().__iter__())
        return iter([indices[at : at + 5] for at in range(0, self.size, 5)])

    def __len__(self):
        return -(-self.size // 5)


def make_loader(kind, workers=0):
    if kind == "sampler":
        return DataLoader(Numbers(), 4, sampler=Remembering(), num_workers=workers)
    if kind == "sampler in a batch sampler":
        return DataLoader(Numbers(), batch_sampler=Batches(Remembering(), 4, False), num_workers=workers)
    if kind == "batch sampler":
        return DataLoader(Numbers(), batch_sampler=RememberingBatches(), num_workers=workers)
    return DataLoader(Numbers(), batch_size=None, sampler=Remembering(), num_workers=workers)


def plain(batch):
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]


def read(source, position, epochs, limit=None, next_epoch=None):
    """Batches of some epochs from a position, and the position after the last of them."""
    next_epoch = next_epoch or (lambda epoch: Position(epoch, state=source.epoch_state()))
    taken = []
    for epoch in range(position.epoch, epochs):
        start = position if epoch == position.epoch else Position(epoch)
        for batch, after in source.iter_from(start):
            taken.append(plain(batch))
            position = after
            if len(taken) == limit:
                return taken, position
        position = next_epoch(epoch + 1)
    return taken, position


@pytest.mark.parametrize("workers", [(0, 0), (2, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("kind", ["sampler", "sampler in a batch sampler", "batch sampler", "single"])
def test_a_sampler_goes_on_with_what_it_remembers(kind, workers):
    before, after = workers
    whole, _ = read(resumable(make_loader(kind, before), seed=3), Position(), 3)
    assert whole[0] != whole[len(whole) // 3]
    per_epoch = len(whole) // 3
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 2, 2 * per_epoch):
        source = resumable(make_loader(kind, before), seed=3)
        first, position = read(source, Position(), 3, limit=stop)
        if stop % per_epoch == 0:  # the loop has seen the epoch end
            position = Position(position.epoch + 1, state=source.epoch_state())
        rest, _ = read(resumable(make_loader(kind, after), seed=3), position, 3)
        assert first + rest == whole, stop


def test_a_position_keeps_the_state_that_it_was_given():
    source = resumable(make_loader("sampler"), seed=3)
    _, position = read(source, Position(), 3, limit=2)
    kept = copy.deepcopy(position.state)
    read(source, position, 3)
    assert position.state == kept == {"turns": 0}


def test_a_sampler_without_a_state_leaves_positions_as_they_were():
    source = resumable(DataLoader(Numbers(), 4, shuffle=True), seed=3)
    _, position = read(source, Position(), 1, limit=2)
    assert position.state is None
    assert source.epoch_state() is None


class Stream(IterableDataset):
    """Says where it is, and counts what it had to build."""

    def __init__(self):
        self.at = 0
        self.built = 0

    def __iter__(self):
        while self.at < SIZE:
            self.at += 1
            self.built += 1
            yield self.at, torch.rand(1).item()
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_stream_goes_on_where_it_says_it_is_and_builds_nothing_before(batch_size):
    def source_of(stream):
        return resumable(DataLoader(stream, batch_size), seed=3)

    whole, _ = read_stream(source_of(Stream()), Position(), 2)
    per_epoch = len(whole) // 2
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        first, position = read_stream(source_of(Stream()), Position(), 2, limit=stop)
        stream = Stream()
        rest, _ = read_stream(source_of(stream), position, 2)
        assert first + rest == whole, stop
        assert stream.built == 2 * SIZE - position.epoch * SIZE - position.samples
    assert resumable(DataLoader(Stream(), batch_size)).notes == ()


def test_with_workers_a_stream_is_read_from_the_start_and_that_is_told():
    source = resumable(DataLoader(Stream(), 4, num_workers=2), seed=3)
    assert "read from the start of its epoch" in source.notes[0]
    whole, _ = read_stream(source, Position(), 1)
    first, position = read_stream(
        resumable(DataLoader(Stream(), 4, num_workers=2), seed=3), Position(), 1, limit=3
    )
    rest, _ = read_stream(resumable(DataLoader(Stream(), 4, num_workers=2), seed=3), position, 1)
    assert first + rest == whole


def read_stream(source, position, epochs, limit=None):
    return read(source, position, epochs, limit, next_epoch=Position)


class Loader:
    """An iterable of batches that is no DataLoader."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        for number in itertools.count(self.at):
            if number == 10:
                self.at = 0
                return
            self.at = number + 1
            yield torch.tensor([number])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_an_iterable_of_batches_goes_on_where_it_says_it_is():
    source = resumable(Loader())
    assert source.notes == ()
    some = list(itertools.islice(source.iter_from(Position()), 4))
    taken, position = [batch.item() for batch, _ in some], some[-1][1]
    assert position.state == {"at": 4}
    rest = [batch.item() for batch, _ in resumable(Loader()).iter_from(position)]
    assert taken + rest == list(range(10))
