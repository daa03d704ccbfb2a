"""How tensors lie in files: stored dtypes, shared memory, and strides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

# The names of the safetensors format, of which 0.4.3 and every later reader knows each. Other dtypes are stored as
# one of these: complex numbers as pairs of reals, the rarer 8-bit floats as their bytes.
STORED_NAMES: dict[torch.dtype, str] = {
    getattr(torch, dtype): name
    for dtype, name in {
        "float64": "F64",
        "int64": "I64",
        "uint64": "U64",
        "float32": "F32",
        "int32": "I32",
        "uint32": "U32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int16": "I16",
        "uint16": "U16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int8": "I8",
        "uint8": "U8",
        "bool": "BOOL",
    }.items()
    if hasattr(torch, dtype)
}
STORED_DTYPES = {name: dtype for dtype, name in STORED_NAMES.items()}

_COMPLEX_PARTS = {
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
    torch.complex32: torch.float16,
}
_BYTE_DTYPES = (
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *STORED_NAMES,
        *_COMPLEX_PARTS,
        *(getattr(torch, name) for name in _BYTE_DTYPES if hasattr(torch, name)),
    )
}
# Not asked of a torch.complex32 tensor: making one warns.
ITEM_BYTES = {
    dtype: 2 * torch.empty((), dtype=_COMPLEX_PARTS[dtype], device="cpu").element_size()
    if dtype in _COMPLEX_PARTS
    else torch.empty((), dtype=dtype, device="cpu").element_size()
    for dtype in DTYPES.values()
}

# Any element of any dtype starts at a multiple of this when its storage does.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Placement:
    """Which memory is stored, and where each leaf lies in it.

    ``nodes[i]`` describes leaf ``i``: ``("tensor", [source, dtype, shape])`` when the source holds its values in
    logical order, with a fourth item when its strides are to be restored, or
    ``("view", [source, dtype, shape, stride, offset in bytes])`` when it shares the source's memory.
    """

    sources: tuple[Tensor, ...]
    owners: tuple[int, ...]
    nodes: tuple[tuple[str, list[Any]], ...]


def stored_form(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape under which a tensor appears in a file.

    Args:
        dtype: The tensor's dtype.
        shape: The tensor's shape.

    Example:
        >>> stored_form(torch.complex128, (3,))
        (torch.float64, (3, 2))
    """
    if dtype in _COMPLEX_PARTS:
        return _COMPLEX_PARTS[dtype], (*shape, 2)
    if dtype in STORED_NAMES:
        return dtype, tuple(shape)
    return torch.uint8, tuple(shape)


