import math
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_budget import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("2h", 7200.0),
        ("11h30m", 41400.0),
        ("1d2h", 93600.0),
        ("2h 30m", 9000.0),
        (" 2h\t30m\n", 9000.0),
        ("90s ", 90.0),
        ("1.5h", 5400.0),
        ("0.5s", 0.5),
        ("1d2h3m4s", 93784.0),
        ("0h30m", 1800.0),
        ("90m", 5400.0),
        (7200, 7200.0),
        (0.25, 0.25),
        (np.float32(1.5), 1.5),
        (np.int64(90), 90.0),
        (Fraction(3, 2), 1.5),
    ],
    ids=repr,
)
def test_a_duration_with_units_or_a_number_of_seconds_is_read(text, seconds):
    parsed = parse_duration(text)
    assert parsed == seconds
    assert type(parsed) is float


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "h",
        "2",
        "90",
        "2h30",
        "30m2h",
        "2h2h",
        "2 hours",
        "2 h",
        "2H",
        "2w",
        "2hh",
        "1,5h",
        ".5h",
        "1.h",
        "1e3s",
        "-2h",
        "+2h",
        "2h-30m",
        "nan",
        "inf",
        "infs",
        "٢h",
        "9" * 400 + "h",
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        None,
        b"2h",
        [2],
        2j,
        10**400,
        np.float64("nan"),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_what_is_no_duration_is_refused_in_one_line_with_value_and_remedy(text):
    with pytest.raises(ValueError, match="is not a duration; write for example '2h'") as caught:
        parse_duration(text, name="budget")
    message = str(caught.value)
    assert message.startswith(f"budget={repr(text)[:57]}")
    assert "\n" not in message
    assert len(message) < 160


@pytest.mark.parametrize("text", ["0h", "0s", "0.0m", 0, 0.0, -0.0, -5, -0.5, np.float32(-1)], ids=repr)
def test_zero_and_negative_durations_are_refused(text):
    with pytest.raises(ValueError, match=r"^save_every=.* is not more than zero; write") as caught:
        parse_duration(text, name="save_every")
    assert repr(text) in str(caught.value)


def test_zero_is_read_where_it_is_allowed_and_negative_is_not():
    assert parse_duration("0s", allow_zero=True) == 0.0
    assert parse_duration(0, allow_zero=True) == 0.0
    with pytest.raises(ValueError, match=r"^margin=-1 is not zero or more"):
        parse_duration(-1, name="margin", allow_zero=True)


@given(
    st.integers(0, 400),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 99),
    st.sampled_from(["", " "]),
)
def test_any_sum_of_ordered_units_is_its_seconds(days, hours, minutes, seconds, gap):
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")]
    text = gap.join(f"{number}{unit}" for number, unit in parts)
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    assert parse_duration(text, allow_zero=True) == total


@given(st.text(max_size=12) | st.floats() | st.integers())
def test_any_input_gives_a_positive_finite_float_or_a_value_error(value):
    seconds = 1.0
    with suppress(ValueError):
        seconds = parse_duration(value)
    assert 0.0 < seconds < math.inf
