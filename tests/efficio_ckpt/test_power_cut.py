"""After a power cut at any moment of a save and its retention, whatever a disk had not flushed, the old or the new state loads.

The calls of a save are recorded, and each prefix is played onto a fresh folder as a disk could have kept it. What was flushed is
there. Of the rest any part may be missing: names in a folder that was not flushed since (any of them, in any combination), and
contents of a file that was not flushed since (absent, shorter, as zeros, or torn at a sector or a page).
"""

import os
import random
import shutil
from collections import Counter
from itertools import combinations

import pytest
from disk import Intercepted, Record, step_of, tree_of

from efficio_ckpt import background_saver, list_checkpoints, load_state, prune, save_state, verify
from efficio_ckpt._folder import Folder

WHOLE_STATES = 20_000
SLICE_STATES = 250
SECTOR, PAGE = 512, 4096


class Disk:
    """What a disk was told, in order: operations on names (in a folder) and on contents (of a file), and what was flushed.

    Args:
        root: Folder that is watched; all in it is taken for flushed at the beginning.
        deaf: Forget what was flushed of ``"names"`` or ``"contents"``, to show that it would be missed.
    """

    def __init__(self, root, *, deaf=None):
        self.root = str(root)
        self._deaf = deaf
        self.operations = []  # (kind, key, detail); key: a folder for names, a number of a file for contents
        self.flushed_at = {}  # key: indexes at which all before was flushed
        self.marks = []  # (index, what holds from there on)
        self._open = {}
        self._contents = {}  # path: number of its file
        self.original = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    self.original[len(self.original)] = file.read()
                self._contents[path] = len(self.original) - 1
        self.files_at_first = dict(self._contents)
        self.folders_at_first = [folder for folder, _, _ in os.walk(self.root)]
        self._next = len(self.original)

    def _note(self, kind, key, detail):
        self.operations.append((kind, key, detail))

    def mark(self, step):
        """From here on, step `step` has been promised to be durable."""
        self.marks.append((len(self.operations), step))

    def __call__(self, name, call, arguments):
        path = arguments[0] if isinstance(arguments[0], str) else str(arguments[0])
        if name == "open":
            new = bool(arguments[1] & os.O_CREAT) and not os.path.exists(path)
            file = call()
            self._open[file] = path
            if new:
                self._contents[path] = self._next
                self._note("link", os.path.dirname(path), (path, self._next))
                self._next += 1
            return file
        if name == "close":
            self._open.pop(arguments[0], None)
            return call()
        if name == "fsync":
            path = self._open[arguments[0]]
            key = path if os.path.isdir(path) else self._contents[path]
            result = call()
            if self._deaf != ("contents" if isinstance(key, int) else "names"):
                self._note("flush", key, None)
            return result
        if name == "write":
            path = self._open[arguments[0]]
            position = os.lseek(arguments[0], 0, os.SEEK_CUR)
            count = call()
            self._note("write", self._contents[path], (position, bytes(arguments[1][:count])))
            return count
        result = call()
        if name == "truncate":
            self._note("truncate", self._contents[path], arguments[1])
        elif name == "mkdir":
            self._note("mkdir", os.path.dirname(path), path)
        elif name == "rmdir":
            self._note("rmdir", os.path.dirname(path), path)
        elif name == "unlink":
            self._note("unlink", os.path.dirname(path), path)
            del self._contents[path]
        elif name == "replace":
            target = str(arguments[1])
            assert os.path.dirname(target) == os.path.dirname(path)
            self._note("rename", os.path.dirname(path), (path, target))
            self._contents[target] = self._contents.pop(path)
        return result

    def unflushed(self, length):
        """Indexes of the operations before `length` that a power cut then may undo."""
        last = {}
        for index, (kind, key, _) in enumerate(self.operations[:length]):
            if kind == "flush":
                last[key] = index
        return [
            index
            for index, (kind, key, _) in enumerate(self.operations[:length])
            if kind != "flush" and index > last.get(key, -1)
        ]

    def promised(self, length):
        return max((step for index, step in self.marks if index <= length), default=0)

    def after_cut(self, length, kept, tear):
        """What lies there when only `kept` of the unflushed operations before `length` reached the disk.

        Args:
            length: Operations before the cut.
            kept: Indexes.
            tear: Called with the bytes of an unflushed write that was kept; what of it is on the disk.
        """
        lost = set(self.unflushed(length)) - set(kept)
        torn = set(kept)
        contents = {number: bytearray(data) for number, data in self.original.items()}
        files = dict(self.files_at_first)
        folders = set(self.folders_at_first)
        for index, (kind, key, detail) in enumerate(self.operations[:length]):
            if kind == "flush" or index in lost:
                continue
            if kind == "link":
                files[detail[0]] = detail[1]
                contents.setdefault(detail[1], bytearray())
            elif kind == "write":
                position, data = detail
                if index in torn:
                    data = tear(data)
                memory = contents.setdefault(key, bytearray())
                memory.extend(bytes(max(0, position - len(memory))))
                memory[position : position + len(data)] = data
            elif kind == "truncate":
                del contents[key][detail:]
            elif kind == "mkdir":
                folders.add(detail)
            elif kind == "rmdir":
                folders.discard(detail)
            elif kind == "unlink":
                files.pop(detail, None)
            elif kind == "rename" and detail[0] in files:
                files[detail[1]] = files.pop(detail[0])
        return folders, {path: bytes(contents[number]) for path, number in files.items()}


