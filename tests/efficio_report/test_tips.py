import re

import pytest

from efficio_report import GPUSample, collect_report, tips

GB = 10**9
# An hour on a fed GPU.
GOOD = {"setup": 60.0, "data": 90.0, "train": 3120.0, "evaluate": 240.0, "save": 60.0, "other": 30.0}


def report_of(seconds=None, *, utilization=0.97, memory=14 * GB, samples=60, **changes):
    """A report of the good hour with some phases changed, and `samples` equal samples of its GPU."""
    gpu = [GPUSample(float(second), utilization, memory, 16 * GB) for second in range(samples)]
    options = {"steps": 10_000, "device": "cuda", "skipped_steps": 8, "saves": 6, **changes}
    return collect_report({**GOOD, **(seconds or {})}, gpu, **options)


def topics(report):
    return [tip.topic for tip in tips(report)]


def test_a_run_with_nothing_to_gain_gets_no_tips():
    assert tips(report_of()) == ()
    assert tips(report_of(samples=0)) == ()


def test_an_empty_report_gets_no_tips():
    assert tips(collect_report({}, steps=0)) == ()


def test_a_try_out_of_seconds_gets_no_tips():
    seconds = dict.fromkeys(("setup", "data", "train", "evaluate", "save"), 3.0)
    assert tips(collect_report(seconds, steps=10, device="cpu")) == ()


CASES = {
    "data": ({"data": 2000.0}, {"utilization": 0.4}, "the GPU waited for data 39 % of the time (33m 20s)"),
    "memory": ({}, {"memory": 4 * GB}, "at most 25 % of the GPU's memory was in use (4.0 GB of 16.0 GB)"),
    "utilization": (
        {},
        {"utilization": 0.31},
        "the GPU was busy 31 % of the time, although its data was there",
    ),
    "evaluate": ({"evaluate": 1500.0}, {}, "evaluating took 31 % of the time (25m 00s)"),
    "save": ({"save": 400.0}, {}, "saving took 10 % of the time (6m 40s in 6 saves)"),
    "setup": ({"setup": 1600.0}, {}, "setting up took 31 % of the time (26m 40s)"),
    "skipped": (
        {},
        {"skipped_steps": 1500},
        "1,500 of 11,500 optimizer steps were skipped because their gradients overflowed",
    ),
    "cpu": ({}, {"device": "cpu", "samples": 0}, "training ran on the CPU for 52m 00s, 87 % of the time"),
}


@pytest.mark.parametrize("topic", CASES)
def test_each_thing_to_gain_is_told_alone_with_its_figure(topic):
    seconds, options, measured = CASES[topic]
    (tip,) = tips(report_of(seconds, **options))
    assert tip.topic == topic
    assert tip.measured == measured
    assert re.search(r"\d", tip.measured)
    assert str(tip) == f"{measured}: {tip.change}"
    assert "\n" not in str(tip)


@pytest.mark.parametrize(
    ("topic", "below", "above"),
    [
        ("data", {"seconds": {"data": 550.0}}, {"seconds": {"data": 551.0}}),
        ("evaluate", {"seconds": {"evaluate": 1120.0}}, {"seconds": {"evaluate": 1121.0}}),
        ("save", {"seconds": {"save": 186.0}}, {"seconds": {"save": 187.0}}),
        ("setup", {"seconds": {"setup": 1180.0}}, {"seconds": {"setup": 1181.0}}),
        ("memory", {"memory": 8 * GB}, {"memory": 8 * GB - 1}),
        ("utilization", {"utilization": 0.5}, {"utilization": 0.49}),
        ("skipped", {"skipped_steps": 526}, {"skipped_steps": 527}),
        (
            "cpu",
            {"device": "cpu", "seconds": {"train": 299.0}},
            {"device": "cpu", "seconds": {"train": 300.0}},
        ),
    ],
)
def test_a_tip_begins_at_its_threshold(topic, below, above):
    options = {"utilization": 0.8} if topic == "data" else {}
    assert topic not in topics(report_of(**{**options, **below}))
    assert topic in topics(report_of(**{**options, **above}))


def test_waiting_for_data_is_no_fault_while_the_gpu_is_busy():
    assert topics(report_of({"data": 2000.0}, utilization=0.95)) == []
    assert topics(report_of({"data": 2000.0}, samples=0)) == ["data"]


def test_on_a_cpu_it_is_training_that_waits():
    report = report_of({"data": 2000.0}, device="cpu", samples=0)
    assert topics(report) == ["cpu", "data"]
    assert tips(report)[1].measured.startswith("training waited for data")


def test_an_idle_gpu_is_not_blamed_on_the_step_when_the_data_was_late_or_little_was_trained():
    assert topics(report_of({"data": 1000.0}, utilization=0.3)) == ["data"]
    assert "utilization" not in topics(report_of({"evaluate": 3000.0}, utilization=0.3))


def test_a_few_samples_of_the_gpu_are_not_enough_for_a_tip():
    assert topics(report_of(utilization=0.1, memory=GB, samples=9)) == []
    assert topics(report_of(utilization=0.1, memory=GB, samples=10)) == ["utilization", "memory"]


@pytest.mark.parametrize("samples", [[GPUSample(0.0)] * 60, [GPUSample(0.0, memory_used_bytes=1)] * 60])
def test_a_gpu_that_tells_little_gets_no_tip_about_it(samples):
    assert tips(collect_report(GOOD, samples, steps=100, device="cuda")) == ()


def test_a_scaler_that_looks_for_its_scale_in_a_short_run_is_no_fault():
    assert topics(report_of(steps=20, skipped_steps=9)) == []
    assert topics(report_of(steps=20, skipped_steps=10)) == ["skipped"]


def test_several_things_to_gain_are_all_told():
    seconds = {"data": 3000.0, "save": 2000.0, "train": 1000.0}
    assert topics(report_of(seconds, utilization=0.2, memory=GB)) == ["data", "memory", "save"]
