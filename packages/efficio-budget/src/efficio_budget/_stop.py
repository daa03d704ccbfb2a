"""The wish to stop: from a signal, or from code."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], object] | int | None
_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})


class Stop:
    """A flag that says whether to stop, and why: falsy until something asks for a stop.

    The first reason stays; a loop looks at the flag between two steps, saves, and ends. The flag may be read
    and set from any thread.

    Examples:
        >>> stop = Stop()
        >>> bool(stop), stop.reason
        (False, None)
        >>> stop.request("budget")
        >>> stop.request("SIGTERM")
        >>> bool(stop), stop.reason
        (True, 'budget')
    """

    __slots__ = ("_process", "_reason", "_received", "_watches")

    def __init__(self) -> None:
        self._reason: str | None = None
        self._received: signal.Signals | None = None
        self._watches: dict[signal.Signals, _Watch] = {}
        self._process: int | None = None

    def __bool__(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why to stop: the name of the signal, such as `"SIGTERM"`, or what `request` was given."""
        return self._reason

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that came, also when something else had asked for the stop before."""
        return self._received

    @property
    def watched(self) -> tuple[str, ...]:
        """The names of the signals that set this flag; empty outside the main thread."""
        return tuple(watched.name for watched in self._watches)

    def request(self, reason: str) -> None:
        """Asks for a stop from code.

        Args:
            reason: One or two words for the report; ignored when a stop was asked for before.

        Raises:
            ValueError: An empty reason.
        """
        if not reason:
            msg = f"reason={reason!r} says nothing; give for example 'budget'"
            raise ValueError(msg)
        if self._reason is None:
            self._reason = reason

    def call_previous(self) -> bool:
        """Calls the handler that the received signal had before, once, for example after the last save.

        A handler written in Python is called with the signal's number and None for the frame. The defaults of
        the system and of Python are not: they would end the process, or raise KeyboardInterrupt, which is for
        the caller to decide.

        Returns:
            Whether a handler was called. A second call, or one before any signal came, is False.
        """
        received = self._received
        watch = self._watches.get(received) if received is not None else None
        if received is None or watch is None or watch.passed_on:
            return False
        watch.passed_on = True
        previous = _open_handler(watch.previous)
        if not callable(previous) or previous is signal.default_int_handler:
            return False
        previous(received, None)
        return True

    def __repr__(self) -> str:
        return f"Stop(reason={self._reason!r})"


class _Watch:
    """The handler of one signal in one context; it outlives the context where others still refer to it."""

    __slots__ = ("passed_on", "previous", "stop")

    def __init__(self, stop: Stop, previous: _Handler) -> None:
        self.stop = stop
        self.previous = previous
        self.passed_on = False

    @property
    def is_open(self) -> bool:
        return self.stop._process == os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if not self.is_open:
            # A forked child, whose parent must be able to end it; or the context ended where it could not put
            # the handler back: in another thread, or below one that was opened later and still runs.
            _act(received, frame, _open_handler(self.previous))
        elif self.stop._received is None:
            self.stop._received = received
            if self.stop._reason is None:
                self.stop._reason = received.name
        elif received == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            _act(received, frame, _foreign_handler(self.previous))


def _open_handler(handler: _Handler) -> _Handler:
    """The first handler down the chain that is not of a context that has ended."""
    if not isinstance(handler, _Watch) or handler.is_open:
        return handler
    return _open_handler(handler.previous)


def _foreign_handler(handler: _Handler) -> _Handler:
    """The first handler down the chain that is not ours: a second signal is not one more wish to stop."""
    if not isinstance(handler, _Watch):
        return handler
    return _foreign_handler(handler.previous)


def _act(received: signal.Signals, frame: FrameType | None, handler: _Handler) -> None:
    """Does what the process would have done with this signal."""
    if callable(handler):
        handler(received, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(received, signal.SIG_DFL)
        signal.raise_signal(received)


@contextmanager
def stop_on_signals(
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[Stop]:
    """Turns the first signal into a wish to stop, and lets a second one act at once.

    The first of the signals sets the flag and nothing else, so the body can finish its step and save. A second
    one no longer waits: SIGINT raises KeyboardInterrupt, any other does what it did before, which for SIGTERM
    without a handler ends the process. On leaving, in whatever way, the former handlers are back, except one
    that the body itself replaced: that stays.

    A signal that the process ignores (`nohup`, a job in the background) stays ignored, and one whose handler
    was not installed from Python is left alone, as it could not be put back. Outside the main thread, where
    Python allows no handlers, none is installed: one warning is logged, and the flag works from code only.

    Contexts may be nested; the innermost takes the signal, and `Stop.call_previous` hands it on. A process
    forked in the body reacts to signals as if there were no context: its parent can end it. On Windows
    SIGINT is Ctrl-C, and another process's `os.kill` with SIGTERM ends this one without a handler.

    Args:
        signals: Numbers such as `signal.SIGTERM`.

    Yields:
        The flag. It stays readable after the context.

    Raises:
        ValueError: Something that is not a signal of this platform, or cannot be caught.

    Examples:
        >>> with stop_on_signals() as stop:
        ...     for step in range(10):
        ...         if step == 3:
        ...             signal.raise_signal(signal.SIGTERM)
        ...         if stop:
        ...             break
        >>> step, stop.reason
        (3, 'SIGTERM')
    """
    chosen = [_catchable(number) for number in dict.fromkeys(signals)]
    stop = Stop()
    stop._process = os.getpid()
    try:
        if _is_main_thread():
            for each in chosen:
                _install(each, stop)
        elif chosen:
            names = ", ".join(each.name for each in chosen)
            _logger.warning("not in the main thread: %s will not stop and save this run", names)
        yield stop
    finally:
        # One assignment closes all of them before the first is put back: a signal that comes in between is
        # passed to its former handler, and what that raises leaves nothing half done.
        stop._process = None
        if _is_main_thread():
            for each, watch in stop._watches.items():
                previous = _open_handler(watch.previous)
                if signal.getsignal(each) is watch:
                    signal.signal(each, previous)


def _catchable(number: int) -> signal.Signals:
    try:
        chosen = signal.Signals(number)
    except ValueError:
        msg = f"signals holds {number!r}, which is no signal here; give for example signal.SIGTERM"
        raise ValueError(msg) from None
    if chosen.name in _UNCATCHABLE:
        msg = f"signals holds {chosen.name}, which no process can catch; give for example signal.SIGTERM"
        raise ValueError(msg)
    return chosen


def _install(watched: signal.Signals, stop: Stop) -> None:
    previous = signal.getsignal(watched)
    if previous == signal.SIG_IGN:
        return
    if previous is None:
        _logger.warning(
            "%s has a handler from outside Python, which is kept: it will not stop this run", watched.name
        )
        return
    watch = stop._watches[watched] = _Watch(stop, previous)
    signal.signal(watched, watch)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
