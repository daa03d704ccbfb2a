"""Whatever a call to the disk answers, at any call of a save, a load or a removal: no checkpoint is lost, and the error is one."""

import errno
import logging
import os
import random
import shutil
import subprocess
import threading
from collections import Counter

import pytest
import torch
from disk import WRITING, Intercepted, Record, step_of, tree_of

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_checkpoint,
    load_state,
    prune,
    save_state,
    verify,
)
from efficio_ckpt._folder import Folder
from efficio_ckpt._save import write_checkpoint
from efficio_ckpt._tree import flatten

CALLS = (*WRITING, "listdir", "scandir", "stat", "statvfs")
NUMBERS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENOTCONN,
    errno.EROFS,
    errno.EACCES,
    errno.ETIMEDOUT,
)
WHOLE_POINTS = 10_000


class Interruption(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


class Fails:
    """An action that raises at one call below a folder, or from it on."""

    def __init__(self, root, point, error, *, lasting):
        self.root, self.point, self.error, self.lasting = str(root), point, error, lasting
        self.count = 0
        self.raised = 0
        self._files = set()

    def __call__(self, name, call, arguments):
        path = arguments[0] if arguments else ""
        ours = path in self._files if isinstance(path, int) else str(path).startswith(self.root)
        if not ours:
            return call()
        self.count += 1
        hit = self.count > self.point if self.lasting else self.count == self.point + 1
        if hit and not (name == "close" and self.error is Interruption):
            if name == "close":
                call()
                self._files.discard(path)
            self.raised += 1
            raise (
                self.error() if isinstance(self.error, type) else OSError(self.error, os.strerror(self.error))
            )
        result = call()
        if name == "open":
            self._files.add(result)
        elif name == "close":
            self._files.discard(path)
        return result


class Reads(Folder):
    """A disk whose reads go through an action."""

    def open(self, folder, name):
        action = self.action
        file = action("open file", lambda: super(Reads, self).open(folder, name), (self.root,))

        class File:
            def __enter__(self):
                return self

            def __exit__(self, *exception):
                file.close()

            def read(self, size=-1):
                return action("read", lambda: file.read(size), (action.root,))

            def readinto(self, target):
                return action("readinto", lambda: file.readinto(target), (action.root,))

        return File()


def place_of(root, action):
    place = Reads(str(root))
    object.__setattr__(place, "action", action)
    return place


def save(place, step, *, keep=1):
    save_state(place, tree_of(step), step=step, keep=keep, shard_bytes=2000)


def save_in_the_background(place):
    saver = background_saver(place, keep=1, run_id=None)
    try:
        saver.save(tree_of(3), step=3)
    finally:
        saver.close()


def load(place):
    assert step_of(load_state(place)) in {1, 2}


# What is done, and the steps that may be there after an error and after success.
WORK = {
    "save": (lambda place: save(place, 3), {2, 3}, {3}),
    "background": (save_in_the_background, {2, 3}, {3}),
    "load": (load, {2}, {2}),
    "verify": (verify, {2}, {2}),
    "prune": (lambda place: prune(place, keep=1), {2}, {2}),
}
ERRORS = {
    **{errno.errorcode[number]: number for number in NUMBERS},
    "interruption": Interruption,
    "MemoryError": MemoryError,
}


def attempt(work, error, *, lasting, root, point):
    """Do some work with an error at a call; the outcome, and how many calls there were."""
    do, after_error, after_success = WORK[work]
    action = Fails(root, point, ERRORS[error], lasting=lasting)
    outcome = "done"
    with Intercepted(action, CALLS):
        try:
            do(place_of(root, action))
        except CheckpointError as problem:
            outcome = "CheckpointError"
            text = str(problem)
            assert str(root) in text, text
            assert "\n" not in text, text
        except (Interruption, MemoryError):
            assert error in {"interruption", "MemoryError"}
            outcome = error
    step = step_of(load_state(root))
    assert step in (after_success if outcome == "done" else after_error), f"step {step} after {outcome}"
    verify(root)
    save(root, 9)
    assert step_of(load_state(root)) == 9
    return outcome, action


def sweep(work, error, *, lasting, folder, points):
    """Raise at each of the points until one lies behind the last call."""
    base, outcomes, failures = folder / "base", Counter(), []
    folder.mkdir()
    for step in (1, 2):
        save(base, step, keep=2)
    for point in points:
        root = folder / str(point)
        shutil.copytree(base, root)
        try:
            outcome, action = attempt(work, error, lasting=lasting, root=root, point=point)
        except Exception as problem:
            failures.append(f"call {point}: {type(problem).__name__}: {problem}"[:300])
        else:
            if not action.raised:
                break
            outcomes[outcome] += 1
        shutil.rmtree(root)
    shutil.rmtree(folder)
    return outcomes, failures


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("work", WORK)
def test_an_error_at_some_call_costs_nothing(quick_path, work, lasting):
    draw = random.Random(os.urandom(8))
    raised = 0
    for error in ERRORS:
        points = sorted(draw.sample(range(40), 5))
        outcomes, failures = sweep(work, error, lasting=lasting, folder=quick_path / error, points=points)
        assert failures == [], error
        raised += sum(outcomes.values())
    assert raised


@pytest.mark.torture
def test_an_error_at_every_call_costs_nothing(quick_path):
    record = Record("errors", {"errors": list(ERRORS)})
    for work in WORK:
        for error in ERRORS:
            for lasting in (False, True):
                part = f"{work}, {error}, {'lasting' if lasting else 'once'}"
                if not record.has(part):
                    outcomes, failures = sweep(
                        work, error, lasting=lasting, folder=quick_path / "sweep", points=range(100_000)
                    )
                    points = sum(outcomes.values()) + len(failures)
                    record.add(part, points, {"outcomes": dict(outcomes)}, failures)
    print(record.path, record.content["points"])
    assert record.content["failures"] == []


@pytest.mark.parametrize("where", ["begin", "write", "commit", "remove"])
def test_a_run_goes_on_when_its_saving_thread_is_ended_and_is_told(quick_path, where):
    class Ending(Folder):
        def _end(self, name):
            if name == where and threading.current_thread() is not threading.main_thread() and not ended:
                ended.append(name)
                raise SystemExit

        def begin(self, folder, note):
            super().begin(folder, note)
            self._end("begin")

        def write(self, folder, name, chunks):
            super().write(folder, name, chunks)
            self._end("write")

        def commit(self, folder, manifest, *, expired):
            super().commit(folder, manifest, expired=())
            self._end("commit")
            for name in expired:
                self.remove(name)

        def remove(self, folder):
            self._end("remove")
            super().remove(folder)

    ended = []
    save(quick_path, 1)
    with background_saver(Ending(str(quick_path)), keep=1) as saver:
        assert saver.save(tree_of(2), step=2)
        with pytest.raises(CheckpointError, match="could not save step 2"):
            saver.wait()
        assert ended == [where]
        assert saver.status.in_flight_step is None
        assert step_of(load_state(quick_path)) == (2 if where in {"commit", "remove"} else 1)
        saver.save(tree_of(3), step=3, wait=True)
    assert step_of(load_state(quick_path)) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("work", ["save", "load"])
def test_a_thread_of_checksums_that_is_ended_is_no_hang_and_no_damage(quick_path, work, monkeypatch):
    import hashlib
    import zlib

    save_state(quick_path, {"w": torch.ones(2**25)}, step=1)
    crc32, sha256 = zlib.crc32, hashlib.sha256
    left = [1]

    def end():
        if threading.current_thread().name == "efficio-ckpt-digest" and left:
            left.pop()
            raise SystemExit

    class Sha256:
        def __init__(self, *arguments):
            self.sha = sha256(*arguments)

        def update(self, part):
            end()
            self.sha.update(part)

        def hexdigest(self):
            return self.sha.hexdigest()

    monkeypatch.setattr(zlib, "crc32", lambda *arguments: end() or crc32(*arguments))
    monkeypatch.setattr(hashlib, "sha256", Sha256)
    tree = {"w": torch.zeros(2**25)}
    do = {"save": lambda: save_state(quick_path, tree, step=2), "load": lambda: load_state(quick_path)}[work]
    with pytest.raises(CheckpointError, match="the thread that takes checksums was ended"):
        do()
    assert load_state(quick_path)["w"][-1] == 1
    assert not list(quick_path.glob("*/DAMAGE.txt"))


def test_too_little_memory_is_told_and_is_no_damage(quick_path, monkeypatch, caplog):
    save(quick_path, 1)
    save(quick_path, 2)
    empty = torch.empty

    def full(*shape, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CheckpointError, match="needs more memory than there is"):
        load_state(quick_path)
    with background_saver(quick_path) as saver:
        with caplog.at_level(logging.WARNING, logger="efficio_ckpt"):
            saver.save(tree_of(3), step=3)  # without a copy
        assert "no room in memory for a copy of" in caplog.text
        assert saver.status.last_step == 3
        monkeypatch.setattr(torch, "empty", empty)
        assert saver.save(tree_of(4), step=4, wait=True)
    assert step_of(load_state(quick_path)) == 4


@pytest.fixture
def megabyte(tmp_path):
    """A real file system of 1 MB, and a function that mounts it again, read-only."""
    place = tmp_path / "mounted"
    place.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if not done or done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip() if done else 'no mount command'}")
    try:
        yield (
            place,
            lambda: subprocess.run([mount, "-o", "remount,ro", str(place)], check=True, capture_output=True),
        )
    finally:
        subprocess.run([shutil.which("umount"), str(place)], check=True)


