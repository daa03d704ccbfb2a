"""Numbers as people read them."""

import math
from collections.abc import Sequence

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def duration_text(seconds: float) -> str:
    """A duration in hours, minutes and seconds.

    Examples:
        >>> duration_text(0.25), duration_text(59.97), duration_text(252.0), duration_text(6723.4)
        ('0.25s', '1m 00s', '4m 12s', '1h 52m 03s')
    """
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60:,}h {minutes % 60:02d}m {rest:02d}s"


def size_text(size_bytes: int) -> str:
    """A size in decimal units, as disks and hubs count.

    Examples:
        >>> size_text(512), size_text(89_600_000), size_text(15_843_721_216)
        ('512 B', '89.6 MB', '15.8 GB')
    """
    size, unit = float(size_bytes), 0
    while size >= 999.95 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1000.0, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{size:,.1f} {_BYTE_UNITS[unit]}"


def number_text(number: float) -> str:
    """A count or a rate, with as many digits as say something.

    Examples:
        >>> number_text(12345), number_text(3.0), number_text(1234.56), number_text(12.345), number_text(0.01234)
        ('12,345', '3', '1,235', '12.3', '0.0123')
    """
    if number == int(number):
        return f"{int(number):,}"
    if abs(number) >= 100.0:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def percent_text(share: float) -> str:
    """A fraction as a whole percentage.

    Examples:
        >>> percent_text(0.413)
        '41 %'
    """
    return f"{100.0 * share:.0f} %"


def percentages(seconds: Sequence[float]) -> tuple[float, ...]:
    """The parts in percent to one decimal, rounded so that they add up to 100.0.

    Args:
        seconds: Parts of a whole, none negative.

    Returns:
        One percentage for each part; all zero when the whole is zero.

    Examples:
        >>> percentages([1.0, 1.0, 1.0])
        (33.4, 33.3, 33.3)

    Source:
        The largest-remainder method (Hamilton's apportionment).
    """
    whole = math.fsum(seconds)
    if whole <= 0.0:
        return (0.0,) * len(seconds)
    exact = [1000.0 * (part / whole) for part in seconds]
    tenths = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: tenths[index] - exact[index])
    for index in by_remainder[: 1000 - sum(tenths)]:
        tenths[index] += 1
    return tuple(part / 10.0 for part in tenths)
