"""Live: where a run is at this moment, inside a body too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from efficio_budget import Stop

from ._metrics import Metric


@dataclass
class Live:
    """Counters that move while a body runs; a checkpoint holds what `Session.commit` took of them between two bodies.

    Attributes:
        step: Optimizer steps done.
        skipped: Optimizer steps that the scaler skipped.
        samples: Training samples of this session.
        epoch: Epoch that the current loop is in, from 0.
        position: Samples of that epoch that were taken before the batch in the body.
        group: Number of the accumulation group, counted anew in each process; another one when it is tried again.
        group_size: Batches in the accumulation group.
        group_ends: Whether the body's batch, or part of one, is the last of its group, so that an optimizer step is due.
        share: What the body's samples are of those of the group, if all of its batches are of one size.
        body: Number of the body, counted anew in each process.
        batch: What the body got, while it runs.
        part_samples: Samples that a body gets at most, since memory ran out; None for whole batches.
        recovers: Whether bodies are run under `recover_oom`.
        failed: Whether the last body ran out of memory, so that its group is to come again.
        metrics: What the user logged.
        begun: Epochs of each loop that this process has begun, in order.
        complete: Names of those whose last epoch is trained and stored.
        loop: Name of the loop that is running.
        in_body: Whether a body of a loop is running.
        evaluations: Evaluations that are running inside one another.
        failed_saves: Saves that failed while training went on.
        stop: Whether and why to stop, as long as that holds.
        ended: Why the last loop ended before its last epoch.
    """

    step: int = 0
    skipped: int = 0
    samples: int = 0
    epoch: int = 0
    position: int = 0
    group: int = 0
    group_size: int = 1
    group_ends: bool = True
    share: float = 1.0
    body: int = 0
    batch: Any = None
    part_samples: int | None = None
    recovers: bool = False
    failed: bool = False
    metrics: dict[str, Metric] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    loop: str | None = None
    in_body: bool = False
    evaluations: int = 0
    failed_saves: int = 0
    stop: Stop = field(default_factory=Stop)
    ended: str | None = None
