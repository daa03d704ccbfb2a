"""Several transforms as one, with neighbours joined where that gives the same pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._affine import RandomAffine
from ._argument import fill_levels
from ._batch import Shape, batch_shape
from ._crop import RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from ._pointwise import Normalize, RepeatChannels, ToFloat
from ._resize import RandomResizedCrop
from ._window import show, through, whole_window

Transform = Callable[[Tensor], Tensor]


class Compose:
    """Apply transforms in order, joining neighbours where that gives the same pixels with less memory traffic.

    Joined are: one `RandomCrop` with the flips around it (one gather), flips after `RandomResizedCrop` or
    `RandomAffine` (folded into their sampling), both bit for bit; `ToFloat` before `Normalize`, also with
    `RepeatChannels` between, on uint8 in float32 (one pass, equal to a few units in the last place: 1e-6 of the
    result's range). Random parameters are drawn in the same order and number, joined or not.

    Args:
        transforms: Callables from a batch to a batch, in order; your own among them. None gives the batch back.
        fuse: Join neighbours. False applies each transform by itself.

    Raises:
        TypeError: When it is no list of callables, or holds a class instead of an object.

    >>> augment = Compose([RandomCrop(32, 4), RandomHorizontalFlip(), ToFloat(), Normalize(0.5, 0.5)])
    >>> augment(torch.zeros(8, 3, 32, 32, dtype=torch.uint8)).dtype
    torch.float32
    """

    def __init__(self, transforms: Iterable[Transform], *, fuse: bool = True) -> None:
        if not isinstance(transforms, Iterable):
            raise TypeError(f"transforms={transforms!r} is no list; write Compose([first, second])")
        self.transforms = tuple(transforms)
        self.fuse = fuse
        for i, transform in enumerate(self.transforms):
            if isinstance(transform, type):
                raise TypeError(
                    f"transform {i} is the class {transform.__name__}; write {transform.__name__}()"
                )
            if not callable(transform):
                raise TypeError(
                    f"transform {i} is {transform!r}; expected a callable from a batch to a batch"
                )
        self._steps = _joined(self.transforms) if fuse else self.transforms

    def __call__(self, batch: Tensor) -> Tensor:
        """Apply the transforms.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point, on any device. Not changed.

        Returns:
            What the last transform gives.
        """
        batch_shape(batch)
        for step in self._steps:
            batch = step(batch)
        return batch

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.transforms))
        return f"Compose([{inner}])" if self.fuse else f"Compose([{inner}], fuse=False)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compose) and (self.transforms, self.fuse) == (other.transforms, other.fuse)

    def __hash__(self) -> int:
        return hash((self.transforms, self.fuse))


_Flip = RandomHorizontalFlip | RandomVerticalFlip
_Move = RandomCrop | _Flip
_Resampler = RandomResizedCrop | RandomAffine
_MOVES = (RandomCrop, RandomHorizontalFlip, RandomVerticalFlip)
_RESAMPLERS = (RandomResizedCrop, RandomAffine)


@dataclass(frozen=True)
class _Moves:
    moves: tuple[_Move, ...]

    def __call__(self, batch: Tensor) -> Tensor:
        shape = batch_shape(batch)
        window, size = _drawn_window(self.moves, shape)
        crop = self.crop()
        if crop is None:
            return show(batch, window, size)
        return show(batch, window, size, padding=crop.padding, fill=fill_levels(crop.fill))

    def crop(self) -> RandomCrop | None:
        return next((move for move in self.moves if isinstance(move, RandomCrop)), None)


@dataclass(frozen=True)
class _Sampling:
    transform: _Resampler
    flips: tuple[_Flip, ...]

    def __call__(self, batch: Tensor) -> Tensor:
        shape = batch_shape(batch)
        parameters = self.transform.draw(shape)
        window, _ = _drawn_window(self.flips, self.transform.result_shape(shape))
        return self.transform.apply(batch, parameters, window)


@dataclass(frozen=True)
class _Scaling:
    to_float: ToFloat
    repeat: RepeatChannels | None
    normalize: Normalize

    def __call__(self, batch: Tensor) -> Tensor:
        whole = batch.dtype == torch.uint8 and self.to_float.dtype in (None, torch.float32)
        batch = batch if whole else self.to_float(batch)
        return self.normalize(self.repeat(batch) if self.repeat else batch)


def _joined(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    steps: list[Transform] = []
    for transform in transforms:
        taken, step = _join(steps, transform)
        steps[len(steps) - taken :] = [step]
    return tuple(steps)


def _join(steps: list[Transform], transform: Transform) -> tuple[int, Transform]:
    """Say how many of the last steps a transform joins, and what they are together."""
    last = steps[-1] if steps else None
    # Exact types: a subclass may do something else with its batch.
    kind = type(transform)
    if isinstance(transform, _Move) and kind in _MOVES:
        if isinstance(last, _Moves) and not (kind is RandomCrop and last.crop()):
            return 1, _Moves((*last.moves, transform))
        if isinstance(last, _Sampling) and not isinstance(transform, RandomCrop):
            return 1, _Sampling(last.transform, (*last.flips, transform))
        return 0, _Moves((transform,))
    if isinstance(transform, _Resampler) and kind in _RESAMPLERS:
        return 0, _Sampling(transform, ())
    if isinstance(transform, Normalize) and kind is Normalize:
        if type(last) is ToFloat:
            return 1, _Scaling(last, None, transform)
        if type(last) is RepeatChannels and len(steps) > 1:
            before = steps[-2]
            if type(before) is ToFloat:
                return 2, _Scaling(before, last, transform)
    return 0, transform


def _drawn_window(moves: tuple[_Move, ...], shape: Shape) -> tuple[Tensor, tuple[int, int]]:
    window: Tensor | None = None
    for move in moves:
        seen = move.window(move.draw(shape), shape)
        window = seen if window is None else through(window, seen)
        shape = move.result_shape(shape)
    return whole_window(shape[0]) if window is None else window, shape[2:]
