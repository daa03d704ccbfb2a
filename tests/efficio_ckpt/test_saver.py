"""Background saves: the state at the call, one in flight, errors told once, nothing lost at the end."""

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_checkpoint,
    load_state,
    put_snapshot,
    snapshot_tree,
    verify,
)
from efficio_ckpt._folder import Folder


class Gated(Folder):
    """A disk that writes only once it is let."""

    def __init__(self, root):
        super().__init__(str(root))
        object.__setattr__(self, "gate", threading.Event())
        object.__setattr__(self, "begun", threading.Event())

    def write(self, folder, name, chunks):
        self.begun.set()
        assert self.gate.wait(60)
        super().write(folder, name, chunks)


class Full(Folder):
    """A disk that is full for the steps named in `refused`."""

    def __init__(self, root, refused):
        super().__init__(str(root))
        object.__setattr__(self, "refused", refused)

    def write(self, folder, name, chunks):
        if int(folder.split("-")[1]) in self.refused:
            raise OSError(28, "No space left on device")
        super().write(folder, name, chunks)


def test_what_is_stored_is_the_state_at_the_call(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    step()
    storage = Gated(tmp_path)
    objects = {"model": model, "optimizer": optimizer}
    with background_saver(storage) as saver:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert saver.save(snapshot_tree(objects), step=1)
        saver.fence()
        step()
        storage.gate.set()
    stored = load_state(tmp_path)
    assert all(torch.equal(stored["model"][name], value) for name, value in weights.items())
    assert all(float(state["step"]) == 1.0 for state in stored["optimizer"]["state"].values())
    put_snapshot(stored, objects)
    assert torch.equal(model[0].weight, weights["0.weight"])


def test_no_stored_tree_mixes_two_steps(quick_path):
    tensors = [torch.zeros(50 + i) for i in range(20)]
    with background_saver(quick_path, keep=2) as saver:
        for step in range(60):
            for tensor in tensors:
                tensor.fill_(step)
            saver.save({"t": tensors, "n": step}, step=step)
            if saver.status.last_step is not None:
                checkpoint, tree = load_checkpoint(quick_path)
                assert {float(value) for tensor in tree["t"] for value in tensor.unique()} == {
                    float(tree["n"])
                }
                assert checkpoint.step == tree["n"]
        saver.save({"t": tensors, "n": 60}, step=60, wait=True)
        assert saver.status.last_step == 60


def test_a_save_that_finds_one_in_flight_is_skipped_and_a_waiting_one_waits(tmp_path):
    storage = Gated(tmp_path)
    with background_saver(storage, keep=5) as saver:
        assert saver.save({"n": 1}, step=1) is True
        assert storage.begun.wait(60)
        assert saver.save({"n": 2}, step=2) is False
        assert (saver.status.in_flight_step, saver.status.skipped) == (1, 1)
        threading.Timer(0.05, storage.gate.set).start()
        assert saver.save({"n": 3}, step=3, wait=True) is True
        assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [3, 1]
        status = saver.status
        assert (status.last_step, status.in_flight_step, status.skipped, status.error) == (3, None, 1, None)
        assert status.bytes > 0
        assert status.seconds > 0
        assert status.blocked_seconds > 0
        with pytest.raises(FrozenInstanceError):
            status.skipped = 0


def test_a_save_right_after_another_was_done_is_not_skipped(quick_path):
    with background_saver(quick_path) as saver:
        for step in range(200):
            saver.save(step, step=step)
            wait_for(saver)
        status = saver.status
    assert (status.skipped, status.committed) == (0, 200)
    assert status.committed_bytes >= 200 * status.bytes * 0.9
    assert status.committed_seconds >= status.seconds


def wait_for(saver):
    while saver.status.in_flight_step is not None:
        time.sleep(0.001)


@pytest.mark.parametrize("surface", ["save", "wait", "close", "take"])
def test_an_error_surfaces_once_and_training_goes_on(tmp_path, surface):
    saver = background_saver(Full(tmp_path, {2}))
    saver.save({"n": 1}, step=1, wait=True)
    saver.save({"n": 2}, step=2)
    wait_for(saver)
    assert "No space left on device" in saver.status.error
    if surface == "take":
        assert isinstance(saver.take_error(), CheckpointError)
        assert saver.take_error() is None
    else:
        call = {"save": lambda: saver.save({"n": 3}, step=3), "wait": saver.wait, "close": saver.close}[
            surface
        ]
        with pytest.raises(
            CheckpointError, match=r"could not save step 2 .*No space left on device"
        ) as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)
    assert saver.status.error is None
    assert load_state(tmp_path) == {"n": 1}
    if surface != "close":
        assert saver.save({"n": 4}, step=4, wait=True)
        assert load_state(tmp_path) == {"n": 4}
    saver.close()


