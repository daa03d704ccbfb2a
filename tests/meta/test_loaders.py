"""Whatever the loader, a run that is stopped in mid-epoch gets the values that it would have got: samples, order and all draws."""

import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import efficio

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, BATCH, EPOCHS = 40, 6, 2


class Drawing(Dataset):
    """Each sample is its index and draws from everything that draws, generators of its own included."""

    def __init__(self, count=COUNT):
        self.count = count
        self.own = torch.Generator().manual_seed(1)
        self.modern = np.random.default_rng(2)
        self.old = np.random.RandomState(3)
        self.plain = random.Random(4)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draws = [
            random.random(),
            np.random.rand(),
            torch.rand(1).item(),
            torch.rand(1, generator=self.own).item(),
        ]
        draws += [self.modern.random(), self.old.rand(), self.plain.random()]
        return torch.tensor([index, *draws], dtype=torch.float64)


class Batched(Drawing):
    """Gives a whole batch at once, with one draw for all of it."""

    def __getitems__(self, indices):
        shift = random.random()
        return [self[index] + shift for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(COUNT):
            yield torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()])


class Halves:
    """A batch sampler of the user's, with batches of uneven sizes and draws of its own."""

    def __len__(self):
        return 8

    def __iter__(self):
        order = np.random.permutation(COUNT).tolist()
        for start in range(0, COUNT, 10):
            cut = random.randrange(1, 9)
            yield order[start : start + cut]
            yield order[start + cut : start + 10]


def mixed(samples):
    """Mixes each batch with itself by a drawn share, as MixUp does."""
    batch = torch.stack(samples)
    share = float(np.random.beta(1.0, 1.0))
    return share * batch + (1 - share) * batch[torch.randperm(len(batch))]


LOADERS = {
    "draws": lambda **more: DataLoader(Drawing(), BATCH, shuffle=True, **more),
    "in-order": lambda **more: DataLoader(Drawing(), BATCH, **more),
    "drop-last": lambda **more: DataLoader(Drawing(), BATCH, shuffle=True, drop_last=True, **more),
    "mixed-in-collate": lambda **more: DataLoader(Drawing(), BATCH, shuffle=True, collate_fn=mixed, **more),
    "whole-batches": lambda **more: DataLoader(Batched(), BATCH, shuffle=True, **more),
    "with-replacement": lambda **more: DataLoader(
        Drawing(), BATCH, sampler=RandomSampler(range(COUNT), replacement=True, num_samples=50), **more
    ),
    "own-generator": lambda **more: DataLoader(
        Drawing(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **more
    ),
    "batch-sampler": lambda **more: DataLoader(Drawing(), batch_sampler=Halves(), **more),
    "torch-batch-sampler": lambda **more: DataLoader(
        Drawing(), batch_sampler=BatchSampler(RandomSampler(range(COUNT)), 7, True), **more
    ),
    "subset": lambda **more: DataLoader(Subset(Drawing(), range(3, 33)), BATCH, shuffle=True, **more),
    "concatenated": lambda **more: DataLoader(
        ConcatDataset([Drawing(15), Drawing(17)]), BATCH, shuffle=True, **more
    ),
    "no-batching": lambda **more: DataLoader(Drawing(), batch_size=None, shuffle=True, **more),
}
UNWORKED = {
    "tensors": lambda: DataLoader(
        TensorDataset(torch.arange(COUNT, dtype=torch.float64)[:, None]), BATCH, shuffle=True
    ),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "list": lambda: [torch.full((3, 1), float(number)) for number in range(8)],
    "numpy": lambda: efficio.GPULoader.from_tensors(
        np.arange(COUNT, dtype=np.float32)[:, None], list(range(COUNT)), BATCH, shuffle=True, drop_last=True
    ),
}
workers = pytest.mark.skipif(sys.platform == "win32", reason="a worker takes seconds to start there")


def values(storage, loader, stops=()):
    """All batches of one session, with what the body draws; ends by SIGTERM after the first body whose number is in `stops`."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    run = efficio.Run(storage=storage, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for batch in run.loop(loader, EPOCHS):
        x = batch[0] if isinstance(batch, list) and not isinstance(batch, torch.Tensor) else batch
        x = x[0] if isinstance(x, tuple) else x
        seen.append((x.tolist(), torch.rand(1).item(), random.random(), float(np.random.rand())))
        run.backward(model(x.reshape(-1, 1)[:, :1].float().to(run.device)).mean())
        run.step()
        if run.step_count in stops:
            os.kill(os.getpid(), signal.SIGTERM)
    return seen, run


def in_parts(storage, loaders, stops):
    seen = []
    for number, make in enumerate(loaders):
        part, run = values(storage, make(), stops[number : number + 1])
        seen += part
    assert run.finished
    return seen


@pytest.mark.parametrize("name", [*LOADERS, *UNWORKED])
def test_any_loader_goes_on_where_the_run_was_stopped(name, quick_path):
    make = {**LOADERS, **UNWORKED}[name]
    whole, run = values(quick_path / "whole", make())
    assert run.finished
    per_epoch = len(whole) // EPOCHS

    # In mid-epoch, after the last batch of an epoch, and after the first of one.
    stops = [2, per_epoch, per_epoch + 1]
    assert in_parts(quick_path / "parts", [make] * 4, stops) == whole
    firsts = [str(batch[0]) for batch in whole]
    if name not in ("in-order", "stream", "list"):
        assert firsts[:per_epoch] != firsts[per_epoch:]


@workers
@pytest.mark.parametrize("name", LOADERS)
def test_any_loader_goes_on_with_workers_that_it_did_not_have(name, quick_path):
    make = LOADERS[name]
    whole, _ = values(quick_path / "whole", make())

    def worked():
        return make(num_workers=2, persistent_workers=name in ("draws", "mixed-in-collate"))

    assert in_parts(quick_path / "parts", [make, worked, make], [2, len(whole) // EPOCHS + 1]) == whole


@workers
def test_a_stream_goes_on_with_the_workers_that_it_had(quick_path):
    def make():
        return DataLoader(Stream(), BATCH, num_workers=2)

    whole, _ = values(quick_path / "whole", make())
    assert in_parts(quick_path / "parts", [make, make], [5]) == whole
