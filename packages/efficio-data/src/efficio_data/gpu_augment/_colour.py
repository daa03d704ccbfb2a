"""Random brightness and contrast, as torchvision blends them, with a factor of its own for each image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._argument import Range, interval
from ._batch import Shape, batch_shape, check_parameters, constants, send, uniform, working_dtype

# The weights of red, green and blue in torchvision's rgb_to_grayscale (ITU-R BT.601, as it rounds them).
GREY_WEIGHTS = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class RandomBrightness:
    """Multiply each image by a factor of its own. One random number for each sample.

    The result equals ``torchvision.transforms.functional.adjust_brightness``: clamped to 0 to 255 and cut to
    an integer for uint8, clamped to 0 to 1 for floating point. Use it before `Normalize`.

    Args:
        amount: a for factors from max(0, 1 - a) to 1 + a, or (lowest, highest) factor.

    Raises:
        ValueError: When it is neither, or a factor is negative.

    >>> RandomBrightness((0.5, 0.5))(torch.ones(1, 1, 1, 2))
    tensor([[[[0.5000, 0.5000]]]])
    """

    amount: Range

    def __post_init__(self) -> None:
        _factors(self.amount)

    def __call__(self, batch: Tensor) -> Tensor:
        """Draw factors and apply them: ``apply(batch, draw(batch.shape))``."""
        return self.apply(batch, self.draw(batch_shape(batch)))

    def draw(self, shape: Shape) -> Tensor:
        """Draw the factors: ``(N, 1)``, float64, CPU."""
        return _drawn(self.amount, shape)

    def apply(self, batch: Tensor, parameters: Tensor) -> Tensor:
        """Apply given factors.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point from 0 to 1. Not changed.
            parameters: From ``draw``.

        Returns:
            Shape, dtype, device and memory format of the batch.
        """
        check_parameters(parameters, batch_shape(batch), 1)
        factor = send(parameters, batch.device).view(-1, 1, 1, 1)
        return _clamped(batch * factor.to(working_dtype(batch.dtype)), batch.dtype)


@dataclass(frozen=True)
class RandomContrast:
    """Stretch each image about the mean of its grey levels by a factor of its own. One random number a sample.

    The result equals ``torchvision.transforms.functional.adjust_contrast``: clamped to 0 to 255 and cut to
    an integer for uint8, clamped to 0 to 1 for floating point. Use it before `Normalize`.

    Args:
        amount: a for factors from max(0, 1 - a) to 1 + a, or (lowest, highest) factor.

    Raises:
        ValueError: When it is neither, or a factor is negative; when called, for images that have neither one
            channel nor three.

    >>> RandomContrast((0.5, 0.5))(torch.tensor([[[[0.0, 1.0]]]]))
    tensor([[[[0.2500, 0.7500]]]])
    """

    amount: Range

    def __post_init__(self) -> None:
        _factors(self.amount)

    def __call__(self, batch: Tensor) -> Tensor:
        """Draw factors and apply them: ``apply(batch, draw(batch.shape))``."""
        return self.apply(batch, self.draw(batch_shape(batch)))

    def draw(self, shape: Shape) -> Tensor:
        """Draw the factors: ``(N, 1)``, float64, CPU."""
        return _drawn(self.amount, shape)

    def apply(self, batch: Tensor, parameters: Tensor) -> Tensor:
        """Apply given factors.

        Args:
            batch: ``(N, 1 or 3, H, W)``, uint8 or floating point from 0 to 1. Not changed.
            parameters: From ``draw``.

        Returns:
            Shape, dtype, device and memory format of the batch.
        """
        shape = batch_shape(batch)
        if shape[1] not in (1, 3):
            raise ValueError(f"the batch has shape {shape}; RandomContrast expects 1 or 3 channels")
        check_parameters(parameters, shape, 1)
        dtype = working_dtype(batch.dtype)
        # The rest to 1 is taken in float64 before rounding, as torchvision's Python floats are.
        weights = send(torch.cat((parameters, 1 - parameters), dim=1), batch.device).to(dtype)
        factor, rest = weights.view(-1, 2, 1, 1, 1).unbind(1)
        return _clamped((batch * factor).add_(rest * mean_grey(batch)), batch.dtype)


def mean_grey(batch: Tensor) -> Tensor:
    """Measure the mean grey level of each image, as torchvision's ``adjust_contrast`` does.

    Args:
        batch: ``(N, 1 or 3, H, W)``, uint8 or floating point. Not changed.

    Returns:
        ``(N, 1, 1, 1)``, float32 or float64, in the unit of the batch.

    >>> mean_grey(torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)).item()
    76.0
    """
    dtype = working_dtype(batch.dtype)
    if batch.shape[1] == 1:
        return batch.mean(dim=(1, 2, 3), keepdim=True, dtype=dtype)
    if batch.dtype == torch.uint8:
        # Each grey pixel is cut to an integer before the mean, so the channels cannot be averaged apart.
        red, green, blue = (weight * batch[:, i : i + 1] for i, weight in enumerate(GREY_WEIGHTS))
        grey = red.add_(green).add_(blue).to(torch.uint8)
        return grey.mean(dim=(1, 2, 3), keepdim=True, dtype=dtype)
    weights = send(constants(GREY_WEIGHTS), batch.device).to(dtype)
    means = batch.mean(dim=(2, 3), keepdim=True, dtype=dtype)
    return (means * weights.view(1, 3, 1, 1)).sum(dim=1, keepdim=True)


def _factors(amount: Range) -> tuple[float, float]:
    if isinstance(amount, (tuple, list)):
        return interval(amount, name="amount", low=0.0)
    _, spread = interval((0.0, amount), name="amount")
    return max(0.0, 1.0 - spread), 1.0 + spread


def _drawn(amount: Range, shape: Shape) -> Tensor:
    low, high = _factors(amount)
    return low + (high - low) * uniform(shape[0], 1)


def _clamped(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    return pixels.clamp_(0, 255 if dtype == torch.uint8 else 1).to(dtype)
