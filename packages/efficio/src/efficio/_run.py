"""Run: the five packages, composed for an ordinary training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from efficio_budget import Budget
from efficio_ckpt import Retention
from efficio_data import derive_seed, prefetch
from efficio_precision import evaluating, precision_policy
from efficio_report import GPUSample, Report, Totals, span

from ._arguments import whole_number
from ._closing import run_report
from ._compiling import Compiling
from ._console import Notes
from ._determinism import reserve_workspace
from ._fit import place_models, prepared_notes
from ._greeting import environment, greet
from ._identity import data_identity
from ._live import Live
from ._loop import Loop
from ._losses import Losses
from ._naming import is_scheduler, loop_name, object_names
from ._recovery import Recovery
from ._schedule import Schedule
from ._schedulers import Schedulers
from ._session import Session
from ._source import open_source
from ._step_methods import StepMethods
from ._stepping import Stepping
from ._tool_methods import ToolMethods

_SCALER, _COMPILER = "@scaler", "@compiler"  # no keyword of the user's can be these


class Run(StepMethods, ToolMethods):
    """One training that may be stopped and resumed any number of times, and is the same run every time.

    Args:
        budget: Time from here on, such as `"2h"` or `"11h30m"`, or seconds; None for no limit. The loop stops and saves before
            it is up. Each Run has its own, which all of its loops share: a cell that is run again begins a new one.
        storage: A folder (a mounted Drive is one), `hf://user/repository`, or another URL of fsspec.
        checkpoint_mode: `"exact"` keeps every bit.
        save_every: A number of optimizer steps, or a duration such as `"10m"`.
        keep: How many checkpoints stay, or a `Retention`.
        grad_accum_steps: Batches whose gradients one optimizer step takes.
        precision: `"auto"` chooses by the device; or `"fp32"`, `"fp16"`, `"bf16"`.
        seed: Of order and randomness; None takes torch's own at the first start. A resumed run keeps the one it began with.
        scheduler_interval: `"step"` steps a prepared scheduler in `step`, `"epoch"` when an epoch ends, None never.
        margin: Part of the budget kept for the last save; None is ten minutes or a tenth, whichever is less.
        deterministic: Let torch use deterministic kernels only: bitwise the same run on the same kind of GPU, and slower.
            Make the run before anything else computes on the GPU.
        compile_models: Compile them with `torch.compile` when they first compute, if the budget is long enough for that to pay. What the
            compiler has built is stored with the checkpoints, and used by later sessions on the same device and torch.
        progress: Whether to show a progress bar.
        clock: Seconds from any origin, never going back.

    Attributes:
        policy: The number format and why.
        device: Where models and batches are.

    Raises:
        ValueError: An argument makes no sense; the message names it.
        RuntimeError: The GPU has no kernels in this torch.
        CheckpointError: The storage is on a Drive that is not mounted.
    """

    def __init__(
        self,
        budget: str | float | None = None,
        *,
        storage: str | Path = "efficio-run",
        checkpoint_mode: Literal["exact"] = "exact",
        save_every: int | str = "10m",
        keep: int | Retention = 2,
        grad_accum_steps: int = 1,
        precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto",
        seed: int | None = None,
        scheduler_interval: Literal["step", "epoch"] | None = "step",
        margin: str | float | None = None,
        deterministic: bool = False,
        compile_models: bool = False,
        progress: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._totals = Totals(phase="setup", clock=clock)
        self._budget = Budget(budget, margin=margin, clock=clock)
        self._schedule = Schedule(self._budget, save_every, clock=clock)
        self._notes = Notes()
        self._schedulers = Schedulers(scheduler_interval, tell=self._notes.tell)
        self._accumulated = whole_number("grad_accum_steps", grad_accum_steps, at_least=1)
        self._deterministic = deterministic
        reserve_workspace(deterministic)
        self._shown = progress
        self.policy = precision_policy(precision=precision)
        self.device = torch.device(self.policy.device.type)
        self._seed = None if seed is None else whole_number("seed", seed)
        self._keep = keep if isinstance(keep, Retention) else whole_number("keep", keep, at_least=1)
        self._session = Session(
            storage,
            mode=checkpoint_mode,
            keep=self._keep,
            seed=self._seed,
            environment=environment(self.policy),
            clock=clock,
            tell=self._notes.tell,
        )
        self._compiling = Compiling(compile_models, device=self.policy.device.name)
        self._live = Live()
        self._losses = Losses(tell=self._notes.tell)
        self._stepping = Stepping(
            self.policy, self._live, self._schedulers, mark=self._session.changes.mark, losses=self._losses
        )
        self._recovery = Recovery(
            self._live, self._stepping, models=lambda: self._models, tell=self._notes.tell
        )
        self._samples: list[GPUSample] = []
        self._models: list[nn.Module] = []
        self._converted: list[nn.Module] = []
        self._first_step = 0
        self._trace = None
        self._settings = {
            "grad_accum_steps": grad_accum_steps,
            "precision": precision,
            "seed": seed,
            "scheduler_interval": scheduler_interval,
            "deterministic": deterministic,
            "compile_models": compile_models,
        }

    def prepare(self, *objects: Any, **named: Any) -> Any:
        """Take models, optimizers, schedulers and whatever else has a state dict, and restore them from the newest checkpoint.

        Models move to the device (and to channels_last where that helps). Objects are matched by name: `model`, `optimizer`,
        `scheduler` in the order given, or the keyword. May be called again, for a scheduler that is built later.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`; changed in place.
            **named: The same, under names of their own.

        Returns:
            The same objects, one as it is, several as a tuple.

        Raises:
            TypeError: An object has no state dict.
            CheckpointError: They do not fit the checkpoint (nothing is touched), or no checkpoint is good.
        """
        with span(self._totals, "setup"):
            session, first = self._session, not self._session.objects
            added = object_names(objects, named, taken=session.objects)
            self._converted += place_models(added, self.device, self.policy)
            scaler = self._stepping.scaler
            own = {_SCALER: scaler, _COMPILER: self._compiling} if first else {}
            unknown = session.add({**added, **own})
            models = [thing for thing in added.values() if isinstance(thing, nn.Module)]
            self._notes.tell(*self._compiling.compile(models, seconds_left=self._budget.remaining()))
            session.environment["compiled"] = self._compiling.is_on
            if first:
                session.give(self._live)
                self._first_step = self._live.step
                greet(session, self.policy, self._budget, self._notes, seed=self._seed, scaler=scaler)
            known = session.objects.values()
            self._models = [thing for thing in known if isinstance(thing, nn.Module)]
            self._stepping.optimizers[:] = [thing for thing in known if isinstance(thing, Optimizer)]
            self._schedulers.add([thing for thing in known if is_scheduler(thing)])
            self._notes.tell(
                *prepared_notes(
                    session.objects, added, unknown, interval=self._schedulers.interval, policy=self.policy
                )
            )
        given = (*objects, *named.values())
        return given[0] if len(given) == 1 else given

    def loop(
        self,
        loader: Any,
        epochs: int,
        *,
        name: str | None = None,
        gpu_transform: Callable[[Any], Any] | None = None,
    ) -> Iterator[Any]:
        """The batches of some epochs, on the device, from where the run is.

        Between two of them the run is saved when it is due, and stopped when the budget or a signal says so. A `break` after
        a step leaves the body half-way: what was trained since the last checkpoint is then lost.

        Args:
            loader: A `DataLoader`, a `GPULoader`, or batches in a list.
            epochs: How many in all, those of earlier sessions included.
            name: The loop's identity; its ordinal in the run by default. An unfinished loop goes on when it is called again.
            gpu_transform: Applied to each batch on the device, such as `on_inputs(Compose([...]))`.

        Returns:
            An iterator of batches as the loader makes them. It raises KeyboardInterrupt after Ctrl-C, once the body has finished
            and the state is saved, and CheckpointError when the first or the last save fails.

        Raises:
            RuntimeError: Nothing was prepared.
            ValueError: The loader has no batches, or `epochs` is not a count.
        """
        epochs = whole_number("epochs", epochs, at_least=1)
        if not self._session.objects:
            raise RuntimeError("run.loop came before run.prepare: call run.prepare(model, optimizer) first")
        if gpu_transform is not None and not callable(gpu_transform):
            raise TypeError(
                f"gpu_transform is a {type(gpu_transform).__name__}, expected a callable on a batch"
            )
        with span(self._totals, "setup"):
            if name is None:
                name = loop_name(self._live.begun, self._live.complete)
            seed = derive_seed(self._session.progress.seed, "loop", name)
            source, applied = open_source(loader, seed=seed, device=self.device)
        self._notes.use(*applied)
        if self.stopped:
            return iter(())
        return Loop(
            name=name,
            epochs=epochs,
            source=source,
            identity=data_identity(loader),
            transform=gpu_transform,
            accumulated=self._accumulated,
            device=self.device,
            policy=self.policy,
            deterministic=self._deterministic,
            shown=self._shown,
            session=self._session,
            schedule=self._schedule,
            totals=self._totals,
            live=self._live,
            notes=self._notes,
            samples=self._samples,
            converted=self._converted,
            begin=self._begin_loop,
            end_epoch=lambda: self._schedulers.step("epoch"),
            trace=self._trace,
        ).batches()

    @contextmanager
    def evaluate_mode(self) -> Iterator[None]:
        """Evaluate in the body or between loops: no gradients, evaluation mode, and no trace in modes or random streams."""
        if not self._models:
            raise RuntimeError(
                "no model was prepared: call run.prepare(model, optimizer) before run.evaluate_mode()"
            )
        live = self._live
        self._session.fence()  # averaged weights may be swapped in by hand
        live.evaluations += 1
        try:
            with span(self._totals, "evaluate"), evaluating(*self._models, policy=self.policy):
                yield
        finally:
            live.evaluations -= 1
        if not live.evaluations and not live.in_body and self._schedule.drop_request():
            self.save()

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader on the device, without a position: for evaluation."""
        return prefetch(loader, self.device)

    def stop(self) -> None:
        """Ask the loop to save and end when the body has finished, as the budget does and `break` cannot.

        Loops begun afterwards in this process give nothing; a new process goes on where this one ended.
        """
        self._live.stop.request("run.stop()")

    def save(self) -> bool:
        """Save now: in a loop when the body has finished, in an evaluation when it ends (its weights may be others), else at once.

        Returns:
            Whether it is stored already; False, too, where a loop was left half-way and there is nothing that may be saved.

        Raises:
            CheckpointError: It could not be written.
            RuntimeError: Nothing was prepared.
        """
        if self._live.in_body or self._live.evaluations:
            self._schedule.request(urgent=True)
            return False
        if self._session.is_half_way:
            self._notes.tell(
                "not saved: the loop was left inside a body, so what is in memory is of no one moment"
            )
            return False
        with span(self._totals, "save"):
            self._session.save_now(self._live)
        return True

    def report(self) -> Report:
        """Where the time of this session went, and what to change; a notebook shows it, elsewhere print it."""
        return run_report(
            self._totals,
            self._samples,
            first_step=self._first_step,
            live=self._live,
            losses=self._losses,
            session=self._session,
            policy=self.policy,
            notes=self._notes,
        )

    @property
    def stopped(self) -> bool:
        """Whether the budget or a signal has asked for the end; loops begun afterwards give nothing."""
        return bool(self._live.stop)

    @property
    def finished(self) -> bool:
        """Whether every loop that was begun has trained and stored all of its epochs."""
        return bool(self._live.begun) and self._live.complete >= self._live.begun.keys()

    @property
    def step_count(self) -> int:
        """Optimizer steps done, those of earlier sessions included."""
        return self._live.step

    @property
    def epoch(self) -> int:
        """The epoch that the current loop is in, from 0."""
        return self._live.epoch

    @property
    def seed(self) -> int:
        """The seed that order and randomness follow from."""
        return self._session.progress.seed

    def _begin_loop(self) -> None:
        self._schedulers.begin()
        self._stepping.drop_gradients()
