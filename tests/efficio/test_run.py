"""Run as a hostile user and as a clumsy one: what is refused, in which words, and what is never lost."""

import contextlib
import gc
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from efficio import CheckpointError, GPULoader, Run


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def samples(count=12, batch_size=4, *, shuffle=True):
    x = torch.arange(count * 3.0).reshape(count, 3) / 10
    return DataLoader(TensorDataset(x, torch.arange(count) % 2), batch_size, shuffle=shuffle)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def prepared(folder, make=linear, make_optimizer=sgd, **options):
    run = Run(storage=folder, progress=False, **options)
    model = make()
    optimizer = make_optimizer(model)
    run.prepare(model, optimizer)
    return run, model, optimizer


def train_on(run, model, batch):
    x, y = batch
    with run.autocast():
        loss = F.cross_entropy(model(x), y)
    run.backward(loss)
    return run.step()


def fit(run, model, epochs=1, loader=None, **options):
    bodies = 0
    for batch in run.loop(samples() if loader is None else loader, epochs, **options):
        train_on(run, model, batch)
        bodies += 1
    return bodies


def equal(one, two):
    mine, theirs = one.state_dict(), two.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def contents(folder):
    """All files of a storage by path, but the mark of the process that has it open."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files if not path.name.startswith("writer-")}


def one_line(info, *parts):
    text = str(info.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
    return True


# Arguments -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ({"budget": ""}, "budget=''"),
        ({"budget": 0}, "budget=0"),
        ({"budget": -1}, "budget=-1"),
        ({"budget": math.nan}, "budget=nan"),
        ({"budget": math.inf}, "budget=inf"),
        ({"budget": "2 hours"}, "budget='2 hours'"),
        ({"budget": "90"}, "budget='90'"),
        ({"budget": True}, "budget=True"),
        ({"budget": []}, "budget=[]"),
        ({"budget": "20m", "margin": "20m"}, "margin='20m'"),
        ({"budget": "20m", "margin": -1}, "margin=-1"),
        ({"save_every": 0}, "save_every=0"),
        ({"save_every": 2.5}, "save_every=2.5"),
        ({"save_every": True}, "save_every=True"),
        ({"save_every": None}, "save_every=None"),
        ({"save_every": "soon"}, "save_every='soon'"),
        ({"save_every": "0s"}, "save_every='0s'"),
        ({"keep": 0}, "keep=0"),
        ({"keep": True}, "keep=True"),
        ({"keep": "2"}, "keep='2'"),
        ({"grad_accum_steps": 0}, "grad_accum_steps=0"),
        ({"grad_accum_steps": 2.5}, "grad_accum_steps=2.5"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"precision": None}, "precision=None"),
        ({"scheduler_interval": "batch"}, "scheduler_interval='batch'"),
        ({"storage": ""}, "storage=''"),
        ({"storage": "foo://bar"}, "storage='foo://bar'"),
    ],
    ids=str,
)
def test_a_senseless_argument_is_refused_by_its_value_before_anything_is_touched(folder, arguments, value):
    with pytest.raises(ValueError, match=value.split("=")[0]) as info:
        Run(**{"storage": folder, **arguments})
    assert one_line(info, value)
    assert not folder.exists()


@pytest.mark.parametrize("storage", [5, b"run", None, ["run"]], ids=repr)
def test_a_storage_that_is_no_path_is_refused_by_its_type(storage):
    with pytest.raises(TypeError) as info:
        Run(storage=storage)
    assert one_line(info, "storage", type(storage).__name__)


@pytest.mark.parametrize("epochs", [0, -1, True, 2.5, "3", None], ids=repr)
def test_epochs_that_are_no_count_are_refused_when_the_loop_is_called(folder, epochs):
    run, _, _ = prepared(folder)
    with pytest.raises(ValueError, match="expected a whole number") as info:
        run.loop(samples(), epochs)
    assert one_line(info, f"epochs={epochs!r}")


@pytest.mark.parametrize("seed", [1.5, "3", [], math.nan, True], ids=repr)
def test_a_seed_that_is_no_whole_number_is_refused_where_it_is_given(folder, seed):
    with pytest.raises((TypeError, ValueError)) as info:
        Run(storage=folder, seed=seed)
    assert one_line(info, f"seed={seed!r}")


@pytest.mark.parametrize(
    "seed",
    [
        -1,
        0,
        2**63,
        2**64,
        10**40,
        np.int64(3),
    ],
    ids=repr,
)
def test_any_whole_number_is_a_seed_and_is_kept_by_the_resume(folder, seed):
    run, model, _ = prepared(folder, seed=seed)
    assert fit(run, model) == 3
    again, _, _ = prepared(folder)
    assert again.seed == run.seed == seed


def test_a_path_with_a_null_byte_is_refused_by_its_value():
    with pytest.raises(ValueError, match="storage") as info:
        Run(storage="a\0b")
    assert one_line(info, "storage=")


# Storage -------------------------------------------------------------------------------------------------------------------


def test_a_file_in_the_place_of_the_folder_is_named_and_left_alone(folder):
    folder.write_text("precious")
    with pytest.raises(CheckpointError) as info:
        prepared(folder)
    assert one_line(info, str(folder))
    assert folder.read_text() == "precious"


def test_storage_that_cannot_be_written_to_is_found_before_anything_is_trained(folder):
    run, model, _ = prepared(folder)
    before = model.weight.clone()
    folder.write_text("precious")
    with pytest.raises(CheckpointError) as info:
        fit(run, model)
    assert one_line(info, str(folder))
    assert torch.equal(model.weight, before)
    assert run.step_count == 0
    assert folder.read_text() == "precious"


def damage(folder, *, only_newest=False):
    steps = sorted(folder.glob("step-*"))
    for step in steps[-1:] if only_newest else steps:
        path = step / "tensors-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)


def test_with_damaged_checkpoints_only_nothing_starts_afresh_and_nothing_is_removed(folder):
    run, model, _ = prepared(folder)
    fit(run, model)
    damage(folder)
    before = contents(folder)
    with pytest.raises(CheckpointError, match="good") as info:
        prepared(folder)
    assert one_line(info, str(folder))
    after = contents(folder)
    assert before.items() <= after.items()


def test_a_damaged_newest_checkpoint_does_not_cost_the_older_one(folder):
    run, model, _ = prepared(folder)
    fit(run, model)
    damage(folder, only_newest=True)
    again, other, _ = prepared(folder)
    assert again.step_count == 0  # the one that was saved before the first step
    assert fit(again, other) == 3
    assert equal(model, other)


def test_folders_of_another_program_are_neither_read_nor_removed(folder):
    for name in ("step-000000000005", "step-1", "step-000000000005-12345678"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.pt").write_bytes(b"precious")
    before = contents(folder)
    run, model, _ = prepared(folder, save_every=1, keep=1)
    fit(run, model, epochs=3)
    assert before.items() <= contents(folder).items()
    assert prepared(folder)[0].step_count == 9


def test_storage_that_is_removed_in_mid_training_costs_no_training(folder):
    run, model, _ = prepared(folder, save_every=1)
    for batch in run.loop(samples(), 2):
        train_on(run, model, batch)
        if run.step_count == 2:
            shutil.rmtree(folder, ignore_errors=True)
    again, other, _ = prepared(folder)
    assert again.step_count == 6
    assert equal(model, other)


@contextlib.contextmanager
def blocked(folder):
    """A file stands where the folder was."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


