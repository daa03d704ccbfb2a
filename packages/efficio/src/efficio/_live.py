"""Live: where a run is at this moment, inside a body too."""

from __future__ import annotations

from dataclasses import dataclass, field

from efficio_budget import Stop


@dataclass
class Live:
    """Counters that move while a body runs; a checkpoint holds what `Session.commit` took of them between two bodies.

    Attributes:
        step: Optimizer steps done.
        skipped: Optimizer steps that the scaler skipped.
        samples: Training samples of this session.
        epoch: Epoch that the current loop is in, from 0.
        place: Place of the batch in its accumulation group, from 0.
        size: Batches in that group.
        in_body: Whether a body of a loop is running.
        stop: Whether and why to stop, as long as that holds.
        ended: Why the last loop ended before its last epoch.
    """

    step: int = 0
    skipped: int = 0
    samples: int = 0
    epoch: int = 0
    place: int = 0
    size: int = 1
    in_body: bool = False
    stop: Stop = field(default_factory=Stop)
    ended: str | None = None

    @property
    def group_ends(self) -> bool:
        """Whether the batch in the body is the last of its accumulation group, so that an optimizer step is due."""
        return self.place + 1 == self.size
