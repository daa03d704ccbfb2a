import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_report import GPUSample, Report, Totals, collect_report, span, tips

GB = 10**9
HOUR = {"setup": 60.0, "data": 1200.0, "train": 2000.0, "evaluate": 200.0, "save": 40.0}
FULL = {
    "steps": 12345,
    "wall_seconds": 3600.0,
    "samples_seen": 1_580_000,
    "epochs": 3.52,
    "skipped_steps": 3,
    "saves": 12,
    "save_seconds": 31.25,
    "save_bytes": 12 * 89_600_000,
    "resumed_from": 400,
    "stopped": "budget",
    "host": "kaggle",
    "device": "cuda",
    "device_name": "Tesla T4",
    "precision": "float16 with a gradient scaler, because bfloat16 is only emulated on a Tesla T4 (7.5)",
    "applied": ["channels_last", "cudnn.benchmark"],
    "notes": ["the scheduler steps once per optimizer step"],
}
SAMPLES = [GPUSample(float(second), 0.4, 5 * GB, 16 * GB, 61.0, 1590, 70) for second in range(20)]


def full_report(**changes):
    return collect_report(HOUR, SAMPLES, **{**FULL, **changes})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_phases_come_in_the_order_of_a_run_and_add_up_to_the_wall_time():
    totals = {"own": 1.0, "save": 2.0, "train": 3.0, "setup": 4.0, "other": 5.0, "data": 6.0, "evaluate": 7.0}
    report = collect_report(totals, steps=1)
    assert [phase for phase, _ in report.phases] == [
        "setup",
        "data",
        "train",
        "evaluate",
        "save",
        "own",
        "other",
    ]
    assert report.wall_seconds == 28.0
    assert report.seconds("own") == 1.0
    assert report.share("data") == 6.0 / 28.0


def test_what_is_in_no_phase_is_other():
    report = collect_report({"train": 6.0}, steps=1, wall_seconds=10.0)
    assert (report.seconds("other"), report.wall_seconds) == (4.0, 10.0)


def test_phases_longer_than_the_wall_time_count():
    report = collect_report({"train": 6.0, "data": 6.0}, steps=1, wall_seconds=10.0)
    assert (report.seconds("other"), report.wall_seconds) == (0.0, 12.0)


def test_totals_bring_their_own_wall_time():
    clock = Clock()
    totals = Totals(clock=clock)
    with span(totals, "train"):
        clock.now += 3.0
    clock.now += 1.0
    totals.settle()
    before = dict(totals)
    del totals["train"]  # as if an interrupt had lost it
    report = collect_report(totals, steps=1)
    assert before == {"train": 3.0, "other": 1.0}
    assert (report.wall_seconds, report.seconds("other")) == (4.0, 4.0)


@given(
    st.dictionaries(
        st.sampled_from(["setup", "data", "train", "evaluate", "save", "other", "own"]), st.floats(-1e6, 1e6)
    ),
    st.none() | st.floats(-1e6, 1e6),
)
def test_whatever_the_clocks_said_the_phases_add_up_and_none_is_negative(totals, wall_seconds):
    before = dict(totals)
    report = collect_report(totals, steps=1, wall_seconds=wall_seconds)
    assert totals == before
    assert all(seconds >= 0.0 for _, seconds in report.phases)
    assert report.wall_seconds == math.fsum(seconds for _, seconds in report.phases)
    assert report.wall_seconds >= max(0.0, wall_seconds or 0.0) * (1.0 - 1e-12)


def test_rates_are_over_training_and_its_waiting_only():
    report = full_report()
    assert report.steps_per_second == 12345 / 3200.0
    assert report.samples_per_second == 1_580_000 / 3200.0


def test_rates_are_unknown_without_training_time_or_count():
    report = collect_report({"setup": 5.0}, steps=0, samples_seen=0)
    assert (report.steps_per_second, report.samples_per_second) == (None, None)
    assert collect_report({"train": 5.0}, steps=5).samples_per_second is None


@pytest.mark.parametrize(
    ("name", "count"),
    [("steps", -1), ("steps", 1.5), ("saves", math.nan), ("save_bytes", math.inf), ("samples_seen", -0.5)],
)
def test_what_is_no_count_is_refused_by_its_name(name, count):
    with pytest.raises(ValueError, match=rf"^{name}=.* is not a count; give a whole number"):
        collect_report({}, **{"steps": 1, name: count})


@pytest.mark.parametrize("seconds", [math.nan, math.inf], ids=repr)
def test_a_time_that_is_not_finite_is_refused_by_its_name(seconds):
    with pytest.raises(ValueError, match=r"^totals\['train'\]="):
        collect_report({"train": seconds}, steps=1)
    with pytest.raises(ValueError, match=r"^wall_seconds="):
        collect_report({}, steps=1, wall_seconds=seconds)
    with pytest.raises(ValueError, match=r"^save_seconds="):
        collect_report({}, steps=1, save_seconds=seconds)


@pytest.mark.parametrize("name", ["applied", "notes"])
def test_one_text_in_place_of_several_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}='channels_last' is one text; give a list"):
        collect_report({}, steps=1, **{name: "channels_last"})


