"""The memory format of convolutional models."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ._policy import Policy

ModelT = TypeVar("ModelT", bound=nn.Module)


def to_channels_last(model: ModelT, policy: Policy) -> ModelT:
    """Store the weights of a convolutional model in channels_last where that is faster.

    The model is changed in place; values, parameter objects and the optimizers that hold them stay.
    Inputs may stay as they are: the first convolution converts them. Left alone are models without
    2-D convolutions, with 3-D ones (another format), with lazy parameters, and those in which more
    than a quarter of the convolutions are grouped or have a number of output channels that is no
    multiple of 8, since these lose by it (pytorch/pytorch#50036, #34977, #82699).

    Args:
        model: Any module.
        policy: Only `policy.channels_last` is used.

    Returns:
        The same model.
    """
    if policy.channels_last and _gains(model):
        model.to(memory_format=torch.channels_last)
    return model


def _gains(model: nn.Module) -> bool:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return False
    modules = list(model.modules())
    if any(isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)) for module in modules):
        return False
    convolutions = [module for module in modules if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d))]
    awkward = sum(conv.groups > 1 or conv.out_channels % 8 != 0 for conv in convolutions)
    return bool(convolutions) and awkward * 4 <= len(convolutions)
