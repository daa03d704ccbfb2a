"""Metrics: the numbers that a user logs, as far as a run remembers them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from efficio_ckpt import Retention


@dataclass(frozen=True)
class Metric:
    """A number that was logged some times.

    Attributes:
        last: The newest value.
        step: Optimizer steps done when it was logged.
        lowest: The least value that was a number; None before there was one.
        lowest_step: Optimizer steps done then.
        highest: The greatest value that was a number; None before there was one.
        highest_step: Optimizer steps done then.
    """

    last: float
    step: int
    lowest: float | None = None
    lowest_step: int | None = None
    highest: float | None = None
    highest_step: int | None = None


def logged(
    metrics: Mapping[str, Metric], values: Mapping[str, Any], *, step: int, reserved: Collection[str] = ()
) -> dict[str, Metric]:
    """Metrics after some values were logged; what is given is not changed.

    Args:
        metrics: As they were.
        values: Numbers by name: of Python, NumPy, or tensors of one element, which are waited for.
        step: Optimizer steps done.
        reserved: Names of other things that a checkpoint says of itself.

    Raises:
        TypeError: A value is no number, or its name is a reserved one.

    >>> metrics = logged(logged({}, {"loss": 2.0}, step=1), {"loss": 3.0}, step=2)
    >>> metrics["loss"].last, metrics["loss"].lowest, metrics["loss"].lowest_step
    (3.0, 2.0, 1)
    """
    after = dict(metrics)
    for name, value in values.items():
        if name in reserved:
            raise TypeError(f"{name!r} is what checkpoints say of the machine: log it under another name")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name}={value!r:.80} is no number: give a float, or a tensor of one element"
            ) from error
        old = after.get(name)
        low, low_step, high, high_step = (
            (None, None, None, None)
            if old is None
            else (old.lowest, old.lowest_step, old.highest, old.highest_step)
        )
        if not math.isnan(number):
            if low is None or number < low:
                low, low_step = number, step
            if high is None or number > high:
                high, high_step = number, step
        after[name] = Metric(number, step, low, low_step, high, high_step)
    return after


def is_best(
    before: Mapping[str, Metric],
    after: Mapping[str, Metric],
    keep: int | Retention,
    *,
    among: Collection[str],
) -> bool:
    """Whether a value that was just logged is the best so far of the metric that decides which checkpoint stays.

    Args:
        before: Metrics before it was logged.
        after: Metrics with it.
        keep: What stays.
        among: Names of those that were logged.

    >>> first = logged({}, {"loss": 2.0}, step=1)
    >>> is_best(first, logged(first, {"loss": 1.5}, step=2), Retention(best=("loss", "min")), among=["loss"])
    True
    """
    if not isinstance(keep, Retention) or keep.best is None or keep.best[0] not in among:
        return False
    name, end = keep.best
    old, new = before.get(name), after[name]
    if end == "min":
        return new.lowest is not None and (old is None or old.lowest is None or new.lowest < old.lowest)
    return new.highest is not None and (old is None or old.highest is None or new.highest > old.highest)


def to_tree(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """As nested dicts of numbers."""
    return {name: asdict(metric) for name, metric in metrics.items()}


def from_tree(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Metric]:
    """Back from `to_tree`.

    >>> metrics = logged({}, {"loss": 2.0}, step=1)
    >>> from_tree(to_tree(metrics)) == metrics
    True
    """
    return {name: Metric(**fields) for name, fields in tree.items()}
