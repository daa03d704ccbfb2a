"""A spool in front of a remote storage: training never waits for the network, and what the network loses is still here."""

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from trees import same

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_checkpoint,
    load_state,
    save_state,
    spooled,
    verify,
)
from efficio_ckpt._folder import Folder
from efficio_ckpt._objects import Objects
from efficio_ckpt._spool import Spool, is_remote, spool_path, with_spool
from efficio_ckpt._uploader import Uploader, next_wait

RUN = "run"


class Far(Folder):
    """A storage over a network that can be slow, lost, full or forbidden."""

    is_remote = True

    def __init__(self, root):
        super().__init__(str(root))
        state = {
            "open": threading.Event(),
            "error": None,
            "writes": 0,
            "asked": 0,
            "begun": threading.Event(),
        }
        state["open"].set()
        object.__setattr__(self, "net", state)

    @property
    def place(self):
        return "far://run"

    def _reach(self):
        self.net["asked"] += 1
        if self.net["error"] is not None:
            raise self.net["error"]

    def folders(self):
        self._reach()
        return super().folders()

    def files(self, folder):
        self._reach()
        return super().files(folder)

    def begin(self, folder, note):
        self._reach()
        self.net["begun"].set()
        super().begin(folder, note)

    def write(self, folder, name, chunks):
        assert self.net["open"].wait(60)
        self._reach()
        self.net["writes"] += 1
        super().write(folder, name, chunks)

    def commit(self, folder, manifest, *, expired):
        self._reach()
        super().commit(folder, manifest, expired=expired)


LOST = OSError(errno.ENETUNREACH, "Network is unreachable")


def tree_of(step):
    return {"w": torch.full((3000,), float(step)), "step": step}


@pytest.fixture
def far(quick_path):
    return Far(quick_path / "far")


@pytest.fixture
def at_once(monkeypatch):
    """Waits between tries take no time; each is noted."""
    waits = []

    def wait(event, seconds):
        waits.append(seconds)
        time.sleep(0.001)

    make = Uploader.__init__
    monkeypatch.setattr(
        Uploader, "__init__", lambda self, *given, **options: make(self, *given, **options, wait=wait)
    )
    return waits


def saver_of(far, **options):
    return background_saver(far, run_id=RUN, spool=far.root + "-spool", **options)


def steps(storage):
    return [checkpoint.step for checkpoint in list_checkpoints(storage)]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_what_is_saved_arrives_and_is_the_same_there(far):
    with saver_of(far, keep=2) as saver:
        for step in range(5):
            saver.save(tree_of(step), step=step, wait=True)
            assert same(load_state(Folder(far.root)), tree_of(step))
        assert saver.status.upload.step == 4
        assert saver.status.upload.count == 5
    assert steps(Folder(far.root)) == [4, 3]
    assert [checkpoint.step for checkpoint in verify(Folder(far.root))] == [4, 3]
    assert steps(Folder(far.root + "-spool")) == [4]  # the rest was cleared away


def test_a_slow_upload_delays_no_save_and_of_those_that_wait_only_the_newest_goes_up(far):
    with saver_of(far, keep=2) as saver:
        saver.save(tree_of(0), step=0, wait=True)
        far.net["open"].clear()
        far.net["begun"].clear()
        saver.save(tree_of(1), step=1)
        saver.wait(upload=False)
        assert far.net["begun"].wait(60)
        for step in range(2, 7):
            assert saver.save(tree_of(step), step=step)
            saver.wait(upload=False)
            assert saver.status.last_step == step
        assert saver.status.upload.in_flight_step == 1
        assert saver.status.skipped == 0
        far.net["open"].set()
        saver.wait()
        assert saver.status.upload.count == 3  # 0, 1 and 6
    assert steps(Folder(far.root)) == [6, 1]


