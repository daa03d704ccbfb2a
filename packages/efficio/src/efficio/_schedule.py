"""Schedule: when a run is saved, and when it has to stop."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Literal

from efficio_budget import Budget, parse_duration

_FADE = 0.99  # a step that was slow once, by a warm-up or an evaluation, is remembered for some hundred steps


class Schedule:
    """Decides at each turn of a loop from the time, the steps and what steps and saves have been seen to cost.

    Args:
        budget: Time of the whole process.
        save_every: An int of 1 or more is optimizer steps, text is a duration.
        clock: Seconds from any origin.

    Attributes:
        is_urgent: Whether the save that was asked for may not be left out for one in flight.

    Raises:
        ValueError: `save_every` is neither.
    """

    def __init__(self, budget: Budget, save_every: int | str, *, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._limited = budget.seconds < math.inf
        self._steps: int | None = None
        self._seconds = math.inf
        if isinstance(save_every, str):
            self._seconds = parse_duration(save_every, name="save_every")
        elif not hasattr(save_every, "__index__") or isinstance(save_every, bool) or save_every < 1:
            raise ValueError(
                f"save_every={save_every!r}, expected optimizer steps such as 500 or a duration such as '10m'"
            )
        else:
            self._steps = operator.index(save_every)
        self._slowest_turn = 0.0
        self._slowest_save = 0.0
        self._turned = self._saved_at = clock()
        self._saved_step = 0
        self._requested = False
        self.is_urgent = False

    def begin(self, step: int) -> None:
        """Start to count anew: a loop begins."""
        self._turned = self._saved_at = self._clock()
        self._saved_step = step

    def turn(self, step: int) -> Literal["stop", "save"] | None:
        """Note that a body has finished, and say what is due.

        Args:
            step: Optimizer steps done.

        Returns:
            `"stop"` when the time left is not enough for one more body and a save; `"save"` when so many steps, or so much time,
            have passed since the last save, or one was asked for.
        """
        now = self._clock()
        took, faded = now - self._turned, self._slowest_turn * _FADE
        self._turned = now
        self._slowest_turn = took if took > faded else faded
        if self._limited and self._budget.expired(self._slowest_turn + self._slowest_save):
            return "stop"
        if self._steps is not None:
            due = step - self._saved_step >= self._steps
        else:
            due = now - self._saved_at >= self._seconds
        return "save" if due or self._requested else None

    def request(self, *, urgent: bool = False) -> None:
        """Make the next turn save.

        Args:
            urgent: What is to be saved is that turn's state and no later one, so that it waits for a save in flight.
        """
        self._requested = True
        self.is_urgent |= urgent

    def drop_request(self) -> bool:
        """Forget what `request` asked for; whether it was asked and has not been done."""
        requested, self._requested, self.is_urgent = self._requested, False, False
        return requested

    def saved(self, step: int, seconds: float) -> None:
        """Note that a save was made, and how long one takes from the call until it is stored."""
        self._turned = self._saved_at = self._clock()
        self._saved_step = step
        self._requested = self.is_urgent = False
        self._slowest_save = max(self._slowest_save, seconds)
