"""The inputs in a batch: apply a transform to the images and leave labels and the rest alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, cast

from torch import Tensor

INPUT_KEYS = ("image", "images", "pixel_values", "x", "input")


def on_inputs(
    transform: Callable[[Tensor], Tensor], keys: str | Iterable[str] | None = None
) -> Callable[[Any], Any]:
    """Make a transform of images into one of batches.

    A bare tensor is transformed itself, a tuple or list in its first place, a dict or dataclass at its named
    inputs, and so is a namedtuple when ``keys`` are given. The batch keeps its type and is not modified; what is
    not transformed is passed on as the same object.

    Args:
        transform: From the images to the images, for example `gpu_augment.Compose`.
        keys: Names of the inputs, all of which must be there. None: those of "image", "images", "pixel_values",
            "x" and "input" that are there, at least one.

    Returns:
        A callable from a batch to a batch.

    Raises:
        TypeError: When the transform cannot be called; when called, for a batch of another type.
        ValueError: When no names are given; when called, for a batch without the inputs.

    >>> import torch
    >>> halve = on_inputs(lambda images: images / 2)
    >>> halve({"image": torch.ones(2), "label": torch.ones(2)})
    {'image': tensor([0.5000, 0.5000]), 'label': tensor([1., 1.])}
    """
    if not callable(transform) or isinstance(transform, type):
        raise TypeError(f"transform={transform!r} is no callable object; give one from images to images")
    names = None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    if names is not None and not (names and all(isinstance(name, str) for name in names)):
        raise ValueError(f"keys={keys!r} names no input; give names, or None for {', '.join(INPUT_KEYS)}")
    return _OnInputs(transform, names)


@dataclasses.dataclass(frozen=True)
class _OnInputs:
    transform: Callable[[Tensor], Tensor]
    keys: tuple[str, ...] | None

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, MutableMapping):
            changed = {key: self.transform(batch[key]) for key in self._chosen(batch)}
            result = copy.copy(batch)
            result.update(changed)
            return result
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            names = self._chosen([field.name for field in dataclasses.fields(batch)])
            changed = {name: self.transform(getattr(batch, name)) for name in names}
            # Not dataclasses.replace: it would run __init__ and compute other fields again.
            twin = copy.copy(cast(Any, batch))
            for name, value in changed.items():
                object.__setattr__(twin, name, value)
            return twin
        if self.keys is not None and hasattr(batch, "_fields"):
            return batch._replace(
                **{k: self.transform(getattr(batch, k)) for k in self._chosen(batch._fields)}
            )
        if self.keys is not None:
            raise ValueError(
                f"keys={self.keys!r} were given and the batch is a {type(batch).__name__}; leave them out"
            )
        return self._first(batch)

    def _first(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return self.transform(batch)
        if not isinstance(batch, (tuple, list)):
            raise TypeError(
                f"the batch is a {type(batch).__name__}; expected a tensor, tuple, list, dict or dataclass"
            )
        if not batch:
            raise ValueError(
                f"the batch is an empty {type(batch).__name__}; expected the images in its first place"
            )
        first = self.transform(batch[0])
        if isinstance(batch, list):
            result = copy.copy(batch)
            result[0] = first
            return result
        rest = (first, *batch[1:])
        return batch._make(rest) if hasattr(batch, "_make") else type(batch)(rest)

    def _chosen(self, present: Iterable[Any]) -> list[str]:
        names = list(present)
        wanted = INPUT_KEYS if self.keys is None else self.keys
        chosen = [key for key in wanted if key in names]
        if not chosen or (self.keys is not None and len(chosen) < len(wanted)):
            missing = [key for key in wanted if key not in names]
            raise ValueError(
                f"the batch has {names} and not {missing}; name its images with on_inputs(transform, keys=...)"
            )
        return chosen
