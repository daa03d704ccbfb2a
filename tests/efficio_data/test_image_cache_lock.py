from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from efficio_data._cache_lock import hold_lock


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leave(path, **changes):
    """The lock file that a holder with the given differences from this process leaves behind."""
    with hold_lock(path):
        record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **changes}))


def test_a_lock_is_there_while_it_is_held_and_gone_afterwards(tmp_path):
    with hold_lock(tmp_path / "lock") as lock:
        lock.beat()
        record = json.loads((tmp_path / "lock").read_text())
        assert record["pid"] == os.getpid()
        assert record["host"]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_given_back_after_an_exception(tmp_path):
    with pytest.raises(ZeroDivisionError), hold_lock(tmp_path / "lock"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_held_lock_is_refused_naming_its_holder(tmp_path):
    with hold_lock(tmp_path / "lock"):
        with pytest.raises(RuntimeError, match=f'"pid": {os.getpid()}'), hold_lock(tmp_path / "lock"):
            pass
        assert (tmp_path / "lock").exists()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, caplog):
    leave(tmp_path / "lock", pid=dead_pid())
    with hold_lock(tmp_path / "lock"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert "took over" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the start of a process is told by /proc")
def test_a_lock_whose_pid_has_been_reused_is_taken_over(tmp_path):
    leave(tmp_path / "lock", started="1")
    with hold_lock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize(("silent", "held"), [(599.0, True), (601.0, False)])
def test_a_lock_of_another_host_holds_for_ten_silent_minutes(silent, held, tmp_path):
    path = tmp_path / "lock"
    leave(path, host="elsewhere", pid=1)

    def now():
        return path.stat().st_mtime + silent if path.exists() else 0.0

    if held:
        with pytest.raises(RuntimeError, match="elsewhere"), hold_lock(path, now=now):
            pass
    else:
        with hold_lock(path, now=now):
            pass


def test_a_beat_renews_the_lock(tmp_path):
    times = iter([1000.0, 5000.0, 5000.0])
    with hold_lock(tmp_path / "lock", now=lambda: next(times)) as lock:
        lock.beat()
        assert (tmp_path / "lock").stat().st_mtime == 5000.0


def test_a_builder_whose_lock_was_taken_stops_at_the_next_beat(tmp_path):
    with hold_lock(tmp_path / "lock") as lock:
        (tmp_path / "lock").write_text("another's")
        with pytest.raises(RuntimeError, match="taken over"):
            lock.beat()
    assert (tmp_path / "lock").read_text() == "another's"


@pytest.mark.parametrize(("age", "held"), [(1.0, True), (11.0, False)])
def test_a_lock_without_content_is_believed_for_ten_seconds(age, held, tmp_path):
    path = tmp_path / "lock"
    path.write_text("")

    def now():
        return path.stat().st_mtime + age if path.exists() else 0.0

    if held:
        with pytest.raises(RuntimeError, match="just starting"), hold_lock(path, now=now):
            pass
    else:
        with hold_lock(path, now=now):
            pass
