"""Changes: whether anything that is trained has moved since the last point that a checkpoint may be taken of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class Changes:
    """Watches objects, so that a body that was left can be told to have moved something or not.

    - An optimizer raises a flag just before it steps, so that an exception at any place inside leaves it raised.
    - The statistics of BatchNorm are written by a kernel that leaves torch's version counters alone, but its count of batches
      moves with them. Other modules that own buffers raise the flag before they run in training mode.
    - Models without a parameter in any optimizer are averages of weights: their versions count. Schedulers count their steps.
    - Other objects (the user's counters) give no sign: with them nothing is certain.

    The hooks hold this object only: they keep neither a run nor a model alive.

    Attributes:
        is_certain: Whether all objects give a sign when they move.
    """

    def __init__(self) -> None:
        self.is_certain = True
        self._flag = False
        self._handles: list[Any] = []
        self._known: set[int] = set()
        self._tensors: list[Tensor] = []
        self._statistics: list[Tensor] = []
        self._schedulers: list[Any] = []
        self._count_then = 0

    @property
    def seen(self) -> bool:
        """Whether something was seen to move since `settle`."""
        return self._flag or self._count() != self._count_then

    @property
    def possible(self) -> bool:
        """Whether something has moved since `settle`, or cannot be told not to have."""
        return not self.is_certain or self.seen

    def settle(self) -> None:
        """Take what is in memory now for the point to compare with."""
        self._flag = False
        self._count_then = self._count()

    def mark(self) -> None:
        """Take it that something has moved that gives no sign, such as the loss scale when it skips a step."""
        self._flag = True

    def watch(self, objects: Mapping[str, Any]) -> None:
        """Watch objects, each once.

        Args:
            objects: All prepared ones; a name that begins with `@` is the run's own, which moves with its optimizers.
        """
        for name, thing in objects.items():
            if id(thing) not in self._known and not name.startswith("@"):
                self._known.add(id(thing))
                self._watch(thing)
        trained = {
            id(parameter)
            for thing in objects.values()
            if isinstance(thing, Optimizer)
            for group in thing.param_groups
            for parameter in group["params"]
        }
        self._tensors = self._statistics + [
            parameter
            for thing in objects.values()
            if isinstance(thing, nn.Module) and not any(id(p) in trained for p in thing.parameters())
            for parameter in thing.parameters()
        ]

    def unwatch(self) -> None:
        """Let go of everything."""
        while self._handles:
            self._handles.pop().remove()
        for held in (self._tensors, self._statistics, self._schedulers, self._known):
            held.clear()

    def _watch(self, thing: Any) -> None:
        if isinstance(thing, Optimizer):
            self._handles.append(thing.register_step_pre_hook(self._raise))
        elif isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
            self._schedulers.append(thing)
        elif isinstance(thing, nn.Module):
            for module in thing.modules():
                if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None:
                    self._statistics.append(module.num_batches_tracked)
                elif (
                    module._buffers.keys() - module._non_persistent_buffers_set
                ):  # others are in no checkpoint
                    self._handles.append(module.register_forward_pre_hook(self._raise_in_training))
        else:
            self.is_certain = False

    def _count(self) -> int:
        # Runs at each turn of a loop: most models have nothing to count, or some tens of tensors.
        count = 0
        for tensor in self._tensors:
            count += tensor._version
        for scheduler in self._schedulers:
            count += getattr(
                scheduler, "last_epoch", 0
            )  # ChainedScheduler has none, its parts are the user's
        return count

    def _raise(self, *_: Any) -> None:
        self._flag = True

    def _raise_in_training(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self._flag = True
