"""Progress: how far a run is, as it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from efficio_data import Position

from ._metrics import Metric, from_tree, to_tree


@dataclass
class Progress:
    """What a checkpoint knows of a run beside the state of its objects, between two optimizer steps.

    Attributes:
        seed: Seed of the run; from it and the position follow order and randomness.
        step: Optimizer steps done.
        skipped: Optimizer steps that the gradient scaler skipped.
        seconds: Seconds that all sessions took up to here.
        loops: Where each loop is, by its name.
        batches: Batches of that epoch that each loop has taken; for the progress bar, the position counts samples.
        lengths: Batches in an epoch of each loop, where known.
        sizes: Samples that an epoch of each loop draws from, where known.
        identities: What tells the data set of each loop from others, where known.
        part_samples: Samples that a body gets at most, since memory ran out; None for whole batches.
        metrics: What the user logged.
    """

    seed: int
    step: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loops: dict[str, Position] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    identities: dict[str, dict[str, Any]] = field(default_factory=dict)
    part_samples: int | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """As nested dicts of numbers."""
        return {
            "seed": self.seed,
            "step": self.step,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "part_samples": self.part_samples,
            "metrics": to_tree(self.metrics),
            "loops": {
                name: {
                    "epoch": at.epoch,
                    "samples": at.samples,
                    "batches": self.batches.get(name, 0),
                    "length": self.lengths.get(name),
                    "size": self.sizes.get(name),
                    "state": at.state,
                    "identity": self.identities.get(name, {}),
                }
                for name, at in self.loops.items()
            },
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Progress:
        """Back from `to_tree`.

        >>> progress = Progress(seed=3, step=7, loops={"0": Position(1, 32)}, batches={"0": 4})
        >>> Progress.from_tree(progress.to_tree()) == progress
        True
        """
        loops: Mapping[str, Mapping[str, Any]] = tree["loops"]
        return cls(
            seed=tree["seed"],
            step=tree["step"],
            skipped=tree["skipped"],
            seconds=tree["seconds"],
            loops={name: Position(at["epoch"], at["samples"], at.get("state")) for name, at in loops.items()},
            batches={name: at["batches"] for name, at in loops.items()},
            lengths={name: at["length"] for name, at in loops.items() if at["length"] is not None},
            sizes={name: at["size"] for name, at in loops.items() if at["size"] is not None},
            # The first checkpoints had none of these.
            identities={name: dict(at["identity"]) for name, at in loops.items() if at.get("identity")},
            part_samples=tree.get("part_samples"),
            metrics=from_tree(tree.get("metrics", {})),
        )
