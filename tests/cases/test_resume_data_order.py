"""Cases of kind A: the order of the data after a resume."""

import json
import os
import shutil
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import efficio

SIZE, BATCH = 64, 4


def numbers(size=SIZE, batch_size=BATCH):
    return DataLoader(TensorDataset(torch.arange(size)), batch_size, shuffle=True)


def train(storage, loader, epochs=1, *, stop=None, **options):
    """One session: the sample ids of each body; ended by SIGTERM in a body, by number."""
    model = nn.Linear(1, 1)
    run = efficio.Run(storage=storage, progress=False, **options)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    seen = []
    for number, batch in enumerate(run.loop(loader, epochs)):
        ids = batch[0] if isinstance(batch, (list, tuple)) else batch
        seen.append(ids.tolist())
        if number == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        run.backward(model(ids.float()[:, None]).mean())
        run.step()
    return seen, run


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_a_child(folder, act):
    """What a function returns in a process of its own, as JSON carries it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            (folder / "returned").write_text(json.dumps(act()))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    return json.loads((folder / "returned").read_text())


@forks
@quiet_fork
def test_a_new_process_with_another_global_seed_gives_the_rest_of_the_shuffled_epoch(tmp_path):
    """A01: the order is the run's, whatever the new process has seeded or drawn before it resumes."""

    def session(folder, seed, stop=None):
        torch.manual_seed(seed)
        return train(tmp_path / folder, numbers(), stop=stop)[0]

    whole = session("whole", 0)
    before = in_a_child(tmp_path, lambda: session("parts", 0, stop=4))
    after = in_a_child(tmp_path, lambda: session("parts", 99))

    assert before + after == whole
    ids = [index for batch in before + after for index in batch]
    assert (len(before), len(ids) - len(set(ids)), len(set(range(SIZE)) - set(ids))) == (5, 0, 0)
    assert session("other", 99) != whole


@forks
@quiet_fork
@pytest.mark.parametrize("stop", [4, None], ids=["stopped", "finished"])
def test_a_run_that_has_ended_here_goes_on_in_another_process_while_this_one_lives_on(stop, tmp_path):
    """A08: a notebook whose cell has ended keeps its process, and the run is continued from another notebook or a script."""
    before, run = train(tmp_path / "run", numbers(), stop=stop)
    after = in_a_child(tmp_path, lambda: train(tmp_path / "run", numbers(), epochs=2)[0])
    whole, _ = train(tmp_path / "whole", numbers(), epochs=2, seed=run.seed)
    assert before + after == whole


def epoch_run(folder):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = efficio.Run(storage=folder, progress=False, save_every=6, scheduler_interval="epoch")
    run.prepare(model, optimizer, scheduler)
    return run, model, optimizer


def bodies_of(run, model, optimizer):
    """Four epochs of six batches: each body's epoch and learning rate."""
    for x in run.loop([torch.zeros(1, 1)] * 6, 4):
        yield run.epoch, optimizer.param_groups[0]["lr"]
        run.backward(model(x).sum())
        run.step()


def test_a_process_that_dies_after_a_save_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path):
    """A07: the periodic save falls on the last batch of epoch 1, and the process is gone before the next one."""
    dying, before = epoch_run(tmp_path / "dying"), []
    for body in bodies_of(*dying):
        while dying[0].report().saves < 1 + len(before) // 6:  # the first, and one an epoch
            time.sleep(0.001)
        if len(before) == 12:
            break
        before.append(body)
    shutil.copytree(tmp_path / "dying", tmp_path / "left")

    run, *rest = epoch_run(tmp_path / "left")
    after = list(bodies_of(run, *rest))

    assert after[0] == (2, 0.25)
    assert len(before + after) == run.step_count == 24
    assert before + after == list(bodies_of(*epoch_run(tmp_path / "whole")))


class Stream(IterableDataset):
    """Gives all of its samples in each worker, as most do."""

    def __iter__(self):
        return iter(range(6))


def test_an_iterable_dataset_in_a_loop_gets_no_workers_and_each_sample_comes_once(tmp_path):
    """A12: not only through the tuner alone; the report says why there are no workers."""
    seen, run = train(tmp_path, DataLoader(Stream(), batch_size=2))
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert any("no workers: an IterableDataset" in applied for applied in run.report().applied)


@pytest.mark.parametrize(
    ("size", "batch_size"),
    [(120, 10), (200, 20), (95, 10)],
    ids=["longer", "as-many-batches", "shorter-last-batch"],
)
def test_a_data_set_of_another_size_is_told_with_both_sizes(size, batch_size, tmp_path):
    """A13: 100 samples in batches of ten; the number of batches may be the same, and the samples are not."""
    train(tmp_path, numbers(100, 10), stop=4)
    _, run = train(tmp_path, numbers(size, batch_size))
    assert any("100 samples" in note and str(size) in note for note in run.report().notes)
