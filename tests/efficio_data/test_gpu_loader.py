import logging

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from efficio_data import GPULoader, Position, resumable
from efficio_data._gpu_loader import _free_bytes, _refuse_too_large


class Held:
    def __init__(self, data, targets, name="targets", transform=None):
        self.data = data
        setattr(self, name, targets)
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def images(count=20, channels=3):
    return torch.randint(0, 256, (count, channels, 8, 8), dtype=torch.uint8)


def loader(count=20, **options):
    x = images(count)
    return GPULoader.from_tensors(x, torch.arange(count), 6, **{"shuffle": True, "device": "cpu", **options})


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"drop_last": True}, {"transform": lambda x: x + torch.rand(1)}]
)
def test_any_start_gives_the_rest_of_the_epoch(options):
    source = loader(**options)
    whole = list(source.iter_from(Position(2)))
    assert len(whole) == len(source)
    for done in range(1, len(whole)):
        rest = list(source.iter_from(whole[done - 1][1]))
        assert len(rest) == len(whole) - done
        for ((x, y), p), ((u, v), q) in zip(whole[done:], rest, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
            assert p == q


def test_each_sample_comes_once_with_its_own_label():
    x = images(21)
    y = torch.arange(21)
    source = GPULoader.from_tensors(x, y, 4, shuffle=True, device="cpu")
    batches = list(source)
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(21))
    for bx, by in batches:
        assert torch.equal(bx, x[by])


@pytest.mark.parametrize(
    "shape", [(3, 8, 8), (1, 7, 7), (5,), ()], ids=["divides by 8", "does not", "vector", "scalar"]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.complex64, torch.bool])
def test_a_gather_is_right_for_every_row_size_and_dtype(shape, dtype):
    x = torch.randint(0, 2, (10, *shape)).to(dtype)
    for bx, by in GPULoader.from_tensors(x, torch.arange(10), 3, shuffle=True, device="cpu"):
        assert bx.dtype == dtype
        assert torch.equal(bx, x[by])


def test_iterating_again_gives_the_next_epoch():
    source = loader()
    one, two = torch.cat([y for _, y in source]), torch.cat([y for _, y in source])
    assert not torch.equal(one, two)
    assert torch.equal(two, torch.cat([y for (_, y), _ in source.iter_from(Position(1))]))


def test_two_loops_over_one_loader_have_two_orders_and_one_copy_of_the_data():
    source = loader()
    one, two = resumable(source, seed=1), resumable(source, seed=2)
    assert one.x.data_ptr() == two.x.data_ptr() == source.x.data_ptr()
    first = [torch.cat([y for (_, y), _ in s.iter_from(Position())]) for s in (one, two)]
    assert not torch.equal(*first)


def test_work_in_place_does_not_reach_the_data():
    for shuffle in (True, False):
        x = torch.ones(6, 4)
        for bx, by in GPULoader.from_tensors(x, torch.zeros(6), 3, shuffle=shuffle, device="cpu"):
            bx.zero_()
            by.add_(1)
        assert x.sum() == 24


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(10, 28, 28, dtype=torch.uint8),
        np.zeros((10, 28, 28, 1), np.uint8),
        np.zeros((10, 1, 28, 28), np.uint8),
        [[[0] * 28] * 28] * 10,
    ],
    ids=["tensor NHW", "array NHWC", "array NCHW", "list"],
)
@pytest.mark.parametrize(
    "targets", [list(range(10)), np.arange(10), torch.arange(10)], ids=["list", "array", "tensor"]
)
def test_torchvision_layouts_become_channels_first(data, targets):
    source = GPULoader.from_torchvision(Held(data, targets), 4, device="cpu")
    x, y = next(iter(source))
    assert x.shape == (4, 1, 28, 28)
    assert y.tolist() == [0, 1, 2, 3]


def test_svhn_labels_subsets_and_their_subsets_are_taken():
    held = Held(np.arange(10 * 3 * 8 * 8, dtype=np.int64).reshape(10, 3, 8, 8), np.arange(10), "labels")
    part = Subset(Subset(held, [9, 7, 5, 3]), [0, 2])
    x, y = next(iter(GPULoader.from_torchvision(part, 4, device="cpu")))
    assert y.tolist() == [9, 5]
    assert torch.equal(x[1], torch.from_numpy(held.data[5]))


def test_transforms_for_single_images_are_told_to_be_unused(caplog):
    with caplog.at_level(logging.WARNING):
        GPULoader.from_torchvision(Held(images(), list(range(20)), transform=abs), 4, device="cpu")
    assert "not used" in caplog.text


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: loader(0), ValueError, "0 samples"),
        (lambda: loader(5, drop_last=True), ValueError, "drop_last=True give no batch"),
        (lambda: GPULoader.from_tensors(images(3), [1, 2], 2), ValueError, "x has 3 samples and y has 2"),
        (lambda: GPULoader.from_tensors(images(3), list("abc"), 2), TypeError, "encode classes as ints"),
        (lambda: GPULoader.from_tensors(images(3), [1, 2, 3], 0), ValueError, "batch_size=0"),
        (lambda: GPULoader.from_tensors(images(3), [1, 2, 3], 2.0), ValueError, "batch_size=2.0"),
        (
            lambda: GPULoader.from_tensors(images(3), [1, 2, 3], 2, transform=4),
            TypeError,
            "transform is a int",
        ),
        (lambda: GPULoader.from_torchvision(object(), 2), TypeError, "no .data"),
        (
            lambda: GPULoader.from_torchvision(Held(np.zeros((2, 9, 9, 9)), [0, 1]), 2),
            ValueError,
            "permute them",
        ),
    ],
)
def test_bad_input_is_named(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_what_takes_over_thirty_percent_of_free_memory_is_refused():
    _refuse_too_large(299, 1000, torch.device("cpu"))
    _refuse_too_large(10**15, None, torch.device("cpu"))
    with pytest.raises(MemoryError, match="over 30% of"):
        _refuse_too_large(301, 1000, torch.device("cpu"))


def test_memory_that_torch_keeps_for_later_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert _free_bytes(torch.device("cuda", 0)) == 100 + 700 - 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_gives_the_batches_of_the_cpu():
    x, y = images(50), torch.arange(50)
    one = GPULoader.from_tensors(x, y, 7, shuffle=True, device="cpu")
    two = GPULoader.from_tensors(x, y, 7, shuffle=True)
    for (bx, by), (gx, gy) in zip(one, two, strict=True):
        assert gx.is_cuda
        assert torch.equal(bx, gx.cpu())
        assert torch.equal(by, gy.cpu())