def test_a_failed_periodic_save_is_told_and_training_goes_on(folder, capsys):
    run, model, _ = prepared(folder, save_every=1)
    told = ""
    with contextlib.ExitStack() as stack:
        for batch in run.loop(samples(2400), 1):
            train_on(run, model, batch)
            if run.step_count == 3:
                stack.enter_context(blocked(folder))
            if run.step_count > 3 and "a save failed" not in told:
                time.sleep(0.01)  # for the save in flight
                told += capsys.readouterr().out
            elif run.step_count > 3:
                stack.close()
    assert "a save failed, training goes on" in told
    assert run.step_count == 600
    assert equal(prepared(folder)[1], model)


def fit_and_block(run, model, folder, stack):
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        if run.step_count == 3:
            stack.enter_context(blocked(folder))


def test_a_failed_last_save_raises_and_a_later_save_stores_what_was_trained(folder):
    run, model, _ = prepared(folder)
    with contextlib.ExitStack() as stack:
        with pytest.raises(CheckpointError):
            fit_and_block(run, model, folder, stack)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    assert run.save()
    again, other, _ = prepared(folder)
    assert again.step_count == 3
    assert all(torch.equal(trained[name], value) for name, value in other.state_dict().items())


def test_after_a_failed_last_save_the_same_loop_saves_and_trains_no_more(folder):
    run, model, _ = prepared(folder)
    with contextlib.ExitStack() as stack, pytest.raises(CheckpointError):
        fit_and_block(run, model, folder, stack)
    assert fit(run, model) == 0
    assert prepared(folder)[0].step_count == 3


def test_the_memory_of_a_process_is_a_storage():
    place = f"memory://efficio-test-{os.getpid()}"
    run, model, _ = prepared(place)
    fit(run, model)
    assert equal(prepared(place)[1], model)


def test_a_relative_storage_stays_where_it_was_when_the_body_changes_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run, model, _ = prepared("here")
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        os.chdir(tmp_path / "elsewhere")
    assert equal(prepared(tmp_path / "here")[1], model)


# What is prepared ----------------------------------------------------------------------------------------------------------


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def frozen_first(model):
    model[0].requires_grad_(False)
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)


@pytest.mark.parametrize(
    ("make", "make_optimizer", "named"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), sgd, "0.weight is (5, 3) here"),
        (lambda: nn.Sequential(nn.Flatten(), *small()), sgd, "1.weight"),
        (lambda: small()[:2], sgd, "2.weight"),
        (lambda: nn.Sequential(*small(), nn.Linear(2, 2)), sgd, "3.weight"),
        (small, lambda m: torch.optim.Adam(m.parameters()), "it is Adam here and SGD"),
        (
            small,
            lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()], 0.1),
            "4 parameter groups here and 1",
        ),
        (small, frozen_first, "no parameter model.0.weight"),
        (lambda: small().half(), sgd, "float16"),
    ],
    ids=["wider", "renamed", "fewer", "more", "optimizer", "groups", "frozen", "half"],
)
def test_what_does_not_fit_the_checkpoint_is_named_and_neither_side_is_touched(
    folder, make, make_optimizer, named
):
    run, model, _ = prepared(folder, small)
    fit(run, model)
    before = contents(folder)
    other = make()
    weights = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(CheckpointError, match="does not fit") as info:
        Run(storage=folder, progress=False).prepare(other, make_optimizer(other))
    assert one_line(info, named, "nothing was changed")
    assert all(torch.equal(p, w) for p, w in zip(other.parameters(), weights, strict=True))
    assert contents(folder) == before


def test_a_misfit_is_mended_by_preparing_the_right_model_on_the_same_run(folder):
    run, model, _ = prepared(folder, small)
    fit(run, model, epochs=1)
    again = Run(storage=folder, progress=False)
    with pytest.raises(CheckpointError):
        again.prepare(linear())
    right = small()
    again.prepare(right, sgd(right))
    assert equal(right, model)
    assert fit(again, right, epochs=2) == 3


def test_parameters_in_another_order_get_their_own_state(folder):
    run, model, _ = prepared(folder, small)
    fit(run, model, epochs=1)
    fit(run, model, epochs=1, name="more")

    def reversed_sgd(other):
        return torch.optim.SGD(list(other.parameters())[::-1], 0.1, momentum=0.9)

    _, other, optimizer = prepared(folder, small, reversed_sgd)
    assert equal(other, model)
    buffers = [optimizer.state[p]["momentum_buffer"].shape for p in other.parameters()]
    assert buffers == [p.shape for p in other.parameters()]


