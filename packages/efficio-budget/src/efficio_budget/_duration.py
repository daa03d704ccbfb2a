"""Durations as people write them."""

import math
import re
from numbers import Real

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_TEXT = re.compile(rf"(?:{_NUMBER}d)?\s*(?:{_NUMBER}h)?\s*(?:{_NUMBER}m)?\s*(?:{_NUMBER}s)?")
_UNIT_SECONDS = (86400.0, 3600.0, 60.0, 1.0)
_SHOWN_CHARACTERS = 60


def parse_duration(text: str | float, *, name: str = "duration", allow_zero: bool = False) -> float:
    """Reads a duration in days, hours, minutes and seconds.

    Every number needs its unit, the units go from large to small and come once each: `"2h30"`, `"30m2h"` and
    `"2h2h"` can be meant in more than one way and are refused. So is a number given as text: `"90"` does not
    say whether it is seconds or minutes.

    Args:
        text: Such as `"90s"`, `"11h30m"`, `"1d2h"`, `"2h 30m"` or `"1.5h"`; or a number of seconds.
        name: What the value is, for the message of the error.
        allow_zero: Accept a duration of zero.

    Returns:
        Seconds, finite, and more than zero unless `allow_zero`.

    Raises:
        ValueError: `text` is not a duration, or is zero or negative.

    Examples:
        >>> parse_duration("11h30m")
        41400.0
        >>> parse_duration("1d 2h"), parse_duration("1.5h"), parse_duration(90)
        (93600.0, 5400.0, 90.0)
        >>> parse_duration("2 hours", name="budget")
        Traceback (most recent call last):
        ...
        ValueError: budget='2 hours' is not a duration; write for example '2h', '11h30m' or 7200
    """
    seconds = _text_seconds(text) if isinstance(text, str) else _number_seconds(text)
    if seconds is None or not math.isfinite(seconds):
        msg = f"{name}={_shown(text)} is not a duration; write for example '2h', '11h30m' or 7200"
        raise ValueError(msg)
    if seconds < 0 or (seconds == 0 and not allow_zero):
        wanted = "zero or more" if allow_zero else "more than zero"
        msg = f"{name}={_shown(text)} is not {wanted}; write for example '2h', '11h30m' or 7200"
        raise ValueError(msg)
    return seconds


def _text_seconds(text: str) -> float | None:
    match = _TEXT.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        return None
    return math.fsum(
        float(number) * unit for number, unit in zip(match.groups(), _UNIT_SECONDS, strict=True) if number
    )


def _number_seconds(number: object) -> float | None:
    # bool is a Real, and True would be a budget of one second.
    if isinstance(number, bool) or not isinstance(number, Real):
        return None
    try:
        return float(number)
    except OverflowError:
        return None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."
