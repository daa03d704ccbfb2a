"""JSON that is read from a place that may be damaged or hostile."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

_MAX_INT_DIGITS: Final = 20
_SCANNED_BYTES: Final = 2**20


def to_json(value: Any) -> bytes:
    r"""Return the one canonical text of a value of JSON types, as ASCII bytes.

    Args:
        value: Dicts with str keys, lists, str, int, finite float, bool and None.

    Example:
        >>> to_json({"b": [1, None], "a": "é"})
        b'{"a":"\\u00e9","b":[1,null]}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def from_json(data: bytes, *, max_bytes: int, max_depth: int) -> Any:
    """Read JSON of a bounded size and depth.

    Args:
        data: The text.
        max_bytes: Longer texts are refused unread.
        max_depth: Levels of brackets that are accepted.

    Raises:
        ValueError: The text is too long, too deep, gives a key twice, or is no JSON.

    Example:
        >>> from_json(b"[[1]]", max_bytes=10, max_depth=1)
        Traceback (most recent call last):
        ValueError: the JSON is nested 2 levels deep, over the limit of 1
    """
    if len(data) > max_bytes:
        raise ValueError(f"the JSON has {len(data)} bytes, over the limit of {max_bytes}")
    depth = _depth(data)
    if depth > max_depth:
        raise ValueError(f"the JSON is nested {depth} levels deep, over the limit of {max_depth}")
    try:
        # Decoded here: the module would guess UTF-16, in which the brackets above are not where they seem.
        return json.loads(
            data.decode("utf-8"),
            parse_int=_bounded_int,
            parse_constant=_no_constant,
            object_pairs_hook=_single_keys,
        )
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def _depth(data: bytes) -> int:
    """Return how deep brackets are nested outside strings, in time and memory that grow with the text only."""
    plain = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    deepest = level = quotes = 0
    for start in range(0, plain.size, _SCANNED_BYTES):
        marks = plain[start : start + _SCANNED_BYTES]
        counts = quotes + np.cumsum(marks == ord('"'))
        opened = (marks == ord("[")) | (marks == ord("{"))
        closed = (marks == ord("]")) | (marks == ord("}"))
        levels = level + np.cumsum((opened.astype(np.int64) - closed) * (counts % 2 == 0))
        deepest = max(deepest, int(levels.max()))
        level, quotes = int(levels[-1]), int(counts[-1])
    return deepest


def _single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        # Two readers would take two different values.
        raise ValueError("a key is given twice in the JSON")
    return content


def _bounded_int(digits: str) -> int:
    if len(digits) > _MAX_INT_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits in the JSON")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} in the JSON")