@pytest.mark.parametrize(
    "thing",
    [
        object(),
        5,
        "model",
        None,
        [nn.ReLU()],
        {"model": nn.ReLU()},
        torch.zeros(3),
        samples(),
        nn.Linear,
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_has_no_state_is_refused_by_its_type(folder, thing):
    with pytest.raises(TypeError) as info:
        Run(storage=folder, progress=False).prepare(linear(), thing)
    assert one_line(info, type(thing).__name__, "state_dict")
    assert not folder.exists()


def test_preparing_nothing_is_refused(folder):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        Run(storage=folder, progress=False).prepare()


def test_an_object_that_is_prepared_again_keeps_its_name_and_its_state(folder):
    run, model, optimizer = prepared(folder)
    fit(run, model)
    weight = model.weight.clone()
    assert run.prepare(model, optimizer) == (model, optimizer)
    assert torch.equal(model.weight, weight)
    again, other, optimizer = prepared(folder)
    fit(again, other, epochs=2)
    weight = other.weight.clone()
    again.prepare(other, optimizer)
    assert torch.equal(other.weight, weight)


def test_a_scheduler_that_is_given_twice_steps_once(folder):
    run = Run(storage=folder, progress=False)
    model = linear()
    optimizer = sgd(model)
    scheduler = schedules.StepLR(optimizer, 1, gamma=0.5)
    run.prepare(model, optimizer, scheduler, scheduler)
    fit(run, model)
    assert scheduler.get_last_lr() == [0.1 * 0.5**3]


class Kept:
    """Something with a state of its own."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize(
    "name",
    ["ema", "thing", "scaler"],
)
def test_an_object_comes_back_under_any_keyword(folder, name):
    run = Run(storage=folder, progress=False)
    model = linear()
    run.prepare(model, sgd(model), **{name: Kept(7)})
    fit(run, model)
    kept = Kept()
    other = linear()
    Run(storage=folder, progress=False).prepare(other, sgd(other), **{name: kept})
    assert kept.value == 7


def test_an_object_whose_state_cannot_be_stored_is_named_before_anything_is_trained(folder):
    run, model, _ = prepared(folder)
    run.prepare(odd=Kept(object()))
    before = model.weight.clone()
    with pytest.raises(TypeError) as info:
        fit(run, model)
    assert one_line(info, "odd.value", "object")
    assert torch.equal(model.weight, before)


def test_an_object_that_the_checkpoint_does_not_know_is_told_to_be_new(folder, capsys):
    run, model, _ = prepared(folder)
    fit(run, model)
    again = Run(storage=folder, progress=False)
    other = linear()
    again.prepare(other, sgd(other), extra=Kept(5))
    assert "not in the checkpoint, so new: extra" in capsys.readouterr().out


def test_what_is_not_prepared_this_time_is_told_and_carried_on(folder, capsys):
    run, model, _ = prepared(folder)
    run.prepare(extra=Kept(5))
    fit(run, model)
    again, other, _ = prepared(folder)
    fit(again, other, epochs=2)
    assert "in the checkpoint but not prepared, kept as stored: extra" in capsys.readouterr().out
    extra = Kept()
    third = linear()
    Run(storage=folder, progress=False).prepare(third, sgd(third), extra=extra)
    assert extra.value == 5


def test_an_optimizer_of_another_model_is_told(folder, capsys):
    run = Run(storage=folder, progress=False)
    model, stale = linear(), linear()
    run.prepare(model, sgd(stale))
    fit(run, model)
    assert "optimizer" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_models_of_any_number_format_train_and_come_back(folder, dtype):
    def make():
        return nn.Linear(3, 2, dtype=dtype)

    try:
        make()(torch.zeros(1, 3, dtype=dtype))
    except RuntimeError:  # torch 2.0: not implemented for 'Half'
        pytest.skip(f"torch {torch.__version__} has no matrix product in {dtype} on a CPU")
    run, model, _ = prepared(folder, make, lambda m: torch.optim.SGD(m.parameters(), 0.01))
    for x, _ in run.loop(samples(), 1):
        run.backward(model(x.to(dtype)).abs().sum())
        run.step()
    assert equal(prepared(folder, make, lambda m: torch.optim.SGD(m.parameters(), 0.01))[1], model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_without_a_shape_is_told_what_to_do(folder):
    run = Run(storage=folder, progress=False)
    run.prepare(nn.LazyLinear(2))
    with pytest.raises(TypeError, match="run one batch through the lazy module first"):
        next(run.loop(samples(), 1))


def test_an_interrupted_prepare_can_be_called_again(folder):
    run, model, _ = prepared(folder)
    fit(run, model)

    class Interrupted(nn.Linear):
        def load_state_dict(self, *_, **__):
            raise KeyboardInterrupt

    again = Run(storage=folder, progress=False)
    with pytest.raises(KeyboardInterrupt):
        again.prepare(Interrupted(3, 2))
    other = linear()
    again.prepare(other, sgd(other))
    assert equal(other, model)
    assert fit(again, other, epochs=2) == 3


# Loaders -------------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([(torch.ones(3), 1)] * self.count)


class NoBatches:
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda: DataLoader(TensorDataset(torch.ones(0, 3)), 4),
        lambda: DataLoader([], 4),
        lambda: DataLoader(TensorDataset(torch.ones(3, 3)), 4, drop_last=True),
        lambda: DataLoader(TensorDataset(torch.ones(3, 3)), 4, drop_last=True, shuffle=True),
        lambda: DataLoader(Stream(0), 4),
        NoBatches,
    ],
    ids=["list", "empty data set", "empty list", "drop_last", "drop_last shuffled", "stream", "iterable"],
)
def test_a_loader_without_batches_is_an_error_and_costs_nothing(folder, make):
    run, model, _ = prepared(folder)
    before = model.weight.clone()
    with pytest.raises(ValueError, match="no batches") as info:
        fit(run, model, loader=make())
    assert one_line(info, "give")
    assert torch.equal(model.weight, before)
    assert fit(run, model) == 3
    assert run.finished


@pytest.mark.parametrize(
    "make",
    [
        lambda: (batch for batch in samples()),
        lambda: iter(samples()),
        lambda: enumerate(samples()),
        lambda: None,
        lambda: 5,
        lambda: TensorDataset(torch.ones(3, 3)),
        lambda: DataLoader,
    ],
    ids=["generator", "iterator", "enumerate", "None", "int", "data set", "class"],
)
def test_what_cannot_be_read_once_an_epoch_is_refused_by_its_type(folder, make):
    run, _, _ = prepared(folder)
    loader = make()
    with pytest.raises(TypeError) as info:
        run.loop(loader, 1)
    assert one_line(info, type(loader).__name__, "expected a DataLoader")


def test_labels_and_images_of_different_lengths_are_refused_with_both_lengths():
    with pytest.raises(ValueError, match="3 samples and y has 4") as info:
        GPULoader.from_tensors(torch.ones(3, 3), torch.ones(4), 2)
    assert one_line(info)


class FailsOnce(Dataset):
    """Raises at one sample until it is mended."""

    def __init__(self):
        self.broken = True

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.broken and index == 9:
            raise OSError("picture 9 cannot be read")
        return torch.full((3,), index / 10), index % 2


def test_a_data_set_that_fails_in_mid_epoch_loses_no_step_and_the_loop_goes_on_when_mended(folder, tmp_path):
    whole, expected, _ = prepared(tmp_path / "whole")
    mended = FailsOnce()
    mended.broken = False
    fit(whole, expected, loader=DataLoader(mended, 4))

    dataset = FailsOnce()
    run, model, _ = prepared(folder)
    with pytest.raises(OSError, match="picture 9"):
        fit(run, model, loader=DataLoader(dataset, 4))
    assert run.step_count == 2
    assert prepared(folder)[0].step_count == 2
    dataset.broken = False
    run, model, _ = prepared(folder)
    assert fit(run, model, loader=DataLoader(dataset, 4)) == 1
    assert equal(model, expected)


def test_a_stream_that_claims_another_length_is_taken_as_it_comes(folder):
    class Lying(Stream):
        def __len__(self):
            return 100

    run, model, _ = prepared(folder)
    assert fit(run, model, epochs=2, loader=DataLoader(Lying(6), 4)) == 4
    assert run.finished


def test_a_gpu_transform_that_cannot_be_called_is_refused(folder):
    run, _, _ = prepared(folder)
    with pytest.raises(TypeError, match="gpu_transform is a int") as info:
        run.loop(samples(), 1, gpu_transform=5)
    assert one_line(info)


def test_a_gpu_transform_that_raises_costs_no_step(folder):
    run, model, _ = prepared(folder)
    calls = []

    def fails_third(batch):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return batch

    with pytest.raises(ZeroDivisionError):
        fit(run, model, gpu_transform=fails_third)
    assert fit(run, model, gpu_transform=fails_third) == 1
    assert prepared(folder)[0].step_count == 3


def test_a_group_longer_than_the_epoch_steps_once_an_epoch_over_its_real_size(folder):
    run, model, _ = prepared(folder, grad_accum_steps=50)
    assert fit(run, model, epochs=2) == 6
    assert run.step_count == 2
    plain = linear()
    optimizer = sgd(plain)
    x, y = next(iter(samples(12, 12, shuffle=False)))
    for _ in range(2):
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Not the same bits: three sums of four are added in another order than one of twelve.
    torch.testing.assert_close(model.weight.cpu(), plain.weight, rtol=1e-4, atol=1e-6)


# Calls in the wrong place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [lambda run: run.loop(samples(), 1), lambda run: run.save(), lambda run: run.report()],
    ids=["loop", "save", "report"],
)
def test_calls_before_prepare_say_what_to_call_first(folder, call):
    with pytest.raises(RuntimeError, match=r"run\.prepare") as info:
        call(Run(storage=folder, progress=False))
    assert one_line(info)
    assert not folder.exists()


def one_step_by_hand(run, model):
    run.backward(model(torch.ones(2, 3, device=run.device)).sum())
    return run.step()


@pytest.mark.parametrize(
    "before",
    [
        lambda run, model: model(torch.ones(2, 3, device=run.device)),
        one_step_by_hand,
    ],
    ids=["forward", "step"],
)
def test_what_moved_the_model_before_the_first_loop_belongs_to_the_start(folder, before):
    run, model, _ = prepared(folder, normed)
    before(run, model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    loop = run.loop(samples(), 1)
    next(loop)
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    loop.close()


@pytest.mark.parametrize(
    "change",
    [
        one_step_by_hand,
        lambda run, model: model[0].weight.data.zero_(),
        lambda run, model: model(torch.ones(2, 3, device=run.device)),
        lambda run, model: model.load_state_dict(normed().state_dict()),
    ],
    ids=["step", "edit", "statistics", "load_state_dict"],
)
def test_a_save_after_the_loop_stores_what_is_in_memory(folder, change):
    run, model, _ = prepared(folder, normed)
    fit(run, model)
    change(run, model)
    assert run.save()
    again, other, _ = prepared(folder, normed)
    assert equal(other, model)
    assert again.step_count == run.step_count


def test_steps_between_two_loops_are_kept_or_their_loss_is_told(folder, capsys):
    run, model, _ = prepared(folder)
    fit(run, model)
    one_step_by_hand(run, model)
    weight = model.weight.clone()
    loop = run.loop(samples(), 1)
    capsys.readouterr()
    next(loop)
    assert torch.equal(model.weight, weight) or capsys.readouterr().out
    loop.close()


def test_a_save_in_the_body_is_taken_when_the_body_has_finished(folder):
    run, model, _ = prepared(folder)
    loop = run.loop(samples(), 1)
    train_on(run, model, next(loop))
    assert run.save() is False
    train_on(run, model, next(loop))
    loop.close()
    assert prepared(folder)[0].step_count == 1


def leave_by_break(run, model):
    for batch in run.loop(samples(), 2):
        train_on(run, model, batch)
        if run.step_count == 3:
            break


def leave_by_exception(run, model):
    with contextlib.suppress(ValueError):
        for batch in run.loop(samples(), 2):
            train_on(run, model, batch)
            if run.step_count == 3:
                raise ValueError("in the body")


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception], ids=["break", "exception"])
def test_a_save_after_a_loop_that_was_left_half_way_stores_no_mixture(folder, tmp_path, leave):
    whole, expected, _ = prepared(tmp_path / "whole")
    fit(whole, expected, epochs=2)
    run, model, _ = prepared(folder)
    leave(run, model)
    run.save()
    again, other, _ = prepared(folder)
    fit(again, other, epochs=2)
    assert equal(other, expected)


class Parts(nn.Module):
    """Has a loss of its own beside forward, as many models do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)

    def loss(self, x, y):
        return F.cross_entropy(self.last(self.norm(x)), y)


def parts():
    torch.manual_seed(0)
    return Parts()


def test_an_exception_after_a_method_of_the_model_moved_its_statistics_stores_no_mixture(folder, tmp_path):
    def bodies(run, model, fail):
        for x, y in run.loop(samples(), 1):
            loss = model.loss(x, y)
            if fail and run.step_count == 1:
                raise ValueError("in the body")
            run.backward(loss)
            run.step()

    whole, expected, _ = prepared(tmp_path / "whole", parts)
    bodies(whole, expected, fail=False)
    run, model, _ = prepared(folder, parts)
    with pytest.raises(ValueError, match="in the body"):
        bodies(run, model, fail=True)
    again, other, _ = prepared(folder, parts)
    bodies(again, other, fail=False)
    assert equal(other, expected)


def test_an_exception_after_a_counter_of_the_user_moved_stores_no_mixture(folder):
    def bodies(run, model, counter, fail):
        for batch in run.loop(samples(), 1):
            counter.value += 1
            if fail and run.step_count == 1:
                raise ValueError("in the body")
            train_on(run, model, batch)

    run, model, _ = prepared(folder)
    counter = Kept()
    run.prepare(counter=counter)
    with pytest.raises(ValueError, match="in the body"):
        bodies(run, model, counter, fail=True)
    again, other, _ = prepared(folder)
    counter = Kept()
    again.prepare(counter=counter)
    bodies(again, other, counter, fail=False)
    assert counter.value == 3


class Codebook(nn.Module):
    """Keeps its statistics as VQ-VAEs do."""

    def __init__(self, write):
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.register_buffer("sizes", torch.zeros(2))
        self.write = write

    def forward(self, x):
        result = self.last(x)
        self.write(self, result.detach().mean(0))
        return result


def through_data(module, sizes):
    module.sizes.data.mul_(0.9).add_(sizes, alpha=0.1)


def as_new_tensor(module, sizes):
    module.sizes = module.sizes * 0.9 + sizes * 0.1


@pytest.mark.parametrize("write", [through_data, as_new_tensor])
def test_an_exception_after_statistics_that_no_counter_shows_stores_no_mixture(folder, write, capsys):
    run, model, _ = prepared(folder, lambda: Codebook(write))
    with contextlib.suppress(ValueError):
        for x, y in run.loop(samples(), 1):
            loss = F.cross_entropy(model(x), y)
            if run.step_count == 1:
                raise ValueError("in the body")
            run.backward(loss)
            run.step()
    assert "left inside a body that had changed the model" in capsys.readouterr().out
    assert prepared(folder, lambda: Codebook(write))[0].step_count == 0


def test_an_exception_after_a_prepare_in_the_body_stores_no_mixture(folder):
    run, model, optimizer = prepared(folder)
    with contextlib.suppress(ValueError):
        for batch in run.loop(samples(), 1):
            train_on(run, model, batch)
            if run.step_count == 2:
                run.prepare(schedules.ExponentialLR(optimizer, 0.9))
                raise ValueError("in the body")
    again, other, _ = prepared(folder)
    assert again.step_count == 2 or not equal(other, model)


def test_a_model_can_be_prepared_in_the_body_and_is_stored_from_then_on(folder):
    run, model, _ = prepared(folder)
    extra = Kept(3)
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        run.prepare(extra=extra)
        extra.value += 1
    again, _, _ = prepared(folder)
    kept = Kept()
    again.prepare(extra=kept)
    assert kept.value == 6


def test_two_loops_in_turn_are_two_loops_also_after_a_resume(folder, tmp_path):
    def both(run, model, fail_at=None):
        for epochs, loader in ((2, samples()), (1, samples(8))):
            for batch in run.loop(loader, epochs):
                if run.step_count == fail_at:
                    raise ValueError("in the body")
                train_on(run, model, batch)

    whole, expected, _ = prepared(tmp_path / "whole")
    both(whole, expected)
    assert whole.step_count == 8
    for fail_at in (4, 6, 7):
        run, model, _ = prepared(folder / str(fail_at))
        with pytest.raises(ValueError, match="in the body"):
            both(run, model, fail_at)
        again, other, _ = prepared(folder / str(fail_at))
        both(again, other)
        assert again.step_count == 8
        assert again.finished
        assert equal(other, expected)


def test_an_unnamed_loop_is_never_taken_for_a_named_one(folder):
    run, model, _ = prepared(folder)
    assert fit(run, model, name="1") == 3
    assert fit(run, model) == 3


def nested(run, names):
    for batch in run.loop(samples(), 1, name=names[0]):
        for _ in run.loop(samples(8), 1, name=names[1]):
            yield batch


def zipped(run, names):
    loops = (run.loop(samples(), 1, name=name) for name in names)
    yield from zip(*loops, strict=False)


@pytest.mark.parametrize("names", [("a", "b"), (None, None)], ids=["named", "unnamed"])
@pytest.mark.parametrize("together", [nested, zipped])
def test_two_loops_at_once_are_refused(folder, together, names):
    run, model, _ = prepared(folder)
    with pytest.raises(RuntimeError) as info:
        list(together(run, names))
    assert one_line(info, "loop")
    assert fit(run, model, name=names[0]) == 3


def test_a_look_at_the_first_batch_takes_nothing_from_the_training(folder, tmp_path):
    whole, expected, _ = prepared(tmp_path / "whole")
    fit(whole, expected)
    run, model, _ = prepared(folder)
    x, _ = next(iter(run.loop(samples(), 1)))
    gc.collect()
    assert x.shape == (4, 3)
    run.loop(samples(), 1)  # never iterated
    assert fit(run, model) == 3
    assert equal(model, expected)


def test_a_finished_loop_says_so_and_gives_nothing(folder, capsys):
    run, model, _ = prepared(folder)
    fit(run, model, epochs=3)
    again, other, _ = prepared(folder)
    assert fit(again, other, epochs=2) == 0
    assert again.finished
    assert "loop '0' is complete: 3 of 2 epochs are trained" in capsys.readouterr().out
    assert equal(model, other)


@pytest.mark.parametrize(
    ("make", "told"),
    [(lambda: samples(12, 3), "had 3 batches an epoch and now has 4"), (lambda: samples(4), "now has 4")],
    ids=["batches", "samples"],
)
def test_another_length_of_the_epoch_is_told(folder, capsys, make, told):
    run, model, _ = prepared(folder)
    with contextlib.suppress(ValueError):
        for batch in run.loop(samples(), 1):
            if run.step_count == 2:
                raise ValueError("in the body")
            train_on(run, model, batch)
    again, other, _ = prepared(folder)
    fit(again, other, loader=make())
    assert told in capsys.readouterr().out


def test_reports_can_be_asked_for_at_any_time(folder):
    run, model, _ = prepared(folder)
    str(run.report())
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        steps = json.loads(run.report().to_json())["steps"]
        assert steps == run.step_count
    assert str(run.report())
    assert json.loads(run.report().to_json())["steps"] == 3


def test_evaluation_can_be_nested_and_left_by_an_exception(folder):
    run, model, _ = prepared(folder)

    def evaluate():
        with run.evaluate_mode():
            with run.evaluate_mode():
                assert not model.training
            assert not model.training
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: [torch.ones(1), torch.ones(1)], 2),
        (lambda: GPULoader.from_tensors(torch.ones(4, 3), torch.ones(4), 2), 2),
        (lambda: samples(8), 2),
        (lambda: (torch.ones(1) for _ in range(3)), 3),
        (list, 0),
    ],
    ids=["list", "GPULoader", "DataLoader", "generator", "empty"],
)
def test_batches_come_from_anything_that_can_be_iterated(folder, make, count):
    run, _, _ = prepared(folder)
    assert len(list(run.batches(make()))) == count


