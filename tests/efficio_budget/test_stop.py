import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext

import pytest

from efficio_budget import Stop, stop_on_signals

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows delivers no signals between processes")


@pytest.fixture(autouse=True)
def same_handlers_afterwards():
    """Whatever a test does, the next one finds the handlers as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_child(body, *, expect=0):
    """Runs `body` in its own interpreter and returns its output once its exit status was checked."""
    source = "import os, signal, sys, threading, time\nfrom efficio_budget import stop_on_signals\n"
    child = subprocess.run(
        [sys.executable, "-c", source + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == expect, child.stderr
    return child.stdout


def test_a_stop_is_falsy_until_it_is_requested_and_keeps_the_first_reason():
    stop = Stop()
    assert not stop
    assert (stop.reason, stop.received, stop.watched) == (None, None, ())
    stop.request("budget")
    stop.request("SIGTERM")
    assert stop
    assert stop.reason == "budget"
    assert repr(stop) == "Stop(reason='budget')"


def test_a_stop_without_a_reason_is_refused():
    with pytest.raises(ValueError, match="reason='' says nothing"):
        Stop().request("")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_the_first_signal_sets_the_flag_and_nothing_else(number):
    with stop_on_signals() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        assert stop.reason == number.name
        assert stop.received is number
    assert stop.reason == number.name


@posix
def test_a_signal_sent_by_process_id_sets_the_flag():
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_watched_names_the_signals_in_their_order():
    with stop_on_signals([signal.SIGINT, signal.SIGTERM, signal.SIGINT]) as stop:
        assert stop.watched == ("SIGINT", "SIGTERM")


def test_a_second_interrupt_raises_keyboard_interrupt():
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.reason == "SIGINT"


def test_an_interrupt_after_another_signal_raises_keyboard_interrupt():
    with stop_on_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_interrupt_raises_although_the_user_has_a_handler():
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append("user"))
    with stop_on_signals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert calls == []


def test_a_second_term_calls_the_users_handler_at_once():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append((number, frame is not None)))
    with stop_on_signals():
        signal.raise_signal(signal.SIGTERM)
        assert calls == []
        signal.raise_signal(signal.SIGTERM)
        assert calls == [(signal.SIGTERM, True)]


def test_a_first_signal_after_a_request_from_code_does_not_act_at_once():
    with stop_on_signals() as stop:
        stop.request("budget")
        signal.raise_signal(signal.SIGINT)
        assert (stop.reason, stop.received) == ("budget", signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@posix
def test_a_second_term_without_a_handler_ends_the_process_as_term_does():
    body = """
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        print(stop.reason, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached", flush=True)
    """
    assert run_child(body, expect=-signal.SIGTERM) == "SIGTERM\n"


@posix
def test_a_second_term_ends_the_process_from_inside_nested_contexts():
    body = """
    with stop_on_signals(), stop_on_signals() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        print(inner.reason, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached", flush=True)
    """
    assert run_child(body, expect=-signal.SIGTERM) == "SIGTERM\n"


@posix
def test_a_signal_from_another_process_lets_the_body_finish_its_step():
    body = """
    with stop_on_signals() as stop:
        pid = os.getpid()
        killer = os.posix_spawn(sys.executable, [sys.executable, "-c", f"import os; os.kill({pid}, 15)"], os.environ)
        while not stop:
            time.sleep(0.01)
        os.waitpid(killer, 0)
        print("saved", stop.reason)
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """
    assert run_child(body) == "saved SIGTERM\nTrue\n"


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit], ids=str)
def test_the_former_handlers_are_back_whatever_ends_the_body(error):
    def own(number, frame):
        raise AssertionError

    signal.signal(signal.SIGTERM, own)
    interrupt = signal.getsignal(signal.SIGINT)
    with nullcontext() if error is None else pytest.raises(error):
        with stop_on_signals():
            assert signal.getsignal(signal.SIGTERM) is not own
            if error is not None:
                raise error
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGINT) is interrupt


@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.default_int_handler], ids=["system", "python"])
def test_defaults_are_put_back(default):
    signal.signal(signal.SIGINT, default)
    with stop_on_signals():
        pass
    assert signal.getsignal(signal.SIGINT) == default


def test_a_handler_that_the_body_installs_is_left_in_place():
    def own(number, frame):
        raise AssertionError

    with stop_on_signals():
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own


def test_the_users_handler_is_called_once_and_only_when_asked():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    with stop_on_signals() as stop:
        assert not stop.call_previous()
        signal.raise_signal(signal.SIGTERM)
        assert calls == []
    assert stop.call_previous()
    assert not stop.call_previous()
    assert calls == [signal.SIGTERM]


def test_only_the_handler_of_the_received_signal_is_called():
    calls = []
    signal.signal(signal.SIGTERM, lambda *_: calls.append("term"))
    signal.signal(signal.SIGINT, lambda *_: calls.append("int"))
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        stop.call_previous()
    assert calls == ["int"]


@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.default_int_handler], ids=["system", "python"])
def test_defaults_are_not_called_as_a_previous_handler(default):
    signal.signal(signal.SIGINT, default)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.call_previous()


def test_a_stop_from_code_calls_no_handler():
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("called"))
    with stop_on_signals() as stop:
        stop.request("budget")
        assert not stop.call_previous()


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_on_signals() as stop:
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not stop
        assert stop.watched == ("SIGTERM",)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@posix
def test_a_signal_ignored_since_before_the_start_stays_ignored():
    body = """
    if len(sys.argv) == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.execv(sys.executable, [sys.executable, "-c", open("/proc/self/cmdline").read().split(chr(0))[2], "again"])
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        print(stop.watched, bool(stop))
    """
    if not os.path.exists("/proc/self/cmdline"):
        pytest.skip("needs /proc")
    assert run_child(body) == "('SIGTERM',) False\n"


def test_a_handler_from_outside_python_is_left_alone_and_told(monkeypatch, caplog):
    # Python reports such a handler as None, and only knows it when it was there before the interpreter.
    known = signal.getsignal
    before = known(signal.SIGTERM)
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGTERM else known(number)
    )
    with caplog.at_level(logging.WARNING), stop_on_signals() as stop:
        assert known(signal.SIGTERM) is before
        assert stop.watched == ("SIGINT",)
    assert known(signal.SIGTERM) is before
    assert [record.message[:7] for record in caplog.records] == ["SIGTERM"]


def test_nested_contexts_give_the_signal_to_the_innermost_and_restore_in_order():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as outer:
        handler = signal.getsignal(signal.SIGTERM)
        with stop_on_signals() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert inner
            assert not outer
        assert signal.getsignal(signal.SIGTERM) is handler
        assert inner.call_previous()
        assert outer.reason == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_contexts_that_end_in_the_wrong_order_leave_the_first_handler():
    calls = []

    def own(number, frame):
        calls.append(number)

    signal.signal(signal.SIGTERM, own)
    first, second = stop_on_signals(), stop_on_signals()
    outer = first.__enter__()
    inner = second.__enter__()
    first.__exit__(None, None, None)
    signal.raise_signal(signal.SIGTERM)
    assert inner
    assert not outer
    assert inner.call_previous()
    assert calls == [signal.SIGTERM]
    assert not outer
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) is own


def test_outside_the_main_thread_nothing_is_installed_and_one_note_is_logged(caplog):
    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    seen = []

    def train():
        with stop_on_signals() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))
            seen.append(stop.watched)
            stop.request("budget")
            seen.append(bool(stop))

    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert seen == [before, (), True]
    assert len(caplog.records) == 1
    assert "SIGTERM, SIGINT will not stop" in caplog.text


def test_a_context_closed_in_another_thread_hands_signals_on():
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    context = stop_on_signals()
    stop = context.__enter__()
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert not stop
    assert calls == [signal.SIGTERM]


@posix
def test_a_context_closed_in_another_thread_lets_term_end_the_process():
    body = """
    context = stop_on_signals()
    context.__enter__()
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached", flush=True)
    """
    assert run_child(body, expect=-signal.SIGTERM) == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_in_the_body_can_be_ended():
    body = """
    with stop_on_signals() as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bool(stop))
    """
    assert run_child(body) == "-15 False\n"


def test_no_signals_at_all_give_a_flag_for_code():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals([]) as stop:
        assert signal.getsignal(signal.SIGTERM) is before
        assert stop.watched == ()


@pytest.mark.parametrize("number", [0, 99999, "SIGTERM", None], ids=repr)
def test_what_is_no_signal_is_refused_before_anything_is_installed(number):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=r"which is no signal here; give for example signal\.SIGTERM"):
        with stop_on_signals([signal.SIGTERM, number]):
            pytest.fail("entered")
    assert signal.getsignal(signal.SIGTERM) is before


@posix
def test_a_signal_that_cannot_be_caught_is_refused():
    with pytest.raises(ValueError, match="SIGKILL, which no process can catch"):
        with stop_on_signals([signal.SIGKILL]):
            pytest.fail("entered")


def test_importing_installs_nothing():
    body = """
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    assert run_child(body) == "True True\n"


def test_the_package_imports_nothing_but_the_standard_library():
    body = """
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "google", "kaggle_secrets"}))
    """
    assert run_child(body) == "[]\n"
