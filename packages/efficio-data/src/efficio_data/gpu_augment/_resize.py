"""Random resized crops: the ImageNet augmentation, antialiased, with a box of its own for each image."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ._argument import Size, interval, size_pair
from ._batch import (
    Shape,
    batch_shape,
    check_parameters,
    constants,
    memory_format,
    rounded,
    send,
    uniform,
    working_dtype,
)
from ._window import whole_window, window_indices

TRIES = 10


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut a box of random area, shape and place out of each image, and resize it to a fixed size.

    The boxes have the distribution of ``torchvision.transforms.RandomResizedCrop``: up to ten tries, then the
    central crop; 22 random numbers are drawn for each sample, whatever happens. The pixels are those of
    ``torchvision.transforms.functional.resized_crop``: uint8 is computed in float32 and rounded, halves to even.
    Boxes that are enlarged are sampled in one call for the batch; boxes that are reduced are filtered one by one,
    as their triangle filter differs, so a cache of images not much larger than ``size`` is fast.

    Args:
        size: One side for a square, or (height, width), in pixels.
        scale: Least and greatest area of the box, as fractions of the image.
        ratio: Least and greatest width over height of the box.
        antialias: Filter boxes that are reduced. Without it they alias, and every box is sampled at once.

    Raises:
        ValueError: For a size, scale or ratio that is none.

    >>> RandomResizedCrop(24)(torch.zeros(8, 3, 32, 32)).shape
    torch.Size([8, 3, 24, 24])
    """

    size: Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = field(default=(3 / 4, 4 / 3), kw_only=True)
    antialias: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        size_pair(self.size)
        if interval(self.scale, name="scale", above=0.0)[1] > 1:
            raise ValueError(
                f"scale={self.scale!r} goes beyond the image; give fractions of its area up to 1"
            )
        interval(self.ratio, name="ratio", above=0.0)

    def __call__(self, batch: Tensor) -> Tensor:
        """Draw boxes, crop and resize: ``apply(batch, draw(batch.shape))``."""
        return self.apply(batch, self.draw(batch_shape(batch)))

    def draw(self, shape: Shape) -> Tensor:
        """Draw the boxes.

        Args:
            shape: (N, C, H, W) of the batch.

        Returns:
            ``(N, 4)``, float64, CPU: top, left, height and width in pixels.
        """
        draws = uniform(shape[0], 2 * TRIES + 2)
        return random_boxes(draws, shape[2:], scale=self.scale, ratio=self.ratio)

    def apply(self, batch: Tensor, parameters: Tensor, window: Tensor | None = None) -> Tensor:
        """Crop and resize given boxes.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.
            parameters: From ``draw``.
            window: ``(N, 4)``, CPU: flips to apply to the result. None: none.

        Returns:
            ``(N, C, height, width)``, dtype, device and memory format of the batch.
        """
        shape, size = batch_shape(batch), size_pair(self.size)
        check_parameters(parameters, shape, 4)
        ends = parameters[:, :2] + parameters[:, 2:]
        if not bool((parameters >= 0).all() & (ends <= constants(shape[2:])).all()):
            raise ValueError(
                f"the boxes lie outside images of {shape[2]}x{shape[3]}; draw them for this shape"
            )
        window = whole_window(shape[0]) if window is None else window
        pixels = batch.to(working_dtype(batch.dtype))
        reduced = (parameters[:, 2] > size[0]) | (parameters[:, 3] > size[1])
        if not self.antialias or not bool(reduced.any()):
            return rounded(_sampled(pixels, parameters, window, size), batch.dtype)
        result = pixels.new_empty((*shape[:2], *size)).contiguous(memory_format=memory_format(batch))
        enlarged = (~reduced).nonzero()[:, 0]
        if len(enlarged):
            index = send(enlarged, batch.device)
            sampled = _sampled(pixels[index], parameters[enlarged], window[enlarged], size)
            result.index_copy_(0, index, sampled)
        for i in reduced.nonzero()[:, 0].tolist():
            _filter_into(result[i], pixels[i], parameters[i].tolist(), window[i].tolist())
        return rounded(result, batch.dtype)

    def result_shape(self, shape: Shape) -> Shape:
        """Give the shape of the result for the shape of a batch."""
        return (*shape[:2], *size_pair(self.size))


