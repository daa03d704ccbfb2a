"""Closing: what a run reports of itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from efficio_budget import host
from efficio_precision import Policy
from efficio_report import GPUSample, Report, Totals, collect_report

from ._console import Notes
from ._live import Live
from ._losses import Losses
from ._session import Session
from ._words import closing_notes


def run_report(
    totals: Totals,
    samples: Sequence[GPUSample],
    *,
    first_step: int,
    live: Live,
    losses: Losses,
    session: Session,
    policy: Policy,
    notes: Notes,
) -> Report:
    """Where the time of this session went, and what there is to say about it.

    Args:
        totals: Time by phase.
        samples: Of the GPU.
        first_step: Optimizer steps that were done before this session.
        live: Where the run is.
        losses: Looked at once more.
        session: For its saves.
        policy: The number format.
        notes: What was told.
    """
    totals.settle()
    losses.settle()
    status = session.saver.status
    more = closing_notes(
        failed_saves=live.failed_saves, upload_error=status.upload.error, losses_not_finite=losses.not_finite
    )
    return collect_report(
        totals,
        samples,
        steps=live.step - first_step,
        samples_seen=live.samples,
        skipped_steps=live.skipped,
        saves=status.committed,
        save_seconds=status.committed_seconds,
        save_bytes=status.committed_bytes,
        resumed_from=session.resumed_from,
        stopped=live.stop.reason or live.ended,
        host=host(os.environ),
        device=policy.device.type,
        device_name=policy.device.name,
        precision=policy.reason,
        applied=notes.applied,
        notes=(*notes.told, *more),
    )
