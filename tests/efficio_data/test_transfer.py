import collections
import dataclasses
import os
import sys
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

from efficio_data._transfer import leaves, prefetch, to_device

Pair = namedtuple("Pair", ["x", "y"])
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    name: str
    derived: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.derived = self.x + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int = 3


class OwnTo(dict):
    """Moves itself in place and returns itself, as some libraries' batches do."""

    def to(self, device):
        for key, value in self.items():
            self[key] = value.to(device)
        self.moved = True
        return self


class Encoding(UserDict):
    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Marked(list):
    mark = None


class Coordinates(tuple):
    pass


def tensor():
    return torch.arange(3.0)


def marked():
    batch = Marked([tensor(), "a"])
    batch.mark = "kept"
    return batch


STRUCTURES = {
    "tensor": tensor,
    "nested-tuple": lambda: ((tensor(), tensor()), tensor()),
    "list": lambda: [tensor(), [tensor()]],
    "dict": lambda: {"a": (tensor(), tensor()), "s": "text", "n": None, 3: 4.5, "b": b"x", "t": True},
    "namedtuple": lambda: Pair(tensor(), [1, tensor()]),
    "ordered-dict": lambda: OrderedDict(b=tensor(), a=tensor()),
    "defaultdict": lambda: defaultdict(list, x=tensor()),
    "userdict": lambda: UserDict(x=tensor(), n=1),
    "mapping-proxy": lambda: types.MappingProxyType({"x": tensor(), "n": 1}),
    "list-subclass": marked,
    "tuple-subclass": lambda: Coordinates([tensor(), 2]),
    "structseq": lambda: torch.max(torch.rand(2, 3), dim=1),
    "dataclass": lambda: Example(tensor(), "a"),
    "frozen-dataclass": lambda: Frozen(tensor()),
    "packed-sequence": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    "dict-with-own-to": lambda: OwnTo(x=tensor()),
    "userdict-with-own-to": lambda: Encoding(x=tensor()),
    "deep": lambda: {"a": [Pair(tensor(), {"b": Frozen(tensor())})]},
}


def tensors(batch):
    return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]


