"""Saving in the background: the copy in the call, everything else in a thread."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from ._checkpoint import CheckpointError
from ._claim import drop_claim, hold_claim
from ._deferred import Span, spans_of
from ._fence import Fence
from ._folder import Folder
from ._manifest import check_metadata
from ._priority import give_way
from ._retention import Keep
from ._save import Mode, check_arguments, write_checkpoint
from ._spool import Spool
from ._staging import Pool, Staged, stage
from ._status import SaverStatus
from ._storage import Storage
from ._tree import Tree, flatten
from ._uploader import Uploader

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints in the background, one at a time; made by `background_saver`.

    Args:
        storage: Where.
        mode: How tensors are coded.
        keep: How many checkpoints of the run stay, or a `Retention`.
        run_id: Identity of the run.
        copy_bytes: What the copies may take; None for what the memory has room for.
    """

    _pid: int
    _turn: threading.RLock
    _guard: threading.RLock
    _thread: threading.Thread | None
    _claim: str | None
    _wait_copied: Callable[[], None]

    def __init__(
        self, storage: Storage, *, mode: Mode, keep: Keep, run_id: str | None, copy_bytes: int | None = None
    ) -> None:
        self._storage: Storage = storage.folder if isinstance(storage, Spool) else storage
        self._target = storage
        self._uploader = Uploader(storage, keep=keep, run_id=run_id) if isinstance(storage, Spool) else None
        self._mode = mode
        self._keep = keep
        self._run_id = run_id
        self._status = SaverStatus()
        self._closed = False
        self._pool = Pool(copy_bytes)
        self._may_defer = True
        self._fence = Fence()
        self._errors: list[CheckpointError] = []  # at most one, that was not raised yet
        # A script may end, or forget the saver, before it makes the call that would raise it.
        weakref.finalize(self, _tell, self._errors)
        self._forget_threads()
        if self._uploader is not None:
            self._uploader.poke()  # what a former process left behind

    @property
    def status(self) -> SaverStatus:
        """What has been done so far; reading it raises nothing and waits for nothing."""
        if self._uploader is None:
            return self._status
        return replace(self._status, upload=self._uploader.status)

    @property
    def nearest(self) -> Storage:
        """Where what was saved last is read from fastest: the spool, once something was saved here, else the storage."""
        return self._storage if self._status.committed else self._target

    def save(
        self,
        tree: Tree,
        *,
        step: int,
        optimizers: Sequence[Optimizer] = (),
        wait: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Copy a tree and write it in the background.

        Args:
            tree: Nested containers of leaves, which may be live: it is copied before this returns, on CUDA before anything
                that is computed later can change it.
            step: Optimizer steps done.
            optimizers: Their parameters and states, where these are on the CPU, are copied while the next batch is computed, at
                the latest just before one of them steps or `fence` returns. Until then nothing else may change these tensors. A
                change in place through torch is always noticed; one past it, through ``.data`` or memory that is shared, only if it
                meets one of four elements that are compared of each tensor. A change that was noticed fails this save, and
                lets all later ones copy everything in the call.
            wait: Wait for a save in flight, then for this one to be durable, and raise its error; an error of an earlier save
                is then logged only. Otherwise a save that finds another one in flight is skipped.
            metadata: Kept beside it, of JSON types.

        Returns:
            False if it was skipped.

        Raises:
            TypeError: Something in the tree or the metadata cannot be stored; the message names it.
            CheckpointError: This save failed, with `wait`; without it, an earlier one did and this one was not begun. Older
                checkpoints are as they were, and the next call begins afresh.
        """
        begun = time.perf_counter()
        check_arguments(step=step, mode=self._mode, keep=self._keep, run_id=self._run_id)
        details = check_metadata(metadata or {})
        self._notice_fork()
        with self._turn:
            if self._closed:
                raise RuntimeError("this saver is closed; make another one")
            if wait:
                self._join()
                self._log_error()
            else:
                if self._is_busy():
                    self._update(skipped=self._status.skipped + 1)
                    return False
                self._join()
                self._raise_error()
            spans: frozenset[Span] = frozenset()
            if self._may_defer and not wait:
                self._fence.watch(optimizers)
                spans = spans_of(optimizers)
            # A signal handler that saves in the middle of this must not write into the same buffer.
            pool, self._pool = self._pool, Pool(self._pool.limit)
            try:
                staged = stage(flatten(tree, pool.places), pool, spans=spans)
            except RuntimeError as error:  # of CUDA, which may be out of memory
                raise _failure(self._storage, step, error) from error
            finally:
                self._pool = pool
            self._join()
            self._wait_copied = staged.wait
            self._fence.hold(staged.deferred)
            self._update(in_flight_step=step)
            at_once = wait or staged.is_live
            self._start(
                lambda: self._write(
                    staged, step=step, metadata=details, begun=begun, in_background=not at_once
                )
            )
            if at_once:
                self._join()
            if wait and self._status.error is None:
                self._finish_upload()
            self._update(blocked_seconds=time.perf_counter() - begun)
            if wait:
                self._raise_error()
            return True

    def fence(self) -> None:
        """Return when the save in flight no longer reads what it was given, so that anything may change it.

        Errors surface at the next `save`, `wait` or `close`, not here.
        """
        self._notice_fork()
        self._fence.finish()
        self._wait_copied()

    def wait(self, *, upload: bool = True) -> None:
        """Return when no save is in flight: the last one is durable, or has failed.

        Args:
            upload: Where there is a spool, durable means that the remote storage holds it, and not the spool alone.

        Raises:
            CheckpointError: A save failed whose error was not raised yet, or its upload.
        """
        self._notice_fork()
        with self._turn:
            self._join()
            if upload and self._status.error is None:
                self._finish_upload()
        self._raise_error()

    def take_error(self) -> CheckpointError | None:
        """Return the error that the next call would raise, and forget it."""
        self._notice_fork()
        with self._guard:
            error = self._errors.pop() if self._errors else None
            self._status = replace(self._status, error=None)
        return error

    def close(self) -> None:
        """Wait for the save in flight and release the memory; a second call does nothing.

        Raises:
            CheckpointError: A save failed whose error was not raised yet.
        """
        self._notice_fork()
        with self._turn:
            self._closed = True
            self._join()
            self._fence.unwatch()
            self._pool = Pool()
            if self._uploader is not None:
                self._finish_upload()
                self._uploader.stop()
                self._uploader.clear()
            self._drop_claim()
        self._raise_error()

    def claim(self) -> None:
        """Keep other processes from saving this run from here on, and see that none that lives does so already.

        Each save does the same; this is for those who want to know before they train. Only folders can be claimed, and only
        by savers that have a `run_id`.

        Raises:
            CheckpointError: Another process saves the run, or the folder cannot be written to.
        """
        self._notice_fork()
        with self._turn:
            self._join()
            try:
                self._hold_claim()
            except OSError as error:
                raise CheckpointError(
                    f"storage '{self._storage.place}' cannot be written to: {error}; give a folder that can"
                ) from error

    def release(self) -> None:
        """Wait for the save in flight, and let other processes save this run until the next save here claims it again."""
        self._notice_fork()
        with self._turn:
            self._join()
            self._drop_claim()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if kind is None:
                raise
            # What ended the block matters more.
            logger.warning("%s", failure)

    def _finish_upload(self) -> None:
        if self._uploader is not None:
            try:
                self._uploader.finish()
            except CheckpointError as error:
                self._fail(error)

    def _hold_claim(self) -> None:
        if self._run_id is not None and isinstance(self._storage, Folder):
            self._claim = hold_claim(self._storage, self._run_id, held=self._claim)

    def _drop_claim(self) -> None:
        if self._claim is not None and isinstance(self._storage, Folder):
            drop_claim(self._storage, self._claim)
            self._claim = None

    def _write(
        self, staged: Staged, *, step: int, metadata: dict[str, Any], begun: float, in_background: bool
    ) -> None:
        try:
            self._complete(staged)
            if in_background and threading.current_thread() is self._thread:
                give_way()
            self._hold_claim()
            write = (
                self._uploader.write if self._uploader else functools.partial(write_checkpoint, self._storage)
            )
            checkpoint = write(
                staged.flat,
                step=step,
                mode=self._mode,
                keep=self._keep,
                metadata=metadata,
                run_id=self._run_id,
            )
        except BaseException as error:
            self._fail(error if isinstance(error, CheckpointError) else _failure(self._storage, step, error))
            if not isinstance(error, Exception) and self._thread is not threading.current_thread():
                raise
        else:
            seconds = time.perf_counter() - begun
            self._update(
                last_step=step,
                in_flight_step=None,
                seconds=seconds,
                bytes=checkpoint.bytes,
                committed=self._status.committed + 1,
                committed_seconds=self._status.committed_seconds + seconds,
                committed_bytes=self._status.committed_bytes + checkpoint.bytes,
            )
            if self._uploader is not None:
                self._uploader.poke()

    def _complete(self, staged: Staged) -> None:
        changed = staged.deferred.finish()
        staged.wait()
        if changed:
            self._may_defer = False
            # What changes one by hand mostly changes all: the first name will do.
            raise RuntimeError(
                f"{changed[0]} was changed by other code before one of the given optimizers stepped; later saves "
                "copy everything at once"
            )

    def _start(self, work: Callable[[], None]) -> None:
        """Begin a thread that the interpreter waits for at its exit; one a save, so that none waits for work then."""
        if threading.main_thread().is_alive():
            thread = threading.Thread(target=work, name="efficio-ckpt-save", daemon=False)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:
                self._thread = None
                logger.info("no thread can be started any more; saving in the call")
            else:
                return
        work()

    def _is_busy(self) -> bool:
        # The thread outlives its save by a moment, in which nothing is to be skipped.
        alive = self._thread is not None and self._thread.is_alive()
        return alive and self._status.in_flight_step is not None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            step = self._status.in_flight_step
            if step is not None:
                self._fail(_failure(self._storage, step, RuntimeError("the thread that saves was ended")))

    def _fail(self, failure: CheckpointError) -> None:
        with self._guard:
            self._errors[:] = [failure]
            self._status = replace(self._status, in_flight_step=None, error=str(failure))

    def _update(self, **changes: Any) -> None:
        with self._guard:
            self._status = replace(self._status, **changes)

    def _raise_error(self) -> None:
        error = self.take_error()
        if error is not None:
            raise error

    def _log_error(self) -> None:
        error = self.take_error()
        if error is not None:
            logger.warning("an earlier save failed: %s", error)

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            self._forget_threads()

    def _forget_threads(self) -> None:
        """Begin without a save in flight: a forked child has none of its parent's threads, and may have its locked locks."""
        if self._uploader is not None:
            self._uploader.forget_thread()
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._guard = threading.RLock()
        self._thread = None
        self._errors.clear()
        self._claim = None
        self._wait_copied = lambda: None
        self._status = replace(self._status, in_flight_step=None, error=None)


def _tell(errors: Sequence[CheckpointError]) -> None:
    for error in errors:
        logger.warning("%s", error)


def _failure(storage: Storage, step: int, error: BaseException) -> CheckpointError:
    failure = CheckpointError(
        f"could not save step {step} to '{storage.place}': {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure
