"""A fed GPU: resumable order, GPU-resident data, image caches and batch augmentation."""

from ._gpu_loader import GPULoader
from ._keys import derive_seed, seed_generators
from ._order import epoch_order
from ._position import Position
from ._resumable import Resumable, resumable

__all__ = [
    "GPULoader",
    "Position",
    "Resumable",
    "derive_seed",
    "epoch_order",
    "resumable",
    "seed_generators",
]
__version__ = "0.3.0"
