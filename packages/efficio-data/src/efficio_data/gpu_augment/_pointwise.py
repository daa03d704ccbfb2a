"""Each pixel by itself: to floating point, normalised, one channel to several. Nothing is random here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._argument import count, fill_levels
from ._batch import batch_shape, constants, send, working_dtype


@dataclass(frozen=True)
class ToFloat:
    """Make images floating point: uint8 is divided by 255, floating point keeps its values.

    Args:
        dtype: The dtype of the result. None: float32 for uint8, unchanged for floating point.

    Raises:
        TypeError: When the dtype is not a floating point dtype.

    >>> ToFloat()(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))
    tensor([[[[0.0000, 0.2000, 1.0000]]]])
    """

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)

    def __call__(self, batch: Tensor) -> Tensor:
        """Convert a batch.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.

        Returns:
            The images in 0 to 1 when they were uint8. The batch itself when there is nothing to do.
        """
        batch_shape(batch)
        if batch.dtype != torch.uint8:
            return batch if self.dtype is None else batch.to(self.dtype)
        return batch.to(self.dtype or torch.float32).div_(255)


@dataclass(frozen=True)
class Normalize:
    """Subtract the mean of each channel and divide by its standard deviation; uint8 is divided by 255 first.

    Args:
        mean: One number, or one for each channel, in the unit of images from 0 to 1.
        std: The same for the standard deviation, greater than 0.
        dtype: The dtype of the result. None: float32 for uint8, unchanged for floating point.

    Raises:
        ValueError: When mean or std are not numbers or std is not positive; when called, when their number is
            neither 1 nor C.
        TypeError: When the dtype is not a floating point dtype.

    >>> Normalize(0.5, 0.25)(torch.tensor([[[[0.0, 1.0]]]]))
    tensor([[[[-2.,  2.]]]])
    """

    mean: float | Sequence[float]
    std: float | Sequence[float]
    dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # Tuples make two equal transforms equal and keep a caller's list from changing this one later.
        object.__setattr__(self, "mean", fill_levels(self.mean, name="mean"))
        object.__setattr__(self, "std", fill_levels(self.std, name="std"))
        if min(fill_levels(self.std)) <= 0:
            raise ValueError(
                f"std={self.std!r} holds a number that is not positive; give standard deviations"
            )
        _check_dtype(self.dtype)

    def __call__(self, batch: Tensor) -> Tensor:
        """Normalise a batch in one pass, ``batch * scale + shift``, computed in float32 or float64.

        Args:
            batch: ``(N, C, H, W)``, uint8 or floating point. Not changed.

        Returns:
            The normalised images.
        """
        channels = batch_shape(batch)[1]
        mean, std = fill_levels(self.mean), fill_levels(self.std)
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"{name} has {len(values)} values and the batch {channels} channels; give 1 or {channels}"
                )
        unit = 255 if batch.dtype == torch.uint8 else 1
        dtype = working_dtype(batch.dtype)
        factors = torch.empty(2, channels, dtype=torch.float64, device="cpu")
        factors[0] = -constants(mean) / constants(std)
        factors[1] = 1 / (unit * constants(std))
        shift, scale = send(factors.to(dtype), batch.device).view(2, 1, -1, 1, 1)
        wanted = self.dtype or (batch.dtype if batch.is_floating_point() else dtype)
        return torch.addcmul(shift, batch, scale).to(wanted)


@dataclass(frozen=True)
class RepeatChannels:
    """Show one channel as several, for grey images and a model that wants colour.

    The result is a view that takes no memory: read it, do not write into it. A transform after it writes a whole
    tensor.

    Args:
        channels: How many.

    Raises:
        ValueError: When it is no positive integer; when called, for images of more than one channel.

    >>> RepeatChannels(3)(torch.zeros(8, 1, 28, 28)).shape
    torch.Size([8, 3, 28, 28])
    """

    channels: int = 3

    def __post_init__(self) -> None:
        if count(self.channels, name="channels") == 0:
            raise ValueError("channels=0 leaves no image; give at least 1")

    def __call__(self, batch: Tensor) -> Tensor:
        """Repeat the channel.

        Args:
            batch: ``(N, 1, H, W)``, uint8 or floating point.

        Returns:
            ``(N, channels, H, W)``, a view of the batch.
        """
        shape = batch_shape(batch)
        if shape[1] != 1:
            raise ValueError(
                f"the batch has shape {shape}; RepeatChannels({self.channels}) expects (N, 1, H, W)"
            )
        return batch.expand(-1, self.channels, -1, -1)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r} is not a floating point dtype; give for example torch.float16")
