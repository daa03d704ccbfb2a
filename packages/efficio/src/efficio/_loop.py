"""Loop: one pass over some epochs that can be left and entered between any two optimizer steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from efficio_budget import Stop, stop_on_signals
from efficio_ckpt import CheckpointError
from efficio_data import Position, Resumable, derive_seed, grouped, prefetch, seed_generators
from efficio_precision import Policy, tuned_backends
from efficio_report import GPUSample, Totals, sample_gpu

from ._console import Notes, progress_bar
from ._determinism import deterministic_kernels
from ._live import Live
from ._schedule import Schedule
from ._session import Session
from ._source import length, repeats
from ._words import length_note


@dataclass
class Loop:
    """What a loop is made of; `batches()` runs it.

    The consistent point is the loop's next turn. The body of the batch before has finished, the batch counts, and if its
    accumulation group is whole, a checkpoint may be taken: only there are weights, buffers, counters and position of one moment.
    """

    name: str
    epochs: int
    source: Resumable
    transform: Callable[[Any], Any] | None
    accumulated: int
    device: torch.device
    policy: Policy
    deterministic: bool
    shown: bool
    session: Session
    schedule: Schedule
    totals: Totals
    live: Live
    notes: Notes
    samples: list[GPUSample]
    clear_gradients: Callable[[], None]
    end_epoch: Callable[[], None]

    def batches(self) -> Iterator[Any]:
        """The batches of all epochs that are left.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the state is saved.
            CheckpointError: The last save, or the first one, failed.
            ValueError: An epoch had no batches.
        """
        with ExitStack() as stack:
            stack.callback(self.totals.switch, self.totals.switch("setup"))
            position = self._begin()
            self.live.stop = stack.enter_context(stop_on_signals())
            stack.enter_context(deterministic_kernels(self.deterministic))
            benchmark = False if self.deterministic else None
            backends = stack.enter_context(tuned_backends(self.policy, benchmark=benchmark))
            stack.enter_context(sample_gpu(self.samples))
            if position.epoch >= self.epochs:
                return
            bar = stack.enter_context(self._bar(position))
            stack.push(lambda _, error, __: self._left(error))
            for epoch in range(position.epoch, self.epochs):
                start = position if epoch == position.epoch else Position(epoch)
                bar.set_description(self._title(epoch), refresh=False)
                yield from self._epoch(start, backends.observe, bar)
                if self.live.stop:
                    return
            self.totals.switch("save")
            self.session.save(wait=True)
        if self.policy.device.type == "cuda":
            self.notes.use(backends.note)

    def _bar(self, position: Position) -> Any:
        known = length(self.source)
        done = self.session.progress.batches.get(self.name, 0)
        return progress_bar(
            total=None if known is None else known * self.epochs,
            done=done if known is None else known * position.epoch + done,
            title=self._title(position.epoch),
            shown=self.shown,
        )

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self.epochs}"

    def _begin(self) -> Position:
        stored = self.session.progress.lengths.get(self.name)
        known = length(self.source)
        self.notes.tell(length_note(self.name, stored, known), *self.source.notes)
        if not repeats(self.source):
            self.notes.tell(
                "one sample came out differently when it was built twice: its randomness comes from where no key reaches (a clock, "
                "the system's entropy, a generator hidden in a closure), so a resume will not repeat it"
            )
        self.totals.switch("save")
        position, carried = self.session.begin(self.name, known)
        if carried:
            self.notes.tell(f"in the checkpoint but not prepared, kept as stored: {', '.join(carried)}")
        self.live.step, self.live.skipped = self.session.progress.step, self.session.progress.skipped
        self.schedule.begin(self.live.step)
        self.clear_gradients()
        if position.epoch >= self.epochs:
            self.notes.tell(
                f"loop {self.name!r} is complete: {position.epoch} of {self.epochs} epochs are trained"
            )
        return position

    def _epoch(
        self, position: Position, observe: Callable[[tuple[int, ...]], None], bar: Any
    ) -> Iterator[Any]:
        live, session, device, transform = self.live, self.session, self.device, self.transform
        switch, observed = self.totals.switch, device.type == "cuda"
        done = session.progress.batches.get(self.name, 0) if position.samples else 0
        body = derive_seed(session.progress.seed, "loop", self.name, "body", position.epoch)
        live.epoch = position.epoch
        switch("data")
        batches = prefetch(grouped(self.source.iter_from(position), self.accumulated), device)
        try:
            for (batch, after), live.place, live.size in batches:
                switch("train")
                seed_generators(derive_seed(body, position.samples), device=device)
                if transform is not None:
                    batch = transform(batch)
                if observed:
                    observe(_shape(batch))
                live.in_body = True
                yield batch
                live.in_body = False
                switch("data")
                live.samples += after.samples - position.samples
                position = after
                done += 1
                bar.update()
                if live.group_ends:
                    session.commit(self.name, position, batches=done, step=live.step, skipped=live.skipped)
                    if self._pause():
                        return
        finally:
            batches.close()
        if position.samples == 0:
            raise ValueError(
                f"epoch {position.epoch} of loop {self.name!r} had no batches: give the loader data"
            )
        self.end_epoch()
        following = Position(position.epoch + 1)
        session.commit(self.name, following, batches=0, step=live.step, skipped=live.skipped)

    def _pause(self) -> bool:
        """Save or stop here, if it is time; whether to stop."""
        if self.schedule.turn():
            self.live.stop.request("budget")
        if not self.live.stop:
            if self.schedule.is_save_due(self.live.step):
                self._save()
            return False
        self.totals.switch("save")
        self.session.save(wait=True)
        self.live.stop.call_previous()
        self.notes.tell(
            f"stopped by {self.live.stop.reason} at step {self.live.step:,}, saved in {self.session.place}"
        )
        self.live.ended = self.live.stop.reason
        if self.live.stop.received == signal.SIGINT:
            raise KeyboardInterrupt
        return True

    def _save(self) -> None:
        previous = self.totals.switch("save")
        try:
            self.session.save(wait=False)
        except CheckpointError as error:
            self.notes.tell(f"a save failed, training goes on and the checkpoints before it stand: {error}")
        self.schedule.saved(self.live.step, self.session.saver.status.seconds)
        self.totals.switch(previous)

    def _left(self, error: BaseException | None) -> bool:
        """The loop ends. Left half-way, by `break` or an exception, it saves the last turn's state if that is still in memory."""
        live = self.live
        live.in_body = False
        live.place, live.size = 0, 1
        if error is None:
            return False
        interrupted = live.stop.received == signal.SIGINT
        live.stop = Stop()  # what was asked of this loop does not hold for the next one
        if interrupted or isinstance(error, CheckpointError):
            return False
        live.ended = live.ended or "an exception or break"
        self.totals.switch("save")
        if self.session.changes.any:
            self.notes.tell(
                "the loop was left inside a body that had changed the model, which cannot be resumed exactly: the last checkpoint in "
                f"{self.session.place} counts"
            )
            return False
        try:
            self.session.save(wait=True)
        except CheckpointError as failed:
            self.notes.tell(f"the loop was left, and saving there failed: {failed}")
        return False


def _shape(batch: Any) -> tuple[int, ...]:
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return tuple(first.shape) if isinstance(first, torch.Tensor) else ()
