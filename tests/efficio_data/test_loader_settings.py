import os
import pickle
import random
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.sampler import BatchSampler, RandomSampler, WeightedRandomSampler

from efficio_data._item_cost import measure_items, time_batch
from efficio_data._loader_settings import LoaderSettings, loader_settings, measure_loader, tune_loader

LINUX = {"platform": "linux", "start_method": "fork", "cpu_count": 4, "batch_size": 32, "item_seconds": 5e-3}
MB = 10**6
needs_fork = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="workers are added on Linux only"
)


class Slow(Dataset):
    """Samples that say which they are, each taking a little over a millisecond."""

    def __init__(self, size=64, seconds=1.2e-3):
        self.size, self.seconds, self.opened = size, seconds, None

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.opened = index
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return torch.tensor(float(index)), index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


# decide


def test_a_gpu_gets_a_worker_for_each_cpu_and_pinned_memory():
    settings = loader_settings(**LINUX, device_type="cuda")
    assert (settings.num_workers, settings.pin_memory, settings.prefetch_factor) == (4, True, 2)
    assert (
        settings.reason
        == "4 workers: a sample takes 5 ms, 4 CPUs usable; memory is pinned for the copy to the GPU"
    )


def test_training_on_the_cpu_keeps_one_cpu_and_pins_nothing():
    settings = loader_settings(**LINUX)
    assert (settings.num_workers, settings.pin_memory) == (3, False)
    assert loader_settings(**LINUX | {"cpu_count": 1}).num_workers == 0


def test_memory_is_not_pinned_where_batches_are_on_the_gpu_already():
    assert not loader_settings(**LINUX, device_type="cuda", pinnable=False).pin_memory


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        pytest.param({"iterable": True}, "IterableDataset", id="iterable"),
        pytest.param({"platform": "win32", "start_method": "spawn"}, "spawn", id="windows"),
        pytest.param({"platform": "darwin", "start_method": "spawn"}, "darwin", id="macos"),
        pytest.param({"platform": "darwin", "start_method": "fork"}, "darwin", id="macos-with-fork"),
        pytest.param({"start_method": "forkserver"}, "forkserver", id="forkserver"),
        pytest.param({"in_memory": True}, "in memory", id="in-memory"),
        pytest.param({"item_seconds": 49e-6, "batch_size": 4096}, "49 us", id="cheap-items"),
        pytest.param({"item_seconds": 1e-4, "batch_size": 8}, "a batch takes", id="cheap-batches"),
        pytest.param({"batch_bytes": 400 * MB}, "handing it over", id="cheaper-than-their-bytes"),
        pytest.param({"item_seconds": None}, "not known", id="unknown"),
        pytest.param({"owns_generator": True}, "same numbers", id="owned-generator"),
        pytest.param({"trouble": "a sample failed"}, "a sample failed", id="fails-in-a-fork"),
    ],
)
def test_no_workers_are_added_where_they_do_harm_and_the_reason_says_so(facts, word):
    settings = loader_settings(**LINUX | {"device_type": "cuda"} | facts)
    assert settings.num_workers == 0
    assert settings.prefetch_factor is None
    assert settings.reason.startswith("no workers: ")
    assert word in settings.reason


def test_persistent_workers_stay_as_set_and_need_workers():
    assert loader_settings(**LINUX, persistent_workers=True).persistent_workers
    assert not loader_settings(**LINUX).persistent_workers
    assert not loader_settings(**LINUX, iterable=True, persistent_workers=True).persistent_workers


