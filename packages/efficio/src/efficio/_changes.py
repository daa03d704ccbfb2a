"""Changes: whether anything that is trained has moved since the last point that a checkpoint may be taken of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class Changes:
    """Watches optimizers and buffers, so that a body that was left can be told to have moved something or not.

    An optimizer raises the flag just before it steps, so that an exception at any place inside leaves it raised. Buffers are told
    by torch's version counters. Those of BatchNorm's statistics stand still, as a kernel writes them, but its count of batches
    moves with them. Schedulers count their steps. Other objects (an average of weights that is no module, the user's counters) give no sign: with them nothing
    is certain, and `moved` is always True.

    The hooks hold this object only: they keep neither a run nor a model alive.
    """

    __slots__ = ("_buffers", "_handles", "_opaque", "_schedulers", "_stepped", "_versions")

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._buffers: list[Tensor] = []
        self._schedulers: list[Any] = []
        self._versions = 0
        self._stepped = False
        self._opaque = False

    @property
    def moved(self) -> bool:
        """Whether something has moved since `settle`, or cannot be told not to have."""
        return self._opaque or self._stepped or self._count() != self._versions

    def settle(self) -> None:
        """Take what is in memory now for the point to compare with."""
        self._stepped = False
        self._versions = self._count()

    def watch(self, thing: Any) -> None:
        """Watch an optimizer, a scheduler or the buffers of a module; anything else makes `moved` uncertain."""
        if isinstance(thing, Optimizer):
            self._handles.append(thing.register_step_pre_hook(self._before_step))
        elif isinstance(thing, nn.Module):
            for module in thing.modules():
                if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None:
                    self._buffers.append(module.num_batches_tracked)
                else:
                    self._buffers.extend(
                        buffer for buffer in module.buffers(recurse=False) if not buffer.is_inference()
                    )
        elif isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
            self._schedulers.append(thing)
        else:
            self._opaque = True

    def unwatch(self) -> None:
        """Let go of everything."""
        while self._handles:
            self._handles.pop().remove()
        self._buffers.clear()
        self._schedulers.clear()

    def _count(self) -> int:
        count = sum(buffer._version for buffer in self._buffers)
        for scheduler in self._schedulers:
            count += getattr(
                scheduler, "last_epoch", 0
            )  # ChainedScheduler has none, its parts are the user's
        return count

    def _before_step(self, *_: Any) -> None:
        self._stepped = True
