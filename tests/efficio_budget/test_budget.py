import math
import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_budget import Budget


class Clock:
    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def test_the_time_counts_from_the_construction():
    clock = Clock(1000.0)
    budget = Budget("2h", clock=clock)
    assert (budget.elapsed(), budget.remaining()) == (0.0, 7200.0)
    clock.now = 1060.0
    assert (budget.elapsed(), budget.remaining()) == (60.0, 7140.0)
    clock.now = 1000.0 + 7300.0
    assert (budget.elapsed(), budget.remaining()) == (7300.0, 0.0)


@pytest.mark.parametrize(
    ("duration", "margin"),
    [("12h", 600.0), ("100m", 600.0), ("99m", 594.0), ("60s", 6.0), (0.5, 0.05)],
    ids=repr,
)
def test_the_margin_is_ten_minutes_or_a_tenth_whichever_is_less(duration, margin):
    assert Budget(duration).margin == margin


@pytest.mark.parametrize(("margin", "seconds"), [("30s", 30.0), (12, 12.0), (0, 0.0), ("0s", 0.0)], ids=repr)
def test_a_margin_can_be_text_or_seconds_or_nothing(margin, seconds):
    assert Budget("1h", margin=margin).margin == seconds


@pytest.mark.parametrize(
    ("duration", "margin"), [("5m", "5m"), ("5m", "10m"), (60, 60), ("60s", 61.5)], ids=repr
)
def test_a_margin_that_leaves_nothing_is_refused_naming_both(duration, margin):
    with pytest.raises(ValueError, match="leaves nothing of budget=") as caught:
        Budget(duration, margin=margin)
    assert f"margin={margin!r}" in str(caught.value)
    assert f"budget={duration!r}" in str(caught.value)


@pytest.mark.parametrize("duration", ["", "0h", 0, -5, math.nan, "2h30", True], ids=repr)
def test_a_budget_that_is_no_duration_is_refused_by_its_name(duration):
    with pytest.raises(ValueError, match=r"^budget="):
        Budget(duration)


@pytest.mark.parametrize("margin", [-1, "soon", math.nan, True], ids=repr)
def test_a_margin_that_is_no_duration_is_refused_by_its_name(margin):
    with pytest.raises(ValueError, match=r"^margin="):
        Budget("1h", margin=margin)


def test_expired_is_true_exactly_from_the_beginning_of_the_margin():
    clock = Clock()
    budget = Budget(100, margin=10, clock=clock)
    clock.now = math.nextafter(90.0, 0.0)
    assert not budget.expired()
    for clock.now in (90.0, 95.0, 100.0, 1e9):
        assert budget.expired()


def test_work_that_fits_exactly_before_the_margin_still_fits():
    clock = Clock(60.0)
    budget = Budget(100, margin=10, clock=clock)
    clock.now = 120.0
    assert not budget.expired(need=30.0)
    assert budget.expired(need=math.nextafter(30.0, 31.0))


def test_a_budget_without_margin_expires_at_its_end():
    clock = Clock()
    budget = Budget(100, margin=0, clock=clock)
    clock.now = 99.0
    assert not budget.expired()
    clock.now = 100.0
    assert budget.expired()


@pytest.mark.parametrize("need", [-1.0, math.nan], ids=repr)
@pytest.mark.parametrize("duration", ["1h", None], ids=repr)
def test_a_need_that_is_no_time_is_refused(duration, need):
    with pytest.raises(ValueError, match=r"^need="):
        Budget(duration).expired(need=need)


def test_a_budget_of_none_never_expires():
    clock = Clock()
    budget = Budget(None, clock=clock)
    clock.now = 1e12
    assert (budget.seconds, budget.margin, budget.remaining()) == (math.inf, 0.0, math.inf)
    assert budget.elapsed() == 1e12
    assert not budget.expired()
    assert not budget.expired(need=1e12)
    assert budget.stops_at(datetime(2026, 12, 1)) is None


def test_a_budget_of_none_takes_a_margin_and_never_expires():
    budget = Budget(None, margin="10m")
    assert budget.margin == 600.0
    assert not budget.expired()


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1),
    st.floats(1.0, 1e6),
)
def test_a_clock_that_goes_back_gives_no_negative_time(moments, seconds):
    clock = Clock()
    budget = Budget(seconds, clock=clock)
    for clock.now in moments:
        assert budget.elapsed() >= 0.0
        assert 0.0 <= budget.remaining() <= seconds


def test_setting_the_wall_clock_moves_nothing(monkeypatch):
    clock = Clock()
    budget = Budget(100, margin=10, clock=clock)
    for jump in (-3600.0, 3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        clock.now += 44.0
        assert not budget.expired()
    assert budget.elapsed() == 88.0
    assert Budget.__init__.__kwdefaults__["clock"] is time.monotonic


def test_a_second_budget_has_the_whole_time_and_a_shared_one_goes_on():
    clock = Clock()
    shared = Budget(100, margin=0, clock=clock)
    clock.now = 60.0
    assert Budget(100, margin=0, clock=clock).remaining() == 100.0
    assert shared.remaining() == 40.0


def test_stops_at_is_the_time_of_day_at_which_the_margin_begins():
    clock = Clock()
    budget = Budget("2h", margin="15m", clock=clock)
    now = datetime(2026, 12, 1, 23, 0, tzinfo=timezone(timedelta(hours=1)))
    assert budget.stops_at(now) == now + timedelta(minutes=105)
    clock.now = 3600.0
    assert budget.stops_at(now + timedelta(hours=1)) == now + timedelta(minutes=105)
    clock.now = 7000.0
    late = now + timedelta(seconds=7000)
    assert budget.stops_at(late) == late


def test_stops_at_is_none_beyond_the_calendar():
    assert Budget("99999999999999d").stops_at(datetime(2026, 12, 1)) is None


def test_the_text_of_a_budget_says_its_size():
    assert repr(Budget("1h")) == "Budget(seconds=3600.0, margin=360.0)"
