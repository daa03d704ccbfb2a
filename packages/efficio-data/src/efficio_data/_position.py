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


def check_position(position: Position) -> None:
    """See that a position can be one.

    Raises:
        ValueError: It has a negative number.
    """
    if position.epoch < 0 or position.samples < 0:
        raise ValueError(f"{position} has a negative number: epochs and samples count from 0")
