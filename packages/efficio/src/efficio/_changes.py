"""Changes: whether anything that is trained has moved since the last point that a checkpoint may be taken of."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer


class Changes:
    """A flag that optimizers and modules with buffers raise themselves, just before they change something.

    It is raised before an optimizer steps and before a module with buffers (BatchNorm's statistics) runs in training mode; so an
    exception at any place inside leaves it raised. The hooks hold the flag only: they keep neither a run nor a model alive.

    Attributes:
        any: Whether something may have changed since it was last set to False.
    """

    __slots__ = ("_handles", "any")

    def __init__(self) -> None:
        self.any = False
        self._handles: list[Any] = []

    def watch(self, thing: Any) -> None:
        """Hook into an optimizer, or into a module that has buffers; anything else is left alone."""
        if isinstance(thing, Optimizer):
            self._handles.append(thing.register_step_pre_hook(self._before_step))
        elif isinstance(thing, nn.Module) and next(thing.buffers(), None) is not None:
            self._handles.append(thing.register_forward_pre_hook(self._before_forward))

    def unwatch(self) -> None:
        """Take all hooks out."""
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, *_: Any) -> None:
        self.any = True

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self.any = True
