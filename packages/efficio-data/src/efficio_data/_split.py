"""Split: a batch of any structure cut into smaller ones along its samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from ._transfer import leaves

_REPEATED = (str, bytes, bool, int, float, complex, type(None), np.generic)


def split_batch(batch: Any, parts: int, *, samples: int | None = None) -> list[Any]:
    """Cut a batch into parts along the first dimension of its tensors; together they hold each sample once, in order.

    Tuples, lists, named tuples, mappings and dataclasses keep their types. Tensors and arrays are cut into views. A list with as many
    items as there are samples is cut as well, if it is no container of tensors that are: file names, or images of unlike sizes.
    Scalars, tensors without dimensions and text belong to the whole batch, and come with each part.

    Args:
        batch: Nested containers of tensors.
        parts: How many, 1 or more; fewer come back if there are fewer samples. Their sizes differ by one at most.
        samples: In the batch; None for the first dimension of its first tensor.

    Returns:
        The parts.

    Raises:
        ValueError: `parts` is less than 1, or something has another number of samples than the rest.
        TypeError: Something cannot be cut, such as a `PackedSequence` or a graph, or there is no tensor.

    >>> split_batch((torch.arange(5), {"name": "a"}), 2)
    [(tensor([0, 1]), {'name': 'a'}), (tensor([2, 3, 4]), {'name': 'a'})]
    """
    if parts < 1:
        raise ValueError(f"parts={parts}, expected 1 or more")
    count = batch_samples(batch) if samples is None else samples
    parts = max(1, min(parts, count))
    edges = [part * count // parts for part in range(parts + 1)]
    return [_cut(batch, low, high, count) for low, high in pairwise(edges)]


def batch_samples(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor or array that has one.

    Args:
        batch: Nested containers of tensors.

    Raises:
        TypeError: There is none.

    >>> batch_samples({"x": torch.zeros(7, 2), "y": torch.zeros(7)})
    7
    """
    for leaf in leaves(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim:
            return int(leaf.shape[0])
    raise TypeError(
        f"the {type(batch).__name__} holds no tensor with a dimension of samples, so it cannot be cut into parts"
    )


def _cut(value: Any, low: int, high: int, count: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim == 0:
            return value
        if value.shape[0] != count:
            raise ValueError(
                f"a tensor of shape {tuple(value.shape)} is in a batch of {count} samples, so it cannot be cut into parts with "
                "the rest: make its first dimension that of the samples"
            )
        return value[low:high]
    if isinstance(value, _REPEATED):
        return value
    if isinstance(value, PackedSequence):
        raise TypeError(
            "a PackedSequence cannot be cut into parts: give the padded tensor and the lengths, and pack them in the training step"
        )
    if isinstance(value, (list, tuple)):
        return _cut_sequence(value, low, high, count)
    if isinstance(value, Mapping):
        cut = {key: _cut(item, low, high, count) for key, item in value.items()}
        if type(value) is dict:
            return cut
        if not isinstance(value, MutableMapping):
            return type(value)(cut)  # type: ignore[call-arg]
        twin = copy.copy(value)
        for key, item in cut.items():
            twin[key] = item
        return twin
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        twin = copy.copy(value)
        for name in value.__dataclass_fields__:
            object.__setattr__(twin, name, _cut(getattr(value, name), low, high, count))
        return twin
    raise TypeError(
        f"a {type(value).__name__} cannot be cut into parts: give tensors in tuples, lists, dicts or dataclasses"
    )


def _cut_sequence(value: Any, low: int, high: int, count: int) -> Any:
    if len(value) == count and not _holds_columns(value, count):
        cut = value[low:high]
        return type(value)(cut) if type(value) in (list, tuple) else cut
    items = [_cut(item, low, high, count) for item in value]
    if hasattr(value, "_make"):
        return value._make(items)
    return items if type(value) is list else type(value)(items)


def _holds_columns(value: Any, count: int) -> bool:
    """Whether a sequence is a container of tensors whose rows are the samples, and not a list of the samples themselves."""
    rows = [leaf.shape[:1] for leaf in leaves(value) if isinstance(leaf, (torch.Tensor, np.ndarray))]
    return bool(rows) and all(row in ((count,), ()) for row in rows) and (count,) in rows
