import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from efficio import GPULoader
from efficio._source import length, open_source, repeats
from efficio_data import Position

CPU = torch.device("cpu")


def tensors(count=8):
    return TensorDataset(torch.arange(float(count)))


def values(source, position=Position()):  # noqa: B008  a Position is frozen
    return [batch[0].tolist() for batch, _ in source.iter_from(position)]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(tensors(), 2, shuffle=True),
        GPULoader.from_tensors(torch.arange(8.0), torch.zeros(8), 2, shuffle=True, device="cpu"),
        [[torch.tensor([0.0, 1.0])], [torch.tensor([2.0, 3.0])]],
    ],
    ids=["DataLoader", "GPULoader", "list"],
)
def test_every_kind_of_loader_can_start_anywhere(loader):
    source, _ = open_source(loader, seed=3, device=CPU)
    places = [after for _, after in source.iter_from(Position())]
    whole = values(source)
    assert len(whole) == length(source)
    for number, place in enumerate(places, 1):
        assert values(source, place) == whole[number:]


def test_the_order_follows_from_the_seed_alone():
    def order(seed):
        torch.rand(1)
        return values(open_source(DataLoader(tensors(), 2, shuffle=True), seed=seed, device=CPU)[0])

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_what_was_done_to_a_loader_is_said():
    _, applied = open_source(DataLoader(tensors(), 2), seed=0, device=CPU)
    assert len(applied) == 1
    _, applied = open_source(
        GPULoader.from_tensors(torch.ones(4), torch.ones(4), 2, device="cpu"), seed=0, device=CPU
    )
    assert applied == ("the data set lives on cpu",)
    assert open_source([1], seed=0, device=CPU)[1] == ()


class Subclass(DataLoader):
    pass


def test_the_users_loader_is_left_as_it_was():
    loader = Subclass(tensors(), 2, shuffle=True)
    before = dict(vars(loader))
    source, _ = open_source(loader, seed=0, device=CPU)
    values(source)
    assert dict(vars(loader)) == before


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5.0))


def test_the_length_of_a_stream_is_unknown():
    assert length(open_source(DataLoader(Stream(), 2), seed=0, device=CPU)[0]) is None
    assert length(open_source([1, 2], seed=0, device=CPU)[0]) == 2


class Drawn(Dataset):
    """Draws from a generator of torch, or from one that no key reaches."""

    def __init__(self, keyed):
        hidden = torch.Generator().manual_seed(1)
        self.draw = (lambda: torch.rand(1)) if keyed else (lambda: torch.rand(1, generator=hidden))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.draw()


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "hidden"])
def test_randomness_out_of_reach_is_found_by_building_a_sample_twice(keyed):
    source, _ = open_source(DataLoader(Drawn(keyed), 2), seed=0, device=CPU)
    assert repeats(source) is keyed


def test_what_cannot_be_tried_counts_as_repeating():
    assert repeats(open_source([1], seed=0, device=CPU)[0])


@pytest.mark.parametrize(
    ("loader", "numbers"),
    [
        ([], ["list"]),
        (DataLoader(tensors(0), 4), ["0 samples", "batch_size=4"]),
        (DataLoader(tensors(3), 4, drop_last=True), ["3 samples", "batch_size=4", "drop_last=True"]),
    ],
    ids=["list", "empty", "drop_last"],
)
def test_a_loader_without_batches_is_refused_with_its_numbers(loader, numbers):
    with pytest.raises(ValueError, match="no batches") as info:
        open_source(loader, seed=0, device=CPU)
    for number in numbers:
        assert number in str(info.value)