def shape_of(batch):
    """The structure without the tensors: types, keys and all other leaves."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, (tuple, list)):
        return type(batch), [shape_of(part) for part in batch]
    if isinstance(batch, collections.abc.Mapping):
        return type(batch), [(key, shape_of(part)) for key, part in batch.items()]
    if dataclasses.is_dataclass(batch):
        return type(batch), [(f.name, shape_of(getattr(batch, f.name))) for f in dataclasses.fields(batch)]
    return batch


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_tensor_moves_and_the_structure_stays(name):
    batch = STRUCTURES[name]()
    before, had = shape_of(batch), tensors(batch)
    moved = to_device(batch, "meta")
    assert shape_of(moved) == before
    # The lengths of a packed sequence belong on the CPU, wherever its data are.
    expected = {"meta", "cpu"} if isinstance(batch, PackedSequence) else {"meta"}
    assert {t.device.type for t in tensors(moved)} == expected
    assert shape_of(batch) == before
    assert all(one is two for one, two in zip(tensors(batch), had, strict=True))
    assert {t.device.type for t in tensors(batch)} == {"cpu"}


@pytest.mark.parametrize("name", sorted(set(STRUCTURES) - {"dict-with-own-to", "userdict-with-own-to"}))
def test_what_is_there_already_comes_back_as_it_is(name):
    batch = STRUCTURES[name]()
    assert to_device(batch, torch.device("cpu")) is batch


def test_what_hangs_on_a_container_stays():
    assert to_device(marked(), "meta").mark == "kept"
    assert to_device(defaultdict(list, x=tensor()), "meta").default_factory is list
    assert to_device(OwnTo(x=tensor()), "meta").moved
    assert not hasattr(OwnTo(x=tensor()), "moved")


@pytest.mark.parametrize(
    "leaf", [None, "text", 3, 4.5, True, b"x", torch.float16, Pair, Frozen, object(), range(3)], ids=repr
)
def test_what_has_no_tensors_is_passed_on(leaf):
    assert to_device(leaf, "meta") is leaf
    assert to_device([leaf, tensor()], "meta")[0] is leaf


def test_modules_are_not_moved_with_a_batch():
    module = torch.nn.Linear(2, 2)
    assert to_device((module, tensor()), "meta")[0] is module
    assert module.weight.device.type == "cpu"


nested = st.recursive(
    st.sampled_from([None, 1, "a", "tensor"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Frozen, inner)
    ),
    max_leaves=12,
)


@given(nested)
def test_any_nesting_is_followed(batch):
    def filled(part):
        if part == "tensor":
            return tensor()
        if isinstance(part, Pair):
            return Pair(*map(filled, part))
        if isinstance(part, (tuple, list)):
            return type(part)(map(filled, part))
        if isinstance(part, dict):
            return {key: filled(value) for key, value in part.items()}
        return Frozen(filled(part.x)) if isinstance(part, Frozen) else part

    full = filled(batch)
    moved = to_device(full, "meta")
    assert shape_of(moved) == shape_of(full)
    assert all(t.device.type == "meta" for t in tensors(moved))
    assert len(tensors(moved)) == len(tensors(full))


# prefetch


def test_prefetch_moves_batches_in_order_and_passes_positions():
    batches = [((torch.tensor(n), "a"), n) for n in range(5)]
    moved = list(prefetch(batches, "meta"))
    assert [position for _, position in moved] == [0, 1, 2, 3, 4]
    assert all(x.device.type == "meta" and text == "a" for (x, text), _ in moved)


def test_prefetch_pulls_nothing_ahead_without_a_gpu():
    pulled = []

    def source():
        for n in range(5):
            pulled.append(n)
            yield n

    batches = prefetch(source(), "cpu", depth=3)
    assert pulled == []
    assert next(batches) == 0
    assert pulled == [0]


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_closing_prefetch_closes_its_source(taken):
    closed = []

    def source():
        try:
            yield from range(5)
        finally:
            closed.append(True)

    items = source()
    if not taken:
        next(items)  # a generator that never began has nothing to close
    batches = prefetch(items, "cpu")
    for _ in range(taken):
        next(batches)
    batches.close()
    assert closed == [True]
    assert list(batches) == []


def test_closing_prefetch_leaves_an_iterable_that_can_be_iterated_again():
    class File(list):
        closed = False

        def close(self):
            self.closed = True

    batches = File([1, 2])
    moving = prefetch(batches, "cpu")
    next(moving)
    moving.close()
    assert not batches.closed


def test_an_exception_of_the_source_comes_after_the_batches_before_it():
    def source():
        yield 1
        yield 2
        raise ValueError("third")

    batches = prefetch(source(), "cpu")
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(batches)
    assert list(batches) == []


def test_prefetch_refuses_a_depth_of_nothing_when_it_is_called():
    with pytest.raises(ValueError, match="depth=0"):
        prefetch([], "cpu", depth=0)


def test_prefetch_keeps_no_batch():
    alive = []

    def source():
        for n in range(6):
            yield (torch.full((4,), n),)

    batches = prefetch(source(), "cpu")
    for (batch,) in batches:
        alive.append(weakref.ref(batch))
        del batch
        assert all(ref() is None for ref in alive)
    assert len(alive) == 6


class Vectors(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((8,), index), torch.tensor(index)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in /proc")
def test_batches_from_workers_leave_no_descriptors_open():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        loader = DataLoader(Vectors(), batch_size=1, num_workers=2, multiprocessing_context="fork")
        opened = []
        for n, (x, _) in enumerate(prefetch(loader, "cpu")):
            assert int(x[0, 0]) == n
            opened.append(len(os.listdir("/proc/self/fd")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(opened) == 400
    assert max(opened[200:]) <= max(opened[:50])


# on a card


@gpu
@needs_cuda
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_batches_arrive_whole_on_the_gpu_and_back(name, pinned):
    batch = STRUCTURES[name]()
    if pinned:
        batch = torch.utils.data._utils.pin_memory.pin_memory(batch)
    there = to_device(batch, "cuda")
    back = to_device(there, "cpu")
    assert all(map(torch.equal, tensors(back), tensors(batch)))


@gpu
@needs_cuda
def test_prefetch_on_the_gpu_gives_what_the_cpu_has_whatever_the_body_does():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(256, 1024, generator=generator).pin_memory() for _ in range(30)]
    weight = torch.randn(1024, 1024, device="cuda")
    sums = []
    for batch in prefetch(batches, "cuda", depth=3):
        kept = batch
        for _ in range(5):
            kept = (kept @ weight).tanh()
        sums.append((batch * 2).sum(dim=1))
        batch.zero_()  # the body may write into its own batch
    expected = [(batch.cuda() * 2).sum(dim=1) for batch in batches]
    assert len(sums) == 30
    assert all(map(torch.equal, sums, expected))


@gpu
@needs_cuda
def test_prefetch_pulls_at_most_depth_batches_ahead_on_the_gpu():
    pulled = []

    def source():
        for n in range(9):
            pulled.append(n)
            yield torch.tensor(n)

    for n, batch in enumerate(prefetch(source(), "cuda", depth=2)):
        assert int(batch) == n
        assert len(pulled) == min(n + 3, 9)


@gpu
@needs_cuda
def test_an_exception_comes_in_order_on_the_gpu_and_closing_closes_the_source():
    closed = []

    def source():
        try:
            yield torch.tensor(1)
            yield torch.tensor(2)
            raise ValueError("third")
        finally:
            closed.append(True)

    batches = prefetch(source(), "cuda", depth=4)
    assert [int(next(batches)), int(next(batches))] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(batches)
    assert closed == [True]


@gpu
@needs_cuda
def test_epochs_of_prefetch_reuse_one_stream_and_its_memory():
    batches = [torch.zeros(1 << 20).pin_memory() for _ in range(4)]
    reserved = []
    for _ in range(6):
        for batch in prefetch(batches, "cuda"):
            batch.add_(1)
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


@gpu
@needs_cuda
def test_sparse_and_nested_batches_come_ahead_to_the_gpu():
    dense = torch.eye(4)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for sparse, parts in prefetch([(dense.to_sparse(), nested)] * 4, "cuda"):
        assert torch.equal(sparse.to_dense().cpu(), dense)
        assert [len(part) for part in parts.unbind()] == [2, 3]