def test_waiting_makes_the_save_in_flight_durable_and_raises_its_error(tmp_path):
    with background_saver(Full(tmp_path, {2})) as saver:
        saver.wait()
        saver.save({"n": 1}, step=1)
        saver.wait()
        assert saver.status.last_step == 1
        saver.save({"n": 2}, step=2)
        with pytest.raises(CheckpointError, match="could not save step 2"):
            saver.wait()
        saver.wait()


def test_a_final_save_raises_its_own_error_and_logs_an_earlier_one(tmp_path, caplog):
    with background_saver(Full(tmp_path, {1, 3})) as saver:
        saver.save({}, step=1)
        with caplog.at_level(logging.WARNING):
            saver.save({}, step=2, wait=True)
        assert "could not save step 1" in caplog.text
        with pytest.raises(CheckpointError, match="could not save step 3"):
            saver.save({}, step=3, wait=True)
        saver.fence()
        assert load_checkpoint(tmp_path)[0].step == 2


def test_an_error_in_the_block_is_not_hidden_by_a_failed_save(tmp_path, caplog):
    def fail():
        with background_saver(Full(tmp_path, {1})) as saver:
            saver.save({}, step=1)
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        fail()
    assert "could not save step 1" in caplog.text


def test_what_cannot_be_stored_is_told_in_the_call_and_the_saver_goes_on(tmp_path):
    with background_saver(tmp_path) as saver:
        with pytest.raises(TypeError, match="f is a builtins"):
            saver.save({"f": print}, step=1)
        with pytest.raises(ValueError, match="step=-1"):
            saver.save({}, step=-1)
        with pytest.raises(TypeError, match="metadata"):
            saver.save({}, step=1, metadata={"a": print})
        assert saver.save({"n": 1}, step=1, wait=True, metadata={"a": 1})
    assert list_checkpoints(tmp_path)[0].metadata == {"a": 1}