@pytest.mark.parametrize("free_mb", [0, 64, 79, 80, 160, 500, 700, 20_000])
@pytest.mark.parametrize("batch_mb", [1, 40])
def test_batches_under_way_fill_at_most_half_of_the_shared_memory(free_mb, batch_mb):
    settings = loader_settings(
        **LINUX | {"item_seconds": 0.5},
        device_type="cuda",
        batch_bytes=batch_mb * MB,
        shm_free_bytes=free_mb * MB,
    )
    assert settings.num_workers * (settings.prefetch_factor or 0) * batch_mb <= free_mb / 2
    assert settings.num_workers == min(4, free_mb // 2 // batch_mb // (settings.prefetch_factor or 1))
    if settings.num_workers < 4:
        assert "free shared memory" in settings.reason


def test_workers_that_the_user_set_stay_and_short_shared_memory_is_told():
    settings = loader_settings(
        **LINUX | {"num_workers": 4, "prefetch_factor": 3}, batch_bytes=40 * MB, shm_free_bytes=64 * MB
    )
    assert (settings.num_workers, settings.prefetch_factor) == (4, 1)
    assert settings.reason.startswith(
        "4 workers as set by the caller, 1 batch ahead each: batches of 40 MB in 64 MB"
    )
    assert "bus error" in settings.reason
    enough = loader_settings(
        **LINUX | {"num_workers": 4, "prefetch_factor": 3}, batch_bytes=MB, shm_free_bytes=64 * MB
    )
    assert (enough.num_workers, enough.prefetch_factor) == (4, 3)
    assert enough.reason == "4 workers as set by the caller"


@pytest.mark.parametrize(
    "facts", [{"iterable": True}, {"platform": "win32", "start_method": "spawn"}], ids=["iterable", "spawn"]
)
def test_workers_that_the_user_set_stay_where_none_would_be_added(facts):
    assert loader_settings(**LINUX | {"num_workers": 2} | facts).num_workers == 2


def test_workers_that_the_user_set_on_data_in_memory_are_told_to_be_slower():
    settings = loader_settings(**LINUX | {"num_workers": 2, "in_memory": True})
    assert settings.num_workers == 2
    assert "0 would be faster" in settings.reason


def test_workers_that_the_user_set_but_cannot_start_are_an_error_naming_the_part():
    facts = LINUX | {
        "start_method": "spawn",
        "platform": "win32",
        "unpicklable": "its collate_fn cannot be pickled (lambda)",
    }
    with pytest.raises(
        ValueError, match=r"num_workers=2 cannot start on win32 by spawn: its collate_fn cannot be pickled"
    ):
        loader_settings(**facts, num_workers=2)
    assert loader_settings(**facts).num_workers == 0


def test_no_more_workers_than_batches_are_added():
    assert loader_settings(**LINUX, batch_count=2, device_type="cuda").num_workers == 2
    assert loader_settings(**LINUX | {"cpu_count": 64}, device_type="cuda").num_workers == 8


# observe


@needs_fork
def test_slow_samples_are_measured_and_get_workers():
    cost = measure_items(DataLoader(Slow(), batch_size=16))
    assert cost.item_seconds >= 1.2e-3
    assert (cost.batch_size, cost.batch_bytes, cost.trouble) == (16, 16 * (4 + 8), "")
    settings = measure_loader(DataLoader(Slow(), batch_size=16), device="cuda")
    assert settings.num_workers == min(len(os.sched_getaffinity(0)), 4)
    assert settings.pin_memory


@needs_fork
def test_measuring_moves_no_generator_and_does_not_read_the_dataset_of_this_process():
    class Drawing(Slow):
        def __init__(self):
            super().__init__(seconds=0)
            self.generator = np.random.default_rng(0)

        def __getitem__(self, index):
            torch.rand(1), random.random(), np.random.rand(), self.generator.random()
            return super().__getitem__(index)

    own = torch.Generator()
    loader = DataLoader(Drawing(), batch_size=8, shuffle=True, generator=own)

    def states():
        legacy = np.random.get_state()
        return pickle.dumps(
            [
                torch.get_rng_state().tolist(),
                random.getstate(),
                (legacy[1].tolist(), legacy[2:]),
                loader.dataset.generator.bit_generator.state,
                own.get_state().tolist(),
            ]
        )

    before = states()
    settings = measure_loader(loader, device="cpu", rekeyed=True)
    assert states() == before
    assert loader.dataset.opened is None
    assert " takes " in settings.reason  # it was timed
    next(iter(loader))
    assert states() != before  # it does draw


@needs_fork
@pytest.mark.parametrize(
    ("sampler", "size"),
    [
        pytest.param(
            {"sampler": WeightedRandomSampler([0.0, 1.0] * 32, 10), "batch_size": 4}, 4, id="weighted"
        ),
        pytest.param({"batch_sampler": [["a", "b", "c"], ["a"]]}, 3, id="keys-that-are-no-numbers"),
        pytest.param(
            {"batch_sampler": BatchSampler(RandomSampler(range(9)), 5, False)}, 5, id="batch-sampler"
        ),
        pytest.param({"batch_size": None}, 1, id="no-batching"),
        pytest.param({"sampler": iter(range(7)), "batch_size": 2}, 2, id="sampler-without-length"),
    ],
)
def test_the_loaders_own_sampler_says_what_is_timed(sampler, size):
    class Any(Slow):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] if isinstance(index, int) else torch.zeros(1)

    loader = DataLoader(Any(seconds=0), **sampler)
    cost = measure_items(loader)
    assert (cost.trouble, cost.batch_size) == ("", size)
    measure_loader(loader, device="cpu")
    assert len(list(loader)) > 0  # an iterator as a sampler was not used up


