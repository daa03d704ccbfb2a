"""Uploads: the newest checkpoint of a spool goes to the remote storage, as often as it takes."""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ._checkpoint import Checkpoint, CheckpointError
from ._copy import send_checkpoint
from ._manifest import Manifest
from ._priority import give_way
from ._retention import Keep
from ._save import write_checkpoint
from ._spool import Spool
from ._storage import Storage
from ._survey import Survey, is_gone, note_damage, survey
from ._tree import Flat

logger = logging.getLogger(__name__)

_FIRST_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 300.0
_HURRIED_SECONDS: Final = 3.0
_PATIENCE: Final = 4
"""Failures in a row after which somebody who waits is told."""

_LASTING: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.ENOSPC, errno.ENXIO})
"""Errors that do not pass by themselves."""


def next_wait(failures: int, *, draw: float) -> float:
    """Return the seconds to wait after some failures in a row, drawn so that many machines do not come at once.

    Args:
        failures: At least 1.
        draw: Uniform between 0 and 1.

    Example:
        >>> next_wait(1, draw=1.0), next_wait(3, draw=1.0), next_wait(30, draw=0.0)
        (2.0, 8.0, 150.0)
    """
    longest = min(_MOST_SECONDS, _FIRST_SECONDS * 2.0 ** (failures - 1))
    return longest * (0.5 + draw / 2)


@dataclass(frozen=True)
class UploadStatus:
    """How far the remote storage is.

    Args:
        step: Step of the newest checkpoint that it is known to hold of those of this machine.
        in_flight_step: Step that is on its way.
        count: Checkpoints that were sent.
        error: Text of the last failure, until one is sent.
    """

    step: int | None = None
    in_flight_step: int | None = None
    count: int = 0
    error: str | None = None


