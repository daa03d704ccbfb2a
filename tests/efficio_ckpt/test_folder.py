"""A save on a local disk survives a kill and an error at every call that it makes."""

import errno
import os
import shutil
import signal
import time

import pytest
import torch

from efficio_ckpt import CheckpointError, list_checkpoints, load_state, save_state, verify
from efficio_ckpt._folder import WRITER, Folder
from efficio_ckpt._manifest import MANIFEST

OLD = {"w": torch.full((100,), 1.0), "step": 1}
NEW = {"w": torch.full((100,), 2.0), "step": 2}
NEXT = {"w": torch.full((100,), 3.0), "step": 3}

WRITING = ("mkdir", "open", "write", "fsync", "close", "replace", "unlink", "rmdir", "truncate")
posix_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked child")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def is_tree(loaded, tree):
    return loaded["step"] == tree["step"] and torch.equal(loaded["w"], tree["w"])


def intercept(action):
    """Route the calls of `os` that change a disk through `action(name, call, arguments)`; returns how to undo it."""
    originals = {name: getattr(os, name) for name in WRITING}
    for name, call in originals.items():
        setattr(os, name, lambda *a, _name=name, _call=call, **k: action(_name, lambda: _call(*a, **k), a))

    def undo():
        for name, call in originals.items():
            setattr(os, name, call)

    return undo