def test_a_loop_after_one_that_was_left_by_break_begins_from_the_last_checkpoint(folder, capsys):
    run, model, _ = prepared(folder)
    leave_by_break(run, model)
    assert fit(run, model, name="fine") == 3
    assert run.step_count == 3
    assert "goes on from the last checkpoint" in capsys.readouterr().out


class Misbehaves:
    """Does something odd at random places of a body."""

    def __init__(self, seed, run):
        self.draws = random.Random(seed)
        self.run = run

    def __call__(self):
        draw = self.draws.random()
        if draw < 0.08:
            raise ValueError("in the body")
        if draw < 0.12:
            self.run.save()
        elif draw < 0.15:
            self.run.stop()
        elif draw < 0.2:
            with self.run.evaluate_mode():
                torch.rand(1)


def bodies_of_two_loops(run, model, average, odd):
    for epochs, name in ((2, "pretrain"), (1, "fine")):
        for x, y in run.loop(samples(22), epochs, name=name):
            odd()
            loss = F.cross_entropy(F.dropout(model(x + 0.1 * torch.randn_like(x)), 0.2), y)
            odd()
            run.backward(loss)
            run.clip_grad_norm(1.0)
            odd()
            if run.step():
                average.update_parameters(model)
            odd()
        if run.stopped:
            return


