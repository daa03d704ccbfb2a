"""Bit-wise comparison of trees, and a strategy that makes any tree of the closed list."""

import struct
from collections import Counter, OrderedDict

import numpy as np
import torch
from hypothesis import strategies as st

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# from torch 2.1 on
EIGHT_BIT = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
ODD_FLOATS = [
    getattr(torch, name)
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if hasattr(torch, name)
]
INTS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WIDE = [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *EIGHT_BIT, *ODD_FLOATS, *INTS, *WIDE, *COMPLEX]


def bits(tensor):
    plain = tensor.detach().contiguous()
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def same(a, b):
    """Equal types, bits, shapes and (where memory is dense) strides, all the way down."""
    if isinstance(a, torch.Tensor) and a.layout == torch.sparse_coo:
        return (
            type(b) is torch.Tensor
            and (a.layout, a.shape, a.is_coalesced()) == (b.layout, b.shape, b.is_coalesced())
            and same(a._indices(), b._indices())
            and same(a._values(), b._values())
        )
    if isinstance(a, torch.Tensor):
        return (
            type(b) is torch.Tensor
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(bits(a), bits(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype.str == b.dtype.str and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=False)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    return a == b


def tensor_of(dtype, shape, seed):
    count = int(np.prod(shape))
    size = torch.empty((), dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 256, count * size, np.uint8)
    if dtype == torch.bool:
        raw &= 1
    flat = torch.from_numpy(raw).clone() if raw.size else torch.empty(0, dtype=torch.uint8)
    if dtype.is_complex:
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.view_as_complex(flat.view(real).reshape(*shape, 2))
    return flat.view(dtype).reshape(shape)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
tensors = st.builds(tensor_of, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
permuted = st.builds(
    lambda dtype, shape, seed, turn: tensor_of(dtype, shape, seed).permute(
        sorted(range(len(shape)), key=lambda i: (i + turn) % 4)
    ),
    st.sampled_from(DTYPES),
    shapes,
    st.integers(0, 99),
    st.integers(0, 3),
)
sparse = st.builds(
    lambda rows, columns, dtype, seed: torch.sparse_coo_tensor(
        torch.tensor([[row % 5 for row in rows], [(row + columns) % 3 for row in rows]], dtype=torch.int64),
        tensor_of(dtype, (len(rows),), seed),
        (5, 3),
        check_invariants=True,
    ),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(0, 2),
    st.sampled_from([*FLOATS, *INTS, *COMPLEX]),
    st.integers(0, 99),
)
numpy_dtypes = st.sampled_from(
    [
        "?",
        "<i1",
        "<u2",
        "<i4",
        "<u8",
        "<f2",
        "<f4",
        "<f8",
        ">f4",
        ">i8",
        "<c8",
        "<c16",
        "<U3",
        "|S4",
        "<M8[ns]",
        "<m8[s]",
    ]
)


def array_of(dtype, shape, seed):
    kind = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if kind.kind == "U":
        return rng.integers(0, 99, shape).astype(kind)
    raw = rng.integers(0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
    if kind.kind == "b":
        raw &= 1
    return raw.view(kind).reshape(shape) if raw.size else np.empty(shape, kind)


arrays = st.builds(array_of, numpy_dtypes, shapes, st.integers(0, 99))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=True),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.sampled_from([*DTYPES, torch.qint8]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")]),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.builds(lambda array: array.reshape(-1)[0], arrays.filter(lambda array: array.size)),
)
keys = st.recursive(
    st.one_of(
        st.text(max_size=4),
        st.integers(),
        st.booleans(),
        st.none(),
        st.binary(max_size=2),
        st.floats(allow_nan=False),
    ),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
trees = st.recursive(
    st.one_of(scalars, tensors, permuted, sparse, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(-5, 5), max_size=4).map(Counter),
    ),
    max_leaves=12,
)