@needs_fork
@pytest.mark.parametrize(
    ("fails", "word"),
    [
        pytest.param(lambda: 1 / 0, "ZeroDivisionError: division by zero", id="exception"),
        pytest.param(lambda: os._exit(3), "exit code 3", id="death"),
    ],
)
def test_a_sample_that_fails_in_a_fork_means_no_workers_and_the_reason_has_the_error(fails, word):
    class Failing(Slow):
        def __getitem__(self, index):
            return fails()

    settings = measure_loader(DataLoader(Failing()), device="cuda")
    assert settings.num_workers == 0
    assert not settings.pin_memory
    assert word in settings.reason


@needs_fork
def test_a_sample_that_hangs_in_a_fork_means_no_workers(monkeypatch):
    monkeypatch.setattr("efficio_data._child._PATIENCE_SECONDS", 0.2)
    assert "made no sample within" in measure_items(DataLoader(Slow(seconds=60)), seconds=0.1).trouble


@needs_fork
def test_an_empty_loader_is_no_trouble():
    assert measure_loader(DataLoader([]), device="cpu").num_workers == 0


def test_expensive_samples_are_cut_off_and_the_bytes_estimated():
    ticks = iter([0.0, 0.1, *(0.1 + 0.3 * n for n in range(1, 100))])
    cost = time_batch(DataLoader(Slow(seconds=0), batch_size=32), seconds=1.0, clock=lambda: next(ticks))
    reading, collating = 0.3 + 0.1, 0.3 / 4  # four samples, the first not counted, and looks at the clock
    assert cost.item_seconds == pytest.approx(reading + collating, rel=0.1)
    assert (cost.batch_size, cost.batch_bytes) == (32, 32 * (4 + 8))  # a float and an index


def test_batched_reads_and_collation_count():
    class Batched(Slow):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    clock = iter(float(n) for n in range(10))
    cost = time_batch(DataLoader(Batched(seconds=0), batch_size=4), seconds=10, clock=lambda: next(clock))
    assert cost.item_seconds == pytest.approx(
        1 / 4 + 1 / 4
    )  # one second to read the four, one to collate them


@needs_fork
@pytest.mark.parametrize("seconds", [0, 0.3], ids=["whole-batch", "cut-off"])
def test_a_collation_that_fails_in_a_fork_is_found_however_slow_the_samples(seconds):
    def to_a_device(items):
        return torch.stack([number for number, _ in items]).to("meta")

    loader = DataLoader(Slow(seconds=seconds), batch_size=32, collate_fn=to_a_device)
    settings = measure_loader(loader, device="cuda", seconds=0.1)
    assert settings.num_workers == 0
    assert not settings.pin_memory
    assert "on a device already" in settings.reason


def to_a_device(items):
    return torch.stack([item[0] for item in items]).to("meta")


def to_sparse(items):
    return torch.stack([number for number, _ in items]).to_sparse()


TENSORS = TensorDataset(torch.zeros(8, 2))


@pytest.mark.parametrize(
    ("loader", "pinned"),
    [
        pytest.param(DataLoader(TENSORS), True, id="tensors"),
        pytest.param(DataLoader(TENSORS, collate_fn=to_a_device), False, id="tensors-moved-by-collate"),
        pytest.param(DataLoader(Slow(seconds=0)), sys.platform.startswith("linux"), id="items"),
        pytest.param(DataLoader(Slow(seconds=0), collate_fn=to_sparse), False, id="sparse"),
        pytest.param(DataLoader(Stream()), False, id="stream"),
        pytest.param(DataLoader(Stream(), num_workers=1), True, id="stream-in-a-worker"),
        pytest.param(DataLoader(Stream(), pin_memory=True), True, id="as-the-user-set"),
    ],
)
def test_memory_is_pinned_only_where_the_batches_are_certain_to_be_on_the_cpu(loader, pinned):
    assert measure_loader(loader, device="cuda").pin_memory is pinned


