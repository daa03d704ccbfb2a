"""Every stored tree is one moment of the training: its parameters, buffers and optimizer state hold one number, also under readers."""

import os
import signal
import threading
from collections import Counter

import pytest
import torch
from disk import Record
from torch import nn

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_checkpoint,
    snapshot_tree,
    verify,
)
from efficio_ckpt._folder import Folder

WHOLE_SAVES = 10_000
posix_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks readers")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Model(nn.Module):
    """Parameters and buffers of several shapes, dtypes and layouts, one of them tied."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.image = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.coarse = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
        self.last = nn.Linear(7, 5)
        self.last.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(3, 3, dtype=torch.float64).t())


class Training:
    """A fake training, whose every step writes its number into every tensor that there is."""

    def __init__(self):
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.average = [torch.zeros(4), {"deep": torch.zeros(2, 2)}]

    def step(self, number):
        """Values below 256 are exact in each of the dtypes."""
        value = number % 256
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                tensor.fill_(value)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.fill_(value)
            for tensor in (self.average[0], self.average[1]["deep"]):
                tensor.fill_(value)

    def tree(self, number):
        live = snapshot_tree({"model": self.model, "optimizer": self.optimizer})
        return {**live, "average": self.average, "number": number, "words": [str(number)]}


def values(tree):
    """Every number that is stored in a tensor of a tree."""
    if isinstance(tree, torch.Tensor):
        return {float(value) for value in tree.unique()}
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return set().union(*map(values, children))


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return 1
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return sum(map(tensors, children))


def number_of(checkpoint, tree):
    """The step that a stored tree is of; an error if it is of more than one."""
    number = tree["number"]
    assert values({key: tree[key] for key in ("average", "model")}) == {float(number % 256)}, number
    assert values(tree["optimizer"]["state"]) == {float(number % 256)}, number
    assert (checkpoint.step, tree["words"]) == (number, [str(number)])
    assert tensors(tree) >= 25
    return number


def test_a_mixture_would_be_noticed():
    training = Training()
    training.step(3)
    training.model.mean[1, 1] = 4
    with pytest.raises(AssertionError):
        number_of(None, training.tree(3))


def train(place, steps, *, keep=2, run_id="run", checked=1, first=1):
    """Train with a save at each step; every `checked`th stored tree is read. How many saves were committed and checked."""
    training, found = Training(), Counter()
    with background_saver(place, keep=keep, run_id=run_id) as saver:
        for number in range(first, first + steps):
            training.step(number)
            # Some are skipped since one is in flight; a part waits for its turn.
            begun = saver.save(training.tree(number), step=number, wait=number % 3 == 0)
            found["begun" if begun else "skipped"] += 1
            training.step(number + 100)
            if number % checked == 0:
                try:
                    newest = number_of(*load_checkpoint(place, run_id=run_id))
                except FileNotFoundError:
                    assert number < 3, "nothing there though a save was committed"
                else:
                    assert number - 3 <= newest <= number
                    found["checked"] += 1
        saver.wait()
        found["committed"] = saver.status.committed
    return found


def reader(place, stop_at, *, run_id="run"):
    """Load, list and verify again and again until the last step is there; how many trees were read."""
    count = newest = 0
    while newest < stop_at:
        try:
            number = number_of(*load_checkpoint(place, run_id=run_id))
            assert number >= newest, "an older state came back"
            newest = number
            count += 1
            if count % 3 == 0:
                verify(place)
                list_checkpoints(place)
        except FileNotFoundError:
            assert newest == 0, "a fresh start in the middle"
        except CheckpointError as error:
            # With one checkpoint that is replaced all the time a slow reader is told so.
            if "replaced faster" not in str(error):
                raise
    return count


def forked_readers(place, count, stop_at):
    children = []
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(3000)
            text = "died"
            try:
                text = str(reader(place, stop_at))
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"[:500]
            finally:
                os.write(writing, text.encode())
                os._exit(0)
        os.close(writing)
        children.append((child, os.fdopen(reading, "rb")))
    return children


def ended(children):
    counts = []
    for child, file in children:
        with file:
            counts.append(file.read().decode())
        os.waitpid(child, 0)
    return counts


@posix_only
@quiet_fork
@pytest.mark.parametrize("keep", [1, 2])
def test_every_stored_tree_holds_one_number_while_others_read(quick_path, keep):
    steps = 150
    children = forked_readers(quick_path, 2, steps)
    try:
        found = train(quick_path, steps, keep=keep)
    finally:
        if not list_checkpoints(quick_path) or list_checkpoints(quick_path)[0].step < steps:
            for child, _ in children:
                os.kill(child, signal.SIGKILL)
        counts = ended(children)
    assert found["committed"] == found["begun"] >= steps // 3
    assert found["checked"] >= steps - 3
    assert all(count.isdecimal() and int(count) > 3 for count in counts), counts


def test_threads_read_and_save_in_memory_and_each_tree_holds_one_number():
    place = "memory://torn/threads"
    problems, counts = [], []

    def read():
        try:
            counts.append(reader(place, 30))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    train(place, 30, keep=2, checked=10)
    for thread in threads:
        thread.join(120)
    assert problems == []
    assert len(counts) == 2


def test_a_signal_handler_that_saves_in_the_middle_of_a_copy_disturbs_nothing(quick_path, monkeypatch):
    copy = torch.Tensor.copy_
    left = [5]
    with background_saver(quick_path, keep=5) as saver:

        def interrupted(self, *arguments, **options):
            if threading.current_thread() is threading.main_thread() and left[0] >= 0:
                left[0] -= 1
                if left[0] == 0:
                    saver.save({"final": [torch.full((10,), 7.0) for _ in range(20)]}, step=2, wait=True)
            return copy(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
        saver.save({"t": [torch.full((1 + index,), 3.0) for index in range(30)]}, step=1, wait=True)
    monkeypatch.undo()
    assert left[0] < 0
    assert values(load_checkpoint(quick_path, step=1)[1]) == {3.0}
    assert values(load_checkpoint(quick_path, step=2)[1]) == {7.0}


class Replacing(Folder):
    """A disk on which the only checkpoint is replaced just when a reader has listed the folder."""

    def folders(self):
        names = super().folders()
        if self.left:
            self.left.pop()
            with background_saver(self.root, keep=1) as saver:
                saver.save({"n": len(self.left)}, step=10 - len(self.left), wait=True)
        return names


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_checkpoint_that_is_replaced_while_the_folder_is_listed_is_no_fresh_start(quick_path, times):
    with background_saver(quick_path, keep=1) as saver:
        saver.save({"n": -1}, step=1, wait=True)
    place = Replacing(str(quick_path))
    object.__setattr__(place, "left", list(range(times)))
    assert load_checkpoint(place)[1] == {"n": 0}
    object.__setattr__(place, "left", [0])
    assert verify(place) == []
    assert [checkpoint.step for checkpoint in verify(place)] == [10]


class Emptied(Folder):
    """A Drive on which a checkpoint is removed, and so emptied, just when a reader has opened one of its files."""

    def open(self, folder, name):
        file = super().open(folder, name)
        if name == self.name and self.left:
            self.left.pop()
            with background_saver(Folder(self.root, drive=True), keep=1) as saver:
                saver.save({"w": torch.full((9,), 2.0)}, step=2, wait=True)
        return file


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json", "tensors-00001.safetensors"])
def test_a_file_that_is_emptied_under_its_reader_on_a_drive_is_no_damage(quick_path, name, caplog):
    for read in (load_checkpoint, list_checkpoints, verify):
        root = quick_path / read.__name__
        with background_saver(root, keep=1) as saver:
            saver.save({"w": torch.full((9,), 1.0)}, step=1, wait=True)
        place = Emptied(str(root), drive=True)
        object.__setattr__(place, "left", [1])
        object.__setattr__(place, "name", name)
        found = read(place)
        if read is load_checkpoint:
            assert values(found[1]) == {2.0}
        assert values(load_checkpoint(root)[1]) == {1.0 if place.left else 2.0}
        assert caplog.text == ""
    assert list(quick_path.rglob("DAMAGE.txt")) == []


@pytest.mark.torture
@posix_only
@quiet_fork
def test_ten_thousand_saves_hold_one_number_each(quick_path):
    record = Record("torn", {"saves": WHOLE_SAVES})
    batch = 500
    for place_kind in ("disk", "drive", "memory"):
        share = {"disk": 6000, "drive": 2000, "memory": 2000}[place_kind]
        for first in range(1, share, batch):
            part = f"{place_kind}, saves {first} to {first + batch - 1}"
            if record.has(part):
                continue
            root = quick_path / part
            place = (
                f"memory://torn/{first}"
                if place_kind == "memory"
                else Folder(str(root), drive=place_kind == "drive")
            )
            keep = 1 + first // batch % 3
            failures, counts = [], []
            # Every third call waits; the others may be skipped, so this makes at least `batch` committed saves.
            steps = 3 * batch
            children = forked_readers(place, 2, steps) if place_kind != "memory" else []
            try:
                found = train(place, steps, keep=keep)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}"[:500])
                found = Counter()
                for child, _ in children:
                    os.kill(child, signal.SIGKILL)
            counts = ended(children)
            failures += [count for count in counts if not count.isdecimal()]
            reads = found["checked"] + sum(int(count) for count in counts if count.isdecimal())
            record.add(part, found["committed"], {"keep": keep, "trees_read": reads}, failures)
    print(record.path, record.content["points"])
    assert record.content["failures"] == []
    assert record.content["points"] >= WHOLE_SAVES
