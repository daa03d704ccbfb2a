"""How tensors lie in files: stored dtypes, shared memory, and strides."""

from __future__ import annotations

from collections.abc import Sequence
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


MAX_DIMENSIONS = 1000
"""More than any tensor has; the product of a million sizes would be computed for hours."""


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
    shape = sizes(item[1])
    if kind == "view":
        stride, offset = sizes(item[2]), sizes([item[3]])[0]
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
    stride = sizes(item[2])
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


def sizes(values: Any) -> tuple[int, ...]:
    """Return a shape or strides from a document.

    Args:
        values: Should be a list of counts.

    Raises:
        ValueError: It is not, or is longer than any shape.

    Example:
        >>> sizes([2, 3])
        (2, 3)
    """
    if (
        not isinstance(values, list)
        or len(values) > MAX_DIMENSIONS
        or not all(type(value) is int and 0 <= value < 2**62 for value in values)
    ):
        raise ValueError(f"{values!r:.80} is not a list of sizes")
    return tuple(values)
