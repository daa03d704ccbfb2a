"""The memory format of convolutional models."""

from __future__ import annotations

import logging
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._autocast import autocast
from ._evaluation import kept_generators
from ._policy import Policy

ModelT = TypeVar("ModelT", bound=nn.Module)

_logger = logging.getLogger(__name__)

_OF_STRIDES: Final = ("view size is not compatible", "channels_last", "memory format", "contiguous", "stride")
"""What errors say that come of a memory format which some part of a model was not written for."""


def to_channels_last(model: ModelT, policy: Policy, *, example: Any = None) -> ModelT:
    """Store the weights of a convolutional model in channels_last where that is faster.

    The model is changed in place; values, parameter objects and the optimizers that hold them stay.
    Inputs may stay as they are: the first convolution converts them. Left alone are models without
    2-D convolutions, with 3-D ones (another format), with lazy parameters, and those in which more
    than a quarter of the convolutions are grouped or have a number of output channels that is no
    multiple of 8, since these lose by it (pytorch/pytorch#50036, #34977, #82699).

    Args:
        model: Any module.
        policy: `policy.channels_last` decides; a trial runs under its autocast.
        example: An input on the model's device. With one, a forward pass is tried, and a model that cannot
            compute in this format goes back to the usual one. The trial leaves no trace.

    Returns:
        The same model.
    """
    if policy.channels_last and _gains(model):
        model.to(memory_format=torch.channels_last)
        if example is not None and not runs_channels_last(model, policy, example):
            model.to(memory_format=torch.contiguous_format)
    return model


def runs_channels_last(model: nn.Module, policy: Policy, example: Any) -> bool:
    """Tell whether a model in channels_last can compute; what it computes is thrown away.

    Args:
        model: Put back to what it was, random generators included.
        policy: For autocast.
        example: Given to the model as its only argument.

    Returns:
        False if it raised what comes of the memory format. True if it computed, and also if it raised
        something else, such as for another number of arguments: then nothing is known.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with kept_generators(), torch.no_grad(), autocast(policy):
            model(example)
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.cuda.OutOfMemoryError) or not any(words in text for words in _OF_STRIDES):
            return True
        _logger.warning(
            "the model does not run in channels_last and stays contiguous: %s", text.splitlines()[0]
        )
        return False
    except Exception:  # noqa: BLE001  it is called in another way, and will say so then
        return True
    finally:
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
    return True


def example_of(batch: Any) -> Tensor | None:
    """Return the images of a batch: the first tensor in it, or in its tuple, list or dict, if that has four dimensions.

    Args:
        batch: As a loader makes it.

    Example:
        >>> example_of((torch.zeros(2, 3, 4, 4), torch.zeros(2))).shape
        torch.Size([2, 3, 4, 4])
    """
    while isinstance(batch, (tuple, list, dict)):
        if not batch:
            return None
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch if isinstance(batch, Tensor) and batch.ndim == 4 else None


def is_channels_last(model: nn.Module) -> bool:
    """Tell whether the 2-D convolutions of a model are stored in channels_last, and are not so by their shape alone.

    Args:
        model: Any module.
    """
    return any(
        module.weight.is_contiguous(memory_format=torch.channels_last) and not module.weight.is_contiguous()
        for module in model.modules()
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))
    )


def _gains(model: nn.Module) -> bool:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return False
    modules = list(model.modules())
    if any(isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)) for module in modules):
        return False
    convolutions = [module for module in modules if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))]
    awkward = sum(conv.groups > 1 or conv.out_channels % 8 != 0 for conv in convolutions)
    return bool(convolutions) and awkward * 4 <= len(convolutions)
