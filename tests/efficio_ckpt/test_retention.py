"""What stays: the newest, one for each so many steps, and the best; of each run, and of good checkpoints only."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efficio_ckpt import (
    Checkpoint,
    Retention,
    background_saver,
    list_checkpoints,
    load_state,
    prune,
    save_state,
)
from efficio_ckpt._retention import kept, retention_of


def steps(storage, run_id=None):
    return [checkpoint.step for checkpoint in list_checkpoints(storage) if checkpoint.run_id == run_id]


def save(storage, step, **options):
    return save_state(storage, {"n": step}, step=step, **options)


def test_one_for_each_multiple_of_steps_stays_for_good(quick_path):
    for step in range(0, 1000, 30):
        save(quick_path, step, keep=Retention(newest=2, every=200))
    # The first at or behind 200, 400, 600 and 800.
    assert steps(quick_path) == [990, 960, 810, 600, 420, 210]
    assert load_state(quick_path, step=420) == {"n": 420}


@pytest.mark.parametrize(("end", "best"), [("min", 3), ("max", 5)])
def test_the_best_stays_however_old_it_is(quick_path, end, best):
    losses = {1: 0.5, 2: 0.4, 3: 0.1, 4: 0.3, 5: 0.9, 6: 0.2, 7: 0.3, 8: 0.4}
    keep = Retention(newest=1, best=("loss", end))
    for step, loss in losses.items():
        save(quick_path, step, keep=keep, metadata={"loss": loss})
        seen = losses.values() if step == 8 else list(losses.values())[:step]
        good = (min if end == "min" else max)(seen)
        assert set(steps(quick_path)) == {step, next(s for s, value in losses.items() if value == good)}
    assert best in steps(quick_path)


@pytest.mark.parametrize("value", [None, "0.1", True, [0.1], math.nan])
def test_what_is_no_number_is_not_the_best(value):
    found = [
        Checkpoint(2, "b", "exact", 0.0, 1, metadata={"loss": value}),
        Checkpoint(1, "a", "exact", 0.0, 1, metadata={"loss": 0.5}),
        Checkpoint(0, "none", "exact", 0.0, 1),
    ]
    assert kept(found, Retention(newest=1, best=("loss", "min"))) == {"b", "a"}


def test_of_equal_ones_the_newest_is_the_best():
    found = [Checkpoint(s, f"c{s}", "exact", 0.0, 1, metadata={"loss": 1}) for s in (3, 2, 1)]
    assert kept(found, Retention(newest=1, best=("loss", "max"))) == {"c3"}


def test_two_runs_in_one_folder_have_what_stays_for_each(quick_path):
    keep = Retention(newest=1, every=100, best=("loss", "min"))
    for step in range(0, 250, 50):
        save(quick_path, step, keep=keep, run_id="a", metadata={"loss": step})
        save(quick_path, step + 1, keep=1, run_id="b", metadata={"loss": -step})
    assert steps(quick_path, "a") == [200, 100, 0]
    assert steps(quick_path, "b") == [201]


def test_a_damaged_one_neither_counts_nor_goes(quick_path):
    keep = Retention(newest=1, every=100, best=("loss", "min"))
    name = save(quick_path, 110, keep=keep, metadata={"loss": 0.0}).name
    file = quick_path / name / "state.json"
    file.write_bytes(file.read_bytes()[:-1])
    save(quick_path, 120, keep=keep, metadata={"loss": 1.0})
    save(quick_path, 130, keep=keep, metadata={"loss": 2.0})
    save(quick_path, 140, keep=keep, metadata={"loss": 3.0})
    # 120 stands in for it, as the first behind 100 and as the best.
    assert steps(quick_path) == [140, 120]
    assert file.exists()


def test_prune_and_the_background_saver_know_the_same_rules(quick_path):
    keep = Retention(newest=1, every=4)
    with background_saver(quick_path / "a", keep=keep) as saver:
        for step in range(10):
            saver.save({"n": step}, step=step, wait=True)
    for step in range(10):
        save(quick_path / "b", step, keep=10)
    assert sorted(checkpoint.step for checkpoint in prune(quick_path / "b", keep=keep)) == [
        0,
        1,
        2,
        3,
        5,
        6,
        7,
    ]
    assert steps(quick_path / "a") == steps(quick_path / "b") == [9, 8, 4]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([None, 0.5, 1.0, 2.0])), max_size=25),
    st.integers(1, 3),
    st.sampled_from([None, 1, 7, 20]),
    st.sampled_from([None, ("loss", "min"), ("loss", "max")]),
)
def test_what_is_removed_changes_nothing_about_what_stays(saves, newest, every, best):
    """Removing at each save leaves the milestones that are left by removing once at the end, also after a run went back."""
    retention = Retention(newest, every, best)
    there, all_saved = [], []
    for number, (step, loss) in enumerate(saves):
        new = Checkpoint(step, f"c{number}", "exact", 0.0, 1, metadata={} if loss is None else {"loss": loss})
        there, all_saved = [new, *there], [new, *all_saved]
        names = kept(there, retention)
        there = [checkpoint for checkpoint in there if checkpoint.name in names]
        assert new in there
        assert len(there) >= min(newest, len(all_saved))
    assert {checkpoint.name for checkpoint in there} == kept(all_saved, retention)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"newest": 0}, ValueError),
        ({"newest": True}, TypeError),
        ({"every": 0}, ValueError),
        ({"every": 1.5}, TypeError),
        ({"best": "loss"}, TypeError),
        ({"best": ("loss", "lowest")}, ValueError),
    ],
    ids=str,
)
def test_rules_that_make_no_sense_are_told_when_they_are_made(options, error):
    with pytest.raises(error, match="; give"):
        Retention(**options)


def test_a_count_is_the_newest(quick_path):
    assert retention_of(3) == Retention(newest=3)
    with pytest.raises(TypeError, match="keep='two' is no int"):
        save(quick_path, 1, keep="two")
