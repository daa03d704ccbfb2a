"""What a transform is given when it is made: sizes, ranges, probabilities and fill values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

Size = int | tuple[int, int]
Range = float | tuple[float, float]
Fill = float | tuple[float, ...]


def size_pair(size: object, *, name: str = "size") -> tuple[int, int]:
    """Give a size as (height, width).

    Args:
        size: One side for a square, or (height, width), in pixels.
        name: How the argument is called in the error.

    Returns:
        (height, width), both at least 1.

    Raises:
        ValueError: When it is neither one nor two positive integers.

    >>> size_pair(32), size_pair((24, 32))
    ((32, 32), (24, 32))
    """
    sides: tuple[Any, ...] = (
        (size, size) if isinstance(size, Integral) else tuple(size) if isinstance(size, Sequence) else ()
    )
    pixels = [int(side) for side in sides if _is_count(side) and side > 0]
    if len(sides) != 2 or len(pixels) != 2:
        raise ValueError(
            f"{name}={size!r} is not an image size; give one positive integer or (height, width)"
        )
    return pixels[0], pixels[1]


def count(value: object, *, name: str) -> int:
    """Give a number of pixels or channels as an int of at least 0.

    Args:
        value: The number.
        name: How the argument is called in the error.

    Returns:
        The same number.

    Raises:
        ValueError: When it is no integer or is negative.

    >>> count(4, name="padding")
    4
    """
    if not _is_count(value) or value < 0:
        raise ValueError(f"{name}={value!r} is not a count; give an integer of at least 0")
    return int(value)


def probability(p: object, *, name: str = "p") -> float:
    """Give a probability as a float from 0 to 1.

    Args:
        p: The probability.
        name: How the argument is called in the error.

    Returns:
        The same number.

    Raises:
        ValueError: When it lies outside 0 to 1.

    >>> probability(0.5)
    0.5
    """
    if not _is_number(p) or not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}={p!r} is not a probability; give a number from 0 to 1")
    return float(p)


def interval(
    value: object, *, name: str, low: float = -math.inf, above: float | None = None
) -> tuple[float, float]:
    """Give two numbers as (lowest, highest).

    Args:
        value: Two finite numbers in rising order.
        name: How the argument is called in the error.
        low: The least number allowed.
        above: When given, both numbers must be greater than this.

    Returns:
        (lowest, highest).

    Raises:
        ValueError: When there are not two finite numbers in order, or one is too small.

    >>> interval((0.08, 1), name="scale")
    (0.08, 1.0)
    """
    ends: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(ends) != 2 or not all(map(_is_number, ends)) or ends[0] > ends[1]:
        raise ValueError(f"{name}={value!r} is not a range; give (lowest, highest)")
    if ends[0] < low:
        raise ValueError(f"{name}={value!r} begins below {low:g}; give numbers of at least {low:g}")
    if above is not None and ends[0] <= above:
        raise ValueError(f"{name}={value!r} begins at {ends[0]:g}; give numbers greater than {above:g}")
    return float(ends[0]), float(ends[1])


def around(value: object, *, name: str) -> tuple[float, float]:
    """Give a number a as (-a, a), and a range as it is.

    Args:
        value: One number of at least 0, or (lowest, highest).
        name: How the argument is called in the error.

    Returns:
        (lowest, highest).

    Raises:
        ValueError: When it is neither.

    >>> around(15, name="degrees"), around((-5, 20), name="degrees")
    ((-15.0, 15.0), (-5.0, 20.0))
    """
    if isinstance(value, Real):
        if not _is_number(value) or value < 0:
            raise ValueError(f"{name}={value!r} is not a half-width; give a number of at least 0")
        return -float(value), float(value)
    return interval(value, name=name)


def fill_levels(fill: object, *, name: str = "fill") -> tuple[float, ...]:
    """Give a fill value as one number for all channels or one for each.

    Args:
        fill: One number or one for each channel.
        name: How the argument is called in the error.

    Returns:
        A tuple of at least one number.

    Raises:
        ValueError: When there is no number, or something else.

    >>> fill_levels(0), fill_levels((124, 116, 104))
    ((0.0,), (124.0, 116.0, 104.0))
    """
    levels: tuple[Any, ...] = (
        tuple(fill) if isinstance(fill, Sequence) and not isinstance(fill, str) else (fill,)
    )
    if not levels or not all(map(_is_number, levels)):
        raise ValueError(f"{name}={fill!r} is not a pixel value; give one number or one for each channel")
    return tuple(float(level) for level in levels)


def _is_number(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def _is_count(value: object) -> TypeGuard[int]:
    return not isinstance(value, bool) and isinstance(value, Integral)
