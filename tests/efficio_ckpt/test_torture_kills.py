"""A kill at every call that changes the disk, and half-way through every write, leaves the old state or the new one."""

import json
import os
import random
import shutil
from collections import Counter

import pytest
from disk import Record, child_that_dies, step_of, tree_of

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_state,
    prune,
    save_state,
    verify,
)
from efficio_ckpt._folder import EXPIRED, WRITER, Folder

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked child"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

RUN = "run"
SHARD_BYTES = 100  # every tensor in a file of its own
LAST = 99
WHOLE_POINTS = 1000
FEWEST_CALLS = 38  # of retention on a disk; the whole sweep counts them


def save(place, step, *, keep):
    save_state(place, tree_of(step), step=step, keep=keep, run_id=RUN, shard_bytes=SHARD_BYTES)


def save_three(place):
    for step in (1, 2, 3):
        save(place, step, keep=3)


def leave_attempts(place):
    """A good checkpoint, attempts that were killed early and late, and a removal that was."""
    save(place, 1, keep=1)
    for point in (3, 40, 80):
        assert child_that_dies(lambda: save(place, 2, keep=1), point)
    half_removed = next(path for path in os.listdir(place.root) if path.startswith("step-000000000001"))
    shutil.copytree(f"{place.root}/{half_removed}", f"{place.root}/step-000000000000-00000000")
    os.rename(
        f"{place.root}/step-000000000000-00000000/MANIFEST.json",
        f"{place.root}/step-000000000000-00000000/{EXPIRED}",
    )


def leave_damage(place):
    for step in (1, 2):
        save(place, step, keep=2)
    newest = f"{place.root}/{list_checkpoints(place)[0].name}/tensors-00003.safetensors"
    with open(newest, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


def save_in_the_background(place):
    with background_saver(place, keep=1, run_id=RUN) as saver:
        saver.save(tree_of(2), step=2)
        saver.save(tree_of(3), step=3, wait=True)


def load_and_save(place):
    assert step_of(load_state(place)) == 1
    save(place, 3, keep=1)


# What lies there before, what is done, and the steps that may be found afterwards (0: nothing was ever saved).
CASES = {
    "first save": (lambda place: None, lambda place: save(place, 1, keep=1), (0, 1)),
    "save": (lambda place: save(place, 1, keep=1), lambda place: save(place, 2, keep=1), (1, 2)),
    "save over three": (save_three, lambda place: save(place, 4, keep=1), (3, 4)),
    "save after kills": (leave_attempts, lambda place: save(place, 2, keep=1), (1, 2)),
    "background": (lambda place: save(place, 1, keep=1), save_in_the_background, (1, 2, 3)),
    "retention": (save_three, lambda place: prune(place, keep=1), (3,)),
    "damage": (leave_damage, load_and_save, (1, 3)),
}
MODES = {"disk": False, "drive": True}


def found(place):
    try:
        return step_of(load_state(place))
    except FileNotFoundError:
        return 0


def check(place, case):
    """The step that a folder holds after a kill; an error if it is none of those that may be, or if saving goes on wrongly."""
    step = found(place)
    allowed = CASES[case][2]
    assert step in allowed, f"step {step}"
    if case == "damage":
        with pytest.raises(CheckpointError, match="tensors-00003"):
            verify(place)
    else:
        verify(place)
    save(place, LAST, keep=1)
    assert step_of(load_state(place)) == LAST
    assert [checkpoint.step for checkpoint in list_checkpoints(place)] == [LAST]
    for folder in os.scandir(place.root):
        if folder.is_dir():
            names = set(os.listdir(folder))
            assert EXPIRED not in names, "a removal was not finished"
            assert not (WRITER in names and is_whole(f"{folder.path}/{WRITER}")), (
                "an attempt of a dead writer stays"
            )
    return step


def is_whole(path):
    with open(path) as file:
        try:
            return bool(json.load(file))
        except ValueError:
            return False


def sweep(case, mode, folder, points):
    """Kill at each of the points until one lies behind the end; what was found there."""
    prepare, work, _ = CASES[case]
    base, root = folder / "base" / "run", folder / "root"
    base.parent.mkdir(parents=True)
    prepare(Folder(str(base), drive=MODES[mode]))
    kinds, steps, failures = Counter(), [], []
    for point in points:
        shutil.copytree(base.parent, root)
        place = Folder(str(root / "run"), drive=MODES[mode])
        kind = child_that_dies(lambda place=place: work(place), point)
        if kind is None:
            break
        kinds[kind] += 1
        try:
            steps.append(check(place, case))
        except (AssertionError, OSError, CheckpointError) as error:
            failures.append(f"point {point}, before {kind}: {type(error).__name__}: {error}"[:300])
        shutil.rmtree(root)
    assert kind is None or not isinstance(points, range), "the end was not reached"
    if case != "background":
        assert steps == sorted(steps), "once the new state is there it stays"
    shutil.rmtree(folder)
    return kinds, Counter(steps), failures


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_some_call_of_each_kind_of_work_leaves_the_old_or_the_new_state(quick_path, mode):
    draw = random.Random(os.urandom(8))  # other points each time
    for case in CASES:
        # Work with few calls may end before a point is reached; the first of them always is.
        points = sorted({draw.randrange(FEWEST_CALLS), *draw.sample(range(90), 3)})
        kinds, _, failures = sweep(case, mode, quick_path / "sweep", points)
        assert failures == []
        assert kinds, case


@pytest.mark.torture
def test_a_kill_at_every_call_leaves_the_old_or_the_new_state(quick_path):
    record = Record("kills", {"parts": len(tree_of(0)["parts"]), "shard_bytes": SHARD_BYTES})
    for case in CASES:
        for mode in MODES:
            part = f"{case}, {mode}"
            if not record.has(part):
                kinds, steps, failures = sweep(case, mode, quick_path / "sweep", range(100_000))
                outcomes = {
                    "killed_before": dict(kinds.most_common()),
                    "found_steps": {str(step): count for step, count in sorted(steps.items())},
                }
                record.add(part, sum(kinds.values()), outcomes, failures)
    print(record.path, record.content["points"])
    assert record.content["failures"] == []
    assert record.content["points"] >= WHOLE_POINTS
    for case, (_, _, allowed) in CASES.items():
        steps = set(record.content["parts"][f"{case}, disk"]["found_steps"])
        assert steps == set(map(str, allowed)), f"{case}: the kills were all before or all after the commit"
