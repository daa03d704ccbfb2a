"""The time that a run may take."""

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from ._duration import parse_duration

_MARGIN_SECONDS = 600.0
_MARGIN_SHARE = 0.1


def default_margin(seconds: float) -> float:
    """The part of a budget that is kept for the last save.

    Args:
        seconds: The whole budget in seconds.

    Returns:
        Ten minutes or a tenth of the budget, whichever is less, in seconds.

    Examples:
        >>> default_margin(7200.0), default_margin(60.0)
        (600.0, 6.0)
    """
    return min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)


class Budget:
    """A wall-clock budget that starts when it is made.

    The time counts from the construction, whatever the process does. Who makes a second `Budget` in the same
    process gets the whole time again; who means one budget for several runs passes the same object to each.
    Nothing of it belongs into a checkpoint: a resumed process has the time that it is given, not what an
    earlier one left over.

    The default clock is monotonic: a clock that is set, or jumps when a virtual machine wakes up, moves
    neither the elapsed time nor the end. On Linux and macOS it stands still while the machine is suspended.

    Args:
        duration: Text such as `"2h"` or a number of seconds; None is a budget without end.
        margin: The last part of the budget, kept for saving; text or seconds, zero for none. None takes ten
            minutes or a tenth of the budget, whichever is less.
        clock: Seconds from any origin, never going back.

    Raises:
        ValueError: A duration that is none, is not positive, or does not leave anything beyond the margin.

    Examples:
        >>> now = 0.0
        >>> budget = Budget("100s", margin="10s", clock=lambda: now)
        >>> now = 60.0
        >>> budget.elapsed(), budget.remaining(), budget.expired(), budget.expired(need=30.0)
        (60.0, 40.0, False, False)
        >>> budget.expired(need=30.5)
        True
        >>> now = 90.0
        >>> budget.expired()
        True
    """

    __slots__ = ("_clock", "_margin", "_seconds", "_started")

    def __init__(
        self,
        duration: str | float | None,
        *,
        margin: str | float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = math.inf if duration is None else parse_duration(duration, name="budget")
        if margin is not None:
            self._margin = parse_duration(margin, name="margin", allow_zero=True)
        else:
            self._margin = 0.0 if duration is None else default_margin(self._seconds)
        if self._margin >= self._seconds:
            msg = (
                f"margin={margin!r} leaves nothing of budget={duration!r}; "
                "give a longer budget or a margin that is shorter than it"
            )
            raise ValueError(msg)
        self._clock = clock
        self._started = clock()

    @property
    def seconds(self) -> float:
        """The whole budget in seconds, inf when it has no end."""
        return self._seconds

    @property
    def margin(self) -> float:
        """The seconds at the end of the budget that are kept for saving."""
        return self._margin

    def elapsed(self) -> float:
        """Seconds since the budget was made, never negative."""
        return max(0.0, self._clock() - self._started)

    def remaining(self) -> float:
        """Seconds to the end of the budget, margin included, never negative; inf when it has no end."""
        return max(0.0, self._seconds - self.elapsed())

    def expired(self, need: float = 0.0) -> bool:
        """Whether work that takes `need` seconds no longer fits before the margin begins.

        With `left = remaining() - margin`: True when `left <= 0`, and when `need > left`. Work that fits
        exactly still fits; once the margin has begun nothing does, not even work that takes no time.

        Args:
            need: Seconds that the work in question is expected to take.

        Returns:
            Always False for a budget without end.

        Raises:
            ValueError: `need` is negative or not a number.
        """
        if not need >= 0.0:
            msg = f"need={need!r} is not a time; give the expected seconds, zero or more"
            raise ValueError(msg)
        if self._seconds == math.inf:
            return False
        left = self.remaining() - self._margin
        return left <= 0.0 or need > left

    def stops_at(self, now: datetime) -> datetime | None:
        """The time of day at which the margin begins, so that a person can be told when the run stops.

        Args:
            now: The present time, in the time zone that the answer shall have.

        Returns:
            `now` when the margin has begun; None when the budget has no end or ends beyond the calendar.

        Examples:
            >>> budget = Budget("2h", margin="10m", clock=lambda: 0.0)
            >>> format(budget.stops_at(datetime(2026, 12, 1, 9, 0)), "stops at %H:%M")
            'stops at 10:50'
        """
        if self._seconds == math.inf:
            return None
        try:
            return now + timedelta(seconds=max(0.0, self.remaining() - self._margin))
        except OverflowError:
            return None

    def __repr__(self) -> str:
        return f"Budget(seconds={self._seconds}, margin={self._margin})"
