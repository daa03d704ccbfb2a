"""A fed GPU: resumable order, GPU-resident data, image caches and batch augmentation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._gpu_loader import GPULoader
from ._group import grouped
from ._inputs import on_inputs
from ._keys import derive_seed, seed_generators
from ._loader_settings import LoaderSettings, loader_settings, measure_loader, tune_loader
from ._order import epoch_order
from ._position import Position
from ._resumable import Resumable, resumable
from ._split import batch_samples, split_batch
from ._transfer import leaves, prefetch, to_device

if TYPE_CHECKING:
    from . import gpu_augment
    from ._cache_info import CacheInfo
    from ._cache_request import FailedImagesError
    from ._cached_dataset import CachedImageDataset
    from ._image_cache import ImageCache

__all__ = [
    "CacheInfo",
    "CachedImageDataset",
    "FailedImagesError",
    "GPULoader",
    "ImageCache",
    "LoaderSettings",
    "Position",
    "Resumable",
    "batch_samples",
    "derive_seed",
    "epoch_order",
    "gpu_augment",
    "grouped",
    "leaves",
    "loader_settings",
    "measure_loader",
    "on_inputs",
    "prefetch",
    "resumable",
    "seed_generators",
    "split_batch",
    "to_device",
    "tune_loader",
]
__version__ = "0.3.0"

# Imported when they are first asked for: together they take as long as all the rest.
_LATE = {
    "CacheInfo": "._cache_info",
    "CachedImageDataset": "._cached_dataset",
    "FailedImagesError": "._cache_request",
    "ImageCache": "._image_cache",
}


def __getattr__(name: str) -> Any:
    if name == "gpu_augment":
        return import_module(".gpu_augment", __name__)
    if name in _LATE:
        return getattr(import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
