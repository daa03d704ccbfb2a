import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from efficio_data import Position, resumable

START = Position()


class Augmented(Dataset):
    """Draws from every generator that people use, and from one of its own."""

    def __init__(self, size=50):
        self.size = size
        self.own = np.random.default_rng(3)
        self.built = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.built.append(index)
        return index, torch.rand(2), random.random(), np.random.rand(), self.own.random()


class Whole(Augmented):
    def __getitems__(self, indices):
        shift = torch.rand(1).item()
        return [(index, shift) for index in indices]


def noisy_collate(samples):
    return [torch.tensor([s[0] for s in samples]), torch.rand(2)]


def taken(loader, position=START, seed=3):
    return list(resumable(loader, seed=seed).iter_from(position))


def assert_same(one, two):
    assert [position for _, position in one] == [position for _, position in two]
    for (left, _), (right, _) in zip(one, two, strict=True):
        for a, b in zip(left, right, strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


LOADERS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "drop_last": {"shuffle": True, "drop_last": True},
    "weighted": {"sampler": WeightedRandomSampler([1.0] * 25 + [5.0] * 25, 45)},
    "subset": {"sampler": SubsetRandomSampler(range(30))},
    "replacement": {"sampler": RandomSampler(range(50), replacement=True, num_samples=70)},
    "own generator": {"sampler": RandomSampler(range(50), generator=torch.Generator())},
    "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(range(50)), 8, False), "batch_size": 1},
    "varying batches": {"batch_sampler": [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10]], "batch_size": 1},
    "collate": {"shuffle": True, "collate_fn": noisy_collate},
    "single samples": {"shuffle": True, "batch_size": None},
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS.keys())
def test_any_start_gives_the_rest_of_the_uninterrupted_epoch(options):
    def loader():
        return DataLoader(Augmented(), **{"batch_size": 8, **options})

    whole = taken(loader(), Position(1))
    assert len(whole) >= 4
    for done in (1, 3, len(whole)):
        assert_same(whole[done:], taken(loader(), whole[done - 1][1]))


@pytest.mark.slow
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS.keys())
def test_the_number_of_workers_changes_nothing(options):
    def loader(workers):
        return DataLoader(Augmented(), num_workers=workers, **{"batch_size": 8, **options})

    whole = taken(loader(0), Position(1))
    assert_same(whole, taken(loader(2), Position(1)))
    assert_same(whole[2:], taken(loader(2), whole[1][1]))


def test_batched_fetching_and_subsets_are_keyed_too():
    for dataset in (Whole(), Subset(Whole(), range(10, 50))):
        whole = taken(DataLoader(dataset, batch_size=8, shuffle=True))
        assert_same(whole[2:], taken(DataLoader(dataset, batch_size=8, shuffle=True), whole[1][1]))
        assert len({batch[1].flatten()[0].item() for batch, _ in whole}) == len(whole)


def test_persistent_workers_hear_of_each_epoch():
    class Told(Augmented):
        def set_epoch(self, epoch):
            self.told = epoch

        def __getitem__(self, index):
            return index, self.told

    loader = resumable(DataLoader(Told(), batch_size=8, num_workers=1, persistent_workers=True))
    for epoch in (4, 5, 9):
        assert all((batch[1] == epoch).all() for batch, _ in loader.iter_from(Position(epoch)))


def test_persistent_workers_survive_an_epoch_that_was_left_early():
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    source = resumable(loader, seed=3)
    batches = source.iter_from(Position(0))
    next(batches)
    batches.close()
    assert_same(
        list(source.iter_from(Position(0, 8))), taken(DataLoader(Augmented(), batch_size=8, shuffle=True))[1:]
    )


def test_epochs_differ_in_order_and_in_augmentation():
    one, two = (
        taken(DataLoader(Augmented(), batch_size=50, shuffle=True), Position(e))[0][0] for e in (0, 1)
    )
    assert not torch.equal(one[0], two[0])
    assert sorted(one[0].tolist()) == sorted(two[0].tolist())
    for values in (torch.cat([one[k].flatten(), two[k].flatten()]) for k in (1, 2, 3, 4)):
        assert len(set(values.tolist())) == len(values)


def test_an_index_drawn_twice_gets_two_augmentations():
    sampler = WeightedRandomSampler([1.0, 0.0], 40)
    batch, _ = taken(DataLoader(Augmented(2), batch_size=40, sampler=sampler))[0]
    assert len(set(batch[2].tolist())) == 40


