import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_report import Totals, span, timed


class Clock:
    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock(100.0)


def test_the_time_of_a_phase_runs_from_switch_to_switch(clock):
    totals = Totals(clock=clock)
    clock.now += 1.0
    assert totals.switch("setup") == "other"
    clock.now += 2.0
    assert totals.switch("train") == "setup"
    clock.now += 4.0
    assert totals.switch("setup") == "train"
    clock.now += 8.0
    assert totals == {"other": 1.0, "setup": 2.0, "train": 4.0}
    totals.settle()
    assert totals == {"other": 1.0, "setup": 10.0, "train": 4.0}
    assert totals.phase == "setup"
    assert totals.wall_seconds == 15.0


def test_the_first_phase_can_be_named(clock):
    totals = Totals(phase="setup", clock=clock)
    clock.now += 1.0
    totals.settle()
    assert totals == {"setup": 1.0}


def test_the_time_inside_an_inner_span_is_not_in_the_outer_one(clock):
    totals = Totals(clock=clock)
    with span(totals, "train"):
        clock.now += 1.0
        with span(totals, "evaluate"):
            clock.now += 2.0
            with span(totals, "data"):
                clock.now += 4.0
            clock.now += 8.0
        clock.now += 16.0
    clock.now += 32.0
    totals.settle()
    assert totals == {"train": 17.0, "evaluate": 10.0, "data": 4.0, "other": 32.0}


def test_a_span_inside_one_of_the_same_phase_counts_once(clock):
    totals = Totals(clock=clock)
    with span(totals, "save"):
        clock.now += 1.0
        with span(totals, "save"):
            clock.now += 1.0
    assert totals == {"save": 2.0}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_span_that_ends_by_an_exception_counts_and_gives_the_phase_back(clock, error):
    totals = Totals(phase="train", clock=clock)

    def save():
        with span(totals, "save"):
            clock.now += 2.0
            raise error

    with pytest.raises(error):
        save()
    assert totals == {"save": 2.0}
    assert totals.phase == "train"


def test_an_outer_span_mends_what_an_interrupted_inner_one_left(clock):
    totals = Totals(clock=clock)
    with span(totals, "train"):
        totals.switch("evaluate")  # as if the interrupt had come right after the entry: nothing switches back
        clock.now += 1.0
    assert totals.phase == "other"
    assert totals == {"evaluate": 1.0}


@given(
    st.lists(st.tuples(st.sampled_from(["setup", "data", "train", "save", "own"]), st.integers(0, 1000))),
)
def test_the_phases_add_up_to_the_wall_time_whatever_the_order(turns):
    clock = Clock()
    totals = Totals(clock=clock)
    for phase, passed in turns:
        clock.now += passed
        totals.switch(phase)
    clock.now += 1.0
    totals.settle()
    assert sum(totals.values()) == totals.wall_seconds == clock.now


@given(st.lists(st.floats(-1e9, 1e9), max_size=20))
def test_a_clock_that_jumps_gives_no_negative_seconds(jumps):
    clock = Clock()
    totals = Totals(clock=clock)
    for jump in jumps:
        clock.now += jump
        totals.switch("train")
    assert all(seconds >= 0.0 for seconds in totals.values())
    assert totals.wall_seconds >= 0.0


@pytest.mark.parametrize("at", range(1, 40))
def test_an_interrupt_at_any_line_counts_no_second_twice(at):
    clock = Clock()
    totals = Totals(clock=clock)
    lines = 0

    def interrupt(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename.endswith("_totals.py"):
            if event == "line":
                lines += 1
                if lines == at:
                    raise KeyboardInterrupt
            return interrupt
        return None

    before = sys.gettrace()
    interrupted = False
    sys.settrace(interrupt)
    try:
        with span(totals, "train"):
            clock.now += 1.0
            for _ in timed("ab", totals):
                clock.now += 2.0
                with span(totals, "save"):
                    clock.now += 4.0
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(before)
    assert interrupted or lines < at
    clock.now += 8.0
    totals.switch("other")
    clock.now += 16.0
    totals.settle()
    assert sum(totals.values()) <= totals.wall_seconds == clock.now
    assert totals["other"] >= 16.0
    assert totals.phase == "other"


def test_items_come_as_they_are_and_only_the_waiting_is_counted(clock):
    def loader():
        for batch in range(3):
            clock.now += 2.0
            yield batch
        clock.now += 1.0

    totals = Totals(phase="train", clock=clock)
    seen = []
    for batch in timed(loader(), totals):
        assert totals.phase == "train"
        clock.now += 10.0
        seen.append(batch)
    totals.settle()
    assert seen == [0, 1, 2]
    assert totals == {"data": 7.0, "train": 30.0}


def test_starting_the_iteration_counts_as_waiting_and_is_lazy(clock):
    class Loader:
        def __iter__(self):
            clock.now += 5.0
            return iter("a")

    totals = Totals(clock=clock)
    batches = timed(Loader(), totals, phase="wait")
    assert totals == {}
    assert next(batches) == "a"
    assert totals == {"wait": 5.0}


def test_the_phase_at_the_time_of_the_request_goes_on_afterwards(clock):
    totals = Totals(clock=clock)
    batches = timed(range(2), totals)
    with span(totals, "evaluate"):
        next(batches)
        assert totals.phase == "evaluate"
    with span(totals, "train"):
        next(batches)
        assert totals.phase == "train"
        assert list(batches) == []
        assert totals.phase == "train"


def test_a_loader_that_fails_counts_and_gives_the_phase_back(clock):
    def loader():
        clock.now += 3.0
        raise EOFError
        yield

    totals = Totals(phase="train", clock=clock)
    with pytest.raises(EOFError):
        next(timed(loader(), totals))
    assert totals == {"data": 3.0}
    assert totals.phase == "train"


def test_leaving_the_loop_early_keeps_the_phase(clock):
    totals = Totals(phase="train", clock=clock)
    for _ in timed(range(10), totals):
        break
    assert totals.phase == "train"


def test_two_totals_know_nothing_of_each_other(clock):
    first, second = Totals(clock=clock), Totals(clock=clock)
    with span(first, "train"), span(second, "save"):
        clock.now += 1.0
    assert (first, second) == ({"train": 1.0}, {"save": 1.0})


def test_each_thread_can_have_totals_of_its_own():
    found = []

    def work():
        clock = Clock()
        totals = Totals(clock=clock)
        with span(totals, "train"):
            clock.now += 1.0
        found.append(dict(totals))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"train": 1.0}] * 4


def test_the_default_clock_runs_forward():
    totals = Totals()
    with span(totals, "train"):
        sum(range(1000))
    assert totals["train"] > 0.0
