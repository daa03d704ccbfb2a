"""Position: where in its data a training is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """A place between two batches.

    Attributes:
        epoch: Epochs begun before this one, from 0.
        samples: Samples of this epoch that the loop has taken; what a worker has fetched ahead does not count.
    """

    epoch: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.samples < 0:
            raise ValueError(
                f"epoch={self.epoch}, samples={self.samples}: a position has no negative numbers"
            )
