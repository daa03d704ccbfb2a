"""Random crops and flips by whole pixels: exact, in any dtype, one gather for the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ._argument import Fill, Size, count, fill_levels, probability, size_pair
from ._batch import Shape, batch_shape, check_parameters, constants, uniform
from ._window import show, whole_window


@dataclass(frozen=True)
class RandomCrop:
    """Cut a box of a fixed size out of each image, at a random place of its own.

    With ``padding`` the image is first set in a border, as for CIFAR: ``RandomCrop(32, 4)``. Two random numbers
    are drawn for each sample; the places have the distribution of ``torchvision.transforms.RandomCrop``.

    Args:
        size: One side for a square, or (height, width), in pixels.
        padding: Width of the border on all four sides, in pixels.
        fill: Value of the border, one number or one for each channel, in the unit of the batch.

    Raises:
        ValueError: For a size, padding or fill that is none; when called, for images smaller than the crop.

    >>> RandomCrop(32, 4)(torch.zeros(8, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([8, 3, 32, 32])
    """

    size: Size
    padding: int = 0
    fill: Fill = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        size_pair(self.size)
        count(self.padding, name="padding")
        fill_levels(self.fill)

    def __call__(self, batch: Tensor) -> Tensor:
        """Draw places and crop: ``apply(batch, draw(batch.shape))``."""
        return self.apply(batch, self.draw(batch_shape(batch)))

    def draw(self, shape: Shape) -> Tensor:
        """Draw the top left corners.

        Args:
            shape: (N, C, H, W) of the batch.

        Returns:
            ``(N, 2)``, float64, CPU: top and left in pixels of the image; negative in the border.
        """
        down, right = self._room(shape)
        places = uniform(shape[0], 2)
        places[:, 0].mul_(down + 1)
        places[:, 1].mul_(right + 1)
        return places.floor_().sub_(self.padding)

    def apply(self, batch: Tensor, parameters: Tensor) -> Tensor:
        """Crop at given places.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.
            parameters: From ``draw``.

        Returns:
            ``(N, C, height, width)``, dtype, device and memory format of the batch.
        """
        shape = batch_shape(batch)
        check_parameters(parameters, shape, 2)
        corners = parameters + self.padding
        if not bool((corners >= 0).all() & (corners <= constants(self._room(shape))).all()):
            raise ValueError(
                f"the places lie outside images of {shape[2]}x{shape[3]}; draw them for this shape"
            )
        window = self.window(parameters, shape)
        return show(batch, window, size_pair(self.size), padding=self.padding, fill=fill_levels(self.fill))

    def window(self, parameters: Tensor, shape: Shape) -> Tensor:
        """Give the crops as windows, ``(N, 4)``: see ``_window.py``."""
        window = whole_window(shape[0])
        window[:, 0::2] = parameters
        return window

    def result_shape(self, shape: Shape) -> Shape:
        """Give the shape of the result for the shape of a batch."""
        return (*shape[:2], *size_pair(self.size))

    def _room(self, shape: Shape) -> tuple[int, int]:
        height, width = size_pair(self.size)
        down, right = (shape[2] + 2 * self.padding - height, shape[3] + 2 * self.padding - width)
        if min(down, right) < 0:
            raise ValueError(
                f"a crop of {height}x{width} does not fit images of {shape[2]}x{shape[3]} with padding={self.padding}"
            )
        return down, right


@dataclass(frozen=True)
class _RandomFlip:
    p: float = 0.5
    _axis: ClassVar[int]

    def __post_init__(self) -> None:
        probability(self.p)

    def __call__(self, batch: Tensor) -> Tensor:
        """Draw who is mirrored, and mirror: ``apply(batch, draw(batch.shape))``."""
        return self.apply(batch, self.draw(batch_shape(batch)))

    def draw(self, shape: Shape) -> Tensor:
        """Draw who is mirrored: ``(N, 1)``, float64, CPU, 1 for those and 0 for the others."""
        return (uniform(shape[0], 1) < self.p).to(torch.float64)

    def apply(self, batch: Tensor, parameters: Tensor) -> Tensor:
        """Mirror the samples that were drawn.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.
            parameters: From ``draw``.

        Returns:
            Shape, dtype, device and memory format of the batch.
        """
        shape = batch_shape(batch)
        check_parameters(parameters, shape, 1)
        return show(batch, self.window(parameters, shape), shape[2:])

    def window(self, parameters: Tensor, shape: Shape) -> Tensor:
        """Give the flips as windows, ``(N, 4)``: see ``_window.py``."""
        window = whole_window(shape[0])
        # A flag of 1 adds side - 1 to the offset and takes 2 from the sign.
        offset = 2 * (self._axis - 2)
        window[:, offset : offset + 2] += parameters * constants([shape[self._axis] - 1, -2])
        return window

    def result_shape(self, shape: Shape) -> Shape:
        """Give the shape of the result for the shape of a batch."""
        return shape


class RandomHorizontalFlip(_RandomFlip):
    """Mirror images left to right, each with a probability of its own. One random number for each sample.

    Args:
        p: The probability.

    Raises:
        ValueError: When it lies outside 0 to 1.

    >>> RandomHorizontalFlip(1.0)(torch.arange(3.0).view(1, 1, 1, 3))
    tensor([[[[2., 1., 0.]]]])
    """

    _axis = 3


class RandomVerticalFlip(_RandomFlip):
    """Mirror images top to bottom, each with a probability of its own. One random number for each sample.

    Args:
        p: The probability.

    Raises:
        ValueError: When it lies outside 0 to 1.

    >>> RandomVerticalFlip(1.0)(torch.arange(3.0).view(1, 1, 3, 1)).flatten()
    tensor([2., 1., 0.])
    """

    _axis = 2