def test_bad_arguments_are_told_when_the_saver_is_made():
    for options in ({"keep": 0}, {"mode": "light"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            background_saver("memory://x", **options)
    with pytest.raises(ValueError, match="unknown scheme"):
        background_saver("nowhere://x")


def test_a_closed_saver_says_so_and_closes_again(tmp_path):
    saver = background_saver(tmp_path)
    saver.close()
    saver.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.save({}, step=1)


def test_buffers_are_reused_and_shapes_may_change(quick_path):
    with background_saver(quick_path) as saver:
        saver.save({"a": torch.ones(1000)}, step=1, wait=True)
        first = saver._pool.buffer.data_ptr()
        saver.save({"a": torch.zeros(900), "b": torch.ones(3, dtype=torch.bool)}, step=2, wait=True)
        assert saver._pool.buffer.data_ptr() == first
        saver.save({"a": torch.full((5000,), 7.0)}, step=3, wait=True)
        assert torch.equal(load_state(quick_path)["a"], torch.full((5000,), 7.0))


def test_a_buffer_that_is_too_small_is_given_up_before_a_larger_one_is_made(quick_path, monkeypatch):
    from efficio_ckpt import _staging

    held = []
    make = _staging._new_buffer

    def watched(size, **options):
        held.append([buffer() is not None for buffer in buffers])
        buffer = make(size, **options)
        buffers.append(weakref.ref(buffer))
        return buffer

    buffers = []
    monkeypatch.setattr(_staging, "_new_buffer", watched)
    with background_saver(quick_path) as saver:
        for step in range(3):
            saver.save({"a": torch.ones(1000 * (step + 1))}, step=step, wait=True)
    assert held == [[], [False], [False, False]]


@pytest.mark.parametrize("wait", [False, True], ids=["periodic", "final"])
def test_a_state_above_the_limit_is_written_in_the_call_without_a_copy(quick_path, wait, caplog):
    weight = torch.arange(5000.0, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(5000)
    tree = {"w": weight}
    with background_saver(quick_path, copy_bytes=19_999, keep=9) as saver:
        for step in range(3):
            assert saver.save(tree, step=step, optimizers=[optimizer], wait=wait)
            assert (
                saver.status.last_step == step
            )  # durable already: nothing is copied that could be written later
            optimizer.step()
        saver.save({"w": weight.detach()[:1000]}, step=3)  # fits
    for step in range(3):
        assert torch.equal(load_state(quick_path, step=step)["w"], torch.arange(5000.0) - step)
    assert torch.equal(load_state(quick_path)["w"], torch.arange(1000.0) - 3)
    assert caplog.text.count("no room in memory for a copy of 20032 bytes") == 1
    assert "19999 bytes at most" in caplog.text


def test_a_failed_save_above_the_limit_surfaces_at_the_next_call(tmp_path):
    with background_saver(Full(tmp_path, refused={1}), copy_bytes=0) as saver:
        assert saver.save({"w": torch.ones(3)}, step=1)
        assert saver.status.in_flight_step is None
        with pytest.raises(CheckpointError, match="could not save step 1"):
            saver.save({"w": torch.ones(3)}, step=2)


def test_a_copy_is_not_made_when_the_machine_has_too_little_memory(quick_path, monkeypatch, caplog):
    from efficio_ckpt import _staging

    monkeypatch.setattr(_staging, "available_bytes", lambda: 21_000)  # nine tenths are less than the state
    with background_saver(quick_path) as saver:
        saver.save({"w": torch.ones(5000)}, step=1)
        assert saver.status.last_step == 1
        assert "18900 bytes at most" in caplog.text
        monkeypatch.setattr(_staging, "available_bytes", lambda: None)  # not known: it is tried
        saver.save({"w": torch.full((5000,), 2.0)}, step=2)
    assert load_state(quick_path)["w"][-1] == 2
    assert caplog.text.count("no room") == 1


@pytest.mark.parametrize("given", [-1, 1.5, True, "1GB"])
def test_a_limit_that_is_no_size_is_told(tmp_path, given):
    with pytest.raises(ValueError, match=r"copy_bytes=.* is no size"):
        background_saver(tmp_path, copy_bytes=given)


def test_threads_files_and_memory_do_not_grow_with_the_number_of_saves(quick_path):
    def count():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.isdir(
            "/proc/self/fd"
        ) else 0

    with background_saver(quick_path) as saver:
        saver.save({"a": torch.ones(10)}, step=0, wait=True)
        before = count()
        for step in range(1, 40):
            saver.save({"a": torch.ones(10)}, step=step, wait=True)
        assert count() == before


def test_several_savers_and_threads_share_a_folder(quick_path):
    problems = []

    def work(run_id):
        try:
            with background_saver(quick_path, keep=2, run_id=run_id) as saver:
                for step in range(8):
                    saver.save(
                        {"run": run_id, "w": torch.full((100,), float(step))}, step=step, wait=step % 2 == 1
                    )
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for run_id in "abc":
        assert load_state(quick_path, run_id=run_id)["run"] == run_id
    assert len(verify(quick_path)) == 6


def test_one_saver_is_safe_to_use_from_several_threads(quick_path):
    with background_saver(quick_path, keep=3) as saver:
        threads = [
            threading.Thread(
                target=lambda n=n: [
                    saver.save({"n": torch.full((50,), float(n))}, step=n, wait=bool(k % 2)) for k in range(4)
                ]
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert saver.status.error is None
    assert len(verify(quick_path)) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_hangs_nor_disturbs_the_save_of_its_parent(tmp_path):
    storage = Gated(tmp_path / "parent")
    saver = background_saver(storage)
    saver.save({"w": torch.ones(10)}, step=1)
    assert storage.begun.wait(60)
    # The worst moment: another thread of the parent holds the locks.
    saver._guard.acquire()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            saver._storage = Folder(str(tmp_path / "child"))
            assert saver.status.in_flight_step == 1
            saver.fence()
            assert saver.save({"n": 2}, step=2, wait=True)
            saver.close()
            os._exit(0)
        finally:
            os._exit(1)
    saver._guard.release()
    _, status = os.waitpid(child, 0)
    assert status == 0
    storage.gate.set()
    saver.close()
    assert torch.equal(load_state(tmp_path / "parent")["w"], torch.ones(10))
    assert load_state(tmp_path / "child") == {"n": 2}


ENDINGS = {
    "end of the script": "",
    "an exception": "raise KeyError('x')",
    "at exit": "import atexit; atexit.register(lambda: saver.save({'n': 2}, step=2, wait=True) or saver.close())",
    "at exit, in the background": "saver.close(); saver = background_saver(root); import atexit; atexit.register(lambda: saver.save({'n': 2}, step=2))",
    "from a thread": "threading.Thread(target=lambda: saver.save({'n': 2}, step=2, wait=True)).start()",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_the_interpreter_ends_only_when_the_save_is_durable(tmp_path, ending):
    script = f"""
        import sys, threading, time
        from efficio_ckpt import background_saver
        from efficio_ckpt._folder import Folder

        class Slow(Folder):
            def write(self, folder, name, chunks):
                time.sleep(0.5)
                super().write(folder, name, chunks)

        root = Slow({str(tmp_path)!r})
        saver = background_saver(root)
        saver.save({{"n": 1}}, step=1)
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    newest = 2 if "step=2" in ending else 1
    assert load_state(tmp_path) == {"n": newest}, done.stderr
    assert done.returncode == (1 if "raise" in ending else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_gpu_are_the_state_at_the_call(tmp_path):
    tensors = [torch.zeros(1_000_000, device="cuda") for _ in range(20)]
    layout = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    with background_saver(tmp_path) as saver:
        for step in range(5):
            for tensor in tensors:
                tensor.fill_(step)
            kept = layout.clone()
            saver.save({"t": tensors, "c": layout}, step=step, wait=step == 4)
            for tensor in tensors:
                tensor.add_(1000)
            layout.add_(1)
    tree = load_state(tmp_path)
    assert {float(value) for tensor in tree["t"] for value in tensor.unique()} == {4.0}
    assert torch.equal(tree["c"], kept.cpu())
    assert saver._pool.buffer is None
