"""Arguments: whole numbers as users give them, checked once."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, *, at_least: int | None = None) -> int:
    """An int from anything that is a whole number, NumPy's included.

    Args:
        name: Of the argument, for the message.
        value: What was given.
        at_least: The smallest that makes sense.

    Raises:
        ValueError: It is no whole number, or too small.

    >>> whole_number("keep", 2, at_least=1)
    2
    """
    if (
        isinstance(value, bool)
        or not hasattr(value, "__index__")
        or (at_least is not None and value < at_least)
    ):
        bound = "" if at_least is None else f" of {at_least} or more"
        raise ValueError(f"{name}={value!r}, expected a whole number{bound}")
    return operator.index(value)
