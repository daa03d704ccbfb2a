"""Leaves of a tree that are no containers: which ones there are, and their nodes in a document."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ._tensor import ITEM_BYTES

MAX_DEPTH: Final = 100
"""Levels of nesting. Python's own limit of 1,000 frames is shared with the caller's code."""

MAX_PLAIN_INT: Final = 2**53
"""Larger numbers are no JSON numbers to every reader, and are written as text."""

_NUMPY_KINDS: Final = "biufcSUMm"
_NUMPY_DTYPE: Final = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*[a-zA-Z]+\])?")
_DTYPE: Final = re.compile(r"[a-z][a-z0-9_]{1,30}")
_DEVICE: Final = re.compile(r"[a-z_]{1,20}(:\d{1,4})?")
_LEAVES: Final = (
    "tensors, NumPy arrays and scalars, None, bool, int, float, str, bytes, tuple, list, dict, OrderedDict, Counter, "
    "torch.dtype, torch.device and torch.Size"
)


def is_array_dtype(dtype: Any) -> bool:
    """Tell whether arrays of a NumPy dtype can be stored.

    Args:
        dtype: A NumPy dtype.

    Example:
        >>> is_array_dtype(np.dtype("f4")), is_array_dtype(np.dtype(object))
        (True, False)
    """
    return dtype.kind in _NUMPY_KINDS and _NUMPY_DTYPE.fullmatch(dtype.str) is not None


def plain_tensor(tensor: Tensor, path: str) -> Tensor:
    """Return a tensor without its gradient and class, sharing its memory.

    Args:
        tensor: Any tensor.
        path: Where it lies in the tree.

    Raises:
        TypeError: It has no memory of its own that could be stored.
    """
    where = path or "the tree"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{where} is a {type(tensor).__name__}, whose memory is not its own; store a plain tensor"
        )
    if isinstance(tensor, UninitializedTensorMixin):
        raise TypeError(f"{where} has no shape yet; run one batch through the lazy module first")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(
            f"{where} is a {tensor.layout} tensor, which cannot be stored; store .to_dense(), or its parts"
        )
    if tensor.is_quantized or tensor.dtype not in ITEM_BYTES:
        raise TypeError(f"{where} is a tensor of {tensor.dtype}, which cannot be stored; store .dequantize()")
    if tensor.device.type == "meta":
        raise TypeError(f"{where} is on the meta device and has no values")
    plain = tensor
    if type(tensor) is not Tensor or tensor.requires_grad:  # what a state dict gives is plain already
        plain = tensor.detach().as_subclass(Tensor)
    return plain.resolve_conj().resolve_neg()


def array_memory(array: Any) -> Tensor:
    """Return the values of an array as a tensor: of the same dtype where torch has it, of bytes otherwise.

    Args:
        array: Of a dtype that `is_array_dtype` takes; its memory is shared where that is possible.
    """
    contiguous = np.ascontiguousarray(array)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    if array.dtype.kind in "biufc" and array.dtype.isnative:
        try:
            return torch.from_numpy(contiguous.reshape(array.shape))
        except TypeError:
            pass
    return torch.from_numpy(contiguous.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8))


def array_from(memory: Tensor, dtype: str, shape: list[int], order: str) -> Any:
    """Return the array whose values are in a tensor; the inverse of `array_memory`.

    Args:
        memory: From `array_memory`; shared with the result.
        dtype: NumPy's text for the dtype, byte order included.
        shape: Of the array.
        order: ``"C"``, or ``"F"`` when the memory is that of the transposed array.

    Raises:
        ValueError: They do not fit.
    """
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"{dtype!r:.40} is no NumPy dtype that is stored")
    if not memory.is_contiguous():
        # A few bytes would become as many as a shape with strides of 0 says.
        raise ValueError("the memory of an array is in one piece")
    stored_shape = tuple(reversed(shape)) if order == "F" else tuple(shape)
    flat = memory.reshape(-1).numpy()
    array = (flat.view(np.dtype(dtype)) if flat.size else np.empty(0, np.dtype(dtype))).reshape(stored_shape)
    return array.T if order == "F" else array


def float_node(value: float) -> Any:
    """Return the node of a float, exact for every bit.

    Args:
        value: Any float.

    Example:
        >>> float_node(0.1)
        {'float': '0x1.999999999999ap-4'}
    """
    if math.isnan(value):
        return {"nan": struct.pack(">d", value).hex()}
    return {"float": value.hex()}


def scalar_node(value: Any, path: str) -> Any:
    """Return the node of a leaf that is no tensor, array or number of Python's.

    Args:
        value: Bytes, a dtype, a device, a size or a NumPy scalar.
        path: Where it lies in the tree.

    Raises:
        TypeError: It is of no type that can be stored.

    Example:
        >>> scalar_node(b"ab", "x")
        {'bytes': 'YWI='}
    """
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


def key_node(key: Any, path: str, depth: int) -> Any:
    """Return the node of a key of a mapping.

    Args:
        key: A scalar, or a tuple of scalars.
        path: Where the mapping lies in the tree.
        depth: Levels of nesting so far.

    Raises:
        TypeError: It is of no type that can be stored.

    Example:
        >>> key_node((0, "a"), "x", 1)
        {'tuple': [0, 'a']}
    """
    kind = type(key)
    if key is None or kind is bool or kind is str:
        return key
    if kind is int:
        return key if -MAX_PLAIN_INT <= key <= MAX_PLAIN_INT else {"int": hex(key)}
    if kind is float:
        return float_node(key)
    if kind is tuple and depth <= MAX_DEPTH:
        return {"tuple": [key_node(item, path, depth + 1) for item in key]}
    return scalar_node(key, f"key {key!r:.60} of {path or 'the tree'}")


def _device_from(text: str) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"{text!r:.40} is no device")
    return torch.device(text)


def _dtype_from(text: str) -> torch.dtype:
    # Not getattr, which would import modules of torch by name.
    dtype = vars(torch).get(text) if _DTYPE.fullmatch(text) else None
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


SCALARS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": lambda item: int(item, 16),
    "float": float.fromhex,
    "nan": lambda item: struct.unpack(">d", bytes.fromhex(item))[0],
    "bytes": lambda item: base64.b64decode(item, validate=True),
    "dtype": _dtype_from,
    "device": _device_from,
    "Size": torch.Size,
    "numpy": _numpy_scalar_from,
}
