"""Loop: one pass over some epochs that can be left and entered between any two optimizer steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch

from efficio_budget import Stop, stop_on_signals
from efficio_ckpt import CheckpointError
from efficio_data import (
    Position,
    Resumable,
    batch_samples,
    derive_seed,
    grouped,
    prefetch,
    seed_generators,
    split_batch,
)
from efficio_precision import Policy, tuned_backends
from efficio_report import GPUSample, Totals, sample_gpu

from ._console import Notes, progress_bar
from ._determinism import deterministic_kernels
from ._fit import try_layout
from ._identity import moved_classes
from ._live import Live
from ._schedule import Schedule
from ._session import Session
from ._source import epoch_samples, length, next_epoch, source_notes
from ._verify import Trace
from ._words import files_note, length_note


@dataclass
class Loop:
    """What a loop is made of; `batches()` runs it.

    The consistent point is the loop's next turn. The body of the batch before has finished, the batch counts, and if its
    accumulation group is whole, a checkpoint may be taken: only there are weights, buffers, counters and position of one moment.
    """

    name: str
    epochs: int
    source: Resumable
    identity: dict[str, Any]
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
    converted: list[torch.nn.Module]
    begin: Callable[[], None]
    end_epoch: Callable[[], None]
    trace: Trace | None = None

    def batches(self) -> Iterator[Any]:
        """The batches of all epochs that are left.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the state is saved.
            CheckpointError: The last save, or the first one, failed.
            ValueError: An epoch had no batches.
        """
        with ExitStack() as stack:
            if self.live.loop is not None:
                raise RuntimeError(
                    f"loop {self.name!r} begins inside loop {self.live.loop!r}, and a run is in one place at a time: end that one "
                    "first (close() the iterator, if you hold it), or loop over one loader that gives both batches"
                )
            self.live.loop = self.name
            self.live.begun[self.name] = self.epochs
            self.live.complete.discard(self.name)
            stack.callback(setattr, self.live, "loop", None)
            stack.callback(self.totals.switch, self.totals.switch("setup"))
            stack.callback(self.session.rest)
            position = self._begin()
            self.live.stop = stack.enter_context(stop_on_signals())
            stack.enter_context(deterministic_kernels(self.deterministic))
            benchmark = False if self.deterministic else None
            backends = stack.enter_context(tuned_backends(self.policy, benchmark=benchmark))
            if self.device.type == "cuda":
                stack.callback(lambda: self.notes.use(backends.note))
            card = torch.cuda.current_device() if self.device.type == "cuda" else 0
            stack.enter_context(sample_gpu(self.samples, device=card))
            if position.epoch >= self.epochs:
                self.session.save(wait=True)  # nothing new, unless the last save had failed
                self.live.complete.add(self.name)
                return
            bar = stack.enter_context(self._bar(position))
            stack.push(lambda _, error, __: self._left(error))
            for epoch in range(position.epoch, self.epochs):
                start = position if epoch == position.epoch else Position(epoch)
                bar.set_description(self._title(epoch), refresh=False)
                if (yield from self._epoch(start, backends.observe, bar)):
                    return
            self.totals.switch("save")
            self.session.save(wait=True)
            self.live.complete.add(self.name)
            self._pass_on()

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
        progress, name = self.session.progress, self.name
        known, size = length(self.source), epoch_samples(self.source)
        batches, samples = (progress.lengths.get(name), known), (progress.sizes.get(name), size)
        stored = progress.identities.get(name, {})
        if moved := moved_classes(stored, self.identity):
            raise ValueError(
                f"the classes of loop {name!r} are numbered in another way than when the checkpoint was written: {moved}; give the "
                "data set its classes in a fixed order (sorted, or from a list in a file)"
            )
        self.notes.tell(
            length_note(name, batches, samples),
            files_note(name, stored, self.identity) if samples[0] == samples[1] else None,
            *source_notes(self.source),
        )
        self.totals.switch("save")
        self.session.take(self.live)  # with steps between two loops
        position, carried = self.session.begin(name, length=known, size=size)
        self.session.give(self.live)  # other ones, if memory was thrown away
        self.session.progress.identities[name] = self.identity
        if carried:
            self.notes.tell(f"in the checkpoint but not prepared, kept as stored: {', '.join(carried)}")
        self.schedule.begin(self.live.step)
        self.begin()
        if self.trace is not None:
            self.trace.begin(self.live.step, (name, position))
        if position.epoch >= self.epochs:
            self.notes.tell(
                f"loop {self.name!r} is complete: {position.epoch} of {self.epochs} epochs are trained"
            )
        return position

    def _epoch(
        self, position: Position, observe: Callable[[tuple[int, ...]], None], bar: Any
    ) -> Generator[Any, None, bool]:
        """The batches of one epoch; whether the loop is to end there."""
        live, session, device, transform = self.live, self.session, self.device, self.transform
        trace = self.trace
        switch, turn, observed = self.totals.switch, self.schedule.turn, device.type == "cuda"
        done = session.progress.batches.get(self.name, 0) if position.samples else 0
        steps_before: int | None = live.step + live.skipped
        body = derive_seed(session.progress.seed, "loop", self.name, "body", position.epoch)
        live.epoch = position.epoch
        group: list[tuple[Any, int]] = []  # batches and where they begin, for when they have to come again

        def ready(batch: Any, first: int) -> Any:
            """Start the generators of a body, and make of what the loader gave what the body gets."""
            seed_generators(derive_seed(body, first), device=device)
            if transform is not None:
                batch = transform(batch)
            if self.converted:
                self.notes.tell(*try_layout(self.converted, batch, self.policy))
            return batch

        switch("data")
        batches = prefetch(grouped(self.source.iter_from(position), self.accumulated), device)
        try:
            for (raw, after), place, size in batches:
                switch("train")
                live.position = position.samples
                if place == 0:
                    live.group += 1
                    live.group_size, live.share = size, 1.0 / size
                    group.clear()
                if live.part_samples is None:
                    batch = ready(raw, position.samples)
                    if observed:
                        observe(_shape(batch))
                    if trace is not None:
                        trace.batch(batch)
                    live.group_ends = place + 1 == size
                    live.body += 1
                    live.batch, live.in_body = batch, True
                    yield batch
                    live.batch, live.in_body = None, False
                else:
                    yield from self._in_parts(raw, place, position.samples, body, ready)
                if live.recovers:
                    group.append((raw, position.samples))
                del raw
                while live.failed:
                    if len(group) <= place:
                        raise RuntimeError(
                            "out of memory in a group whose first bodies were not run under run.recover_oom(): use it for each"
                        )
                    yield from self._again(group, body, ready)
                switch("data")
                live.samples += after.samples - position.samples
                position = after
                done += 1
                bar.update()
                if live.group_ends:
                    if steps_before is not None:
                        self._see_step(steps_before)
                        steps_before = None
                    session.commit(self.name, position, live, batches=done)
                    if trace is not None:
                        trace.commit(live.step, (self.name, position))
                    due = turn(live.step)
                    if (due or live.stop) and self._pause(due):
                        return True
        finally:
            batches.close()
        if position.samples == 0:
            raise ValueError(
                f"epoch {position.epoch} of loop {self.name!r} had no batches: give the loader data"
            )
        self.end_epoch()
        following = next_epoch(self.source, position.epoch)
        session.commit(self.name, following, live, batches=0)
        if trace is not None:
            trace.commit(live.step, (self.name, following))
        return self._pause(turn(live.step))

    def _again(
        self, group: list[tuple[Any, int]], body: int, ready: Callable[[Any, int], Any]
    ) -> Generator[Any, None, None]:
        """The batches of an accumulation group once more, up to the one that ran out of memory, in smaller parts."""
        self.live.failed = False
        self.live.group += 1
        for place, (raw, first) in enumerate(group):
            yield from self._in_parts(raw, place, first, body, ready)
            if self.live.failed:
                return

    def _in_parts(
        self, raw: Any, place: int, first: int, body: int, ready: Callable[[Any, int], Any]
    ) -> Generator[Any, None, None]:
        """One batch in bodies of at most `live.part_samples` samples; its augmentation is that of the whole.

        Args:
            raw: As it came from the loader.
            place: In its accumulation group.
            first: Samples of the epoch before it.
            body: Key of the bodies of this epoch.
            ready: Makes of it what a body gets.
        """
        live, batch = self.live, ready(raw, first)
        count = batch_samples(batch)
        most = live.part_samples or count
        parts = [batch] if count <= most else split_batch(batch, -(-count // most), samples=count)
        live.position = first
        for number, part in enumerate(parts):
            if number:
                seed_generators(derive_seed(body, first, number), device=self.device)
            if self.trace is not None:
                self.trace.batch(part)
            live.share = (1.0 if len(parts) == 1 else batch_samples(part) / count) / live.group_size
            live.group_ends = number + 1 == len(parts) and place + 1 == live.group_size
            live.body += 1
            live.batch, live.in_body = part, True
            yield part
            live.batch, live.in_body = None, False
            if live.failed:
                return

    def _see_step(self, steps_before: int) -> None:
        if self.live.step + self.live.skipped == steps_before:
            self.notes.tell(
                "the body did not call run.step(): steps are not counted, schedulers stand still and save_every in steps never "
                "comes; write run.backward(loss) and run.step() for loss.backward() and optimizer.step()"
            )

    def _pause(self, due: Literal["stop", "save"] | None) -> bool:
        """Save or stop here, if it is time; whether to stop."""
        stop = self.live.stop
        if due == "stop":
            stop.request("budget")
        if not stop:
            if due == "save":
                self._save()
            return False
        self.totals.switch("save")
        self.session.save(wait=True)
        self.live.ended = stop.reason
        self.notes.tell(f"stopped by {stop.reason} at step {self.live.step:,}, saved in {self.session.place}")
        self._pass_on()
        return True

    def _pass_on(self) -> None:
        """Hand a signal that came on to whom it was meant for, now that everything is saved."""
        stop = self.live.stop
        if stop.received == signal.SIGINT:
            raise KeyboardInterrupt
        stop.call_previous()

    def _save(self) -> None:
        previous = self.totals.switch("save")
        try:
            tried = self.session.save(wait=False, queue=self.schedule.is_urgent)
        except CheckpointError as error:
            tried = True
            self.live.failed_saves += 1
            if (
                self.live.failed_saves == 1
            ):  # the same trouble at each save is told once, and counted in the report
                self.notes.tell(
                    f"a save failed, training goes on and the checkpoints before it stand: {error}"
                )
        if tried:  # while another one is being written it stays due
            self.schedule.saved(self.live.step, self.session.saver.status.seconds)
        self.totals.switch(previous)

    def _left(self, error: BaseException | None) -> bool:
        """The loop ends. Left half-way, by `break` or an exception, it saves the last turn's state if that is still in memory."""
        live = self.live
        live.batch, live.in_body = None, False
        live.group_size, live.group_ends, live.share, live.failed = 1, True, 1.0, False
        if error is None:
            return False
        interrupted = live.stop.received == signal.SIGINT
        live.stop = Stop()  # what was asked of this loop does not hold for the next one
        self.session.is_half_way |= self.session.changes.possible
        dropped = self.schedule.drop_request()
        if interrupted or isinstance(error, CheckpointError):
            return False
        live.ended = live.ended or "an exception or break"
        self.totals.switch("save")
        if self.session.is_half_way:
            self.notes.tell(
                "the loop was left inside a body that had changed the model, which cannot be resumed exactly: the last "
                f"checkpoint in {self.session.place} counts, and the next loop goes on from there"
                + (
                    "; the save that was asked for in that body was dropped: run.stop() saves and ends"
                    if dropped
                    else ""
                )
            )
            return False
        try:
            self.session.save(wait=True)
        except RuntimeError as failed:
            # A CheckpointError is one; others come from a GPU that does nothing any more after the error.
            self.notes.tell(f"the loop was left, and saving there failed: {failed}")
        return False


def _shape(batch: Any) -> tuple[int, ...]:
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return tuple(first.shape) if isinstance(first, torch.Tensor) else ()