def save_and_die(root, point, *, drive):
    """Save in a forked child that kills itself at a point: before a call, or half-way through a write."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status)
    count = 0

    def action(name, call, arguments):
        nonlocal count
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        if name == "write":
            if count == point:
                os.pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], 0)
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
        return call()

    try:
        intercept(action)
        save_state(Folder(root, drive=drive), NEW, step=2, keep=1, shard_bytes=1000)
    finally:
        os._exit(0)


@posix_only
@quiet_fork
@pytest.mark.parametrize("drive", [False, True], ids=["disk", "drive"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_state(quick_path, drive):
    base = quick_path / "base"
    save_state(base, OLD, step=1, keep=1)
    outcomes = []
    for point in range(1000):
        root = quick_path / "run"
        shutil.copytree(base, root)
        killed = save_and_die(str(root), point, drive=drive)
        loaded = load_state(root)
        assert is_tree(loaded, OLD) or is_tree(loaded, NEW), point
        outcomes.append(loaded["step"])
        verify(root)
        storage = Folder(str(root), drive=drive)
        save_state(storage, NEXT, step=3, keep=1)
        assert is_tree(load_state(root), NEXT), point
        left = [path for path in root.glob(f"*/{WRITER}") if path.read_text().endswith("}")]
        assert left == [], (point, "an attempt of a dead writer was not swept")
        assert len(list_checkpoints(root)) == 1
        shutil.rmtree(root)
        if not killed:
            break
    assert not killed
    assert point > 35
    assert outcomes == sorted(outcomes), "once the new state is there it stays"
    assert set(outcomes) == {1, 2}


ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ENOTCONN]


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_an_error_at_any_call_costs_no_older_checkpoint(quick_path, number, lasting):
    raised = 0
    for point in range(1000):
        root = quick_path / str(point)
        save_state(root, OLD, step=1, keep=1)
        count = 0

        def action(name, call, arguments, point=point):
            nonlocal count
            count += 1
            if count == point + 1 or (lasting and count > point):
                if name == "close":
                    call()
                raise OSError(number, os.strerror(number))
            return call()

        undo = intercept(action)
        try:
            save_state(root, NEW, step=2, keep=1)
            failed = False
        except CheckpointError as error:
            failed = True
            text = str(error)
            assert str(root) in text
            assert os.strerror(number) in text
            assert "needed" in text
            assert "free" in text
        finally:
            undo()
        loaded = load_state(root)
        assert (
            is_tree(loaded, OLD) if failed and not lasting else is_tree(loaded, OLD) or is_tree(loaded, NEW)
        )
        if not failed:
            assert is_tree(loaded, NEW)
        raised += failed
        save_state(root, NEXT, step=3, keep=1)
        assert is_tree(load_state(root), NEXT)
        if count <= point:
            break
    assert raised > 15


def test_a_failed_attempt_leaves_nothing_behind(tmp_path):
    save_state(tmp_path, OLD, step=1)
    before = sorted(path for path in tmp_path.rglob("*"))

    def action(name, call, arguments):
        if name == "write" and len(arguments[1]) > 400:
            raise OSError(errno.ENOSPC, "no space left on device")
        return call()

    undo = intercept(action)
    try:
        with pytest.raises(CheckpointError, match="make room, or lower keep"):
            save_state(tmp_path, NEW, step=2)
    finally:
        undo()
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_a_runtime_error_of_a_writer_is_a_checkpoint_error_too(tmp_path):
    class Odd(Folder):
        def write(self, folder, name, chunks):
            raise RuntimeError("unexpected pos 576 vs 534")

    with pytest.raises(CheckpointError, match="unexpected pos 576"):
        save_state(Odd(str(tmp_path)), NEW, step=2)


@pytest.mark.parametrize("drive", [False, True], ids=["disk", "drive"])
def test_files_are_emptied_before_they_go_to_the_bin_of_a_drive_only(tmp_path, drive):
    sizes = []

    def action(name, call, arguments):
        if name == "unlink" and str(arguments[0]).endswith((".safetensors", ".json")):
            sizes.append(os.stat(arguments[0]).st_size)
            newest = list_checkpoints(tmp_path)[0]
            assert newest.step == current, "an old file goes only once the new checkpoint stands"
        return call()

    undo = intercept(action)
    try:
        for current in range(5):
            save_state(Folder(str(tmp_path), drive=drive), NEW, step=current, keep=1)
    finally:
        undo()
    assert len(sizes) == 5 + 3 * 4
    assert all(size == 0 for size in sizes) is drive


def test_nothing_is_overwritten_and_no_link_is_made(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("no links and no rename of this kind")

    for name in ("link", "symlink", "rename"):
        monkeypatch.setattr(os, name, refuse)

    replaced = []

    def action(name, call, arguments):
        if name == "replace":
            replaced.append(os.path.exists(arguments[1]))
        return call()

    undo = intercept(action)
    try:
        for step in (1, 1, 2):
            save_state(tmp_path, NEW, step=step, keep=2)
    finally:
        undo()
    assert replaced == [False] * 4


def test_each_file_and_folder_is_flushed_before_the_manifest_counts(tmp_path):
    log = []

    def action(name, call, arguments):
        result = call()
        if name == "open":
            log.append(("open", os.path.basename(arguments[0]), result))
        elif name == "fsync":
            log.append(
                (
                    "fsync",
                    next(
                        base for kind, base, file in reversed(log) if kind == "open" and file == arguments[0]
                    ),
                    None,
                )
            )
        elif name == "replace":
            log.append(("replace", os.path.basename(arguments[1]), None))
        return result

    undo = intercept(action)
    try:
        checkpoint = save_state(tmp_path, NEW, step=2)
    finally:
        undo()
    order = [(kind, base) for kind, base, _ in log if kind != "open"]
    commit = order.index(("replace", MANIFEST))
    before = order[:commit]
    for base in (
        "tensors-00001.safetensors",
        "state.json",
        checkpoint.name,
        tmp_path.name,
        MANIFEST + ".tmp",
    ):
        assert ("fsync", base) in before, base
    assert order[commit + 1] == ("fsync", checkpoint.name)


def test_a_file_system_that_cannot_flush_directories_is_used_all_the_same(tmp_path):
    def action(name, call, arguments):
        if name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}"):
            raise OSError(errno.EINVAL, "invalid argument")
        return call()

    undo = intercept(action)
    try:
        save_state(tmp_path, NEW, step=2)
    finally:
        undo()
    assert is_tree(load_state(tmp_path), NEW)


def test_an_unfinished_attempt_that_names_no_writer_is_swept_once_it_is_old(tmp_path):
    attempt = tmp_path / "step-000000000009-0123abcd"
    for age, swept in [(60, False), (1000, True)]:
        attempt.mkdir(exist_ok=True)
        (attempt / "tensors-00001.safetensors").write_bytes(b"half")
        then = time.time() - age
        os.utime(attempt / "tensors-00001.safetensors", (then, then))
        save_state(tmp_path, NEW, step=2, keep=1)
        assert attempt.exists() is not swept


@posix_only
@quiet_fork
def test_the_attempt_of_a_living_writer_is_left_alone(tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:

        class Slow(Folder):
            def write(self, folder, name, chunks):
                super().write(folder, name, chunks)
                os.write(writing, b"x")
                time.sleep(60)

        save_state(Slow(str(tmp_path)), OLD, step=1)
        os._exit(0)
    os.read(reading, 1)
    attempt = next(tmp_path.glob("step-000000000001-*"))
    save_state(tmp_path, NEW, step=2)
    assert (attempt / "tensors-00001.safetensors").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    save_state(tmp_path, NEW, step=3)
    assert not attempt.exists()


def test_a_file_that_the_desktop_leaves_in_a_checkpoint_stops_no_retention(tmp_path, caplog):
    for step in range(4):
        folder = tmp_path / save_state(tmp_path, NEW, step=step, keep=1).name
        (folder / ".DS_Store").write_bytes(b"x")
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [3]
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1
    assert caplog.text == ""


def test_folders_of_others_are_never_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    strange = tmp_path / "step-000000000009-0123abcd"
    strange.mkdir()
    (strange / "thoughts.txt").write_text("mine")
    long_ago = time.time() - 10**6
    os.utime(strange / "thoughts.txt", (long_ago, long_ago))
    save_state(tmp_path, NEW, step=2, keep=1)
    assert (strange / "thoughts.txt").read_text() == "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2]