def test_a_checkpoint_that_is_being_uploaded_is_not_removed_under_it(far):
    with saver_of(far, keep=1) as saver:
        far.net["open"].clear()
        saver.save(tree_of(1), step=1)
        assert far.net["begun"].wait(60)
        for step in (2, 3, 4):
            saver.save(tree_of(step), step=step)
            saver.wait(upload=False)
        assert steps(Folder(far.root + "-spool")) == [4, 1]
        far.net["open"].set()
        saver.wait()
        assert steps(Folder(far.root)) == [4]
        saver.save(tree_of(5), step=5, wait=True)
        assert steps(Folder(far.root + "-spool")) == [5]


def test_a_lost_network_loses_nothing_and_training_goes_on(far, at_once, caplog):
    with caplog.at_level(logging.WARNING):
        saver = saver_of(far, keep=2)
        saver.save(tree_of(1), step=1, wait=True)
        far.net["error"] = LOST
        for step in (2, 3):
            assert saver.save(tree_of(step), step=step)
            saver.wait(upload=False)
        wait_until(lambda: len(at_once) >= 3)
        assert "not uploaded to 'far://run'" in caplog.text
        assert "safe on this machine" in caplog.text
        assert saver.status.upload.error is not None
        assert saver.status.upload.step == 1
        far.net["error"] = None
        saver.close()
    assert saver.status.upload.error is None
    assert steps(Folder(far.root)) == [3, 1]


def test_the_last_save_says_where_it_is_if_the_network_does_not_come_back(far, at_once):
    saver = saver_of(far)
    saver.save(tree_of(1), step=1, wait=True)
    far.net["error"] = LOST
    with pytest.raises(CheckpointError, match=r"not uploaded to 'far://run': .*unreachable.*-spool"):
        saver.save(tree_of(2), step=2, wait=True)
    with pytest.raises(CheckpointError, match="not uploaded"):
        saver.close()
    assert same(load_state(far.root + "-spool"), tree_of(2))
    # With the network, this machine goes on from what it has, and another one from what arrived.
    far.net["error"] = None
    assert same(load_state(spooled(far, folder=far.root + "-spool")), tree_of(2))
    assert same(load_state(Folder(far.root)), tree_of(1))
    with saver_of(far) as saver:  # and now it is uploaded without another save
        saver.wait()
    assert same(load_state(Folder(far.root)), tree_of(2))


def test_without_the_network_nothing_is_loaded_as_another_machine_may_have_gone_on(far):
    with saver_of(far) as saver:
        saver.save(tree_of(1), step=1, wait=True)
    far.net["error"] = LOST
    with pytest.raises(CheckpointError, match=r"cannot be read: .*can be given as the storage"):
        load_state(spooled(far, folder=far.root + "-spool"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        saver_of(far)
    assert same(load_state(far.root + "-spool"), tree_of(1))


def test_what_another_machine_saved_since_is_newer_than_what_lies_here(far, quick_path):
    with saver_of(far) as saver:
        saver.save(tree_of(1), step=1, wait=True)
    with background_saver(far, run_id=RUN, spool=quick_path / "other") as saver:
        saver.save(tree_of(2), step=2, wait=True)
    joined = spooled(far, folder=far.root + "-spool")
    assert same(load_state(joined), tree_of(2))
    with saver_of(far) as saver:  # here again: what is saved now is the newest everywhere
        saver.save(tree_of(3), step=3, wait=True)
    assert steps(Folder(far.root)) == [3, 2]
    assert steps(joined) == [3, 2]


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get
)
def test_an_error_that_does_not_pass_is_told_at_once_to_who_waits(far, number):
    with saver_of(far) as saver:
        saver.save(tree_of(1), step=1, wait=True)
        far.net["error"] = OSError(number, os.strerror(number))
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            saver.save(tree_of(2), step=2, wait=True)
        assert time.monotonic() - begun < 30
        far.net["error"] = None
        saver.wait()
    assert steps(Folder(far.root)) == [2, 1]


def test_a_bit_that_flipped_in_the_spool_is_never_uploaded_as_good(far, at_once, caplog):
    saver = saver_of(far, keep=3)
    saver.save(tree_of(1), step=1, wait=True)
    far.net["error"] = LOST
    for step in (2, 3):
        saver.save(tree_of(step), step=step)
        saver.wait(upload=False)
    name = list_checkpoints(far.root + "-spool")[0].name
    path = os.path.join(far.root + "-spool", name, "tensors-00001.safetensors")
    with open(path, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 4]))
    far.net["error"] = None
    with caplog.at_level(logging.WARNING):
        saver.close()
    assert "checksum" in caplog.text
    assert steps(Folder(far.root)) == [2, 1]
    verify(Folder(far.root))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_upload_thread_that_is_killed_is_told_and_the_next_save_sends_again(far, monkeypatch):
    from efficio_ckpt import _uploader

    send = _uploader.send_checkpoint
    left = [1]

    def killed(*arguments, **options):
        if left:
            left.pop()
            raise SystemExit
        return send(*arguments, **options)

    monkeypatch.setattr(_uploader, "send_checkpoint", killed)
    with saver_of(far) as saver:
        saver.save(tree_of(1), step=1)
        saver.wait(upload=False)
        wait_until(lambda: saver.status.upload.error is not None)
        saver.save(tree_of(2), step=2, wait=True)
    assert same(load_state(Folder(far.root)), tree_of(2))


