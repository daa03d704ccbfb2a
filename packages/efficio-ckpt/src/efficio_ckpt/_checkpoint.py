"""What is said about a stored training state, and the error for one that cannot be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, does not fit, or could not be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint, as its manifest describes it.

    Args:
        step: Optimizer steps done when it was taken.
        name: Folder of the checkpoint inside its storage.
        mode: How tensors are coded; ``"exact"`` keeps every bit.
        created: Unix time in seconds at which it was written.
        bytes: Size of its data files together.
        run_id: Identity of the run that wrote it, if it gave one.
        metadata: What the caller wanted to be kept beside it, of JSON types.
    """

    step: int
    name: str
    mode: str
    created: float
    bytes: int
    run_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
