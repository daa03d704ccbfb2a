"""Batches cut into parts along their samples."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from efficio_data import batch_samples, split_batch

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)
Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


@pytest.mark.parametrize("parts", range(1, 13))
def test_each_sample_comes_once_and_in_order_and_sizes_differ_by_one(parts):
    cut = split_batch((X, Y), parts)
    assert len(cut) == min(parts, 10)
    assert torch.equal(torch.cat([x for x, _ in cut]), X)
    assert torch.equal(torch.cat([y for _, y in cut]), Y)
    sizes = [len(y) for _, y in cut]
    assert max(sizes) - min(sizes) <= 1


def test_a_part_is_a_view():
    assert split_batch(X, 2)[1].data_ptr() == X[5:].data_ptr()


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (X, lambda part: part),
        ([X, Y], lambda part: part[0]),
        (Pair(X, Y), lambda part: part.x),
        ({"a": {"x": X}, "t": 0.5, "n": None}, lambda part: part["a"]["x"]),
        (OrderedDict(x=X), lambda part: part["x"]),
        (UserDict(x=X), lambda part: part["x"]),
        (MappingProxyType({"x": X}), lambda part: part["x"]),
        (Sample(X, "a"), lambda part: part.x),
        (Frozen(X), lambda part: part.x),
        ((X, torch.tensor(3.0)), lambda part: part[0]),
        ((X.numpy(), Y), lambda part: torch.from_numpy(part[0])),
        (((X, Y), Y), lambda part: part[0][0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structure_and_types_stay(batch, first):
    parts = split_batch(batch, 3)
    assert all(type(part) is type(batch) for part in parts)
    assert torch.equal(torch.cat([first(part) for part in parts]), X)
    assert torch.equal(first(batch), X)


def test_what_belongs_to_the_whole_batch_comes_with_each_part():
    for part in split_batch({"x": X, "t": torch.tensor(0.5), "k": 3, "text": "a", "none": None}, 2):
        assert (part["t"], part["k"], part["text"], part["none"]) == (0.5, 3, "a", None)


def test_lists_of_samples_are_cut():
    names = [f"{n}.png" for n in range(10)]
    images = [torch.full((3, n + 1), float(n)) for n in range(10)]
    targets = [{"boxes": torch.zeros(n, 4), "n": n} for n in range(10)]
    parts = split_batch((images, targets, names), 3, samples=10)
    assert [n for part in parts for n in part[2]] == names
    assert [t["n"] for part in parts for t in part[1]] == list(range(10))
    assert [image.shape[1] for part in parts for image in part[0]] == list(range(1, 11))


def test_as_many_tensors_as_samples_are_still_a_container():
    x, y = torch.arange(2.0), torch.arange(2)
    assert split_batch([x, y], 2) == [[x[:1], y[:1]], [x[1:], y[1:]]]


def test_a_list_of_another_length_comes_with_each_part():
    assert [part[1] for part in split_batch((X, ["a", "b"]), 2)] == [["a", "b"]] * 2


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((X, torch.zeros(3, 2)), ValueError, r"shape \(3, 2\) is in a batch of 10 samples"),
        (pack_padded_sequence(torch.zeros(4, 2, 1), [4, 3]), TypeError, "PackedSequence cannot be cut"),
        ((X, pack_padded_sequence(torch.zeros(4, 2, 1), [4, 3])), TypeError, "PackedSequence cannot be cut"),
        ((X, SimpleNamespace(edges=Y)), TypeError, "a SimpleNamespace cannot be cut"),
        ({"name": "a", "t": torch.tensor(1.0)}, TypeError, "dict holds no tensor"),
    ],
    ids=["rows", "packed", "packed-inside", "object", "none"],
)
def test_what_cannot_be_cut_is_told(batch, error, message):
    with pytest.raises(error, match=message):
        split_batch(batch, 2)


def test_no_parts():
    with pytest.raises(ValueError, match="parts=0"):
        split_batch(X, 0)


def test_the_number_of_samples():
    assert batch_samples(("a", torch.tensor(1.0), {"x": np.zeros((4, 2))})) == 4