def as_stored(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in the dtype under which it appears in a file.

    Args:
        tensor: Any shape, strides and device; its memory is shared.
    """
    if tensor.dtype in _COMPLEX_PARTS:
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in STORED_NAMES else tensor.view(torch.uint8)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives to a fresh tensor.

    Args:
        shape: Any shape.

    Example:
        >>> contiguous_stride((4, 1, 3))
        (3, 3, 1)
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last one of a tensor, both included.

    Args:
        shape: Any shape.
        stride: As many strides, in elements, none negative.

    Example:
        >>> extent((2, 3), (10, 1))
        13
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether strides only permute memory, without gaps and without sharing an element.

    Args:
        shape: Any shape.
        stride: As many strides, in elements.

    Example:
        >>> is_dense((2, 3), (1, 2)), is_dense((2, 3), (6, 2)), is_dense((2, 3), (0, 1))
        (True, False, False)
    """
    if 0 in shape:
        return False
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def rebuild(kind: str, stored: Tensor, item: Sequence[Any]) -> Tensor:
    """Return a leaf from the memory that was stored for it; the inverse of `place`.

    Args:
        kind: ``"tensor"`` or ``"view"``.
        stored: Contiguous CPU tensor in its stored dtype, with memory of its own; shared with the result unless strides
            are restored.
        item: What `place` said about the leaf, without the number of the source.

    Raises:
        ValueError: The description does not fit the stored memory.
    """
    dtype = DTYPES[item[0]]
    shape = _sizes(item[1])
    if kind == "view":
        stride, offset = _sizes(item[2]), _sizes([item[3]])[0]
        itemsize = ITEM_BYTES[dtype]
        stored_bytes = stored.numel() * stored.element_size()
        if (
            len(stride) != len(shape)
            or offset % itemsize
            or offset + extent(shape, stride) * itemsize > stored_bytes
        ):
            raise ValueError(
                f"a view of shape {shape} lies outside its stored memory of {stored_bytes} bytes"
            )
        view = torch.empty(0, dtype=dtype, device="cpu")
        return view.set_(stored.untyped_storage(), offset // itemsize, shape, stride)
    stored_dtype, stored_shape = stored_form(dtype, shape)
    if stored.dtype != stored_dtype or tuple(stored.shape) != stored_shape:
        raise ValueError(f"stored as {stored.dtype} {tuple(stored.shape)}, described as {dtype} {shape}")
    if dtype in _COMPLEX_PARTS:
        tensor = torch.view_as_complex(stored)
    else:
        tensor = stored if dtype in STORED_NAMES else stored.view(dtype)
    if len(item) == 2:
        return tensor
    stride = _sizes(item[2])
    if len(stride) != len(shape) or not is_dense(shape, stride):
        raise ValueError(f"strides {stride} do not fit shape {shape}")
    return as_written(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"), tensor)


def as_written(target: Tensor, source: Tensor) -> Tensor:
    """Copy values bit by bit into a tensor of the same dtype and shape, and return it.

    Args:
        target: Overwritten.
        source: Any strides.
    """
    as_stored(target).copy_(as_stored(source))
    return target


def place(leaves: Sequence[Tensor]) -> Placement:
    """Decide which memory to store so that every leaf can be rebuilt, shared memory once.

    Leaves that share elements, such as tied weights, share them again after loading. A leaf that is a part of a large
    tensor takes only its own elements along.

    Args:
        leaves: Dense tensors; they are not read, only their strides and addresses are.
    """
    sources: list[Tensor] = []
    owners: list[int] = []
    nodes: list[tuple[str, list[Any]]] = [("", [])] * len(leaves)

    def store(tensor: Tensor, owner: int) -> int:
        sources.append(tensor)
        owners.append(owner)
        return len(sources) - 1

    for members in _clusters(leaves):
        first = members[0]
        if len({_view_key(leaves[index]) for index in members}) == 1:
            node = _place_alone(leaves[first], lambda tensor, owner=first: store(tensor, owner))
            for index in members:
                nodes[index] = node
            continue
        low = min(_span(leaves[index])[0] for index in members)
        high = max(_span(leaves[index])[1] for index in members)
        cover = _covering(leaves, members, low, high)
        if cover is None and not _share_elements(leaves, members, low, high):
            for index in members:
                nodes[index] = _place_alone(leaves[index], lambda tensor, owner=index: store(tensor, owner))
            continue
        if cover is None:
            low -= low % _ALIGNMENT
            memory = torch.empty(0, dtype=torch.uint8, device=leaves[first].device)
            base = store(memory.set_(leaves[first].untyped_storage(), low, (high - low,), (1,)), first)
        else:
            base = store(as_stored(leaves[cover]), cover)
        for index in members:
            leaf = leaves[index]
            item = [base, _name(leaf.dtype), list(leaf.shape)]
            if index == cover:
                nodes[index] = ("tensor", item)
            else:
                nodes[index] = ("view", [*item, list(leaf.stride()), _span(leaf)[0] - low])
    return Placement(tuple(sources), tuple(owners), tuple(nodes))


def _place_alone(leaf: Tensor, store: Any) -> tuple[str, list[Any]]:
    shape, stride = tuple(leaf.shape), leaf.stride()
    item = [_name(leaf.dtype), list(shape)]
    elements = extent(shape, stride)
    if elements < prod(shape):
        memory = leaf.as_strided((elements,), (1,), leaf.storage_offset())
        return "view", [store(as_stored(memory)), *item, list(stride), 0]
    if stride != contiguous_stride(shape) and is_dense(shape, stride):
        item.append(list(stride))
    return "tensor", [store(as_stored(leaf)), *item]


def _clusters(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Group the leaves whose spans of memory meet; in the order of their first leaf."""
    storages: dict[object, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        storages[(leaf.device, leaf.untyped_storage().data_ptr()) if leaf.numel() else index].append(index)
    clusters: list[list[int]] = []
    for members in storages.values():
        end = -1
        for index in sorted(members, key=lambda index: _span(leaves[index])):
            low, high = _span(leaves[index])
            if low >= end:
                clusters.append([])
            clusters[-1].append(index)
            end = max(end, high)
    return sorted((sorted(cluster) for cluster in clusters), key=lambda cluster: cluster[0])


def _covering(leaves: Sequence[Tensor], members: Sequence[int], low: int, high: int) -> int | None:
    """Return the leaf that holds all the memory in order, if the others can be views of it."""
    for index in members:
        if leaves[index].is_contiguous() and _span(leaves[index]) == (low, high):
            aligned = all(
                (_span(leaves[other])[0] - low) % leaves[other].element_size() == 0 for other in members
            )
            if aligned and leaves[index].stride() == contiguous_stride(leaves[index].shape):
                return index
    return None


def _share_elements(leaves: Sequence[Tensor], members: Sequence[int], low: int, high: int) -> bool:
    """Tell whether any byte belongs to two of the views; neighbouring columns meet in span only."""
    spans = sorted(_span(leaves[index]) for index in members)
    if all(before[1] <= after[0] for before, after in pairwise(spans)):
        return False
    seen = torch.zeros(high - low, dtype=torch.bool, device="cpu")
    for index in members:
        leaf = leaves[index]
        size = leaf.element_size()
        if extent(leaf.shape, leaf.stride()) < leaf.numel():
            return True
        view = seen.as_strided(
            (*leaf.shape, size), (*(step * size for step in leaf.stride()), 1), _span(leaf)[0] - low
        )
        if bool(view.any()):
            return True
        view.fill_(1)
    return False


def _span(leaf: Tensor) -> tuple[int, int]:
    low = int(leaf.storage_offset()) * leaf.element_size()
    return low, low + extent(leaf.shape, leaf.stride()) * leaf.element_size()


def _view_key(leaf: Tensor) -> tuple[object, ...]:
    return leaf.dtype, leaf.storage_offset(), tuple(leaf.shape), leaf.stride()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**62 for value in values):
        raise ValueError(f"{values!r:.80} is not a list of sizes")
    return tuple(values)
