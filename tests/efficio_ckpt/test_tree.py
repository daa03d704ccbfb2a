"""Any tree of the closed list comes back with the same types, bits and shared memory."""

import contextlib
import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import DTYPES, bits, permuted, same, tensor_of, tensors, trees

from efficio_ckpt import load_state, save_state
from efficio_ckpt._leaf import MAX_DEPTH
from efficio_ckpt._placement import Places
from efficio_ckpt._tree import copied, flatten, unflatten


@given(tree=trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_of_the_closed_list_comes_back_bit_for_bit(tree):
    flat = flatten(tree)
    document = json.loads(json.dumps(flat.document))
    stored = [torch.empty(source.shape, dtype=source.dtype).copy_(source) for source in flat.sources]
    assert same(tree, unflatten(document, stored))
    assert same(tree, copied(tree))


@given(tree=trees)
@settings(max_examples=20, deadline=None)
def test_any_tree_comes_back_from_a_storage(tree):
    save_state("memory://trees", tree, step=0, keep=1)
    assert same(tree, load_state("memory://trees"))


@given(tensor=st.one_of(tensors, permuted))
@settings(max_examples=100, deadline=None)
def test_strides_of_dense_tensors_come_back(tensor):
    if tensor.numel():
        assert copied(tensor).stride() == tensor.stride()


VIEWS = {
    "tied": lambda t: [t, t, t.view(4, 6)],
    "rows": lambda t: [t, t[1:3], t[2:]],
    "overlapping rows": lambda t: [t[:3], t[1:]],
    "columns apart": lambda t: [t[:, :2], t[:, 2:4], t[:, 4:]],
    "columns meeting": lambda t: [t[:, :3], t[:, 2:]],
    "transposed": lambda t: [t, t.t()],
    "transposed only": lambda t: [t.t(), t.t()],
    "other dtype": lambda t: [t, t.view(torch.int32)],
    "bytes inside": lambda t: [t.view(torch.uint8)[:, 4:9], t[:, 1:]],
    "expanded": lambda t: [t[0:1].expand(5, 6)],
    "windows": lambda t: [t.reshape(-1).unfold(0, 4, 2)],
    "windows and whole": lambda t: [t.reshape(-1).unfold(0, 4, 2), t],
    "apart": lambda t: [t[0], t[3]],
    "scalar inside": lambda t: [t[1, 2], t],
    "empty": lambda t: [t[:0], t, t[:, :0]],
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS.keys())
def test_what_shares_memory_shares_it_again(views):
    originals = views(torch.arange(24, dtype=torch.float32).reshape(4, 6).clone())
    copies = copied(originals)
    assert same(originals, copies)
    for index in range(len(originals)):
        for tensors_ in (originals, copies):
            tensor = tensors_[index]
            if tensor.numel():
                memory = tensor.as_strided((1,), (1,), tensor.storage_offset())
                memory.view(torch.uint8).fill_(index + 1)
        assert same(originals, copies), index


def test_a_slice_of_a_large_tensor_stores_only_the_slice():
    large = torch.zeros(1000, 1000)
    for part in (large[3:5], large[:, 7:9], large[5], [large[:, 1], large[:, 3]]):
        stored = sum(source.numel() for source in flatten(part).sources)
        assert stored == sum(leaf.numel() for leaf in (part if isinstance(part, list) else [part]))


def test_an_expanded_tensor_stores_its_memory_once():
    assert flatten(torch.zeros(1).expand(10**9)).sources[0].numel() == 1


def test_tied_weights_are_stored_once_under_the_first_name():
    weight = torch.ones(2)
    flat = flatten({"a": {"w": weight}, "b": weight})
    assert flat.names == ("a.w",)


def test_parameters_and_plain_subclasses_come_back_as_tensors_without_gradient():
    class Mine(torch.Tensor):
        pass

    tree = {"p": torch.nn.Parameter(torch.ones(2)), "m": torch.ones(2).as_subclass(Mine)}
    copy = copied(tree)
    assert [type(leaf) for leaf in copy.values()] == [torch.Tensor, torch.Tensor]
    assert not copy["p"].requires_grad


def test_lazily_conjugated_and_negated_tensors_store_their_values():
    z = tensor_of(torch.complex64, (3,), 1)
    assert torch.equal(bits(copied(z.conj())), bits(z.conj().resolve_conj()))
    assert torch.equal(copied(z.conj().imag), z.conj().imag.resolve_neg())


Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


UNSTORABLE = {
    "function": lambda: 0,
    "set": {1},
    "object": object(),
    "defaultdict": defaultdict(int),
    "namedtuple": Point(1, 2),
    "enum": Colour.RED,
    "complex": 1j,
    "object array": np.array([None]),
    "structured array": np.zeros(1, [("a", "i4")]),
    "masked array": np.ma.masked_array([1]),
    "sparse without values": torch.eye(2).to_sparse().to("meta"),
    "meta": torch.empty(2, device="meta"),
    "uninitialised": torch.nn.parameter.UninitializedParameter(),
    "generator": torch.Generator(),
}


@pytest.mark.parametrize("leaf", UNSTORABLE.values(), ids=UNSTORABLE.keys())
def test_what_cannot_be_stored_is_refused_with_its_path(leaf):
    with pytest.raises(TypeError, match=r"^scheduler\.lr_lambdas\[1\] (is|has|is on)"):
        flatten({"scheduler": {"lr_lambdas": [0, leaf]}})


def test_keys_that_cannot_be_stored_are_refused_with_their_path():
    with pytest.raises(TypeError, match=r"key frozenset\(\{1\}\) of a\.b"):
        flatten({"a": {"b": {frozenset({1}): 0}}})


def test_a_tree_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        flatten(loop)


def test_the_deepest_tree_that_is_taken_comes_back_from_a_storage():
    tree = 1
    for _ in range(MAX_DEPTH + 1):
        tree = {"k": tree}
    save_state("memory://deep", tree, step=0)
    assert load_state("memory://deep") == tree
    with pytest.raises(ValueError, match="nested deeper"):
        flatten({"k": tree})


def test_container_types_and_key_order_come_back():
    tree = {
        "o": OrderedDict([("b", 1), ("a", 2)]),
        "c": Counter({"x": -1}),
        3: (1, [2, (3,)]),
        "3": True,
        (1, "k"): None,
    }
    copy = copied(tree)
    assert same(tree, copy)
    assert list(copy["o"]) == ["b", "a"]


def test_names_are_unique_and_valid_whatever_the_keys_are(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    one = torch.ones(1)
    tree = {
        "a.b": one.clone(),
        "a": {"b": one.clone(), "": one.clone()},
        "__metadata__": one.clone(),
        "\ud800": one.clone(),
        "x" * 5000: one.clone(),
        "x" * 4999: one.clone(),
        1: one.clone(),
        "1": one.clone(),
    }
    checkpoint = save_state(tmp_path, tree, step=0)
    assert same(tree, load_state(tmp_path))
    assert len(safetensors.load_file(tmp_path / checkpoint.name / "tensors-00001.safetensors")) == 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_is_read_by_the_safetensors_library(dtype, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensor = tensor_of(dtype, (3, 2), 0)
    checkpoint = save_state(tmp_path, {"t": tensor, "empty": tensor[:0], "scalar": tensor[0, 0]}, step=0)
    loaded = safetensors.load_file(tmp_path / checkpoint.name / "tensors-00001.safetensors")
    assert torch.equal(bits(loaded["t"]), bits(tensor))
    assert loaded["empty"].numel() == 0


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "tensor",
                        "view",
                        "array",
                        "tuple",
                        "dict",
                        "Counter",
                        "OrderedDict",
                        "int",
                        "float",
                        "nan",
                        "bytes",
                        "dtype",
                        "device",
                        "Size",
                        "numpy",
                        "x",
                    ]
                ),
                inner,
                max_size=2,
            )
        ),
        max_leaves=8,
    )
)
@settings(max_examples=300, deadline=None)
def test_a_hostile_document_is_a_value_error_and_nothing_else(data):
    with contextlib.suppress(ValueError):
        unflatten(data, [torch.ones(2)])