def random_boxes(
    draws: Tensor, image: tuple[int, int], *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Turn random numbers into boxes: the first of ten tries that fits, else the central crop.

    Args:
        draws: ``(N, 22)``, float64 in [0, 1): ten areas, ten shapes, the place down and across.
        image: (height, width) of the images.
        scale: Least and greatest area, as fractions of the image.
        ratio: Least and greatest width over height; its logarithm is uniform.

    Returns:
        ``(N, 4)``, float64: top, left, height and width in pixels.

    Source:
        Szegedy et al. 2014, Going deeper with convolutions (arXiv 1409.4842), as torchvision has it.

    >>> random_boxes(torch.zeros(1, 22, dtype=torch.float64), (32, 32), scale=(0.25, 1.0), ratio=(1.0, 1.0))
    tensor([[ 0.,  0., 16., 16.]], dtype=torch.float64)
    """
    height, width = image
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, :TRIES])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * draws[:, TRIES : 2 * TRIES])
    tall, wide = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (tall >= 1) & (tall <= height) & (wide >= 1) & (wide <= width)
    first = fits.to(torch.int8).argmax(dim=1, keepdim=True)
    sides = torch.cat((tall.gather(1, first), wide.gather(1, first)), dim=1)
    room = constants(image) - sides
    boxes = torch.cat(((draws[:, 2 * TRIES :] * (room + 1)).floor(), sides), dim=1)
    central = constants(_central_box(image, ratio))
    return torch.where(fits.any(dim=1, keepdim=True), boxes, central)


def _central_box(image: tuple[int, int], ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    height, width = image
    tall, wide = height, width
    if width / height < ratio[0]:
        tall = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        wide = min(width, max(1, round(height * ratio[1])))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _sampled(pixels: Tensor, boxes: Tensor, window: Tensor, size: tuple[int, int]) -> Tensor:
    n, _, height, width = pixels.shape
    if n == 0:
        return pixels.new_empty((*pixels.shape[:2], *size))
    sent = send(torch.cat((boxes, window), dim=1), pixels.device)
    places = window_indices(sent[:, 4:], size)
    grids = []
    for axis, (place, side, extent) in enumerate(zip(places, size, (height, width), strict=True)):
        start, length = sent[:, axis, None], sent[:, axis + 2, None]
        position = start + ((place + 0.5) * (length / side) - 0.5).clamp_(min=0)
        position = torch.minimum(position, start + length - 1)
        grids.append((2 * position / max(extent - 1, 1) - 1).to(pixels.dtype))
    rows, columns = grids
    grid = pixels.new_empty((n, *size, 2))
    grid[..., 0] = columns[:, None, :]
    grid[..., 1] = rows[:, :, None]
    layout = memory_format(pixels)
    sampled = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=True)
    return sampled.contiguous(memory_format=layout)


def _filter_into(result: Tensor, image: Tensor, box: list[float], window: list[float]) -> None:
    top, left, tall, wide = (int(side) for side in box)
    crop = image[None, :, top : top + tall, left : left + wide]
    tall, wide = result.shape[1:]
    if wide == 1:
        # torch (2.14, CPU) does not filter down the rows when the result is one pixel wide: lay it on its side.
        side = F.interpolate(crop.transpose(2, 3), (wide, tall), mode="bilinear", antialias=True)
        pixels = side.transpose(2, 3)[0]
    else:
        pixels = F.interpolate(crop, (tall, wide), mode="bilinear", antialias=True)[0]
    mirrored = [axis + 1 for axis in (0, 1) if window[2 * axis + 1] < 0]
    result.copy_(pixels.flip(mirrored) if mirrored else pixels)
