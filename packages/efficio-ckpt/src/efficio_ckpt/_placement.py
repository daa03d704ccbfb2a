"""Which memory a set of tensors needs, shared memory once, and where each lies in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from ._tensor import as_stored, contiguous_stride, extent, is_dense

# Any element of any dtype starts at a multiple of this when its storage does.
_ALIGNMENT: Final = 16


@dataclass(frozen=True)
class Placement:
    """Which memory is stored, and where each leaf lies in it.

    ``nodes[i]`` describes leaf ``i``: ``("tensor", [source, dtype, shape])`` when the source holds its values in
    logical order, with a fourth item when its strides are to be restored, or
    ``("view", [source, dtype, shape, stride, offset in bytes])`` when it shares the source's memory.

    Each source lies in the memory of a leaf, its owner; ``are_whole`` when each is the whole of its owner.
    """

    sources: tuple[Tensor, ...]
    owners: tuple[int, ...]
    nodes: tuple[tuple[str, list[Any]], ...]
    are_whole: bool


class Places:
    """Places the tensors of one tree after another, and knows those that it has placed before by their addresses.

    It holds no tensor.

    Attributes:
        layout: An object that stays the same one for as long as sources have the same addresses, shapes, strides and dtypes.
    """

    def __init__(self) -> None:
        self.layout: object = object()
        self._seen: list[tuple[Any, ...]] = []
        self._owners: tuple[int, ...] = ()
        self._nodes: tuple[tuple[str, list[Any]], ...] = ()

    def place(self, leaves: Sequence[Tensor]) -> Placement:
        """Do what `place` does, and faster for leaves that lie where those of the last call lay.

        Args:
            leaves: As for `place`.
        """
        seen = [
            (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.storage_offset())
            for leaf in leaves
        ]
        if self._owners and seen == self._seen:
            sources = tuple(as_stored(leaves[owner]) for owner in self._owners)
            return Placement(sources, self._owners, self._nodes, are_whole=True)
        placement = place(leaves)
        self.layout = object()
        self._seen = seen
        self._owners = placement.owners if placement.are_whole else ()
        self._nodes = placement.nodes
        return placement


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
    parts: list[int] = []

    def store(tensor: Tensor, owner: int, *, is_part: bool = False) -> int:
        sources.append(tensor)
        owners.append(owner)
        if is_part:
            parts.append(owner)
        return len(sources) - 1

    for members in _clusters(leaves):
        first = members[0]
        if len({_view_key(leaves[index]) for index in members}) == 1:
            node = _place_alone(leaves[first], first, store)
            for index in members:
                nodes[index] = node
            continue
        low = min(_span(leaves[index])[0] for index in members)
        high = max(_span(leaves[index])[1] for index in members)
        cover = _covering(leaves, members, low, high)
        if cover is None and not _share_elements(leaves, members, low, high):
            for index in members:
                nodes[index] = _place_alone(leaves[index], index, store)
            continue
        if cover is None:
            low -= low % _ALIGNMENT
            memory = torch.empty(0, dtype=torch.uint8, device=leaves[first].device)
            memory.set_(leaves[first].untyped_storage(), low, (high - low,), (1,))
            base = store(memory, first, is_part=True)
        else:
            base = store(as_stored(leaves[cover]), cover)
        for index in members:
            leaf = leaves[index]
            item = [base, _name(leaf.dtype), list(leaf.shape)]
            if index == cover:
                nodes[index] = ("tensor", item)
            else:
                nodes[index] = ("view", [*item, list(leaf.stride()), _span(leaf)[0] - low])
    return Placement(tuple(sources), tuple(owners), tuple(nodes), are_whole=not parts)


def _place_alone(leaf: Tensor, owner: int, store: Callable[..., int]) -> tuple[str, list[Any]]:
    shape, stride = tuple(leaf.shape), leaf.stride()
    item = [_name(leaf.dtype), list(shape)]
    elements = extent(shape, stride)
    if elements < prod(shape):
        memory = leaf.as_strided((elements,), (1,), leaf.storage_offset())
        return "view", [store(as_stored(memory), owner, is_part=True), *item, list(stride), 0]
    if stride != contiguous_stride(shape) and is_dense(shape, stride):
        item.append(list(stride))
    return "tensor", [store(as_stored(leaf), owner), *item]


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
