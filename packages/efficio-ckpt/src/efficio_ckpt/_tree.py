"""Trees of plain leaves, and the typed document that describes one exactly."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from . import _tensor

Tree = Any
"""Nested dicts, lists and tuples of leaves; the leaf types are a closed list (see `flatten`)."""

MAX_DEPTH: Final = 100
"""Levels of nesting. Python's own limit of 1,000 frames is shared with the caller's code."""

_MAX_PLAIN_INT: Final = 2**53
_NUMPY_KINDS: Final = "biufcSUMm"
_NUMPY_DTYPE: Final = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*[a-zA-Z]+\])?")
_DTYPE: Final = re.compile(r"[a-z][a-z0-9_]{1,30}")
_DEVICE: Final = re.compile(r"[a-z_]{1,20}(:\d{1,4})?")
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_MAPPING_TYPES: Final[dict[str, Any]] = {name: kind for kind, name in _MAPPINGS.items()}
_LEAVES: Final = (
    "tensors, NumPy arrays and scalars, None, bool, int, float, str, bytes, tuple, list, dict, OrderedDict, Counter, "
    "torch.dtype, torch.device and torch.Size"
)


@dataclass(frozen=True)
class Flat:
    """A tree cut into a document of JSON types and the memory that it refers to.

    Args:
        document: The typed tree; scalars are in it, tensors are numbers of sources.
        sources: Tensors in their stored dtype, in any strides and on any device, not copied.
        names: A unique name for each source: the path of the first leaf that lies in it.
    """

    document: Any
    sources: tuple[Tensor, ...]
    names: tuple[str, ...]


def flatten(tree: Tree) -> Flat:
    """Cut a tree into a document and its tensors, without copying any.

    Args:
        tree: Nested containers of leaves. Tensors may live on any device and share memory; gradients are not kept.

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
        leaves.append(_plain_tensor(tensor, path))
        paths.append(path)
        tensor_nodes.append({})
        return tensor_nodes[-1]

    def add_array(array: Any, path: str) -> dict[str, Any]:
        if array.dtype.kind not in _NUMPY_KINDS or not _NUMPY_DTYPE.fullmatch(array.dtype.str):
            raise TypeError(
                f"{path or 'the tree'} is a NumPy array of {array.dtype}; store numbers, text or dates"
            )
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        node = add_tensor(_array_memory(array.T if fortran else array), path)
        arrays.append((node, [array.dtype.str, list(array.shape), "F" if fortran else "C"]))
        return node

    def visit(value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_MAX_PLAIN_INT <= value <= _MAX_PLAIN_INT else {"int": hex(value)}
        if kind is float:
            return _float_node(value)
        if isinstance(value, Tensor):
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
                [_key_node(key, path, depth + 1), visit(item, _join(path, key), depth + 1)]
                for key, item in value.items()
            ]
            return {_MAPPINGS[kind]: pairs}
        if kind is np.ndarray:
            return add_array(value, path)
        return _scalar_node(value, path)

    document = visit(tree, "", 0)
    placement = _tensor.place(leaves)
    for node, (kind, item) in zip(tensor_nodes, placement.nodes, strict=True):
        node[kind] = item
    for node, description in arrays:
        node["array"] = description
    return Flat(document, placement.sources, _unique_names([paths[owner] for owner in placement.owners]))


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
            memo[key] = _tensor.rebuild(kind, stored[item[0]], item[1:])
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
            return _array_from(leaf(kind, item), *description)
        ((kind, item),) = node.items()
        if kind in {"tensor", "view"}:
            return leaf(kind, item)
        if kind == "tuple":
            return tuple(visit(value) for value in item)
        if kind == "Counter":
            return _counter((visit(key), visit(value)) for key, value in item)
        if kind in _MAPPING_TYPES:
            return _MAPPING_TYPES[kind]((visit(key), visit(value)) for key, value in item)
        return _SCALARS[kind](item)

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


def _plain_tensor(tensor: Tensor, path: str) -> Tensor:
    where = path or "the tree"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{where} is a {type(tensor).__name__}, whose memory is not its own; store a plain tensor"
        )
    if isinstance(tensor, UninitializedTensorMixin):
        raise TypeError(f"{where} has no shape yet; run one batch through the lazy module first")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{where} is a {tensor.layout} tensor; store .to_dense(), or its indices and values")
    if tensor.is_quantized or tensor.dtype not in _tensor.ITEM_BYTES:
        raise TypeError(f"{where} is a tensor of {tensor.dtype}, which cannot be stored; store .dequantize()")
    if tensor.device.type == "meta":
        raise TypeError(f"{where} is on the meta device and has no values")
    plain = tensor.detach().as_subclass(Tensor)
    return plain.resolve_conj().resolve_neg()


def _array_memory(array: Any) -> Tensor:
    contiguous = np.ascontiguousarray(array)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    if array.dtype.kind in "biufc" and array.dtype.isnative:
        try:
            return torch.from_numpy(contiguous.reshape(array.shape))
        except TypeError:
            pass
    return torch.from_numpy(contiguous.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8))


def _array_from(memory: Tensor, dtype: str, shape: list[int], order: str) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r:.40} is no NumPy dtype that is stored")
    stored_shape = tuple(reversed(shape)) if order == "F" else tuple(shape)
    flat = memory.reshape(-1).numpy()
    array = (flat.view(np.dtype(dtype)) if flat.size else np.empty(0, np.dtype(dtype))).reshape(stored_shape)
    return array.T if order == "F" else array


def _float_node(value: float) -> Any:
    if math.isnan(value):
        return {"nan": struct.pack(">d", value).hex()}
    return {"float": value.hex()}


def _scalar_node(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is torch.Size:
        return {"Size": list(value)}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
        return {"numpy": [value.dtype.str, value.tobytes().hex()]}
    raise TypeError(
        f"{path or 'the tree'} is a {kind.__module__}.{kind.__qualname__}; what can be stored is {_LEAVES}"
    )


def _key_node(key: Any, path: str, depth: int) -> Any:
    kind = type(key)
    if key is None or kind is bool or kind is str:
        return key
    if kind is int:
        return key if -_MAX_PLAIN_INT <= key <= _MAX_PLAIN_INT else {"int": hex(key)}
    if kind is float:
        return _float_node(key)
    if kind is tuple and depth <= MAX_DEPTH:
        return {"tuple": [_key_node(item, path, depth + 1) for item in key]}
    return _scalar_node(key, f"key {key!r:.60} of {path or 'the tree'}")


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


def _device_from(text: str) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"{text!r:.40} is no device")
    return torch.device(text)


def _dtype_from(text: str) -> torch.dtype:
    dtype = getattr(torch, text) if _DTYPE.fullmatch(text) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r:.40} is no dtype of this torch")
    return dtype


def _numpy_scalar_from(item: list[str]) -> Any:
    dtype, data = item
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r:.40} is no NumPy dtype that is stored")
    kind, raw = np.dtype(dtype), bytes.fromhex(data)
    if kind.itemsize != len(raw):
        raise ValueError(f"a scalar of {kind} has {kind.itemsize} bytes, and {len(raw)} are stored")
    return np.frombuffer(raw, kind, 1)[0] if raw else np.zeros((), kind)[()]


_SCALARS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": lambda item: int(item, 16),
    "float": float.fromhex,
    "nan": lambda item: struct.unpack(">d", bytes.fromhex(item))[0],
    "bytes": lambda item: base64.b64decode(item, validate=True),
    "dtype": _dtype_from,
    "device": _device_from,
    "Size": torch.Size,
    "numpy": _numpy_scalar_from,
}
