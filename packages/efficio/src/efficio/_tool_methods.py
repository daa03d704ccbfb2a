"""What a script calls beside its loops: to choose a batch size, to log, to see that a resume is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from efficio_ckpt import CheckpointError, Retention

from ._arguments import whole_number
from ._console import Notes, say
from ._live import Live
from ._metrics import Metric, is_best, logged
from ._probe import probe_batch_size
from ._session import Session
from ._stepping import Stepping
from ._verify import Trace, Verification, verify


class ToolMethods:
    """The part of `Run` that is used before and between loops."""

    device: torch.device
    save: Callable[[], bool]
    stop: Callable[[], None]
    _settings: dict[str, Any]
    _session: Session
    _stepping: Stepping
    _live: Live
    _notes: Notes
    _models: list[nn.Module]
    _keep: int | Retention
    _trace: Trace | None

    def find_batch_size(
        self, train: Callable[[int], Any], *, start: int = 8, limit: int = 4096, headroom: float = 0.1
    ) -> int:
        """Find the largest batch that memory has room for, before the loop; everything that is trained meanwhile is undone.

        Args:
            train: Makes a batch of so many samples and does with it what the loop's body does.
            start: Samples in the first try.
            limit: The largest answer.
            headroom: The part of a batch for which there must be room beyond it.

        Returns:
            Samples, a multiple of 8 from 8 on. What it would gain is told.

        Raises:
            RuntimeError: Inside a loop, or not even one sample fits.
            ValueError: An argument makes no sense.
        """
        return probe_batch_size(
            train,
            session=self._session,
            stepping=self._stepping,
            live=self._live,
            device=self.device,
            tell=self._notes.tell,
            start=start,
            limit=limit,
            headroom=headroom,
        )

    def log(self, **metrics: Any) -> None:
        """Remember numbers, such as a validation loss: `run.metrics` has the last, the lowest and the highest, after a resume too.

        A checkpoint's metadata holds what was logged of its very weights, since its last optimizer step. With
        `keep=Retention(best=("val_loss", "min"))` the best one so far is saved when it is logged, and stays.

        Args:
            **metrics: Numbers, or tensors of one element, which are waited for.

        Raises:
            TypeError: One is no number, or has the name of something else that a checkpoint says of itself.
        """
        before, live = self._live.metrics, self._live
        live.metrics = logged(before, metrics, step=live.step, reserved=self._session.environment)
        if self._models and is_best(before, live.metrics, self._keep, among=metrics):
            try:
                self.save()
            except CheckpointError as error:
                self._notes.tell(f"the best checkpoint so far was not saved: {error}")

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """What was logged: for each name `last`, `lowest` and `highest`, each with the step."""
        return MappingProxyType(self._live.metrics)

    def verify_resume(self, train: Callable[[Any], object], *, steps: int = 8) -> Verification:
        """Find out whether a training is exact: train, kill, resume and compare every batch and every tensor.

        It is trained four times for so many steps, each time with a new run of the same settings as this one (accumulation,
        precision, seed, scheduler_interval, deterministic, compile_models) in a temporary folder: twice without a stop, then up to a
        SIGKILL in the middle, then resumed with other global seeds. Where processes can be forked and no GPU is in use,
        each is a process of its own, with one thread; else the training is left and begun anew in this process.

        Args:
            train: Takes a run, builds models and loaders, prepares them and trains, as the script does.
            steps: Optimizer steps to compare, at least 3.

        Returns:
            What came out; it is shown as well: `exact`, or the first step that differs, what differs there, and where to look.

        Raises:
            ValueError: The training takes fewer than three steps.
            RuntimeError: It failed; the message ends with its traceback.
        """
        steps = whole_number("steps", steps, at_least=3)

        def make_run(storage: Path) -> Any:
            return type(self)(  # type: ignore[call-arg]
                storage=storage, save_every=1, progress=False, **self._settings
            )

        return verify(train, make_run, steps=steps, tell=lambda text: say(f"efficio: {text}"))

    def _trace_steps(self, path: Path, *, last: int, kill_at: int | None, in_child: bool) -> None:
        """Write down what each step takes and leaves; for `verify_resume`."""
        self._trace = Trace(
            path,
            lambda: self._session.objects,
            self.stop,
            lambda: self._session.saver.wait(upload=False),
            last=last,
            kill_at=kill_at,
            in_child=in_child,
        )