def test_no_skipped_sample_is_built():
    dataset = Augmented()
    taken(DataLoader(dataset, batch_size=8), Position(0, 40))
    assert dataset.built == list(range(40, 50))


def test_another_batch_size_goes_on_at_the_same_sample():
    order = torch.cat([b[0] for b, _ in taken(DataLoader(Augmented(), batch_size=8, shuffle=True))])
    rest = torch.cat(
        [b[0] for b, _ in taken(DataLoader(Augmented(), batch_size=5, shuffle=True), Position(0, 24))]
    )
    assert torch.equal(order[24:], rest)
    varying = {"batch_sampler": [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10]]}
    rest = [b[0].tolist() for b, _ in taken(DataLoader(Augmented(), **varying), Position(0, 6))]
    assert rest == [[6, 7, 8], [9, 10]]


def test_the_loader_itself_and_its_class_are_left_alone():
    class Mine(DataLoader):
        extra = "kept"

    loader = Mine(Augmented(), batch_size=8, shuffle=True)
    before = dict(loader.__dict__)
    source = resumable(loader)
    list(source.iter_from(Position()))
    assert loader.__dict__ == before
    assert type(source._loader) is Mine
    assert len(source) == len(loader) == 7


def test_user_code_in_a_worker_reads_and_writes_the_dataset_itself():
    class Opened(Augmented):
        def __getitem__(self, index):
            return index, self.handle

    def open_handle(worker_id):
        info = get_worker_info()
        assert info.dataset.size == 50
        info.dataset.handle = 7 + worker_id

    loader = DataLoader(Opened(), batch_size=8, num_workers=1, worker_init_fn=open_handle)
    assert all((batch[1] == 7).all() for batch, _ in taken(loader))


def test_drawing_an_order_moves_no_generator():
    loader = DataLoader(
        TensorDataset(torch.arange(20)), batch_size=4, sampler=SubsetRandomSampler(range(20)), num_workers=1
    )
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    taken(loader)
    assert torch.equal(torch.rand(1), expected)


def test_an_endless_sampler_is_drawn_as_it_is_used():
    class Endless:
        def __iter__(self):
            while True:
                yield int(torch.randint(50, (1,)))

    def first(count, position=START):
        batches = resumable(DataLoader(Augmented(), batch_size=8, sampler=Endless())).iter_from(position)
        return [next(batches) for _ in range(count)]

    whole = first(200)  # over a chunk of draws
    assert_same(whole[150:], first(50, whole[149][1]))


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(start, 30, step):
            yield i, torch.rand(1), np.random.rand()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_is_repeated_and_says_what_it_needs(workers):
    def loader():
        return DataLoader(Stream(), batch_size=4, num_workers=workers)

    whole = taken(loader(), Position(2))
    assert sum(len(batch[0]) for batch, _ in whole) == 30
    assert_same(whole[3:], taken(loader(), whole[2][1]))
    assert f"num_workers={workers}" in resumable(loader()).notes[0]
    other = taken(loader(), Position(3))
    assert not torch.equal(whole[0][0][1], other[0][0][1])


def test_a_list_of_batches_goes_on_where_it_was():
    batches = [torch.full((2,), i) for i in range(5)]
    assert [b[0].item() for b, _ in taken(batches, Position(0, 3))] == [3, 4]
    assert resumable(batches).notes == ()


def test_what_can_be_iterated_only_once_is_refused():
    with pytest.raises(TypeError, match="generator, expected a DataLoader"):
        resumable(i for i in range(3))
    with pytest.raises(TypeError, match="int, expected"):
        resumable(3)


def test_randomness_out_of_reach_is_noticed():
    hidden = random.Random(1)

    class Hidden(Augmented):
        def __getitem__(self, index):
            return index, torch.tensor(hidden.random())

    assert resumable(DataLoader(Augmented(), batch_size=4, shuffle=True)).repeats()
    assert not resumable(DataLoader(Hidden(), batch_size=4, shuffle=True)).repeats()


def test_a_spawned_worker_gives_the_same_stream():
    def loader(**options):
        return DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True, **options)

    assert_same(taken(loader()), taken(loader(num_workers=1, multiprocessing_context="spawn")))
