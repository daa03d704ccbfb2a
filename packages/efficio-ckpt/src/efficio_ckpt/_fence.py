"""The fence between a save and the optimizers: none of them steps before its tensors are copied."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from ._deferred import DeferredCopies


class Fence:
    """Finishes deferred copies before an optimizer steps.

    The hooks that it leaves in optimizers keep nothing alive, and do nothing in a forked child: what a thread of the parent was
    copying is not the child's to finish.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._deferred: DeferredCopies | None = None
        self._hooks: dict[int, tuple[weakref.ref[Optimizer], Any]] = {}

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Put a hook before the step of optimizers, one in each.

        Args:
            optimizers: Those that are watched already are left alone.
        """
        reference = weakref.ref(self)

        def finish(*_: Any) -> None:
            fence = reference()
            if fence is not None:
                fence.finish()

        for optimizer in optimizers:
            known = self._hooks.get(id(optimizer))
            if known is None or known[0]() is not optimizer:
                handle = optimizer.register_step_pre_hook(finish)
                self._hooks[id(optimizer)] = weakref.ref(optimizer), handle

    def unwatch(self) -> None:
        """Take the hooks away."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def hold(self, deferred: DeferredCopies) -> None:
        """From here on, these copies are finished before a watched optimizer steps."""
        self._pid = os.getpid()
        self._deferred = deferred

    def finish(self) -> None:
        """Return when what is held is copied."""
        deferred = self._deferred
        if deferred is not None and not deferred.done and os.getpid() == self._pid:
            deferred.finish()
