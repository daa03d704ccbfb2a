"""Compiling: `torch.compile` where it pays within the budget, and what it has built, carried from session to session."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

_COLD_SECONDS: Final = 90.0
_WARM_SECONDS: Final = 20.0
"""Estimates of what compiling a model takes without, and with, what another session has built. How long it really takes depends on the
model: on two cores it is a minute or more for most, and some seconds for the smallest."""

_PAYS_BACK: Final = 10.0
"""It is worth it when this many times its own time is left: compiled steps are faster by a part, not by a multiple."""

_MOST_BYTES: Final = 64 * 2**20
"""More is not carried: each checkpoint would hold it."""


class Compiling:
    """Decides, compiles, and has a state: what the compiler has built in this session or in an earlier one.

    Args:
        wanted: Whether models are to be compiled at all.
        device: Name of the device; what was built for another one is not used.

    Attributes:
        is_on: Whether models are compiled in this session.

    Raises:
        ValueError: It is wanted and this torch cannot do it in place.
    """

    def __init__(self, wanted: bool, *, device: str) -> None:
        if wanted and not hasattr(nn.Module, "compile"):
            raise ValueError(f"compile_models=True needs torch 2.2 or newer, this is {torch.__version__}")
        self.is_on = False
        self._wanted = wanted
        self._made_for = {"torch": str(torch.__version__), "device": device, "machine": platform.machine()}
        self._carried: dict[str, Any] = {}
        self._artifacts: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """What was built, with what it was built for; what was loaded, where nothing was built here."""
        if self.is_on:
            self._take_built()
        if self._artifacts is None:
            return dict(self._carried)
        return {**self._made_for, "artifacts": self._artifacts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what an earlier session has built; it is used when something is compiled."""
        self._carried = dict(state)

    def compile(self, models: Iterable[nn.Module], *, seconds_left: float) -> list[str]:
        """Compile models in place, if that pays; they are built when they first compute.

        Args:
            models: Their names and states stay as they are.
            seconds_left: Of the budget.

        Returns:
            What to say about it.
        """
        models = list(models)
        if not self._wanted or not models:
            return []
        is_warm = bool(self._carried) and all(
            self._carried.get(key) == value for key, value in self._made_for.items()
        )
        takes = _WARM_SECONDS if is_warm else _COLD_SECONDS
        if not self.is_on and seconds_left < _PAYS_BACK * takes:
            return [
                f"not compiled: about {takes:.0f} s for it would not pay back in the {seconds_left / 60:.0f} minutes that are left"
            ]
        if is_warm and not self.is_on and hasattr(torch.compiler, "load_cache_artifacts"):
            torch.compiler.load_cache_artifacts(self._carried["artifacts"].numpy().tobytes())
        self.is_on = True
        for model in models:
            model.compile()
        return ["compiled by torch.compile" + (", with what an earlier session has built" if is_warm else "")]

    def _take_built(self) -> None:
        """Take what the compiler has built; the same tensor as before if that is the same."""
        if not hasattr(torch.compiler, "save_cache_artifacts"):  # before torch 2.7
            return
        found = torch.compiler.save_cache_artifacts()
        if found is None or len(found[0]) > _MOST_BYTES:
            return
        if self._artifacts is None or self._artifacts.numpy().tobytes() != found[0]:
            self._artifacts = torch.frombuffer(bytearray(found[0]), dtype=torch.uint8)