def averaged_run(folder, accumulated, **options):
    run, model, _ = prepared(folder, normed, grad_accum_steps=accumulated, seed=5, **options)
    average = AveragedModel(model)
    run.prepare(average=average)
    return run, model, average


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_at_random_the_run_ends_as_the_one_that_was_never_stopped(folder, seed):
    draws = random.Random(seed)
    accumulated = draws.choice([1, 2, 3])
    whole, expected, expected_average = averaged_run(folder / "whole", accumulated)
    bodies_of_two_loops(whole, expected, expected_average, lambda: None)
    current = None
    for _ in range(60):
        if current is None or draws.random() < 0.5:
            current = averaged_run(folder / "cut", accumulated, save_every=draws.choice([1, 3, "1h"]))
        with contextlib.suppress(ValueError):
            bodies_of_two_loops(*current, Misbehaves(draws.random(), current[0]))
            if not current[0].stopped:
                break
        if current[0].stopped:
            current = None
    else:
        bodies_of_two_loops(*averaged_run(folder / "cut", accumulated), lambda: None)
        current = averaged_run(folder / "cut", accumulated)
    run, model, average = current
    assert run.step_count == whole.step_count
    assert equal(model, expected)
    assert equal(average, expected_average)


# Optimizers and schedulers -------------------------------------------------------------------------------------------------


