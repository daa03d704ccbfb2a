"""Sparse tensors as the dense ones that they are made of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ._tensor import is_dense, sizes

_COMPRESSED: Final[dict[torch.layout, tuple[str, str]]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS: Final[dict[str, torch.layout]] = {
    str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *_COMPRESSED)
}


def is_sparse(tensor: Tensor) -> bool:
    """Tell whether a tensor is one that `parts_of` takes apart.

    Args:
        tensor: Any.

    Example:
        >>> is_sparse(torch.eye(2).to_sparse()), is_sparse(torch.eye(2))
        (True, False)
    """
    own_memory = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.device.type != "meta"
    return own_memory and tensor.layout in _LAYOUTS.values()


def parts_of(tensor: Tensor) -> tuple[list[Any], list[Tensor]]:
    """Return what describes a sparse tensor, and its indices and values, which share its memory.

    Args:
        tensor: Sparse, coalesced or not; nothing is sorted or summed.

    Example:
        >>> parts_of(torch.eye(2).to_sparse())[0]
        ['sparse_coo', [2, 2], True]
    """
    plain = tensor.detach()
    name = str(plain.layout).removeprefix("torch.")
    if plain.layout == torch.sparse_coo:
        # The public accessors refuse a tensor that is not coalesced.
        parts = [plain._indices(), plain._values()]
        description = [name, list(plain.shape), plain.is_coalesced()]
    else:
        parts = [*(getattr(plain, part)() for part in _COMPRESSED[plain.layout]), plain.values()]
        description = [name, list(plain.shape), False]
    # Not detach(): the values of a compressed one stay views of something without strides, and complex ones fail by that.
    return description, [part.data if _is_plain(part) else part.contiguous() for part in parts]


def sparse_from(layout: str, shape: list[int], coalesced: bool, parts: Sequence[Any]) -> Tensor:
    """Return the sparse tensor of some parts; the inverse of `parts_of`.

    Args:
        layout: Its name in torch.
        shape: Of the dense tensor that it stands for; no memory is taken for that.
        coalesced: Whether the indices are sorted and unique, which is checked.
        parts: Indices and values; shared with the result.

    Raises:
        ValueError: They do not fit.
    """
    if layout not in _LAYOUTS or not all(isinstance(part, Tensor) and _is_plain(part) for part in parts):
        raise ValueError(f"{layout!r:.40} and its parts are no sparse tensor")
    size, kind = sizes(shape), _LAYOUTS[layout]
    if kind == torch.sparse_coo:
        indices, values = parts
        sparse = torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
        return _marked_coalesced(sparse) if coalesced else sparse
    compressed, other, values = parts
    with warnings.catch_warnings():
        # That these layouts are new was told to whoever made the tensor.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_compressed_tensor(
            compressed, other, values, size, layout=kind, check_invariants=True
        )


def _marked_coalesced(sparse: Tensor) -> Tensor:
    """Say of a sparse tensor that its indices are sorted and unique, if they are; torch before 2.1 takes no such word."""
    before, after = sparse._indices()[:, :-1], sparse._indices()[:, 1:]
    is_larger = torch.zeros(before.shape[1:], dtype=torch.bool)
    is_equal = torch.ones_like(is_larger)  # in all dimensions so far
    for low, high in zip(before, after, strict=True):
        is_larger |= is_equal & (high > low)
        is_equal &= high == low
    if not is_larger.all():
        raise ValueError("the indices of a coalesced tensor are not sorted and unique")
    return sparse._coalesced_(True)


def _is_plain(part: Tensor) -> bool:
    """Whether each element has memory of its own; a few bytes would else become as many as a shape says, once they are read."""
    return part.layout == torch.strided and (not part.numel() or is_dense(part.shape, part.stride()))