class Uploader:
    """Sends the newest checkpoint of one run from its spool to the remote storage, one at a time, in a thread.

    Those that became older while another one was on its way are left out. A failure is logged and tried again after a while that
    grows, for as long as the program runs.

    Args:
        spool: Both places.
        keep: How many checkpoints of the run stay in the remote storage, or a `Retention`.
        run_id: Identity of the run.
        wait: Waits on an event for so many seconds, for tests.
    """

    _changed: threading.Condition
    _awake: threading.Event
    _thread: threading.Thread | None
    _current: Manifest | None

    def __init__(
        self,
        spool: Spool,
        *,
        keep: Keep,
        run_id: str | None,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._spool = spool
        self._keep = keep
        self._run_id = run_id
        self._wait_on = wait
        self._sent = _highest_serial(self._spool.remote)
        self._status = UploadStatus()
        self.forget_thread()

    @property
    def status(self) -> UploadStatus:
        """How far it is."""
        return self._status

    def write(self, flat: Flat, **options: Any) -> Checkpoint:
        """Write and commit a checkpoint into the spool; or, where its disk takes nothing, into the remote storage.

        Args:
            flat: As for `write_checkpoint`.
            **options: For `write_checkpoint`.

        Raises:
            CheckpointError: Neither took it.
        """
        try:
            return write_checkpoint(
                self._spool.folder, flat, after_serial=self._sent, held=self._held, **options
            )
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _LASTING:
                raise
            logger.warning("%s; it is uploaded directly instead", error)
        checkpoint = write_checkpoint(
            self._spool.remote, flat, after_serial=_highest_serial(self._spool.folder), **options
        )
        self._sent = max(self._sent, _highest_serial(self._spool.remote))
        return checkpoint

    def poke(self) -> None:
        """Say that there may be something new."""
        with self._changed:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._work, name="efficio-ckpt-upload", daemon=False)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end
                self._thread = None
                logger.warning("%s", self._left_behind("no thread can be started any more"))

    def finish(self) -> None:
        """Return when the newest checkpoint is in the remote storage.

        Raises:
            CheckpointError: It could not be sent. It stays in the spool, and this goes on trying.
        """
        with self._changed:
            failures_then = self._failures
            self._lasting = False
            self._waiting += 1
        try:
            self.poke()
            self._awake.set()  # not after the wait that may be going on
            with self._changed:
                while self._thread is not None:
                    if self._lasting or self._failures - failures_then >= _PATIENCE:
                        break
                    self._changed.wait(1.0)
                if self._status.error is not None:
                    raise CheckpointError(self._left_behind(self._status.error))
        finally:
            with self._changed:
                self._waiting -= 1

    def stop(self) -> None:
        """Try no more once what is on its way has arrived or failed; a new process goes on from the spool."""
        self._stopped = True
        self._awake.set()

    def clear(self) -> None:
        """Remove from the spool what the remote storage holds, but for the newest, from which a resume is faster."""
        try:
            found = survey(self._spool.folder)
            for manifest in self._own(found)[1:]:
                if manifest.serial <= self._sent:
                    self._spool.folder.remove(manifest.checkpoint.name)
        except (OSError, CheckpointError) as error:
            logger.warning("could not clear the spool '%s': %s", self._spool.folder.root, error)

    def forget_thread(self) -> None:
        """Begin without a thread: a forked child has none of its parent's."""
        self._changed = threading.Condition(threading.RLock())
        self._awake = threading.Event()
        self._thread = None
        self._current = None
        self._failures = 0
        self._waiting = 0
        self._lasting = False
        self._stopped = False

    def _work(self) -> None:
        give_way()
        try:
            while (manifest := self._next()) is not None:
                self._current = manifest
                try:
                    self._send(manifest)
                finally:
                    self._current = None
        except BaseException as error:
            with self._changed:
                self._failed(error, lasting=True)
                self._thread = None
                self._changed.notify_all()
            raise

    def _send(self, manifest: Manifest) -> None:
        """Send one checkpoint; or note that it failed, and wait until it is time to try again."""
        checkpoint = manifest.checkpoint
        self._note(in_flight_step=checkpoint.step)
        try:
            send_checkpoint(self._spool.folder, manifest, self._spool.remote, keep=self._keep)
        except ValueError as error:
            # The copy on this machine is bad, and there may be an older one that is good and not sent.
            if not is_gone(self._spool.folder, checkpoint.name):
                note_damage(self._spool.folder, checkpoint.name, str(error))
                logger.warning("'%s': %s; it is not sent", self._spool.folder.root, error)
        except (OSError, CheckpointError) as error:
            if is_gone(self._spool.folder, checkpoint.name):
                return
            cause = error if isinstance(error, OSError) else error.__cause__
            self._failed(error, lasting=getattr(cause, "errno", None) in _LASTING)
            # Not from the global generator, which is the training's.
            seconds = next_wait(self._failures, draw=random.SystemRandom().random())
            logger.warning("%s", self._left_behind(str(error)))
            if threading.main_thread().is_alive() and not self._stopped:
                self._awake.clear()
                self._wait_on(self._awake, min(seconds, _HURRIED_SECONDS) if self._waiting else seconds)
        else:
            with self._changed:
                self._sent = max(self._sent, manifest.serial)
                self._failures = 0
                self._status = UploadStatus(step=checkpoint.step, count=self._status.count + 1)
                self._changed.notify_all()

    def _next(self) -> Manifest | None:
        """The newest checkpoint that was not sent; None, and the thread is at its end, if there is none or nobody waits for it."""
        with self._changed:
            gives_up = self._status.error is not None and (
                self._stopped or not threading.main_thread().is_alive()
            )
            own: list[Manifest] = []
            try:
                own = [] if gives_up else self._own(survey(self._spool.folder))
            except FileNotFoundError:
                pass
            except CheckpointError as error:
                self._failed(error, lasting=True)
            if own and own[0].serial > self._sent:
                return own[0]
            self._thread = None
            self._changed.notify_all()
            return None

    def _own(self, found: Survey) -> list[Manifest]:
        return [
            manifest
            for manifest in found.good
            if manifest.checkpoint.run_id == self._run_id and manifest.checkpoint.name not in found.suspect
        ]

    def _held(self) -> frozenset[str]:
        """Folders of the spool that are being read, and must not be removed now."""
        current = self._current
        return frozenset() if current is None else frozenset({current.checkpoint.name})

    def _failed(self, error: BaseException, *, lasting: bool) -> None:
        with self._changed:
            self._failures += 1
            self._lasting = lasting
            self._note(error=str(error) or type(error).__name__, in_flight_step=None)
            self._changed.notify_all()

    def _note(self, *, in_flight_step: int | None, error: str | None = None) -> None:
        with self._changed:
            now = self._status
            self._status = UploadStatus(now.step, in_flight_step, now.count, error or now.error)

    def _left_behind(self, problem: str) -> str:
        return (
            f"not uploaded to '{self._spool.place}': {problem}; it is safe on this machine in '{self._spool.folder.root}', and "
            "the next saver of this run uploads it"
        )


def _highest_serial(storage: Storage) -> int:
    """The number of the checkpoint that was saved last; 0 where there is none."""
    try:
        found = survey(storage)
    except FileNotFoundError:
        return 0
    return max((manifest.serial for manifest in found.good), default=0)
