"""Compiling: `torch.compile` where it pays within the budget, and what it has built, carried from session to session."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

_COLD_SECONDS: Final = 90.0
_WARM_SECONDS: Final = 20.0
"""What compiling a model has been seen to take, about, without what another session has built and with it. Two cores and a T4 take longer."""

_PAYS_BACK: Final = 10.0
"""A compiled step is a fifth faster, say: compiling is worth it when this many times its own time is left."""

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

    def state_dict(self) -> dict[str, Any]:
        """What was built, with what it was built for; what was loaded, where nothing was built here."""
        built = self._built() if self.is_on else None
        if built is None:
            return dict(self._carried)
        return {**self._made_for, "artifacts": torch.frombuffer(bytearray(built), dtype=torch.uint8)}

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

    @staticmethod
    def _built() -> bytes | None:
        if not hasattr(torch.compiler, "save_cache_artifacts"):  # before torch 2.7
            return None
        found = torch.compiler.save_cache_artifacts()
        return None if found is None or len(found[0]) > _MOST_BYTES else bytes(found[0])
