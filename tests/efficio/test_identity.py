"""Another data set of the same size is noticed where the data set says what it is."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

import efficio
from efficio._identity import data_identity


class Pictures(Dataset):
    """As torchvision's ImageFolder."""

    def __init__(self, root, names, classes):
        self.root = str(root)
        self.classes = classes
        self.class_to_idx = {name: number for number, name in enumerate(classes)}
        self.samples = [(f"{root}/{name}", number % len(classes)) for number, name in enumerate(names)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return torch.ones(1), self.samples[index][1]


NAMES = [f"{n}.png" for n in range(8)]


def train(folder, dataset, *, stop=None):
    model = nn.Linear(1, 2)
    run = efficio.Run(storage=folder, progress=False, seed=0)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    seen = []
    for x, y in run.loop(DataLoader(dataset, 2), 1):
        seen.append(y)
        run.backward(model(x).mean())
        run.step()
        if len(seen) == stop:
            run.stop()
    return run


@pytest.mark.parametrize("wrapped", [False, True], ids=["folder", "subset"])
def test_classes_that_are_numbered_otherwise_are_an_error_that_names_them(wrapped, tmp_path):
    def dataset(classes):
        whole = Pictures("/data", NAMES, classes)
        return Subset(whole, range(6)) if wrapped else whole

    train(tmp_path, dataset(["cat", "dog", "owl"]), stop=1)
    with pytest.raises(ValueError, match="'cat' was class 0 and is 1, 'dog' was class 1 and is 0;"):
        train(tmp_path, dataset(["dog", "cat", "owl"]))
    assert train(tmp_path, dataset(["cat", "dog", "owl"])).finished  # nothing was lost by it


def test_new_and_missing_classes_are_named(tmp_path):
    train(tmp_path, Pictures("/data", NAMES, ["cat", "dog"]), stop=1)
    with pytest.raises(ValueError, match="'dog' was class 1 and is none, 'eel' is new"):
        train(tmp_path, Pictures("/data", NAMES, ["cat", "eel"]))


@pytest.mark.parametrize("names", [[*NAMES[:-1], "new.png"], NAMES[::-1]], ids=["another", "order"])
def test_other_files_of_the_same_number_are_told(names, tmp_path, capsys):
    train(tmp_path, Pictures("/kaggle/input", NAMES, ["cat", "dog"]), stop=1)
    train(tmp_path, Pictures("/kaggle/input", names, ["cat", "dog"]))
    assert "the files of loop '0', or their labels or order, are not those" in capsys.readouterr().out


def test_the_same_files_elsewhere_are_the_same(tmp_path, capsys):
    train(tmp_path, Pictures("/kaggle/input/birds", NAMES, ["cat", "dog"]), stop=1)
    assert train(tmp_path, Pictures("/content/birds", NAMES, ["cat", "dog"])).finished
    assert "are not those" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "odd",
    [
        [1, 2],
        None,
        DataLoader([1, 2, 3]),
        type(
            "Odd", (), {"dataset": type("D", (), {"classes": 3, "samples": "x", "class_to_idx": {"a": "b"}})}
        ),
        type("Odd", (), {"dataset": type("D", (), {"samples": [("a", 1, 2)], "root": "/"})}),
    ],
    ids=["list", "none", "loader", "types", "triples"],
)
def test_a_data_set_that_says_nothing(odd):
    assert data_identity(odd) == {}


def test_checkpoints_without_identities_go_on(tmp_path):
    from efficio._progress import Progress
    from efficio_data import Position

    tree = Progress(seed=1, loops={"0": Position(1, 2)}).to_tree()
    old = copy.deepcopy(tree)
    for name in ("part_samples", "metrics"):
        del old[name]
    for name in ("identity", "state"):
        del old["loops"]["0"][name]
    assert Progress.from_tree(old) == Progress.from_tree(tree)


# Samplers and streams with a state, in a run


class Remembering(Sampler):
    def __init__(self):
        self.turns = 0

    def __len__(self):
        return 10

    def __iter__(self):
        self.turns += 1
        return iter([(index * 3 + self.turns) % 10 for index in range(10)])

    def state_dict(self):
        return {"turns": self.turns}

    def load_state_dict(self, state):
        self.turns = state["turns"]


class Stream(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_run_goes_on_with_the_state_of_its_sampler_or_stream(kind, group, tmp_path):
    def session(folder, stop=None):
        model = nn.Linear(1, 1)
        run = efficio.Run(storage=folder, progress=False, seed=0, grad_accum_steps=group)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loader = (
            DataLoader(list(range(10)), 2, sampler=Remembering())
            if kind == "sampler"
            else DataLoader(Stream(), 2)
        )
        seen = []
        for batch in run.loop(loader, 3):
            seen.append(batch.tolist())
            run.backward(model(torch.ones(1, 1)).mean())
            run.step()
            if len(seen) == stop:
                run.stop()
        return seen

    whole = session(tmp_path / "whole")
    assert len(whole) == 15
    for stop in range(1, 15):
        parts = [session(tmp_path / str(stop), stop), session(tmp_path / str(stop))]
        assert parts[0] + parts[1] == whole, stop
