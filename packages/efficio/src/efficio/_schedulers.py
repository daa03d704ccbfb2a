"""Schedulers: the prepared learning-rate schedulers, stepped once where they should be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.optim import Optimizer

Interval = Literal["step", "epoch"]


class Schedulers:
    """Steps the schedulers of a run at one of two occasions.

    Args:
        interval: `"step"`: after each optimizer step that was not skipped; `"epoch"`: when an epoch ends; None: never.
        tell: Takes a sentence for the user, when a scheduler was seen to be stepped by someone else as well.

    Raises:
        ValueError: The interval is none of these.
    """

    def __init__(self, interval: Interval | None, *, tell: Callable[[str], None]) -> None:
        if interval not in ("step", "epoch", None):
            raise ValueError(f"scheduler_interval={interval!r}, expected 'step', 'epoch' or None")
        self.interval = interval
        self._tell = tell
        self._all: list[Any] = []
        self._left_at: dict[int, int | None] = {}

    def add(self, schedulers: Sequence[Any]) -> None:
        """Take schedulers, each once."""
        self._all.extend(thing for thing in schedulers if not any(thing is known for known in self._all))

    def begin(self) -> None:
        """Forget where they were left: what happens between two loops is the user's, and a loop may have gone back."""
        self._left_at.clear()

    def step(self, interval: Interval, optimizers: Sequence[Optimizer] = ()) -> None:
        """Step all of them if it is their occasion, or those of some optimizers.

        Args:
            interval: Which occasion this is.
            optimizers: Those that have stepped; none for all.
        """
        if interval != self.interval:
            return
        for scheduler in self._all:
            if not optimizers or scheduler.optimizer in optimizers:
                self._step(scheduler)

    def _step(self, scheduler: Any) -> None:
        at = getattr(scheduler, "last_epoch", None)  # ChainedScheduler has none
        if id(scheduler) in self._left_at:
            if self._left_at[id(scheduler)] != at:
                self._tell(
                    f"{type(scheduler).__name__} is stepped by hand, too: it moves faster than it should"
                )
            scheduler.step()
        else:
            with warnings.catch_warnings():
                # Restored at an epoch's edge it is stepped before this process's first optimizer step, of which torch warns.
                warnings.filterwarnings(
                    "ignore", message="Detected call of `lr_scheduler.step", category=UserWarning
                )
                scheduler.step()
        self._left_at[id(scheduler)] = getattr(scheduler, "last_epoch", None)
