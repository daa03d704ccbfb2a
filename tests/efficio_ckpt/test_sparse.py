"""Sparse tensors come back with the same indices, values, order and flag; a description that does not fit is refused."""

import json

import pytest
import torch

from efficio_ckpt import (
    background_saver,
    load_state,
    put_snapshot,
    save_state,
    take_snapshot,
)
from efficio_ckpt._sparse import is_sparse, parts_of, sparse_from
from efficio_ckpt._tree import copied, flatten, unflatten

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")

LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]


def matrix(dtype=torch.float32):
    dense = torch.zeros(4, 6, dtype=dtype)
    dense[0, 1], dense[3, 5], dense[2, 0] = 1, 2, 3
    return dense


def sparse(layout, dtype=torch.float32):
    blocks = {"blocksize": (2, 3)} if "bs" in layout else {}
    return matrix(dtype).to_sparse(layout=getattr(torch, layout), **blocks)


def uncoalesced(values=(1.0, 2.0, 4.0)):
    return torch.sparse_coo_tensor(
        torch.tensor([[3, 0, 3], [1, 2, 1]]), torch.tensor(values), (5, 4), check_invariants=True
    )


def same(one, other):
    assert (one.layout, one.dtype, one.shape) == (other.layout, other.dtype, other.shape)
    (description, parts), (others_description, others) = parts_of(one), parts_of(other)
    return description == others_description and all(
        torch.equal(part, twin) for part, twin in zip(parts, others, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_each_layout_and_dtype_comes_back(quick_path, layout, dtype):
    tree = {"s": sparse(layout, dtype), "n": 1}
    save_state(quick_path, tree, step=1)
    assert same(load_state(quick_path)["s"], tree["s"])


@pytest.mark.parametrize(
    "tensor",
    [
        uncoalesced(),
        uncoalesced().coalesce(),
        torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.ones(2, 3, 4), (5, 3, 4), check_invariants=True
        ),
        torch.sparse_coo_tensor(
            torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (10**9, 10**9), check_invariants=True
        ),
        torch.sparse_coo_tensor(
            torch.tensor([[0, 1], [2, 3]]), torch.ones(1).expand(2), (4, 4), check_invariants=True
        ),
        torch.sparse_coo_tensor(
            torch.empty(0, 1, dtype=torch.int64), torch.tensor([7.0]), (), check_invariants=True
        ),
        torch.eye(3).to_sparse().t(),
        torch.nn.Parameter(torch.eye(3).to_sparse()),
    ],
    ids=[
        "uncoalesced",
        "coalesced",
        "dense-dimensions",
        "empty",
        "expanded",
        "0-dim",
        "transposed",
        "parameter",
    ],
)
def test_odd_ones_come_back(quick_path, tensor):
    save_state(quick_path, [tensor], step=1)
    (loaded,) = load_state(quick_path)
    assert same(loaded, tensor.detach())
    assert not loaded.requires_grad


def test_a_batch_of_compressed_ones_comes_back(quick_path):
    tensor = torch.stack([matrix(), matrix()]).to_sparse_csr()
    save_state(quick_path, tensor, step=1)
    assert same(load_state(quick_path), tensor)


def test_coalescing_is_neither_done_nor_forgotten(quick_path):
    save_state(quick_path, {"raw": uncoalesced(), "sorted": uncoalesced().coalesce()}, step=1)
    loaded = load_state(quick_path)
    assert not loaded["raw"].is_coalesced()
    assert loaded["sorted"].is_coalesced()
    assert torch.equal(loaded["raw"].to_dense(), loaded["sorted"].to_dense())


def test_a_tensor_that_is_in_the_tree_twice_is_stored_once_and_shared_again(quick_path):
    tensor = sparse("sparse_coo")
    tree = {"a": tensor, "b": tensor, "values": tensor._values()}
    assert len(flatten(tree).sources) == 2
    save_state(quick_path, tree, step=1)
    loaded = load_state(quick_path)
    loaded["values"].zero_()
    assert not loaded["a"].to_dense().any()
    assert not loaded["b"].to_dense().any()


def test_a_save_in_the_background_holds_what_was_there_at_the_call(quick_path):
    tensor = uncoalesced()
    with background_saver(quick_path) as saver:
        saver.save({"s": tensor}, step=1)
        tensor._values().zero_()
    assert same(load_state(quick_path)["s"], uncoalesced())
    copy = copied([uncoalesced()])[0]
    assert same(copy, uncoalesced())


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", uncoalesced().coalesce())
        self.layer = torch.nn.Linear(4, 2)


def test_a_module_with_a_sparse_buffer_and_an_optimizer_of_sparse_gradients_are_restored(quick_path):
    def made():
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(9, 3, sparse=True)
        return Graph(), embedding, torch.optim.SparseAdam(list(embedding.parameters()))

    graph, embedding, optimizer = made()
    embedding(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    graph.edges = graph.edges * 3
    objects = {"graph": graph, "embedding": embedding, "optimizer": optimizer}
    save_state(quick_path, take_snapshot(objects), step=1)
    fresh = dict(zip(objects, made(), strict=True))
    put_snapshot(load_state(quick_path), fresh)
    assert same(fresh["graph"].edges, graph.edges)
    assert torch.equal(fresh["embedding"].weight, embedding.weight)
    state = fresh["optimizer"].state[fresh["embedding"].weight]
    assert torch.equal(state["exp_avg"], optimizer.state[embedding.weight]["exp_avg"])


def test_a_safetensors_reader_sees_indices_and_values(quick_path):
    safetensors = pytest.importorskip("safetensors.torch")
    save_state(quick_path, {"s": uncoalesced()}, step=1)
    (file,) = quick_path.glob("step-*/tensors-*")
    found = sorted(safetensors.load_file(file).values(), key=torch.Tensor.dim)
    assert torch.equal(found[0], uncoalesced()._values())
    assert torch.equal(found[1], uncoalesced()._indices())


INDICES = {"tensor": [0, "int64", [2, 3]]}
VALUES = {"tensor": [1, "float32", [3]]}
STORED = [torch.tensor([[3, 0, 3], [1, 2, 1]]), torch.tensor([1.0, 2.0, 4.0])]


@pytest.mark.parametrize(
    "item",
    [
        ["sparse_coo", [3, 4], False, [INDICES, VALUES]],
        ["sparse_coo", [5], False, [INDICES, VALUES]],
        ["sparse_coo", [5, -4], False, [INDICES, VALUES]],
        ["sparse_coo", [2**61, 2**61, 2**61], False, [INDICES, VALUES]],
        ["sparse_coo", [5, 4], True, [INDICES, VALUES]],
        ["sparse_coo", [5, 4], False, [VALUES, INDICES]],
        ["sparse_coo", [5, 4], False, [INDICES]],
        ["sparse_coo", [5, 4], False, [INDICES, 3]],
        [
            "sparse_coo",
            [5, 4],
            False,
            [INDICES, {"sparse": ["sparse_coo", [5, 4], False, [INDICES, VALUES]]}],
        ],
        [
            "sparse_coo",
            [5, 4],
            False,
            [{"view": [0, "int64", [2, 10**12], [0, 0], 0]}, {"view": [1, "float32", [10**12], [0], 0]}],
        ],
        ["sparse_csr", [5, 4], False, [INDICES, VALUES]],
        ["sparse_csr", [10**12, 4], False, [VALUES, VALUES, VALUES]],
        ["strided", [5, 4], False, [INDICES, VALUES]],
        ["jagged", [5, 4], False, [INDICES, VALUES]],
        [["sparse_coo"], [5, 4], False, [INDICES, VALUES]],
        ["sparse_coo"],
        None,
    ],
    ids=lambda item: json.dumps(item)[:60],
)
def test_a_description_that_does_not_fit_is_refused(item):
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        unflatten({"sparse": item}, [tensor.clone() for tensor in STORED])


def test_the_descriptions_above_are_refused_for_what_is_wrong_with_them():
    good = {"sparse": ["sparse_coo", [5, 4], False, [INDICES, VALUES]]}
    assert same(unflatten(good, STORED), uncoalesced())


def test_a_sparse_tensor_without_values_is_refused_by_its_path():
    with pytest.raises(TypeError, match=r"a\.b is a torch\.sparse_coo tensor"):
        flatten({"a": {"b": torch.eye(2).to_sparse().to("meta")}})
    assert not is_sparse(torch.ones(2))


@pytest.mark.parametrize(
    "indices", [[[1, 0]], [[0, 0]], [[0, 0, 1], [1, 1, 0]], [[0, 1, 0], [0, 0, 1]]], ids=str
)
def test_indices_that_are_not_sorted_and_unique_are_refused_for_a_coalesced_one(indices):
    parts = [torch.tensor(indices), torch.ones(len(indices[0]))]
    shape = [2] * len(indices)
    sparse_from("sparse_coo", shape, False, parts)
    with pytest.raises(ValueError, match="not sorted and unique"):
        sparse_from("sparse_coo", shape, True, parts)


@pytest.mark.parametrize("indices", [[[]], [[1]], [[0, 1]], [[0, 0, 1], [0, 1, 0]]], ids=str)
def test_indices_that_are_sorted_and_unique_are_taken(indices):
    parts = [torch.tensor(indices, dtype=torch.int64), torch.ones(len(indices[0]))]
    assert sparse_from("sparse_coo", [2] * len(indices), True, parts).is_coalesced()
