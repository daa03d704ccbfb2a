"""The region of a step that computes in the policy's format."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import nn

from ._policy import Policy

# Stateless, so one object serves every step, every thread and every nesting.
_FULL_PRECISION: AbstractContextManager[None] = nullcontext()


def unsafe_under_autocast(*modules: nn.Module) -> tuple[str, ...]:
    """Name the modules that fail under autocast on a GPU, though a CPU runs them.

    That is `nn.BCELoss`: its logarithms need float32, so CUDA's autocast refuses it at the first
    step. `nn.BCEWithLogitsLoss` without the sigmoid before it is the same loss and safe. The
    function form, `F.binary_cross_entropy`, leaves no module to be found.

    Args:
        modules: Models and losses; they are only looked at.

    Returns:
        The dotted name of each, or the class name for one that was given itself.

    Example:
        >>> unsafe_under_autocast(nn.Sequential(nn.Sigmoid(), nn.BCELoss()), nn.BCELoss())
        ('1', 'BCELoss')
    """
    return tuple(
        name or type(module).__name__
        for root in modules
        for name, module in root.named_modules()
        if isinstance(module, nn.BCELoss)
    )


def autocast(policy: Policy) -> AbstractContextManager[object]:
    """Compute in the policy's format inside this `with`.

    Made for the hot loop: fp32 gives one shared object that does nothing, 16 bits a copy of a
    ready region instead of torch's constructor, which asks the driver about the device each time.

    Args:
        policy: Its device type and dtype are used.

    Returns:
        A context manager for one `with`; call again for the next one.

    Raises:
        RuntimeError: The policy is for CUDA and there is none, where torch would warn and go on in float32.
    """
    if policy.dtype is torch.float32:
        return _FULL_PRECISION
    # A torch.autocast keeps the outer state on itself, so sharing one would break nested regions and threads.
    region = torch.autocast.__new__(torch.autocast)
    vars(region).update(vars(_region(policy.device.type, policy.dtype)))
    return region


@lru_cache(maxsize=8)
def _region(device_type: str, dtype: torch.dtype) -> torch.autocast:
    if device_type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "the policy is for a CUDA device and there is none; make it with precision_policy()"
        )
    return torch.autocast(device_type, dtype=dtype)
