"""Session: what a run holds in memory and in storage, and how the one follows from the other."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from efficio_ckpt import (
    CheckpointError,
    Retention,
    Saver,
    background_saver,
    load_checkpoint,
    put_snapshot,
    rng_state,
    set_rng_state,
    snapshot_tree,
    spooled,
)
from efficio_data import Position

from ._changes import Changes
from ._live import Live
from ._progress import Progress
from ._words import weights_alone_hint

_log = logging.getLogger(__name__)

# The one thing of this package that outlives a run: a cell that is run again makes a new run while the old one may still be saving
# to the same place. The new one has to wait for it, and only the process knows both.
_open_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()


class Session:
    """The prepared objects, the progress, and their checkpoints in one storage.

    What is in memory is either of one moment between two optimizer steps, and can be saved; or a loop was left inside a body that
    had changed it (`is_half_way`), and it can only be thrown away by `rewind`. The two never mix.

    Attributes:
        objects: What is stored, by name.
        progress: How far the run is, as of the last `commit`.
        changes: Whether the objects have left that point.
        is_half_way: Whether a loop was left so that what is in memory is of no one moment.
        resumed_from: Step of the checkpoint that was loaded; None for a new run.
        environment: What a checkpoint says about where it is written.
        stored_environment: What the loaded checkpoint says about where it was written.
    """

    def __init__(
        self,
        storage: str | Path,
        *,
        mode: Literal["exact"],
        keep: int | Retention,
        seed: int | None,
        environment: Mapping[str, Any],
        clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self._storage = spooled(storage)
        self._mode = mode
        self._keep = keep
        self._seed = seed
        self.environment = dict(environment)
        self._clock = clock
        self._tell = tell
        self._started = clock()
        self._seconds_before = 0.0
        self._closed = False
        self._begun: set[str] = set()
        self._saver: Saver | None = None
        self._stored: dict[str, Any] = {}
        self._rng: Any = None
        self._saved: tuple[int, dict[str, Position]] | None = None
        self._run_id = ""
        self.objects: dict[str, Any] = {}
        self.progress = Progress(seed=0)
        self.changes = Changes()
        self.is_half_way = False
        self.resumed_from: int | None = None
        self.stored_environment: dict[str, Any] = {}

    @property
    def place(self) -> str:
        """Where the checkpoints are, without secrets."""
        return self._storage.place

    @property
    def saver(self) -> Saver:
        """The saver of this run; it is there once something was prepared."""
        if self._saver is None:
            raise RuntimeError("nothing was prepared: call run.prepare(model, optimizer) first")
        return self._saver

    def has_stored(self, name: str) -> bool:
        """Whether the loaded checkpoint holds a state of this name that is not empty."""
        return bool(self._stored.get(name))

    def add(self, objects: Mapping[str, Any]) -> tuple[str, ...]:
        """Take objects under their names, and restore them from the newest good checkpoint.

        Returns:
            Names of those that the checkpoint does not know: they start as they are.

        Raises:
            CheckpointError: They do not fit the checkpoint, or there are checkpoints but none is good. Nothing is touched.
        """
        if self._saver is None:
            self._open()
        self.fence()
        together = {**self.objects, **objects}
        moved = self.changes.seen
        # All of them again, not the new ones alone: a scheduler that was built meanwhile has written its own learning rate into a
        # restored optimizer. After training by hand only the new ones, or that would be undone.
        try:
            put_snapshot(self._stored, objects if moved else together, beside=self.objects)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {weights_alone_hint(self.place)}") from error
        if not self.objects:
            self._restore_generators()
        new = objects.keys() - self.objects.keys()
        self.objects = together
        self.changes.watch(together)
        if not moved:
            self.changes.settle()
        unknown = sorted(name for name in new - self._stored.keys() if not name.startswith("@"))
        return () if self.resumed_from is None else tuple(unknown)

    def begin(self, name: str, *, length: int | None, size: int | None) -> tuple[Position, tuple[str, ...]]:
        """Make memory and storage agree before a loop goes on.

        - What a loop left half-way is thrown away for the last checkpoint.
        - What user code did by hand before a loop begins for the first time belongs to what the loop begins with, and is stored
          with it. A script that is resumed does it once more: before a loop that had begun in an earlier session, it is undone.
        - A new run stores its first checkpoint, so that there is always one to go back to, and storage that cannot be written to
          is found before anything is trained.

        Returns:
            Where the loop is, and the names in the checkpoint for which no object was prepared.

        Raises:
            CheckpointError: The storage cannot be written to, another process trains this run, or no checkpoint is good.
        """
        self.saver.claim()
        # What no object has claimed is carried on, from checkpoint to checkpoint.
        self._stored = {key: state for key, state in self._stored.items() if key not in self.objects}
        begun_before = name in self.progress.loops and name not in self._begun
        self._begun.add(name)
        if self.is_half_way:
            self._tell(
                f"loop {name!r} goes on from the last checkpoint: what was left half-way is thrown away"
            )
            self.rewind()
        elif begun_before and self.changes.possible:
            if self.changes.seen:
                self._tell(
                    f"what was done by hand before loop {name!r} is in its checkpoint already, and is not done twice"
                )
            self.rewind()
        elif begun_before:
            self._restore_generators()  # for what user code draws after a loop that is complete
        elif name not in self.progress.loops:
            self.progress.loops[name] = Position()
            if self._saved is None or self.changes.seen:
                self.save(wait=True, always=True)
        self.changes.settle()
        if length is not None:
            self.progress.lengths[name] = length
        if size is not None:
            self.progress.sizes[name] = size
        return self.progress.loops.setdefault(name, Position()), tuple(
            sorted(key for key in self._stored if not key.startswith("@"))
        )

    def commit(self, name: str, position: Position, live: Live, *, batches: int) -> None:
        """Move the point that the next checkpoint is taken of to here: the body has finished, an optimizer step is whole."""
        self.progress.loops[name] = position
        self.progress.batches[name] = batches
        self.take(live)
        self.changes.settle()

    def take(self, live: Live) -> None:
        """Take over how far a run is: its steps, and what it has learned about itself."""
        progress = self.progress
        progress.step, progress.skipped = live.step, live.skipped
        progress.part_samples, progress.metrics = live.part_samples, live.metrics

    def give(self, live: Live) -> None:
        """Set a run to how far it is in memory, the opposite of `take`."""
        progress = self.progress
        live.step, live.skipped = progress.step, progress.skipped
        live.part_samples, live.metrics = progress.part_samples, progress.metrics

    def save(self, *, wait: bool, always: bool = False, queue: bool = False) -> bool:
        """Store the state of the last `commit`.

        Args:
            wait: Until it is durable; otherwise a save may be skipped while another is being written.
            always: Also when no step was taken since the last save.
            queue: Wait for a save in flight, and begin this one then; otherwise it is left out.

        Returns:
            Whether a checkpoint was begun; False when there is nothing new.

        Raises:
            CheckpointError: It could not be written, or an earlier one in the background could not.
            RuntimeError: A later run has taken over the storage.
        """
        if self._closed:
            raise RuntimeError(f"a later Run took over the storage {self.place!r}: go on with that one")
        if queue:
            self._is_durable(upload=False)
        if not wait and self.saver.status.in_flight_step is not None:
            return False  # before the states are collected for nothing
        point = self.progress.step, dict(self.progress.loops)
        if point == self._saved and not always and (not wait or self._is_durable()):
            return False
        self.progress.seconds = self._seconds_before + max(0.0, self._clock() - self._started)
        if wait:
            self._is_durable(upload=False)  # or its error would only be logged
        tree = {
            "objects": {**self._stored, **snapshot_tree(self.objects)},
            "progress": self.progress.to_tree(),
            "rng": rng_state(),
        }
        begun = self.saver.save(
            tree,
            step=self.progress.step,
            optimizers=[thing for thing in self.objects.values() if isinstance(thing, Optimizer)],
            wait=wait,
            metadata={**self.environment, **self._fresh_metrics()},
        )
        if begun:
            self._saved = point
        return begun

    def save_now(self, live: Live) -> None:
        """Store what is in memory between two loops, whatever was stored before.

        Args:
            live: How far the run is, steps by hand included.

        Raises:
            CheckpointError: It could not be written.
        """
        self.take(live)
        self.save(wait=True, always=True)
        self.rest()

    def fence(self) -> None:
        """Before something else than an optimizer may change what is trained: a save in flight takes its copy now."""
        if self._saver is not None:
            self._saver.fence()

    def rest(self) -> None:
        """No loop runs: wait for the save in flight, and let another process go on with the run."""
        self.saver.release()

    def rewind(self) -> None:
        """Load the newest good checkpoint of this run over what is in memory."""
        self._is_durable(upload=False)
        _, tree = load_checkpoint(self.saver.nearest, run_id=self._run_id)
        put_snapshot(tree["objects"], self.objects)
        self._rng = tree["rng"]
        self._restore_generators()
        self.progress = Progress.from_tree(tree["progress"])
        self._saved = self.progress.step, dict(self.progress.loops)
        self.changes.settle()
        self.is_half_way = False

    def close(self) -> None:
        """Wait for the save in flight and let go of the objects; an error of that save is logged."""
        self._closed = True
        self.changes.unwatch()
        if self._saver is not None:
            try:
                self._saver.close()
            except CheckpointError as error:
                _log.warning("%s", error)
        if _open_sessions.get(self.place) is self:
            del _open_sessions[self.place]

    def _fresh_metrics(self) -> dict[str, float]:
        """What was logged of the very weights that are saved: by it a checkpoint is known for the best."""
        progress = self.progress
        return {
            name: metric.last for name, metric in progress.metrics.items() if metric.step == progress.step
        }

    def _restore_generators(self) -> None:
        if self._rng is not None:
            set_rng_state(self._rng)

    def _is_durable(self, *, upload: bool = True) -> bool:
        """Wait for the save in flight, and for its upload if there is one; False, and a line in the log, if it failed."""
        try:
            self.saver.wait(upload=upload)
        except CheckpointError as error:
            self._tell(f"a save failed, and the checkpoints before it stand: {error}")
            return False
        return True

    def _open(self) -> None:
        former = _open_sessions.get(self.place)
        if former is not None and former is not self:
            former.close()
        try:
            checkpoint, tree = load_checkpoint(self._storage)
        except FileNotFoundError:
            self._run_id = uuid.uuid4().hex
            self.progress = Progress(seed=torch.initial_seed() if self._seed is None else self._seed)
        else:
            self._run_id = checkpoint.run_id or uuid.uuid4().hex
            self._stored, self._rng = dict(tree["objects"]), tree["rng"]
            self.progress = Progress.from_tree(tree["progress"])
            self._seconds_before = self.progress.seconds
            self.resumed_from = checkpoint.step
            self.stored_environment = dict(checkpoint.metadata)
            self._saved = self.progress.step, dict(self.progress.loops)
        self._saver = background_saver(
            self._storage, mode=self._mode, keep=self._keep, run_id=self._run_id
        ).__enter__()
        _open_sessions[self.place] = self
