"""Which checkpoints of a run stay when a newer one is saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ._checkpoint import Checkpoint

_MAX_COUNT: Final = 10**12


@dataclass(frozen=True)
class Retention:
    """What stays of a run's checkpoints; each rule keeps some, and what none keeps is removed.

    Args:
        newest: So many of those that were saved last, at least 1.
        every: For each multiple of this many steps, the first checkpoint that was saved at or behind it, for good.
        best: A number in the metadata and which end of it is good, such as ``("loss", "min")``: the best checkpoint so far.
            Those without that number take no part.

    Raises:
        TypeError: A rule is of another type.
        ValueError: A count is out of range, or the end is neither ``"min"`` nor ``"max"``.
    """

    newest: int = 2
    every: int | None = None
    best: tuple[str, Literal["min", "max"]] | None = None

    def __post_init__(self) -> None:
        _check_count("keep", self.newest)
        if self.every is not None:
            _check_count("every", self.every)
        best: Any = self.best
        if best is None:
            return
        if not isinstance(best, tuple) or len(best) != 2 or not isinstance(best[0], str):
            raise TypeError(f"best={best!r} is no rule; give for example best=('loss', 'min')")
        if best[1] not in {"min", "max"}:
            raise ValueError(f"best={best!r} names no end; give 'min' or 'max' as the second item")

    @property
    def least(self) -> int:
        """Checkpoints that stay in any case."""
        return self.newest + (self.best is not None)


Keep = int | Retention
"""A number of checkpoints, or the rules."""


def retention_of(keep: Keep) -> Retention:
    """Return the rules that an argument ``keep`` means.

    Args:
        keep: A count of the newest ones, or the rules.

    Raises:
        TypeError: It is neither.
        ValueError: The count is out of range.

    Example:
        >>> retention_of(3)
        Retention(newest=3, every=None, best=None)
    """
    return keep if isinstance(keep, Retention) else Retention(newest=keep)


def kept(checkpoints: Sequence[Checkpoint], retention: Retention) -> set[str]:
    """Return the names of the checkpoints that stay.

    What is removed by this changes nothing about what stays the next time.

    Args:
        checkpoints: Good ones of one run, the one that was saved last first.
        retention: The rules.

    Example:
        >>> saved = [Checkpoint(step, f"c{step}", "exact", 0.0, 9) for step in (0, 40, 90, 130, 170, 210, 230)]
        >>> sorted(kept(saved[::-1], Retention(newest=1, every=100)))
        ['c130', 'c210', 'c230']
    """
    names = {checkpoint.name for checkpoint in checkpoints[: retention.newest]}
    if retention.every is not None:
        first: dict[int, str] = {}
        for checkpoint in reversed(checkpoints):
            first.setdefault(checkpoint.step // retention.every, checkpoint.name)
        names |= {name for multiple, name in first.items() if multiple > 0}
    if retention.best is not None:
        key, end = retention.best
        sign = 1.0 if end == "min" else -1.0
        scores = [
            (sign * number, c.name)
            for c in checkpoints
            if (number := _number(c.metadata.get(key))) is not None
        ]
        if scores:
            names.add(min(scores, key=lambda score: score[0])[1])
    return names


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is no int; give a count, at least 1")
    if not 1 <= value < _MAX_COUNT:
        raise ValueError(f"{name}={value} is out of range; give a count, at least 1")