def test_a_step_without_an_optimizer_is_an_error(folder):
    run = Run(storage=folder, progress=False)
    model = linear()
    run.prepare(model)
    with pytest.raises(RuntimeError) as info:
        one_step_by_hand(run, model)
    assert one_line(info, "optimizer")


class OwnOptimizer:
    """Steps, but is no torch.optim.Optimizer."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(parameter.grad)

    def zero_grad(self, set_to_none=True):
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_an_optimizer_of_another_kind_is_told_and_not_counted_as_stepped(folder, capsys):
    model = linear()
    run = Run(storage=folder, progress=False)
    run.prepare(model, OwnOptimizer(model.parameters()))
    assert "OwnOptimizer" in capsys.readouterr().out
    with pytest.raises(RuntimeError) as info:
        one_step_by_hand(run, model)
    assert one_line(info, "optimizer")


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)


def test_an_optimizer_that_needs_a_closure_asks_for_it_in_our_words(folder):
    run, model, _ = prepared(folder, make_optimizer=lbfgs)
    with pytest.raises(RuntimeError, match="closure") as info:
        fit(run, model)
    assert one_line(info, "LBFGS")


def test_an_optimizer_with_a_closure_goes_on_where_it_was(folder):
    def bodies(epochs, place):
        run, model, optimizer = prepared(place, make_optimizer=lbfgs)

        for x, y in run.loop(samples(), epochs):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                return loss

            assert run.step(closure=closure)
        return model

    whole = bodies(2, folder / "whole")
    bodies(1, folder / "cut")
    assert equal(bodies(2, folder / "cut"), whole)


def test_sparse_gradients_train_clip_and_resume(folder):
    def make():
        torch.manual_seed(0)
        return nn.Embedding(10, 2, sparse=True)

    def adam(model):
        return torch.optim.SparseAdam(model.parameters(), 0.1)

    def bodies(run, model, epochs):
        for _, y in run.loop(samples(), epochs):
            run.backward(model(y).sum())
            run.clip_grad_norm(1.0)
            run.step()

    whole, expected, _ = prepared(folder / "whole", make, adam)
    bodies(whole, expected, 2)
    run, model, _ = prepared(folder / "cut", make, adam)
    bodies(run, model, 1)
    again, other, _ = prepared(folder / "cut", make, adam)
    bodies(again, other, 2)
    assert equal(other, expected)


SCHEDULERS = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 4]),
    "LinearLR": lambda o: schedules.LinearLR(o),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5**x),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=6),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=2), schedules.LambdaLR(o, lambda step: 0.5**step)], [2]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LambdaLR(o, lambda step: 0.9**step), schedules.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.05),
}


def with_scheduler(folder, make_scheduler, **options):
    run = Run(storage=folder, progress=False, **options)
    model = linear()
    optimizer = sgd(model)
    scheduler = make_scheduler(optimizer)
    run.prepare(model, optimizer, scheduler)
    return run, model, optimizer, scheduler


# SequentialLR of torch 2.0 warns of its own call
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_every_scheduler_goes_on_where_it_was(folder, name, interval):
    def rates(run, model, optimizer, fail_at=None):
        seen = []
        with contextlib.suppress(ZeroDivisionError):
            for batch in run.loop(samples(), 2):
                if run.step_count == fail_at:
                    raise ZeroDivisionError
                seen.append(optimizer.param_groups[0]["lr"])
                train_on(run, model, batch)
        return [*seen, optimizer.param_groups[0]["lr"]]

    whole = with_scheduler(folder / "whole", SCHEDULERS[name], scheduler_interval=interval)
    expected = rates(*whole[:3])
    assert len(set(expected)) > 1
    first = with_scheduler(folder / "cut", SCHEDULERS[name], scheduler_interval=interval)
    begin = rates(*first[:3], fail_at=2)
    second = with_scheduler(folder / "cut", SCHEDULERS[name], scheduler_interval=interval)
    assert begin[:2] + rates(*second[:3]) == expected
    assert equal(second[1], whole[1])


def test_a_scheduler_that_needs_a_metric_is_left_to_the_user_and_resumed(folder, capsys):
    def plateau(optimizer):
        return schedules.ReduceLROnPlateau(optimizer, patience=0)

    run, model, optimizer, scheduler = with_scheduler(folder, plateau)
    fit(run, model)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        scheduler.step(1.0)
    fit(run, model, name="more")
    _, _, optimizer, scheduler = with_scheduler(folder, plateau)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert scheduler.best == 1.0
    assert "stepped by run" not in capsys.readouterr().out


def test_a_scheduler_past_its_end_raises_and_stores_no_mixture(folder):
    def cycle(optimizer):
        return schedules.OneCycleLR(optimizer, 0.1, total_steps=4)

    run, model, _, _ = with_scheduler(folder, cycle)
    states = {}

    def bodies():
        for batch in run.loop(samples(), 2):
            states[run.step_count] = {name: value.clone() for name, value in model.state_dict().items()}
            train_on(run, model, batch)

    with pytest.raises(ValueError, match="total steps"):
        bodies()
    again, other, _, _ = with_scheduler(folder, cycle)
    stored = states[again.step_count]
    assert all(torch.equal(stored[name], value) for name, value in other.state_dict().items())


def test_a_scheduler_that_is_also_stepped_by_hand_is_told(folder, capsys):
    run, model, _, scheduler = with_scheduler(folder, lambda o: schedules.ExponentialLR(o, 0.9))
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        scheduler.step()
    assert "ExponentialLR is stepped by hand, too" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_that_goes_back_with_the_run_is_not_taken_for_stepped_by_hand(folder, capsys, interval):
    run, model, _, scheduler = with_scheduler(
        folder, lambda o: schedules.ExponentialLR(o, 0.9), scheduler_interval=interval
    )
    leave_by_exception(run, model)
    leave_by_exception(run, model)
    fit(run, model, epochs=2)
    assert scheduler.last_epoch == (6 if interval == "step" else 2)
    assert "by hand" not in capsys.readouterr().out


def test_a_body_that_never_calls_step_is_told(folder, capsys):
    run, model, optimizer = prepared(folder)
    capsys.readouterr()
    for x, y in run.loop(samples(), 1):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "run.step" in capsys.readouterr().out


def test_averaged_weights_come_back_with_their_count(folder):
    def bodies(epochs):
        model = normed()
        run = Run(storage=folder, progress=False)
        optimizer = sgd(model)
        averaged = AveragedModel(model)
        run.prepare(model, optimizer, ema=averaged)
        for batch in run.loop(samples(), epochs):
            train_on(run, model, batch)
            averaged.update_parameters(model)
        return averaged

    bodies(1)
    assert int(bodies(2).n_averaged) == 6


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="no loss scaling on a CPU before torch 2.3")
def test_a_loss_that_is_not_a_number_skips_the_step_in_fp16_and_is_counted(folder):
    run, model, _ = prepared(folder, precision="fp16")
    for number, (x, y) in enumerate(run.loop(samples(), 1)):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.backward(loss * math.nan if number == 1 else loss)
        assert run.step() is (number != 1)
    assert run.step_count == 2
    assert model.weight.isfinite().all()
    assert json.loads(run.report().to_json())["skipped_steps"] == 1


# The process ---------------------------------------------------------------------------------------------------------------


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_runs_leave_no_thread_file_or_handler_behind(folder):
    import signal

    def handlers():
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def once(number):
        run, model, _ = prepared(folder / str(number), save_every=1)
        fit(run, model)

    once("warm")
    gc.collect()
    before = threading.active_count(), open_files(), handlers()
    for number in range(20):
        once(number)
    gc.collect()
    assert (threading.active_count(), open_files(), handlers()) == before


def test_many_saves_keep_no_copies(folder):
    import weakref

    run, model, _ = prepared(folder, save_every=1, keep=1)
    for batch in run.loop(samples(80), 1):
        train_on(run, model, batch)
    assert len(list(folder.glob("step-*"))) <= 2
    kept = weakref.ref(model)
    del run, model, batch
    gc.collect()
    assert kept() is None


def test_a_later_run_on_the_same_storage_takes_over(folder):
    run, model, _ = prepared(folder)
    fit(run, model)
    later, other, _ = prepared(folder)
    assert equal(model, other)
    fit(later, other, epochs=2)
    with pytest.raises(RuntimeError) as info:
        fit(run, model, epochs=3)
    assert one_line(info)
    assert prepared(folder)[0].step_count == 6


def test_a_run_that_was_replaced_says_so(folder):
    run, model, _ = prepared(folder)
    prepared(folder)
    with pytest.raises(RuntimeError, match=str(folder)):
        fit(run, model)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_in_the_body_disturbs_nothing(folder):
    run, model, _ = prepared(folder, save_every=1)
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert equal(prepared(folder)[1], model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_users_default_dtype_is_borne(folder, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        run, model, _ = prepared(folder)
        assert model.weight.dtype == dtype
        for x, y in run.loop(samples(), 1):
            run.backward(F.cross_entropy(model(x.to(dtype)), y))
            run.step()
        assert equal(prepared(folder)[1], model)
    finally:
        torch.set_default_dtype(before)


def test_a_run_in_another_thread_trains_and_says_what_it_cannot_do(folder, caplog):
    counts = []

    def work():
        run, model, _ = prepared(folder)
        counts.append(fit(run, model))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [3]
    assert "not in the main thread" in caplog.text


# The budget ----------------------------------------------------------------------------------------------------------------


def test_a_budget_that_is_up_at_once_still_makes_progress_in_each_session(folder):
    for session in range(3):
        clock = Clock()
        run, model, _ = prepared(folder, budget="10s", clock=clock)
        bodies = 0
        for batch in run.loop(samples(), 1):
            train_on(run, model, batch)
            clock.now += 60.0
            bodies += 1
        assert bodies == 1
        assert run.stopped
        assert run.step_count == session + 1
    assert not run.finished


def test_a_clock_that_goes_back_neither_stops_nor_breaks_a_run(folder):
    clock = Clock()
    run, model, _ = prepared(folder, budget="100s", save_every="10s", clock=clock)
    for batch in run.loop(samples(), 2):
        train_on(run, model, batch)
        clock.now -= 400.0
    assert run.finished
    assert not run.stopped
    assert json.loads(run.report().to_json())["wall_seconds"] >= 0.0


def test_a_loop_after_the_stop_gives_nothing_and_keeps_what_there_is(folder):
    clock = Clock()
    run, model, _ = prepared(folder, budget="100s", clock=clock)
    for batch in run.loop(samples(), 1):
        train_on(run, model, batch)
        clock.now += 99.0
    before = contents(folder)
    assert fit(run, model) == 0
    assert contents(folder) == before


# The whole quick start -----------------------------------------------------------------------------------------------------

QUICK_START = """
import os, signal, sys, warnings
warnings.simplefilter("error")
import torch, torch.nn.functional as F
from torch import nn
import efficio

torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(1000, 8), torch.randint(0, 2, (1000,)))
loader = torch.utils.data.DataLoader(data, 10, shuffle=True)
model = nn.Sequential(nn.Linear(8, 2), nn.Dropout(0.1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = efficio.Run("2h", storage=sys.argv[1], save_every=500)
model, optimizer = run.prepare(model, optimizer)
for x, y in run.loop(loader, epochs=100):
    with run.autocast():
        loss = F.cross_entropy(model(x), y)
    run.backward(loss)
    run.step()
    if sys.argv[2] == "interrupt" and run.step_count == 3000:
        os.kill(os.getpid(), signal.SIGINT)
print(run.report())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends itself SIGINT")
def test_ten_thousand_steps_with_an_interrupt_give_no_warning_and_few_lines(folder):
    lines = 0
    for part in ("interrupt", "rest"):
        done = subprocess.run(
            [sys.executable, "-c", QUICK_START, str(folder), part],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ("KeyboardInterrupt" in done.stderr) == (part == "interrupt")
        assert "Warning" not in done.stderr
        lines += done.stderr.count("\r") + done.stderr.count("\n")
    assert done.returncode == 0, done.stderr
    assert "efficio: resumed at step 3,000" in done.stdout
    assert lines <= 50