def test_a_file_system_of_a_megabyte_takes_what_fits_and_keeps_what_it_had(megabyte):
    place, _ = megabyte
    save_state(place, {"w": torch.zeros(400, 256)}, step=1, keep=1)
    for step in range(2, 5):
        with pytest.raises(CheckpointError, match=r"No space left on device.*make room, or lower keep"):
            save_state(place, {"w": torch.ones(800, 256)}, step=step, keep=1)
        assert len(list(place.iterdir())) == 1
    assert torch.equal(load_state(place)["w"], torch.zeros(400, 256))
    with background_saver(place, keep=1) as saver:
        failed = 0
        for step in range(10, 20):
            try:
                saver.save({"w": torch.full((800, 256), float(step))}, step=step)
                saver.wait()  # a slow machine would skip all saves but the first
            except CheckpointError:
                failed += 1  # and the training goes on
        assert failed == 10
        saver.take_error()
        with pytest.raises(CheckpointError, match="could not save step 20"):
            saver.save({"w": torch.ones(800, 256)}, step=20, wait=True)
        saver.save({"w": torch.full((500, 256), 2.0)}, step=21, wait=True)
    assert torch.equal(load_state(place)["w"], torch.full((500, 256), 2.0))


def test_a_file_system_that_is_read_only_is_read_and_not_saved_to(megabyte):
    place, freeze = megabyte
    save(place, 1, keep=2)
    save(place, 2, keep=2)
    newest = next(place.glob("step-000000000002-*/tensors-00001.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    freeze()
    assert step_of(load_state(place)) == 1
    with pytest.raises(CheckpointError, match="tensors-00001"):
        verify(place)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(place, 3)
    assert [checkpoint.step for checkpoint in list_checkpoints(place)] == [2, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="changes the user in a child")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["not writable", "not readable"])
def test_a_folder_without_permission_is_told(quick_path, mode):
    place = quick_path / "run"
    save(place, 1)
    quick_path.chmod(0o755)
    place.chmod(mode)
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)  # the owner of all may do anything
            told(place, readable=mode != 0)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    place.chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0
    assert step_of(load_state(place)) == 1


def told(place, *, readable):
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(place, 2)
    if readable:
        assert step_of(load_state(place)) == 1
    else:
        with pytest.raises(CheckpointError, match="Permission denied"):
            load_state(place)


def test_a_clock_that_goes_backwards_changes_nothing(quick_path):
    place = Folder(str(quick_path))
    for step, clock in enumerate([2e9, 1e9, 0.0, -5.0, 3e9, 2.5e9], start=1):
        attempt = quick_path / f"step-{step:012d}-0123abcd"
        attempt.mkdir()
        (attempt / "tensors-00001.safetensors").write_bytes(b"of a writer who gave no name")
        os.utime(attempt / "tensors-00001.safetensors", (1.5e9, 1.5e9))
        options = {"step": step, "mode": "exact", "keep": 2, "metadata": {}, "run_id": None}
        write_checkpoint(place, flatten(tree_of(step)), **options, clock=lambda clock=clock: clock)
        checkpoint, tree = load_checkpoint(quick_path)
        assert checkpoint.step == step_of(tree) == step
        assert checkpoint.created == clock
        assert attempt.exists() is (clock < 1.5e9), "what is younger than the clock is left alone"
    assert [checkpoint.step for checkpoint in list_checkpoints(quick_path)] == [6, 5]
