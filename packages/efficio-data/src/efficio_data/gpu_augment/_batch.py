"""A batch of images as the transforms see it, and the small tensor of random parameters beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]


def batch_shape(batch: Tensor) -> Shape:
    """Give the shape of a batch, once it is known to be one.

    Args:
        batch: Images, ``(N, C, H, W)``, uint8 or floating point, on any device.

    Returns:
        (N, C, H, W). N may be 0.

    Raises:
        TypeError: When it is no tensor, or its dtype is neither uint8 nor floating point.
        ValueError: When it does not have four dimensions with at least one channel and pixel.

    >>> batch_shape(torch.zeros(8, 3, 32, 32))
    (8, 3, 32, 32)
    """
    if not isinstance(batch, Tensor):
        raise TypeError(f"the batch is a {type(batch).__name__}; expected a tensor of shape (N, C, H, W)")
    if batch.ndim != 4 or 0 in batch.shape[1:]:
        hint = "; batch one image with image[None]" if batch.ndim == 3 else ""
        raise ValueError(f"the batch has shape {tuple(batch.shape)}; expected (N, C, H, W){hint}")
    if batch.dtype != torch.uint8 and not batch.is_floating_point():
        raise TypeError(f"the batch has dtype {batch.dtype}; expected uint8 or a floating point dtype")
    n, channels, height, width = batch.shape
    return n, channels, height, width


def constants(values: Sequence[Any]) -> Tensor:
    """Give plain numbers as a CPU tensor, whatever the default device and dtype are.

    Args:
        values: Numbers, or equally long rows of numbers.

    Returns:
        float64, CPU.

    >>> constants([1, 2])
    tensor([1., 2.], dtype=torch.float64)
    """
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def uniform(n: int, columns: int) -> Tensor:
    """Draw the random numbers of one transform for one batch, on the CPU, from torch's global generator.

    They are drawn in double precision, so that a choice among k pixels is even and the arithmetic on them
    agrees between processors. The number of draws depends on the shape alone.

    Args:
        n: Samples in the batch.
        columns: Numbers for each sample.

    Returns:
        ``(n, columns)``, float64, CPU, each in [0, 1).
    """
    return torch.rand(n, columns, dtype=torch.float64, device="cpu")


def check_parameters(parameters: Tensor, shape: Shape, columns: int) -> None:
    """Refuse parameters that were not drawn for a batch of this size.

    Args:
        parameters: What ``draw`` gave, or what a caller says it gave.
        shape: (N, C, H, W) of the batch.
        columns: Numbers for each sample.

    Raises:
        ValueError: When they are not ``(N, columns)`` on the CPU.

    >>> check_parameters(torch.zeros(8, 2), (8, 3, 32, 32), 2)
    """
    if tuple(parameters.shape) != (shape[0], columns) or parameters.device.type != "cpu":
        raise ValueError(
            f"the parameters have shape {tuple(parameters.shape)} on {parameters.device}; "
            f"expected {(shape[0], columns)} on cpu, from draw(batch.shape)"
        )


def send(parameters: Tensor, device: torch.device) -> Tensor:
    """Send a small CPU tensor to where the batch is, without waiting for the device.

    Args:
        parameters: Any small CPU tensor. float64 becomes float32 for Apple's GPUs, which lack it.
        device: The batch's device.

    Returns:
        The parameters there.
    """
    if device.type == "mps" and parameters.dtype == torch.float64:
        parameters = parameters.to(torch.float32)
    if device.type == "cuda":
        return parameters.pin_memory().to(device, non_blocking=True)
    return parameters.to(device)


def memory_format(batch: Tensor) -> torch.memory_format:
    """Say whether a batch is stored channels-last.

    Args:
        batch: ``(N, C, H, W)``.

    Returns:
        ``torch.channels_last`` when it is, and is not contiguous as well, else ``torch.contiguous_format``.

    >>> memory_format(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    torch.channels_last
    """
    last = batch.is_contiguous(memory_format=torch.channels_last) and not batch.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Say in which dtype pixels of a dtype are computed.

    Args:
        dtype: uint8 or a floating point dtype.

    Returns:
        float64 for float64, else float32.

    >>> working_dtype(torch.uint8), working_dtype(torch.float16)
    (torch.float32, torch.float32)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn computed pixels back into the dtype of the batch; for uint8 round to the nearest, halves to even.

    Args:
        pixels: float32 or float64. Not kept: it may be changed.
        dtype: The dtype wanted.

    Returns:
        The pixels in that dtype.
    """
    if dtype == torch.uint8:
        pixels = pixels.round_().clamp_(0, 255)
    return pixels.to(dtype)


def fill_tensor(levels: tuple[float, ...], batch: Tensor) -> Tensor:
    """Give a fill value as a tensor that broadcasts against a batch.

    Args:
        levels: One number, or one for each channel.
        batch: The batch, for its channels, dtype and device.

    Returns:
        ``(1, 1 or C, 1, 1)`` on the batch's device, float64 (float32 where there is none).

    Raises:
        ValueError: When their number is not 1 or C, or a uint8 batch cannot hold one.
    """
    if len(levels) not in (1, batch.shape[1]):
        raise ValueError(
            f"fill has {len(levels)} values and the batch {batch.shape[1]} channels; give 1 or {batch.shape[1]}"
        )
    if batch.dtype == torch.uint8 and not all(0 <= level <= 255 for level in levels):
        raise ValueError(f"fill={levels} does not fit a uint8 batch; give numbers from 0 to 255")
    return send(constants(levels), batch.device).view(1, -1, 1, 1)
