"""Seconds by phase: a stopwatch on which exactly one phase runs at any time."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

_Item = TypeVar("_Item")


class Totals(dict[str, float]):
    """Seconds by phase, such as `{"train": 41.5, "data": 3.2}`, and the phase that runs now.

    Exactly one phase runs at any time, so every second is counted once and all phases add up to the time since
    the construction, however spans nest and whatever exception ends them. The time of the running phase is in
    the dict after the next `switch` or `settle`.

    It belongs to one thread. Work in another thread is not part of this thread's time; time it with `Totals`
    of its own.

    Args:
        phase: The phase that runs at first.
        clock: Seconds from any origin. A clock that goes back adds nothing; no phase is ever negative.

    Examples:
        >>> now = 0.0
        >>> totals = Totals(clock=lambda: now)
        >>> now = 2.0
        >>> totals.switch("train")
        'other'
        >>> now = 5.0
        >>> totals.switch("data")
        'train'
        >>> totals
        {'other': 2.0, 'train': 3.0}
    """

    __slots__ = ("_clock", "_since", "_started", "phase")

    def __init__(self, *, phase: str = "other", clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._started = self._since = clock()
        self.phase = phase

    def switch(self, phase: str) -> str:
        """Ends the running phase and starts another one, for about a third of a microsecond.

        Args:
            phase: The phase that runs from now on.

        Returns:
            The phase that ran until now, to switch back to.
        """
        now = self._clock()
        previous = self.phase
        spent = now - self._since
        # No calls from here on: CPython looks for signals at calls, and an interrupt between two of these lines
        # would lose this one interval. (It would then count as "other", as the wall time is measured apart.)
        self._since = now
        self.phase = phase
        if spent > 0.0:
            try:
                self[previous] += spent
            except KeyError:
                self[previous] = spent
        return previous

    def settle(self) -> None:
        """Adds the running phase's time up to now; the phase goes on."""
        self.switch(self.phase)

    @property
    def wall_seconds(self) -> float:
        """Seconds from the construction to the last `switch` or `settle`."""
        return max(self._since - self._started, sum(self.values()))


class _Span:
    __slots__ = ("_phase", "_previous", "_totals")

    def __init__(self, totals: Totals, phase: str) -> None:
        self._totals = totals
        self._phase = phase
        self._previous = phase

    def __enter__(self) -> None:
        self._previous = self._totals.switch(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._totals.switch(self._previous)


def timed(items: Iterable[_Item], totals: Totals, *, phase: str = "data") -> Iterator[_Item]:
    """Yields the items, counting the time in which the next one is waited for.

    The phase that runs when an item is asked for goes on when it is there: the body of a for loop keeps its
    phase. Starting the iteration, as with the worker processes of a loader, counts as waiting.

    Args:
        items: Usually a loader; iterated once, lazily.
        totals: Where the seconds are added.
        phase: What they are added to.

    Yields:
        The items, as they are.

    Examples:
        >>> now = 0.0
        >>> def loader():
        ...     global now
        ...     for batch in "ab":
        ...         now += 3.0
        ...         yield batch
        >>> totals = Totals(phase="train", clock=lambda: now)
        >>> for batch in timed(loader(), totals):
        ...     now += 1.0
        >>> totals.settle()
        >>> totals
        {'data': 6.0, 'train': 2.0}
    """
    switch = totals.switch
    previous = switch(phase)
    try:
        iterator = iter(items)
    finally:
        switch(previous)
    while True:
        previous = switch(phase)
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            switch(previous)
        yield item


def span(totals: Totals, phase: str) -> AbstractContextManager[None]:
    """Counts the time of a block as one phase.

    Spans may nest: the time of an inner one is not counted in the outer one.

    Args:
        totals: Where the seconds are added.
        phase: `"setup"`, `"data"`, `"train"`, `"evaluate"` and `"save"` are known to the report; any other name
            is reported as it is.

    Returns:
        A context manager, to be entered in the thread of `totals`.

    Examples:
        >>> now = 0.0
        >>> totals = Totals(clock=lambda: now)
        >>> with span(totals, "train"):
        ...     now += 3.0
        ...     with span(totals, "save"):
        ...         now += 1.0
        >>> totals
        {'train': 3.0, 'save': 1.0}
    """
    return _Span(totals, phase)
