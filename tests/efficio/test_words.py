from datetime import datetime

import pytest

from efficio._words import bce_note, environment_note, length_note, scheduler_note, start_line, storage_note


def start(**values):
    given = {
        "resumed_from": None,
        "seconds": 0.0,
        "place": "here",
        "precision": "fp32: why",
        "stops_at": None,
    }
    return start_line(**{**given, **values})


def test_a_new_run_says_where_it_is_and_how_it_computes():
    assert start() == "efficio: new run in here, fp32: why"


def test_a_resumed_run_says_from_which_step_and_after_how_long():
    line = start(resumed_from=12345, seconds=5400.0)
    assert line == "efficio: resumed at step 12,345 (1.50 h so far) from here, fp32: why"


def test_a_run_resumed_at_its_first_checkpoint_is_not_new():
    assert "resumed at step 0" in start(resumed_from=0)


def test_a_budget_says_when_it_stops():
    assert start(stops_at=datetime(2026, 12, 1, 9, 5)).endswith(", stops at 09:05")


@pytest.mark.parametrize(
    ("host", "place", "told"),
    [
        ("local", "/content/run", False),
        ("colab", "/content/run", True),
        ("colab", "/content/drive/MyDrive/run", False),
        ("colab", "gs://bucket/run", False),
        ("kaggle", "/tmp/run", True),
        ("kaggle", "/kaggle/working/run", False),
        ("kaggle", "/content/drive/MyDrive/run", True),
        ("colab", "/content/drives/run", True),
    ],
)
def test_storage_that_goes_with_the_machine_is_told_with_a_place_that_stays(host, place, told):
    note = storage_note(host, place)
    assert (note is not None) is told
    if told:
        assert place in note
        assert "give storage=" in note


def test_each_thing_that_is_not_as_it_was_is_told_with_both_values():
    stored = {"device": "Tesla T4", "torch": "2.5.1", "threads": 2}
    note = environment_note(stored, {"device": "cpu", "torch": "2.5.1", "threads": 4})
    assert "device: Tesla T4 when saved, cpu now" in note
    assert "threads: 2 when saved, 4 now" in note
    assert "2.5.1" not in note


def test_what_a_checkpoint_does_not_say_is_not_told():
    assert environment_note({}, {"device": "cpu"}) is None
    assert environment_note({"host": "colab"}, {"device": "cpu"}) is None


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ("step", "by run.step(), once per optimizer step"),
        ("epoch", "when an epoch ends"),
        (None, "left to you"),
    ],
    ids=str,
)
def test_who_steps_the_schedulers_is_told_by_name(interval, words):
    note = scheduler_note(["scheduler", "warm_up"], interval)
    assert "scheduler, warm_up" in note
    assert words in note


def test_without_schedulers_nothing_is_said_about_them():
    assert scheduler_note([], "step") is None


def test_another_number_of_samples_is_told_as_another_data_set():
    note = length_note("0", (10, 20), (1000, 2000))
    assert "'0' had 1,000 samples an epoch and now has 2,000" in note
    assert "another data set" in note
    assert length_note("0", (10, 10), (1000, 1001)) is not None


@pytest.mark.parametrize("samples", [(100, 100), (None, 100), (100, None), (None, None)], ids=str)
def test_another_number_of_batches_is_told_with_both(samples):
    note = length_note("0", (1000, 2000), samples)
    assert "'0' had 1,000 batches an epoch and now has 2,000" in note
    assert ("only if the data set is the same" in note) is (None in samples)


@pytest.mark.parametrize("batches", [(None, None), (None, 3), (3, None), (3, 3)], ids=str)
@pytest.mark.parametrize("samples", [(None, None), (None, 9), (9, None), (9, 9)], ids=str)
def test_lengths_that_are_the_same_or_unknown_are_not_told(batches, samples):
    assert length_note("0", batches, samples) is None


def test_losses_that_fail_in_16_bit_are_named():
    assert bce_note(()) is None
    assert "head.loss, tail" in bce_note(("head.loss", "tail"))