def test_threads_and_files_do_not_grow_with_the_number_of_saves(far):
    with saver_of(far, keep=1) as saver:
        for step in range(3):
            saver.save(tree_of(step), step=step, wait=True)
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for step in range(3, 60):
            saver.save(tree_of(step), step=step, wait=True)
        wait_until(lambda: threading.active_count() <= before[0])
        assert len(os.listdir("/proc/self/fd")) <= before[1]
    assert len(os.listdir(far.root)) == 1


def test_two_runs_share_a_storage_and_its_spool(far):
    with saver_of(far, keep=1) as saver:
        saver.save(tree_of(1), step=1, wait=True)
    with background_saver(far, run_id="other", spool=far.root + "-spool", keep=1) as saver:
        saver.save(tree_of(7), step=7, wait=True)
    assert sorted(steps(Folder(far.root))) == [1, 7]


def test_a_saver_without_a_spool_uploads_in_the_save(far, tmp_path):
    with background_saver(far, run_id=RUN, spool=False) as saver:
        saver.save(tree_of(1), step=1, wait=True)
    assert steps(Folder(far.root)) == [1]
    assert not os.path.exists(far.root + "-spool")
    save_state(
        spooled(far, folder=tmp_path / "spool"), tree_of(2), step=2
    )  # waits for the network, as it says
    assert steps(Folder(far.root)) == [2, 1]
    assert not (tmp_path / "spool").exists()


def test_local_storages_have_no_spool(tmp_path):
    for url in (tmp_path, "memory://spool-none", f"file://{tmp_path}"):
        assert not isinstance(spooled(url), Spool)


def test_what_was_not_uploaded_is_found_by_the_plain_name_of_the_storage(
    far, at_once, monkeypatch, quick_path
):
    monkeypatch.setenv("EFFICIO_SPOOL", str(quick_path / "spools"))
    saver = background_saver(far, run_id=RUN)
    saver.save(tree_of(1), step=1, wait=True)
    far.net["error"] = LOST
    with pytest.raises(CheckpointError):
        saver.save(tree_of(2), step=2, wait=True)
    with pytest.raises(CheckpointError):
        saver.close()
    far.net["error"] = None
    assert load_checkpoint(far)[0].step == 2
    assert isinstance(with_spool(far), Spool)


