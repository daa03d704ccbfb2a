"""Schedule: when a run is saved, and when it has to stop."""

from __future__ import annotations

from collections.abc import Callable

from efficio_budget import Budget, parse_duration

_FADE = 0.99  # a step that was slow once, by a warm-up or an evaluation, is remembered for some hundred steps


class Schedule:
    """Decides at each turn of a loop from the time, the steps and what steps and saves have been seen to cost.

    Args:
        budget: Time of the whole process.
        save_every: An int of 1 or more is optimizer steps, text is a duration.
        clock: Seconds from any origin.

    Raises:
        ValueError: `save_every` is neither.
    """

    def __init__(self, budget: Budget, save_every: int | str, *, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._steps: int | None = None
        self._seconds: float | None = None
        if isinstance(save_every, str):
            self._seconds = parse_duration(save_every, name="save_every")
        elif isinstance(save_every, bool) or not isinstance(save_every, int) or save_every < 1:
            raise ValueError(
                f"save_every={save_every!r}, expected optimizer steps such as 500 or a duration such as '10m'"
            )
        else:
            self._steps = save_every
        self._slowest_turn = 0.0
        self._slowest_save = 0.0
        self._turned = self._saved_at = clock()
        self._saved_step = 0
        self._requested = False

    def begin(self, step: int) -> None:
        """Start to count anew: a loop begins."""
        self._turned = self._saved_at = self._clock()
        self._saved_step = step

    def turn(self) -> bool:
        """Note that a body has finished; whether the time is up, for one more body, a save and what lies between."""
        now = self._clock()
        self._slowest_turn = max(now - self._turned, self._slowest_turn * _FADE)
        self._turned = now
        return self._budget.expired(max(0.0, self._slowest_turn) + self._slowest_save)

    def is_save_due(self, step: int) -> bool:
        """Whether so many steps, or so much time, have passed since the last save, or one was asked for."""
        if self._requested:
            return True
        if self._steps is not None:
            return step - self._saved_step >= self._steps
        return self._seconds is not None and self._turned - self._saved_at >= self._seconds

    def request(self) -> None:
        """Make the next turn save."""
        self._requested = True

    def saved(self, step: int, seconds: float) -> None:
        """Note that a save was made, and how long one takes from the call until it is stored."""
        self._turned = self._saved_at = self._clock()
        self._saved_step = step
        self._requested = False
        self._slowest_save = max(self._slowest_save, seconds)
