import math

import numpy as np
import pytest

from efficio._schedule import Schedule
from efficio_budget import Budget


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def schedule(clock, *, budget=None, save_every="1000h", margin=0):
    made = Schedule(
        Budget(budget, margin=None if budget is None else margin, clock=clock), save_every, clock=clock
    )
    made.begin(0)
    return made


@pytest.mark.parametrize(
    "save_every", [0, -1, True, False, 2.5, math.nan, None, "", "soon", "0s", "3", [], 1j], ids=repr
)
def test_a_senseless_interval_is_refused_by_its_value(clock, save_every):
    with pytest.raises(ValueError, match="save_every=") as info:
        schedule(clock, save_every=save_every)
    assert repr(save_every) in str(info.value)


@pytest.mark.parametrize("save_every", [3, np.int64(3)], ids=repr)
def test_a_number_counts_steps_whatever_the_time(clock, save_every):
    made = schedule(clock, save_every=save_every)
    assert [made.turn(step) for step in (1, 2)] == [None, None]
    clock.now += 1e6
    assert made.turn(2) is None
    assert made.turn(3) == "save"
    made.saved(3, 0.1)
    assert [made.turn(step) for step in (4, 5, 6)] == [None, None, "save"]


def test_a_save_that_was_not_made_stays_due(clock):
    made = schedule(clock, save_every=3)
    assert [made.turn(step) for step in (3, 4, 5)] == ["save"] * 3


def test_steps_count_from_where_the_loop_begins(clock):
    made = schedule(clock, save_every=3)
    made.begin(100)
    assert [made.turn(step) for step in (101, 102, 103)] == [None, None, "save"]


def test_a_duration_counts_from_the_last_save_whatever_the_steps(clock):
    made = schedule(clock, save_every="10s")
    clock.now += 9.5
    assert made.turn(1000) is None
    clock.now += 0.5
    assert made.turn(1001) == "save"
    made.saved(1001, 0.1)
    clock.now += 9.5
    assert made.turn(1002) is None


def test_a_save_that_was_asked_for_is_due_once(clock):
    made = schedule(clock)
    made.request()
    assert made.turn(1) == "save"
    made.saved(1, 0.1)
    assert made.turn(2) is None


def test_a_request_can_be_dropped_and_says_whether_there_was_one(clock):
    made = schedule(clock)
    assert made.drop_request() is False
    made.request()
    assert made.drop_request() is True
    assert made.turn(1) is None


def test_it_stops_while_one_more_body_and_a_save_still_fit(clock):
    made = schedule(clock, budget="100s")
    made.saved(0, 5.0)
    for step in range(9):
        clock.now += 10.0
        assert made.turn(step) == (None if step < 8 else "stop")
    assert clock.now - 1000.0 == 90.0  # 10 s are left: enough for a body, not for the save after it


def test_the_margin_is_kept(clock):
    made = schedule(clock, budget="100s", margin="50s")
    clock.now += 25.0
    assert made.turn(1) is None
    clock.now += 25.0
    assert made.turn(2) == "stop"


def test_a_slow_body_is_remembered_and_slowly_forgotten(clock):
    made = schedule(clock, budget="1000s")
    clock.now += 500.0
    made.turn(0)
    clock.now += 1.0
    assert made.turn(1) is None  # 499 s left, 495 remembered
    clock.now += 14.0
    assert made.turn(2) == "stop"  # 485 s left, 490 remembered
    patient = schedule(clock, budget="1000s")
    clock.now += 500.0
    patient.turn(0)
    for step in range(300):
        clock.now += 1.0
        assert patient.turn(step) is None


def test_the_time_of_a_save_is_not_the_time_of_a_body(clock):
    made = schedule(clock, budget="100s")
    clock.now += 1.0
    made.turn(1)
    clock.now += 40.0
    made.saved(1, 1.0)
    clock.now += 1.0
    assert made.turn(2) is None
    clock.now += 55.0
    assert made.turn(3) == "stop"


def test_without_a_budget_nothing_stops(clock):
    made = schedule(clock)
    clock.now += 1e12
    assert made.turn(1) != "stop"


def test_a_stop_goes_before_a_save(clock):
    made = schedule(clock, budget="10s", save_every=1)
    clock.now += 20.0
    assert made.turn(1) == "stop"


def test_a_clock_that_goes_back_stops_nothing(clock):
    made = schedule(clock, budget="100s", save_every="10s")
    clock.now -= 500.0
    assert made.turn(1) is None
