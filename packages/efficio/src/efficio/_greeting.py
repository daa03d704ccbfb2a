"""Greeting: what a run says of itself before it trains."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

import torch

from efficio_budget import Budget, host
from efficio_precision import Policy

from ._console import Notes, say
from ._session import Session
from ._words import environment_note, start_line, storage_note


def environment(policy: Policy) -> dict[str, Any]:
    """What a checkpoint says about where it was written, as far as it can change bits."""
    return {
        "device": policy.device.name,
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
    }


def greet(
    session: Session, policy: Policy, budget: Budget, notes: Notes, *, seed: int | None, scaler: Any
) -> None:
    """Say where the run starts from and until when, and what about it is not as it was.

    Args:
        session: After its first `add`.
        policy: For the number format and the reason.
        budget: For the time of day at which it stops.
        notes: Where it is noted for the report.
        seed: The one that the user asked for.
        scaler: The run's loss scaler, after it was restored.
    """
    say(
        start_line(
            resumed_from=session.resumed_from,
            seconds=session.progress.seconds,
            place=session.place,
            precision=policy.reason,
            stops_at=budget.stops_at(datetime.now()),
        )
    )
    notes.use(policy.reason)
    notes.tell(storage_note(host(os.environ), session.place))
    if session.resumed_from is None:
        return
    notes.tell(environment_note(session.stored_environment, session.environment))
    kept = session.progress.seed
    if seed not in (None, kept):
        notes.tell(f"seed={seed} is not used: this run began with {kept} and keeps it")
    if scaler.is_enabled() and not session.has_stored("@scaler"):
        notes.tell(f"the loss scale starts afresh at {scaler.get_scale():,.0f}: the checkpoint has none")