def test_memory_is_not_pinned_for_batches_that_could_not_be_seen(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert not measure_loader(DataLoader(Slow(), collate_fn=to_a_device), device="cuda").pin_memory


@needs_fork
def test_an_iterable_dataset_is_not_measured_and_yields_each_sample_once():
    tuned = tune_loader(DataLoader(Stream(), batch_size=None), device="cuda")
    assert tuned.num_workers == 0
    assert [int(n) for n in tune_loader(DataLoader(Stream(), batch_size=None), device="cpu")] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_dataset_in_memory_is_seen_through_a_subset():
    data = TensorDataset(torch.zeros(8, 2))
    subset = torch.utils.data.Subset(torch.utils.data.Subset(data, range(6)), range(4))
    assert "in memory" in measure_loader(DataLoader(subset), device="cpu").reason or sys.platform != "linux"


@needs_fork
def test_a_generator_that_the_dataset_owns_gets_no_workers_unless_it_is_rekeyed():
    data = Slow()
    data.generator = np.random.default_rng(0)
    loader = DataLoader(data, batch_size=16)
    assert "same numbers" in measure_loader(loader, device="cuda").reason
    assert measure_loader(loader, device="cuda", rekeyed=True).num_workers > 0


def test_a_lambda_under_spawn_gets_no_workers_or_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: "spawn")
    settings = measure_loader(DataLoader(Slow(), collate_fn=lambda items: items), device="cpu")
    assert settings.num_workers == 0
    assert "spawn" in settings.reason
    with pytest.raises(ValueError, match=r"its collate_fn cannot be pickled .*lambda"):
        measure_loader(DataLoader(Slow(), collate_fn=lambda items: items, num_workers=2), device="cpu")


@needs_fork
def test_the_start_method_of_the_process_stays_unfixed():
    code = (
        "import multiprocessing, torch; from torch.utils.data import DataLoader; from efficio_data._loader_settings import measure_loader;"
        "measure_loader(DataLoader(list(range(8))), device='cpu'); assert multiprocessing.get_start_method(allow_none=True) is None"
    )
    assert (
        os.spawnve(
            os.P_WAIT,
            sys.executable,
            [sys.executable, "-c", code],
            os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        == 0
    )


# apply


class Special(DataLoader):
    pass


def collate(items):
    return items


def init(worker):
    pass


def test_a_tuned_loader_keeps_its_class_and_all_other_options():
    generator = torch.Generator()
    loader = Special(
        Slow(),
        batch_size=5,
        shuffle=True,
        drop_last=True,
        generator=generator,
        collate_fn=collate,
        worker_init_fn=init,
    )
    loader.mark = "mine"
    before = dict(vars(loader))
    tuned = tune_loader(loader, LoaderSettings(2, False, True, 3, "because"))
    assert type(tuned) is Special
    assert vars(loader) == before
    changed = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    assert vars(tuned) == before | changed
    assert tuned.sampler is loader.sampler
    assert len(tuned) == 12


@needs_fork
def test_a_tuned_loader_yields_the_same_batches_from_workers_and_shares_no_iterator():
    loader = DataLoader(Slow(seconds=0), batch_size=8, num_workers=1, persistent_workers=True)
    running = iter(loader)
    next(running)
    tuned = tune_loader(loader, LoaderSettings(2, False, False, 2, ""))
    assert tuned._iterator is None
    assert loader._iterator is running
    one, two = (
        [batch[1] for batch in tuned],
        [batch[1] for batch in DataLoader(Slow(seconds=0), batch_size=8)],
    )
    assert len(one) == len(two) == 8
    assert all(map(torch.equal, one, two))
    assert len(list(running)) == 7


@needs_fork
def test_one_call_measures_and_tunes():
    tuned = tune_loader(DataLoader(Slow(), batch_size=16), device="cpu")
    assert tuned.num_workers == min(len(os.sched_getaffinity(0)) - 1, 4)
    assert len({int(n) for batch in tuned for n in batch[1]}) == 64


@needs_fork
def test_global_numpy_draws_differ_between_the_samples_of_tuned_workers():
    class Drawing(Slow):
        def __getitem__(self, index):
            return np.random.rand()

    tuned = tune_loader(DataLoader(Drawing(8), batch_size=1), LoaderSettings(2, False, False, 2, ""))
    assert len({float(batch) for _ in range(2) for batch in tuned}) == 16


@pytest.mark.parametrize("call", [tune_loader, measure_loader])
def test_what_is_not_a_dataloader_is_refused(call):
    with pytest.raises(TypeError, match="loader is a list, expected a torch DataLoader"):
        call([1, 2])
