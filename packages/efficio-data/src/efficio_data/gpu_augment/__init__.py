"""Augmentation of a whole batch where it lies, with parameters of its own for every image in it.

Each transform maps ``(N, C, H, W)``, uint8 or floating point, to a batch on the same device, and leaves its input
as it was. Random parameters are drawn on the CPU from torch's global generator, in one go for the batch, and sent
as one small tensor: a T4, an A100 and a CPU draw the same augmentation, the number of draws depends on the
shape of the batch alone, and seeding ``torch.default_generator`` before a batch is all that it takes to have that batch again.

A transform with parameters can be taken apart: ``apply(batch, draw(batch.shape))`` is what calling it does, and
the same parameters can be applied to images and to their masks.
"""

from ._affine import RandomAffine
from ._colour import RandomBrightness, RandomContrast
from ._compose import Compose
from ._crop import RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from ._pointwise import Normalize, RepeatChannels, ToFloat
from ._resize import RandomResizedCrop

__all__ = [
    "Compose",
    "Normalize",
    "RandomAffine",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "RepeatChannels",
    "ToFloat",
]
