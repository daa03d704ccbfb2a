"""Trees of plain leaves, and the typed document that describes one exactly."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ._leaf import (
    MAX_DEPTH,
    MAX_PLAIN_INT,
    SCALARS,
    array_from,
    array_memory,
    float_node,
    is_array_dtype,
    key_node,
    plain_tensor,
    scalar_node,
)
from ._placement import Places, place
from ._sparse import is_sparse, parts_of, sparse_from
from ._tensor import rebuild

Tree = Any
"""Nested dicts, lists and tuples of leaves; the leaf types are a closed list (see `flatten`)."""

_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_MAPPING_TYPES: Final[dict[str, Any]] = {name: kind for kind, name in _MAPPINGS.items()}


@dataclass(frozen=True)
class Flat:
    """A tree cut into a document of JSON types and the memory that it refers to.

    Args:
        document: The typed tree; scalars are in it, tensors are numbers of sources.
        sources: Tensors in their stored dtype, in any strides and on any device, not copied.
        names: A unique name for each source: the path of the first leaf that lies in it.
        layout: The same object for two trees whose sources have the same addresses, shapes, strides and dtypes, if it is not None.
    """

    document: Any
    sources: tuple[Tensor, ...]
    names: tuple[str, ...]
    layout: object = None


def flatten(tree: Tree, places: Places | None = None) -> Flat:
    """Cut a tree into a document and its tensors, without copying any.

    Args:
        tree: Nested containers of leaves. Tensors may live on any device and share memory; gradients are not kept.
        places: Knows where the tensors of an earlier tree lay, which makes this one faster where they still lie there.

    Raises:
        TypeError: A leaf or key is of no type that can be stored; the message names its path in the tree.
        ValueError: The tree is nested deeper than 100 levels, or contains itself.

    Example:
        >>> flatten({"step": 3, "betas": (0.5, 0.25)}).document
        {'dict': [['step', 3], ['betas', {'tuple': [{'float': '0x1.0000000000000p-1'}, {'float': '0x1.0000000000000p-2'}]}]]}
    """
    leaves: list[Tensor] = []
    paths: list[str] = []
    tensor_nodes: list[dict[str, Any]] = []
    arrays: list[tuple[dict[str, Any], list[Any]]] = []

    def add_tensor(tensor: Tensor, path: str) -> dict[str, Any]:
        leaves.append(plain_tensor(tensor, path))
        paths.append(path)
        tensor_nodes.append({})
        return tensor_nodes[-1]

    def add_array(array: Any, path: str) -> dict[str, Any]:
        if not is_array_dtype(array.dtype):
            raise TypeError(
                f"{path or 'the tree'} is a NumPy array of {array.dtype}; store numbers, text or dates"
            )
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        node = add_tensor(array_memory(array.T if fortran else array), path)
        arrays.append((node, [array.dtype.str, list(array.shape), "F" if fortran else "C"]))
        return node

    def visit(value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"int": hex(value)}
        if kind is float:
            return float_node(value)
        if isinstance(value, Tensor):
            if value.layout != torch.strided and is_sparse(value):
                description, parts = parts_of(value)
                return {"sparse": [*description, [add_tensor(part, path) for part in parts]]}
            return add_tensor(value, path)
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{path[:60]}… is nested deeper than {MAX_DEPTH} levels, or the tree contains itself"
            )
        if kind is list:
            return [visit(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [visit(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]}
        if kind in _MAPPINGS:
            pairs = [
                [key_node(key, path, depth + 1), visit(item, _join(path, key), depth + 1)]
                for key, item in value.items()
            ]
            return {_MAPPINGS[kind]: pairs}
        if kind is np.ndarray:
            return add_array(value, path)
        return scalar_node(value, path)

    document = visit(tree, "", 0)
    placement = place(leaves) if places is None else places.place(leaves)
    for node, (kind, item) in zip(tensor_nodes, placement.nodes, strict=True):
        node[kind] = item
    for node, description in arrays:
        node["array"] = description
    names = _unique_names([paths[owner] for owner in placement.owners])
    return Flat(document, placement.sources, names, None if places is None else places.layout)


def unflatten(document: Any, stored: Sequence[Tensor]) -> Tree:
    """Build the tree that a document describes; the inverse of `flatten`.

    Args:
        document: What `flatten` returned, or the same read from JSON.
        stored: For each source a contiguous CPU tensor with memory of its own. The tree takes it over.

    Raises:
        ValueError: The document is not one that `flatten` makes, or does not fit the memory.

    Example:
        >>> flat = flatten({"lr": 0.1, 3: (torch.ones(2), None)})
        >>> unflatten(flat.document, flat.sources)
        {'lr': 0.1, 3: (tensor([1., 1.]), None)}
    """
    memo: dict[str, Tensor] = {}
    forms: dict[int, str] = {}

    def leaf(kind: str, item: list[Any]) -> Tensor:
        key = repr((kind, item))
        # Each new form may be a copy; a document that asks for many would fill the memory.
        if kind == "tensor" and forms.setdefault(item[0], key) != key:
            raise ValueError(f"tensor {item[0]!r} is described in two ways")
        if key not in memo:
            if type(item[0]) is not int or not 0 <= item[0] < len(stored):
                raise ValueError(f"tensor {item[0]!r} was not stored")
            memo[key] = rebuild(kind, stored[item[0]], item[1:])
        return memo[key].detach()

    def visit(node: Any) -> Any:
        if node is None or isinstance(node, (bool, str, int)):
            return node
        if isinstance(node, list):
            return [visit(item) for item in node]
        if not isinstance(node, dict):
            raise ValueError(f"{type(node).__name__} is no node of a tree")
        if "array" in node:
            (kind, item), description = (
                next(pair for pair in node.items() if pair[0] != "array"),
                node["array"],
            )
            return array_from(leaf(kind, item), *description)
        ((kind, item),) = node.items()
        if kind in {"tensor", "view"}:
            return leaf(kind, item)
        if kind == "sparse":
            key = repr(node)
            if key not in memo:
                layout, shape, coalesced, parts = item
                memo[key] = sparse_from(layout, shape, coalesced, [visit(part) for part in parts])
            return memo[key].detach()
        if kind == "tuple":
            return tuple(visit(value) for value in item)
        if kind == "Counter":
            mapping: dict[Any, Any] = _counter((visit(key), visit(value)) for key, value in item)
        elif kind in _MAPPING_TYPES:
            mapping = _MAPPING_TYPES[kind]((visit(key), visit(value)) for key, value in item)
        else:
            return SCALARS[kind](item)
        if len(mapping) != len(item):
            raise ValueError("a key is given twice")
        return mapping

    try:
        return visit(document)
    except (
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        RuntimeError,
        AttributeError,
        StopIteration,
        struct.error,
    ) as error:
        raise ValueError(f"the tree cannot be rebuilt: {error}") from error


def copied(tree: Tree) -> Tree:
    """Return a copy of a tree on the CPU that shares no memory with it.

    Leaves that share memory among themselves share the copy.

    Args:
        tree: As for `flatten`.

    Raises:
        TypeError: As for `flatten`.
        ValueError: As for `flatten`.

    Example:
        >>> weight = torch.ones(2)
        >>> copy = copied({"tied": [weight, weight]})
        >>> weight.zero_()
        tensor([0., 0.])
        >>> copy
        {'tied': [tensor([1., 1.]), tensor([1., 1.])]}
    """
    flat = flatten(tree)
    return unflatten(
        flat.document,
        [
            torch.empty(source.shape, dtype=source.dtype, device="cpu").copy_(source)
            for source in flat.sources
        ],
    )


def _join(path: str, key: Any) -> str:
    if type(key) is str and key:
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r:.60}]"


def _unique_names(paths: Sequence[str]) -> tuple[str, ...]:
    seen: set[str] = set()
    names = []
    for index, path in enumerate(paths):
        # A lone surrogate is no valid UTF-8, and "__metadata__" is the format's own key.
        name = path[:200].encode("utf-8", "backslashreplace").decode("utf-8") or "tensor"
        if name in seen or name == "__metadata__":
            name = f"{name}#{index}"
        while name in seen:
            name += "#"
        seen.add(name)
        names.append(name)
    return tuple(names)


def _counter(pairs: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, value in pairs:
        dict.__setitem__(counter, key, value)
    return counter