def lay(state, disk, target):
    """Write folders and files below a fresh folder; what lies in a folder that is lost is lost."""
    folders, files = state
    there = {disk.root}
    for folder in sorted(folders):
        if os.path.dirname(folder) in there or folder == disk.root:
            there.add(folder)
            os.makedirs(target + folder.removeprefix(disk.root), exist_ok=True)
    for path, data in files.items():
        if os.path.dirname(path) in there:
            with open(target + path.removeprefix(disk.root), "wb") as file:
                file.write(data)


def tears(draw):
    """How an unflushed write may have reached the disk."""
    cut = draw.random()

    def prefix(unit):
        return lambda data: data[: int(len(data) * cut) // unit * unit]

    def zeroed(unit):
        def tear(data):
            kept = int(len(data) * cut) // unit * unit
            return data[:kept] + bytes(len(data) - kept)

        return tear

    def holes(data):
        pages = [data[start : start + PAGE] for start in range(0, len(data), PAGE)]
        return b"".join(page if draw.random() < 0.5 else bytes(len(page)) for page in pages)

    return {
        "whole": lambda data: data,
        "zeros": lambda data: bytes(len(data)),
        "absent": lambda data: b"",
        "sectors": prefix(SECTOR),
        "pages": prefix(PAGE),
        "zeros after sectors": zeroed(SECTOR),
        "zeros after pages": zeroed(PAGE),
        "holes": holes,
    }


def subsets(pending, draw):
    """Every subset of a few; of many none, all, all but one, one alone, prefixes, pairs that are missing, and some at random."""
    if len(pending) <= 6:
        return [kept for size in range(len(pending) + 1) for kept in combinations(pending, size)]
    chosen = [(), tuple(pending)]
    chosen += [tuple(other for other in pending if other != one) for one in pending]
    chosen += [(one,) for one in pending]
    chosen += [tuple(pending[:end]) for end in range(1, len(pending))]
    pairs = list(combinations(pending, 2))
    chosen += [
        tuple(other for other in pending if other not in pair)
        for pair in draw.sample(pairs, min(10, len(pairs)))
    ]
    chosen += [tuple(one for one in pending if draw.random() < 0.5) for _ in range(40)]
    return list(dict.fromkeys(chosen))


SHARD_BYTES = 2000


def save(place, step, *, keep):
    save_state(place, tree_of(step), step=step, keep=keep, shard_bytes=SHARD_BYTES)


def two_saves(place, mark):
    for step in (2, 3):
        save(place, step, keep=1)
        mark(step)


def first_save(place, mark):
    save(place, 1, keep=1)
    mark(1)
    save(place, 2, keep=2)
    mark(2)


def fewer(place, mark):
    save(place, 4, keep=1)
    mark(4)


def prune_all_but_one(place, mark):
    mark(3)
    prune(place, keep=1)


def in_the_background(place, mark):
    with background_saver(place, keep=1, run_id="run") as saver:
        for step in (2, 3):
            saver.save(tree_of(step), step=step, wait=True)
            mark(step)


def save_until(last, *, run_id=None):
    def prepare(place):
        for step in range(1, last + 1):
            save_state(place, tree_of(step), step=step, keep=last, run_id=run_id, shard_bytes=SHARD_BYTES)

    return prepare


SCENARIOS = {
    "two saves": (save_until(1), two_saves, 1),
    "first save": (lambda place: None, first_save, 0),
    "first save in an unflushed folder": (
        lambda place: None,
        lambda place, mark: (os.mkdir(place.root), first_save(place, mark)),
        0,
    ),
    "save over three": (save_until(3), fewer, 3),
    "retention": (save_until(3), prune_all_but_one, 3),
    "background": (save_until(1, run_id="run"), in_the_background, 1),
}
MODES = {"disk": False, "drive": True}


def recorded(scenario, mode, folder, *, deaf=None):
    prepare, work, before = SCENARIOS[scenario]
    place = Folder(str(folder / "run"), drive=MODES[mode])
    folder.mkdir()
    prepare(place)
    disk = Disk(folder, deaf=deaf)
    disk.mark(before)
    with Intercepted(disk):
        work(place, disk.mark)
    return disk


def states(disk, draw):
    """Every way in which the disk may be found: after each operation, with each choice of what was not flushed."""
    for length in range(len(disk.operations) + 1):
        pending = disk.unflushed(length)
        ways = tears(draw)
        for kept in subsets(pending, draw):
            writes = any(disk.operations[index][0] == "write" for index in kept)
            for way in ways if writes else ["whole"]:
                yield length, kept, way, ways[way]


def check(disk, length, target):
    """The step that is found after a cut; an error if it is older than what had been promised, or newer than what was begun."""
    place = Folder(target + "/run")
    try:
        step = step_of(load_state(place))
    except FileNotFoundError:
        step = 0
    steps = [mark for _, mark in disk.marks]
    following = next((mark for index, mark in disk.marks if index > length), disk.promised(length))
    assert step in {disk.promised(length), following}, (
        f"step {step} of {steps}, promised {disk.promised(length)}"
    )
    if step:
        verify(place)
    save(place, 99, keep=1)
    assert step_of(load_state(place)) == 99
    if step and list_checkpoints(place)[-1].run_id is None:
        assert [checkpoint.step for checkpoint in list_checkpoints(place)] == [99]
    return step


def replay(disk, draw, target, *, limit=None):
    """Check the states of a disk, or as many of them as `limit` says; points, ways of tearing, steps found, failures."""
    every = list(states(disk, draw))
    chosen = every if limit is None else draw.sample(every, min(limit, len(every)))
    ways, steps, failures = Counter(), Counter(), []
    for length, kept, way, tear in chosen:
        state = disk.after_cut(length, kept, tear)
        lay(state, disk, str(target))
        ways[way] += 1
        try:
            steps[check(disk, length, str(target))] += 1
        except Exception as error:
            undone = [disk.operations[index][:2] for index in set(disk.unflushed(length)) - set(kept)]
            failures.append(
                f"after {length} of {len(disk.operations)}, {way}, without {undone}: {error}"[:600]
            )
        shutil.rmtree(target)
    return len(chosen), ways, steps, failures


@pytest.mark.parametrize("mode", MODES)
def test_a_power_cut_in_some_moments_of_a_save_loses_nothing_that_was_promised(quick_path, mode):
    draw = random.Random(os.urandom(8))
    for scenario in SCENARIOS:
        disk = recorded(scenario, mode, quick_path / scenario)
        share = SLICE_STATES // len(SCENARIOS) // len(MODES)
        points, _, _, failures = replay(disk, draw, quick_path / "target", limit=share)
        assert failures == [], scenario
        assert points == share


@pytest.mark.parametrize("deaf", ["names", "contents"])
def test_a_flush_that_is_left_out_would_be_found(quick_path, deaf):
    disk = recorded("two saves", "disk", quick_path / "watched", deaf=deaf)
    _, _, _, failures = replay(disk, random.Random(0), quick_path / "target", limit=60)
    assert failures


@pytest.mark.torture
def test_a_power_cut_in_any_moment_of_a_save_loses_nothing_that_was_promised(quick_path):
    record = Record("power-cuts", {"shard_bytes": SHARD_BYTES, "seed": 0})
    for scenario in SCENARIOS:
        for mode in MODES:
            part = f"{scenario}, {mode}"
            if record.has(part):
                continue
            disk = recorded(scenario, mode, quick_path / part)
            points, ways, steps, failures = replay(disk, random.Random(0), quick_path / "target")
            found = {str(step): count for step, count in sorted(steps.items())}
            outcomes = {
                "operations": len(disk.operations),
                "unflushed_kept": dict(ways.most_common()),
                "found_steps": found,
            }
            record.add(part, points, outcomes, failures)
    print(record.path, record.content["points"])
    assert record.content["failures"] == []
    assert record.content["points"] >= WHOLE_STATES