def test_a_report_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        full_report().steps = 5


def test_the_text_says_everything_that_is_known():
    text = str(full_report())
    for expected in (
        "efficio report: 1h 00m 00s, stopped: budget",
        "waiting for data",
        "20m 00s  33.3 %",
        "1h 00m 00s 100.0 %",
        "12,345 (3.86 a second), 3 more skipped",
        "1,580,000 (494 a second)",
        "3.52",
        "from step 400",
        "12, 1.1 GB, 31.2s in all",
        "kaggle",
        "cuda, Tesla T4",
        "float16 with a gradient scaler",
        "40 % on average, 40 % at most",
        "5.0 GB at most, 31 % of 16.0 GB",
        "61 W on average",
        "1590 MHz on average",
        "70 °C at most",
        "  - channels_last",
        "  - the scheduler steps once per optimizer step",
        "  - the GPU waited for data",
    ):
        assert expected in text


def test_what_is_not_known_is_not_in_the_text():
    assert str(collect_report({}, steps=0)) == (
        "efficio report: 0.00s\n\nWhere the time went\n  in all                         0.00s\n\n"
        "What was done\n  steps                 0"
    )


def test_a_gpu_that_tells_nothing_is_not_available_in_the_text():
    text = str(collect_report({}, [GPUSample(0.0)], steps=0))
    assert len(re.findall(r"^  GPU \w+ +n/a$", text, re.MULTILINE)) == 5


def test_the_percentages_in_the_text_add_up_to_a_hundred():
    text = str(collect_report({"setup": 1.0, "data": 1.0, "train": 1.0}, steps=1))
    parts = [float(part) for part in re.findall(r"([\d.]+) %", text)]
    assert parts[-1] == 100.0
    assert sum(round(10 * part) for part in parts[:-1]) == 1000


def test_a_long_phase_name_is_cut_and_keeps_its_figures_in_their_columns():
    lines = str(collect_report({"train": 1.0, "p" * 200: 1.0}, steps=1)).split("\n")
    train, own = (next(line for line in lines if word in line) for word in ("training", "ppp"))
    assert own.replace("p" * 21, "training".ljust(21)) == train


@given(
    st.text(max_size=200),
    st.lists(st.text(max_size=200), max_size=3),
    st.floats(0.0, 1e12),
    st.integers(0, 10**18),
)
def test_no_line_of_the_text_is_longer_than_78_columns(words, texts, seconds, count):
    report = full_report(
        stopped=words, host=words, precision=words, applied=texts, notes=texts, steps=count, save_bytes=count
    )
    report = dataclasses.replace(
        report, phases=((words, seconds), ("train", 1.0)), wall_seconds=seconds + 1.0
    )
    assert max(len(line) for line in str(report).split("\n")) <= 78


def test_the_page_holds_the_lines_of_the_text_and_loads_nothing():
    page = full_report()._repr_html_()
    for expected in (
        "waiting for data",
        "33.3 %",
        "Tesla T4",
        "channels_last",
        "31 % of 16.0 GB",
        "the GPU waited",
    ):
        assert expected in page
    assert "http" not in page
    assert "<script" not in page
    assert "src=" not in page
    ElementTree.fromstring(page)


def test_every_text_of_the_page_is_escaped():
    evil = "<script>alert('\"&')</script>"
    report = full_report(
        stopped=evil, host=evil, device=evil, device_name=evil, precision=evil, applied=[evil], notes=[evil]
    )
    report = dataclasses.replace(report, phases=((evil, 1.0),))
    page = report._repr_html_()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 8
    assert "".join(ElementTree.fromstring(page).itertext()).count(evil) == 8


def test_the_json_holds_every_field_and_comes_back():
    report = full_report()
    read = json.loads(report.to_json())
    assert read["schema_version"] == 1
    assert {field.name for field in dataclasses.fields(Report)} < set(read)
    assert read["phases"] == dict(report.phases)
    assert list(read["phases"]) == [phase for phase, _ in report.phases]
    assert read["gpu"] == dataclasses.asdict(report.gpu)
    assert read["applied"] == FULL["applied"]
    assert read["steps_per_second"] == report.steps_per_second
    assert read["tips"] == [dataclasses.asdict(tip) for tip in tips(report)] != []
    for name in ("steps", "epochs", "save_seconds", "resumed_from", "stopped", "precision"):
        assert read[name] == FULL[name]


def test_unknown_figures_are_null_in_the_json():
    read = json.loads(collect_report({}, steps=0).to_json())
    assert read["samples_seen"] is read["gpu"] is read["stopped"] is None
    assert (read["phases"], read["tips"]) == ({"other": 0.0}, [])


def test_the_numbers_of_other_libraries_become_plain_ones():
    report = collect_report(
        {"train": np.float32(2.0)},
        steps=np.int64(4),
        samples_seen=np.int32(64),
        epochs=np.float64(1.0),
        save_seconds=np.float32(0.5),
    )
    assert json.loads(report.to_json())["steps"] == 4
    assert report == collect_report({"train": 2.0}, steps=4, samples_seen=64, epochs=1.0, save_seconds=0.5)
