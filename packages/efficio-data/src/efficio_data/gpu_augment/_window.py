"""A window: which pixel of the source each pixel of the result shows, for moves by whole pixels.

For one sample and one axis it is ``source = offset + sign * index``, so any chain of crops and flips is again
a window. A batch of windows is ``(N, 4)`` on the CPU: row offset, row sign, column offset, column sign.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._batch import constants, fill_tensor, memory_format, send


def whole_window(n: int) -> Tensor:
    """Give the windows that leave images as they are.

    Args:
        n: Samples.

    Returns:
        ``(n, 4)``, float64, CPU.

    >>> whole_window(1)
    tensor([[0., 1., 0., 1.]], dtype=torch.float64)
    """
    return constants([0, 1, 0, 1]).repeat(n, 1)


def through(first: Tensor, second: Tensor) -> Tensor:
    """Compose two windows: the second looks at what the first shows.

    Args:
        first: ``(N, 4)``.
        second: ``(N, 4)``.

    Returns:
        ``(N, 4)``.

    >>> flip = torch.tensor([[0.0, 1.0, 31.0, -1.0]])
    >>> through(torch.tensor([[-4.0, 1.0, 2.0, 1.0]]), flip)
    tensor([[-4.,  1., 33., -1.]])
    """
    offset, sign = first.view(-1, 2, 2).unbind(2)
    both = second.view(-1, 2, 2) * sign[:, :, None]
    both[:, :, 0] += offset
    return both.flatten(1)


def window_indices(window: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """List the source rows and columns that windows show.

    Args:
        window: ``(N, 4)``, on any device.
        size: (height, width) of the result.

    Returns:
        Rows ``(N, height)`` and columns ``(N, width)``, in the dtype of the windows and on their device.

    >>> window_indices(torch.tensor([[0, 1, 2, -1]]), (2, 3))
    (tensor([[0, 1]]), tensor([[2, 1, 0]]))
    """
    rows, columns = (
        window[:, axis, None] + window[:, axis + 1, None] * torch.arange(side, device=window.device)
        for axis, side in ((0, size[0]), (2, size[1]))
    )
    return rows, columns


def show(
    batch: Tensor,
    window: Tensor,
    size: tuple[int, int],
    *,
    padding: int = 0,
    fill: tuple[float, ...] = (0.0,),
) -> Tensor:
    """Move pixels: one gather for the batch, with crops and flips of each sample in it.

    Args:
        batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.
        window: ``(N, 4)`` on the CPU; rows and columns outside the image show the fill value.
        size: (height, width) of the result.
        padding: How far outside the image a window may look, in pixels.
        fill: The value outside, one or one for each channel.

    Returns:
        ``(N, C, height, width)``, dtype, device and memory format of the batch.
    """
    layout = memory_format(batch)
    n, channels = batch.shape[:2]
    source = _padded(batch, padding, fill) if padding else batch
    # In the flattened image a window starts at one place and takes one step down and one across.
    width = source.shape[3]
    places = constants([[width, 0, 0], [0, width, 0], [1, 0, 0], [0, 0, 1]])
    border = constants([padding * (width + 1), 0, 0])
    steps = torch.addmm(border, window.to(torch.float64), places).to(torch.int64)
    start, down, across = send(steps, batch.device)[:, :, None].unbind(1)
    rows = down * torch.arange(size[0], device=batch.device)
    columns = start + across * torch.arange(size[1], device=batch.device)
    flat = (rows[:, :, None] + columns[:, None, :]).flatten(1)
    if layout == torch.channels_last:
        # Rows of C values lie together: the gather runs over pixels and keeps them so.
        pixels = source.permute(0, 2, 3, 1).flatten(1, 2)
        index = flat[:, :, None].expand(-1, -1, channels)
        return pixels.gather(1, index).view(n, *size, channels).permute(0, 3, 1, 2)
    index = flat[:, None, :].expand(-1, channels, -1)
    return source.flatten(2).gather(2, index).view(n, channels, *size)


def _padded(batch: Tensor, padding: int, fill: tuple[float, ...]) -> Tensor:
    n, channels, height, width = batch.shape
    if len(set(fill)) == 1:
        fill_tensor(fill, batch)
        return F.pad(batch, (padding,) * 4, value=fill[0])
    padded = batch.new_empty((n, channels, height + 2 * padding, width + 2 * padding)).contiguous(
        memory_format=memory_format(batch)
    )
    padded.copy_(fill_tensor(fill, batch))
    padded[:, :, padding:-padding, padding:-padding] = batch
    return padded
