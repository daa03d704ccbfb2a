"""Position: where in its data a training is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Position:
    """A place between two batches.

    Attributes:
        epoch: Epochs begun before this one, from 0.
        samples: Samples of this epoch that the loop has taken; what a worker has fetched ahead does not count.
        state: What a sampler or a stream with a state of its own needs beside these, from its `state_dict`; None for others.
    """

    epoch: int = 0
    samples: int = 0
    state: Any = field(default=None, compare=False)


def check_position(position: Position) -> None:
    """See that a position can be one.

    Raises:
        ValueError: It has a negative number.
    """
    if position.epoch < 0 or position.samples < 0:
        raise ValueError(f"{position} has a negative number: epochs and samples count from 0")