HOSTILE = {
    "view outside": {"view": [0, "float32", [100], [1], 0]},
    "view beyond by offset": {"view": [0, "float32", [2], [1], 4]},
    "misaligned view": {"view": [0, "float32", [1], [1], 1]},
    "huge shape": {"tensor": [0, "float32", [2**61, 0]]},
    "negative": {"view": [0, "float32", [1], [-1], 0]},
    "stride that shares": {"tensor": [0, "float32", [2], [0]]},
    "another number": {"tensor": [1, "float32", [2]]},
    "negative number": {"tensor": [-1, "float32", [2]]},
    "dtype that is no dtype": {"dtype": "load"},
    "dtype that is no name": {"dtype": "__class__"},
    "device that is none": {"device": "nowhere"},
    "object array": {"tensor": [0, "float32", [2]], "array": ["|O8", [1], "C"]},
    "array too large": {"tensor": [0, "float32", [2]], "array": ["<f4", [3], "C"]},
    "two forms of one tensor": [{"tensor": [0, "float32", [2]]}, {"tensor": [0, "float32", [2], [1]]}],
    "scalar of gigabytes": {"numpy": ["<U1000000000", ""]},
    "unhashable key": {"dict": [[[], 1]]},
}


@pytest.mark.parametrize("document", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_document_that_does_not_fit_its_memory_is_refused(document):
    with pytest.raises(ValueError, match="the tree cannot be rebuilt"):
        unflatten(document, [torch.ones(2)])


def _trees_in_turn():
    """Trees of tensors that stay, move, change their shape, become views of each other, or come back."""
    weight, other = torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4)
    pair = torch.arange(6.0)
    yield {"a": weight, "b": [other, 1]}
    yield {"a": weight, "b": [other, 2]}
    yield {"a": weight, "b": [weight, 2]}  # tied now
    yield {"a": weight, "b": [other, 2]}
    yield {"a": weight.t(), "b": [other, 2]}
    yield {"a": weight.view(4, 3), "b": [other, 2]}
    yield {"a": weight.view(torch.int32), "b": [other, 2]}
    yield {"a": pair[:4], "b": [pair[2:], 2]}  # they share two elements
    yield {"a": pair[:4], "b": [pair[2:], 3]}
    yield {"a": pair[::2], "b": [pair[1::2], 3]}
    yield {"a": pair.expand(5, 6), "b": [pair, 3]}
    yield {"a": torch.complex(pair, pair), "b": [pair, 3], "c": torch.empty(0)}
    yield {"c": torch.complex(pair, pair), "b": [pair, 3], "a": torch.empty(0)}
    for number in range(4):  # memory that was given back may come again for another tensor
        yield {"a": torch.full((1000,), float(number)), "b": [torch.full((1000,), -float(number)), 3]}


def test_a_tree_whose_tensors_were_placed_before_is_cut_as_one_that_was_not():
    places = Places()
    for tree in _trees_in_turn():
        for _ in range(2):
            known, anew = flatten(tree, places), flatten(tree)
            assert known.document == anew.document
            assert known.names == anew.names
            assert [s.dtype for s in known.sources] == [s.dtype for s in anew.sources]
            assert [s.stride() for s in known.sources] == [s.stride() for s in anew.sources]
            assert all(map(torch.equal, known.sources, anew.sources))


def test_the_layout_is_the_same_object_for_as_long_as_tensors_stay_where_they_are():
    places = Places()
    weight, other = torch.ones(4), torch.ones(4)
    first = flatten({"w": weight, "n": 1}, places).layout
    assert flatten({"w": weight, "n": 2}, places).layout is first
    assert flatten({"w": other, "n": 2}, places).layout is not first
