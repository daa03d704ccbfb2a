"""More training out of every GPU hour, and a resume that is the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import efficio_data
from efficio_ckpt import CheckpointError
from efficio_data import GPULoader, on_inputs, tune_loader

from ._run import Run

if TYPE_CHECKING:
    from efficio_data import CachedImageDataset, ImageCache, gpu_augment

__all__ = [
    "CachedImageDataset",
    "CheckpointError",
    "GPULoader",
    "ImageCache",
    "Run",
    "gpu_augment",
    "on_inputs",
    "tune_loader",
]
__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    if name in ("CachedImageDataset", "ImageCache", "gpu_augment"):  # which efficio_data imports late
        return getattr(efficio_data, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
