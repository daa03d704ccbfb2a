"""Hundreds of saves leave nothing behind, and every way in which a process can end keeps what was promised."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

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
from efficio_ckpt._folder import WRITER, Folder

posix_only = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks or signals")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(place):
    """Open files, threads, and entries in memory:// or on the disk."""
    gc.collect()
    if isinstance(place, str):
        import fsspec

        system = fsspec.filesystem("memory")
        entries = sum("/endless/" in path for path in [*system.store, *system.pseudo_dirs])
    else:
        entries = len(list(place.rglob("*")))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), entries


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_five_hundred_saves_hold_no_more_than_the_first(quick_path, kind):
    place = quick_path if kind == "disk" else "memory://endless/run"
    weights = torch.zeros(2**18)
    sizes = []
    with background_saver(place, keep=2, run_id="run") as saver:
        for step in range(500):
            weights.fill_(step)
            saver.save({"w": weights, "list": list(range(100)), "step": step}, step=step, wait=step % 5 == 0)
            if step % 10 == 9:
                saver.wait()
            if step == 99:
                before = held(place)
            if step >= 99 and step % 100 == 99:
                sizes.append(resident_bytes())
        saver.wait()
        after = held(place)
        assert load_checkpoint(place, run_id="run")[1]["step"] == saver.status.last_step
    assert after == before
    # A state of 1 MB: one that stays at every tenth save would be 40 MB.
    assert sizes[-1] - sizes[0] < 20 * 2**20, sizes


GATED = """
    import os, signal, sys, threading, time
    import torch
    from efficio_ckpt import background_saver, save_state
    from efficio_ckpt._folder import Folder

    class Gated(Folder):
        def write(self, folder, name, chunks):
            while not os.path.exists(root + ".go"):
                time.sleep(0.001)
            super().write(folder, name, chunks)

    root = sys.argv[1]
    save_state(root, {"n": 1}, step=1, run_id="run")
    saver = background_saver(Gated(root), run_id="run", keep=1)

    def ready():
        while not any("000000000002" in name for name in os.listdir(root)):
            time.sleep(0.001)
        print("ready", flush=True)

    def idle():
        # In short sleeps: the system may give a signal to the other thread, and then nothing wakes this one.
        for _ in range(6000):
            time.sleep(0.01)
"""
ENDS = {
    "sys.exit": ("saver.save({'n': 2}, step=2); ready(); sys.exit(3)", None, 3, 2),
    "os._exit": ("saver.save({'n': 2}, step=2); ready(); os._exit(4)", None, 4, 1),
    "SIGTERM without a handler": (
        "saver.save({'n': 2}, step=2); ready(); idle()",
        signal.SIGTERM,
        -signal.SIGTERM,
        1,
    ),
    "SIGTERM that raises": (
        """
        def end(*arguments): raise SystemExit(5)
        signal.signal(signal.SIGTERM, end)
        with saver:
            saver.save({'n': 2}, step=2); ready(); idle()
        """,
        signal.SIGTERM,
        5,
        2,
    ),
    "SIGTERM with a last save": (
        """
        stop = []
        signal.signal(signal.SIGTERM, lambda *arguments: stop.append(1))
        with saver:
            saver.save({'n': 2}, step=2); ready()
            while not stop: time.sleep(0.001)
            saver.save({'n': 3}, step=3, wait=True)
        """,
        signal.SIGTERM,
        0,
        3,
    ),
    "SIGTERM with a last save in the handler": (
        """
        def end(*arguments):
            saver.save({'n': 3}, step=3, wait=True); os._exit(0)
        signal.signal(signal.SIGTERM, end)
        saver.save({'n': 2}, step=2); ready(); idle()
        """,
        signal.SIGTERM,
        0,
        3,
    ),
    "Ctrl-C": (
        "saver.save({'n': 2}, step=2); ready(); idle()",
        signal.SIGINT,
        -signal.SIGINT,
        2,
    ),
}


@pytest.mark.slow
@posix_only
def test_a_process_that_ends_in_the_middle_of_a_save_keeps_what_was_promised(tmp_path):
    started = {}
    for end, (script, *_) in ENDS.items():
        source = textwrap.dedent(GATED) + textwrap.dedent(script)
        started[end] = subprocess.Popen(
            [sys.executable, "-c", source, str(tmp_path / end)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for end, process in started.items():
        _, number, code, newest = ENDS[end]
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        if number is not None:
            process.send_signal(number)
        if newest > 1:
            (tmp_path / f"{end}.go").touch()
        _, errors = process.communicate(timeout=300)
        assert process.returncode == code, (end, errors)
        assert load_state(tmp_path / end) == {"n": newest}, end
        verify(tmp_path / end)
        # What it left is cleared by the next save.
        save_state(tmp_path / end, {"n": 9}, step=9, run_id="run", keep=1)
        assert [path.name for path in (tmp_path / end).glob(f"*/{WRITER}")] == []
        assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / end)] == [9]


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


@posix_only
@quiet_fork
def test_worker_processes_that_are_forked_during_a_save_end_and_disturb_nothing(quick_path):
    storage = Gated(quick_path)
    with background_saver(storage, run_id="run") as saver:
        saver.save({"w": torch.ones(1000)}, step=1)
        assert storage.begun.wait(60)
        workers = [
            multiprocessing.get_context("fork").Process(target=lambda: saver.status.skipped) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
        storage.gate.set()
    assert torch.equal(load_state(quick_path)["w"], torch.ones(1000))


@pytest.mark.slow
def test_runs_pruners_and_readers_share_a_folder_in_many_threads(quick_path):
    problems, done = [], threading.Event()

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                problems.append(f"{type(error).__name__}: {error}")

        return threading.Thread(target=run)

    def train(run_id):
        with background_saver(quick_path, keep=3, run_id=run_id) as saver:
            for step in range(1, 41):
                saver.save(
                    {"run": run_id, "w": torch.full((100,), float(step))}, step=step, wait=step % 2 == 0
                )

    def read():
        while not done.is_set():
            for run_id in "ab":
                try:
                    tree = load_state(quick_path, run_id=run_id)
                except FileNotFoundError:
                    continue
                except CheckpointError as error:
                    if "replaced faster" not in str(error):
                        raise
                    continue
                assert tree["run"] == run_id
                assert len(tree["w"].unique()) == 1
            list_checkpoints(quick_path)
            verify(quick_path)

    def tidy():
        while not done.is_set():
            prune(quick_path, keep=1)

    others = [guarded(read), guarded(tidy), guarded(tidy)]
    trainings = [guarded(lambda run_id=run_id: train(run_id)) for run_id in "ab"]
    for thread in [*others, *trainings]:
        thread.start()
    for thread in trainings:
        thread.join()
    done.set()
    for thread in others:
        thread.join()
    assert problems == []
    for run_id in "ab":
        assert load_checkpoint(quick_path, run_id=run_id)[0].step == 40


def test_a_save_that_fails_at_the_exit_of_the_interpreter_is_told(tmp_path):
    script = """
        import sys
        from efficio_ckpt import background_saver
        from efficio_ckpt._folder import Folder

        class Full(Folder):
            def write(self, folder, name, chunks):
                raise OSError(28, "No space left on device")

        saver = background_saver(Full(sys.argv[1]))
        saver.save({"n": 1}, step=1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "could not save step 1" in done.stderr
    assert "No space left on device" in done.stderr
