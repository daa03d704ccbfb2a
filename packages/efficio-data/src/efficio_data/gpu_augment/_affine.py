"""Random rotation, shift, zoom and shear: one affine map for each image, one grid for the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ._argument import Fill, Range, around, fill_levels, interval, probability
from ._batch import (
    Shape,
    batch_shape,
    check_parameters,
    constants,
    fill_tensor,
    memory_format,
    rounded,
    send,
    uniform,
    working_dtype,
)
from ._window import whole_window, window_indices


@dataclass(frozen=True)
class RandomAffine:
    """Rotate, shift, zoom and shear each image about its centre by amounts of its own.

    The amounts have the distribution of ``torchvision.transforms.RandomAffine``, shifts in whole pixels included;
    six random numbers are drawn for each sample, whichever are used. The pixels are those of
    ``torchvision.transforms.functional.affine``, with two differences: bilinear sampling is the default, and a
    ``fill`` other than 0 blends once at the border where torchvision blends twice. uint8 is computed in float32
    and rounded, halves to even.

    Args:
        degrees: a for rotations from -a to a, or (lowest, highest), in degrees.
        translate: Greatest shift across and down, as fractions of width and height. None: no shift.
        scale: (least, greatest) zoom. None: no zoom.
        shear: a for a shear along x from -a to a, (lowest, highest), or (lowest x, highest x, lowest y,
            highest y), in degrees. None: no shear.
        fill: Value outside the image, one number or one for each channel, in the unit of the batch.
        interpolation: How to sample between pixels.

    Raises:
        ValueError: For an argument that is not what it should be.

    >>> RandomAffine(15, (0.1, 0.1))(torch.zeros(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    degrees: Range
    translate: tuple[float, float] | None = None
    scale: tuple[float, float] | None = field(default=None, kw_only=True)
    shear: Range | tuple[float, float, float, float] | None = field(default=None, kw_only=True)
    fill: Fill = field(default=0, kw_only=True)
    interpolation: Literal["bilinear", "nearest"] = field(default="bilinear", kw_only=True)

    def __post_init__(self) -> None:
        self._ranges((1, 1, 1, 1))
        fill_levels(self.fill)
        if self.interpolation not in ("bilinear", "nearest"):
            raise ValueError(f"interpolation={self.interpolation!r} is unknown; give 'bilinear' or 'nearest'")

    def __call__(self, batch: Tensor) -> Tensor:
        """Draw amounts and apply them: ``apply(batch, draw(batch.shape))``."""
        return self.apply(batch, self.draw(batch_shape(batch)))

    def draw(self, shape: Shape) -> Tensor:
        """Draw the amounts.

        Args:
            shape: (N, C, H, W) of the batch.

        Returns:
            ``(N, 6)``, float64, CPU: rotation in degrees, shift across and down in pixels, zoom, shear along x
            and y in degrees.
        """
        low, high = constants(self._ranges(shape)).unbind(1)
        amounts = low + (high - low) * uniform(shape[0], 6)
        amounts[:, 1:3] = amounts[:, 1:3].round()
        return amounts

    def apply(self, batch: Tensor, parameters: Tensor, window: Tensor | None = None) -> Tensor:
        """Apply given amounts.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.
            parameters: From ``draw``.
            window: ``(N, 4)``, CPU: flips to apply to the result. None: none.

        Returns:
            Shape, dtype, device and memory format of the batch.
        """
        shape = batch_shape(batch)
        check_parameters(parameters, shape, 6)
        window = whole_window(shape[0]) if window is None else window
        pixels = batch.to(working_dtype(batch.dtype))
        fill = fill_tensor(fill_levels(self.fill), batch).to(pixels.dtype)
        if shape[0] == 0:
            return batch.clone()
        grid = _grid(inverse_matrices(parameters), window, pixels)
        # Zeros lie outside for grid_sample; shifting the values makes them the fill.
        filled = any(fill_levels(self.fill))
        moved = F.grid_sample(
            pixels - fill if filled else pixels,
            grid,
            mode=self.interpolation,
            padding_mode="zeros",
            align_corners=False,
        ).contiguous(memory_format=memory_format(batch))
        return rounded(moved.add_(fill) if filled else moved, batch.dtype)

    def result_shape(self, shape: Shape) -> Shape:
        """Give the shape of the result for the shape of a batch."""
        return shape

    def _ranges(self, shape: Shape) -> list[tuple[float, float]]:
        across, down = _fractions(self.translate or (0.0, 0.0))
        zoom = (1.0, 1.0) if self.scale is None else interval(self.scale, name="scale", above=0.0)
        shear_x = shear_y = (0.0, 0.0)
        if isinstance(self.shear, Sequence) and len(self.shear) == 4:
            shear_x, shear_y = (interval(self.shear[i : i + 2], name="shear") for i in (0, 2))
        elif self.shear is not None:
            shear_x = around(self.shear, name="shear")
        return [
            around(self.degrees, name="degrees"),
            (-across * shape[3], across * shape[3]),
            (-down * shape[2], down * shape[2]),
            zoom,
            shear_x,
            shear_y,
        ]


def inverse_matrices(amounts: Tensor) -> Tensor:
    """Turn amounts into the maps from a place in the result to its place in the image.

    Args:
        amounts: ``(N, 6)``, float64, as `RandomAffine.draw` gives them.

    Returns:
        ``(N, 6)``, float64: the rows of 2 x 3 matrices, for (x, y, 1) in pixels from the centre of the image.

    Source:
        The inverse of shift, zoom, rotation, shear along y, shear along x, applied to a place from right to left.

    >>> inverse_matrices(torch.tensor([[0.0, 2.0, -4.0, 2.0, 0.0, 0.0]], dtype=torch.float64)).tolist()
    [[0.5, 0.0, -1.0, 0.0, 0.5, 2.0]]
    """
    angle, shear_x, shear_y = (torch.deg2rad(amounts[:, i]) for i in (0, 4, 5))
    across, down, zoom = amounts[:, 1], amounts[:, 2], amounts[:, 3]
    cos, sin, tan_x, tan_y = angle.cos(), angle.sin(), shear_x.tan(), shear_y.tan()
    # Undo the rotation, then the shear along y (second row), then the shear along x (first row).
    second_x, second_y = (tan_y * cos - sin) / zoom, (tan_y * sin + cos) / zoom
    first_x, first_y = cos / zoom + tan_x * second_x, sin / zoom + tan_x * second_y
    first_shift, second_shift = (
        -(x * across + y * down) for x, y in ((first_x, first_y), (second_x, second_y))
    )
    return torch.stack((first_x, first_y, first_shift, second_x, second_y, second_shift), dim=1)


def _fractions(translate: Sequence[float]) -> tuple[float, float]:
    try:
        across, down = (probability(fraction, name="translate") for fraction in translate)
    except (TypeError, ValueError):
        raise ValueError(
            f"translate={translate!r} is not a shift; give fractions of width and height, each from 0 to 1"
        ) from None
    return across, down


def _grid(matrices: Tensor, window: Tensor, pixels: Tensor) -> Tensor:
    n, _, height, width = pixels.shape
    sent = send(torch.cat((matrices, window), dim=1), pixels.device)
    rows, columns = window_indices(sent[:, 6:], (height, width))
    x, y = columns + (0.5 - width / 2), rows + (0.5 - height / 2)
    # Sums of outer products, not a matrix product: tensor cores would round it to ten bits (TF32).
    grid = pixels.new_empty((n, height, width, 2))
    for i, side in enumerate((width, height)):
        by_x, by_y, shift = (sent[:, 3 * i + j, None] * (2 / side) for j in range(3))
        across, down = (by_x * x).to(grid.dtype), (by_y * y + shift).to(grid.dtype)
        torch.add(across[:, None, :], down[:, :, None], out=grid[..., i])
    return grid