def test_a_full_disk_under_the_spool_sends_the_save_directly(far, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with saver_of(far) as saver:
        saver.save(tree_of(1), step=1, wait=True)

        def fail(self, folder, name, chunks):
            if not isinstance(self, Far):
                raise full
            write(self, folder, name, chunks)

        write = Folder.write
        monkeypatch.setattr(Folder, "write", fail)
        saver.save(tree_of(2), step=2, wait=True)
        assert steps(Folder(far.root)) == [2, 1]
        monkeypatch.undo()
        saver.save(tree_of(3), step=3, wait=True)
    assert steps(Folder(far.root)) == [3, 2]


SCRIPT = """
    import sys, threading, time, torch
    sys.path.insert(0, {tests!r})
    from efficio_ckpt import background_saver
    from test_spool import Far, saver_of, tree_of
    far = Far({root!r})
    saver = saver_of(far)
    saver.save(tree_of(1), step=1, wait=True)
    far.net["open"].clear()
    saver.save(tree_of(2), step=2)
    saver.wait(upload=False)
    assert far.net["begun"].wait(60)
    print("uploading", flush=True)
    {end}
"""


def child_of(far, end):
    code = textwrap.dedent(SCRIPT).format(tests=os.path.dirname(__file__), root=far.root, end=end)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_process_that_is_killed_during_an_upload_leaves_it_to_the_next_one(far):
    with child_of(far, "time.sleep(60)") as child:
        assert child.stdout.readline() == "uploading\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert same(load_state(Folder(far.root)), tree_of(1))
    assert same(load_state(spooled(far, folder=far.root + "-spool")), tree_of(2))
    with saver_of(far) as saver:
        saver.wait()
    assert same(load_state(Folder(far.root)), tree_of(2))


def test_the_interpreter_ends_when_the_upload_has_arrived(far):
    with child_of(far, "threading.Timer(0.3, far.net['open'].set).start()") as child:
        assert child.stdout.readline() == "uploading\n"
        assert child.wait(60) == 0
    assert same(load_state(Folder(far.root)), tree_of(2))


def test_the_interpreter_ends_also_when_the_upload_fails(far):
    far_lost = "far.net['error'] = OSError(101, 'lost'); far.net['open'].set()"
    with child_of(far, far_lost) as child:
        assert child.stdout.readline() == "uploading\n"
        assert child.wait(60) == 0
    assert same(load_state(far.root + "-spool"), tree_of(2))


def test_a_forked_child_neither_hangs_nor_uploads_for_its_parent(far):
    with saver_of(far) as saver:
        far.net["open"].clear()
        saver.save(tree_of(1), step=1)
        assert far.net["begun"].wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs is ended by it, and the status says so
            saver.fence()
            saver.wait(upload=False)
            os._exit(0 if saver.status.upload.count == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        far.net["open"].set()
        saver.wait()
    assert steps(Folder(far.root)) == [1]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, "/me/.cache/efficio/spool/run-"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/efficio/spool/run-"),
        ({"EFFICIO_SPOOL": "/s", "XDG_CACHE_HOME": "/c"}, "/s/run-"),
    ],
    ids=["home", "cache", "named"],
)
def test_each_storage_has_a_folder_of_its_own(environ, folder):
    first = spool_path("hf://me/run", environ=environ, home="/me")
    second = spool_path("s3://me/run", environ=environ, home="/me")
    assert first.startswith(folder)
    assert second.startswith(folder)
    assert first != second


def test_waits_grow_to_a_limit_and_differ():
    assert [next_wait(n, draw=1.0) for n in (1, 2, 3, 8, 9, 50)] == [2.0, 4.0, 8.0, 256.0, 300.0, 300.0]
    assert next_wait(2, draw=0.0) == 2.0


def test_uploads_draw_nothing_from_the_generators_of_the_training(far, at_once):
    import random

    random.seed(3)
    expected = random.Random(3).random()
    with saver_of(far) as saver:
        far.net["error"] = LOST
        saver.save(tree_of(1), step=1)
        wait_until(lambda: len(at_once) > 2)
        far.net["error"] = None
    assert random.random() == expected


@pytest.mark.parametrize(
    ("protocol", "remote"),
    [(("s3", "s3a"), True), ("gs", True), (("file", "local"), False), ("memory", False)],
)
def test_a_file_system_is_remote_unless_it_is_of_this_machine(protocol, remote):
    class System:
        pass

    System.protocol = protocol
    assert is_remote(Objects(System(), "run", "x://run")) == remote
