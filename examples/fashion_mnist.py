"""Read the FashionMNIST subset that lies beside the examples."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch

FOLDER = Path(__file__).parent / "data" / "fashion_mnist"
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def load(split: Literal["train", "test"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one split into memory.

    Args:
        split: ``"train"`` (10,000 images) or ``"test"`` (2,000 images).

    Returns:
        Images, uint8 of shape (N, 1, 28, 28), and labels, int64 of shape (N,), both on the CPU.

    Raises:
        FileNotFoundError: If the file is not there.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is not known; give 'train' or 'test'")
    path = FOLDER / f"{split}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; take it from the repository or make it again with make_subset.py in that folder"
        )
    with np.load(path, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()
