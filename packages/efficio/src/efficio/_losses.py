"""Losses: whether they are finite, without waiting for the device at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

TOGETHER: Final = 64
"""Losses that are looked at together."""


class Losses:
    """Looks at many losses at once, some steps later, and says which was the first that was not finite.

    On a GPU the answer is copied while training goes on, and read when the next ones are looked at.

    Args:
        tell: Takes a sentence for the user.

    Attributes:
        not_finite: How many there were.
        seen: Those that were not looked at yet, each with the optimizer steps done, the epoch and the position in it.
    """

    def __init__(self, *, tell: Callable[[str], None]) -> None:
        self.not_finite = 0
        self.seen: list[tuple[Tensor, int, int, int]] = []
        self._tell = tell
        self._under_way: tuple[Tensor, list[tuple[int, int, int]], Any] | None = None

    def settle(self) -> None:
        """Look at all that were noted; waits for the device."""
        self.look()
        self._read()

    def look(self) -> None:
        """Look at all that were noted, and read what was found the last time."""
        self._read()
        places = [(step, epoch, position) for _, step, epoch, position in self.seen]
        seen = [loss for loss, *_ in self.seen]
        self.seen.clear()
        if not seen:
            return
        device = seen[0].device
        try:
            finite = torch.stack(seen).isfinite()
        except RuntimeError:  # of unlike shapes, or on several devices
            finite = torch.stack([loss.to(device).isfinite().all() for loss in seen])
        copied = None
        if device.type == "cuda":
            host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
            finite = host.copy_(finite, non_blocking=True)
            copied = torch.cuda.current_stream(device).record_event()
        self._under_way = finite, places, copied
        if copied is None:
            self._read()

    def _read(self) -> None:
        if self._under_way is None:
            return
        finite, places, copied = self._under_way
        self._under_way = None
        if copied is not None:
            copied.synchronize()  # it was copied some tens of steps ago
        self.found([place for place, good in zip(places, finite.tolist(), strict=True) if not good])

    def found(self, places: list[tuple[int, int, int]]) -> None:
        """Count losses that are not finite, and tell of the first of all.

        Args:
            places: Of each the optimizer steps done, the epoch and the position in it.
        """
        if places and not self.not_finite:
            step, epoch, position = places[0]
            self._tell(
                f"the loss was NaN or infinite after step {step:,}, in the batch behind sample {position:,} of epoch {epoch}: "
                "look at that batch, lower the learning rate, or clip the gradients"
            )
        self.not_finite += len(places)
