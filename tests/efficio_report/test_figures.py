import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_report._figures import duration_text, number_text, percentages, size_text


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=9).filter(lambda parts: sum(parts) > 1e-200))
def test_percentages_add_up_to_a_hundred_and_are_off_by_less_than_a_tenth(parts):
    rounded = percentages(parts)
    assert sum(round(10 * part) for part in rounded) == 1000
    for part, percentage in zip(parts, rounded, strict=True):
        assert abs(percentage - 100.0 * part / sum(parts)) < 0.1 + 1e-9


@pytest.mark.parametrize("parts", [[], [0.0], [0.0, 0.0]], ids=repr)
def test_the_parts_of_nothing_are_nothing(parts):
    assert percentages(parts) == (0.0,) * len(parts)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00s"),
        (9.994, "9.99s"),
        (9.996, "10.0s"),
        (59.94, "59.9s"),
        (59.96, "1m 00s"),
        (3599.4, "59m 59s"),
        (3599.6, "1h 00m 00s"),
        (43200.0, "12h 00m 00s"),
        (1e7, "2,777h 46m 40s"),
    ],
)
def test_a_duration_never_shows_sixty_of_a_unit(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960_000, "1.0 GB"), (10**19, "10,000.0 PB")],
)
def test_a_size_is_shown_in_the_largest_unit_that_it_fills(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (1_580_000, "1,580,000"), (0.5, "0.5"), (99.96, "100"), (263.4, "263")]
)
def test_a_number_has_the_digits_that_say_something(number, text):
    assert number_text(number) == text
