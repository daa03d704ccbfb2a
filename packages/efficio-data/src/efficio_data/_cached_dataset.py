"""Cached dataset: an image cache as a dataset of torch, read in whole batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ._image_cache import ImageCache

Sample = tuple[Any, Any]


class Batch(tuple[Sample, ...]):
    """Samples that are views of one tensor of images (N, C, H, W) and one of labels."""

    images: Tensor
    labels: Tensor

    def __new__(cls, images: Tensor, labels: Tensor) -> Batch:
        """Cut the tensors into samples; they are not copied."""
        whole = labels.ndim == 1 and not labels.is_floating_point()
        batch = super().__new__(
            cls, zip(images.unbind(0), labels.tolist() if whole else labels.unbind(0), strict=True)
        )
        batch.images, batch.labels = images, labels
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self.images, self.labels)


class CachedImageDataset(Dataset[Sample]):
    """A map-style dataset over an image cache: (image, label), the image (C, H, W) uint8.

    A label is an int or bool where labels are whole numbers, else a tensor of their dtype. It can be pickled: a worker process
    opens the cache for itself. Memory is what the page cache holds; nothing is loaded in advance.

    Args:
        root: Folder of a complete cache.
        transform: Applied to each image. Without one, batches are read as a whole; with one, image by image.

    Attributes:
        data: The images (N, H, W, C) uint8, read-only, as `GPULoader.from_torchvision` takes them.
        targets: The labels.
    """

    def __init__(
        self, root: str | os.PathLike[str], transform: Callable[[Tensor], Any] | None = None
    ) -> None:
        self.root = Path(root).absolute()
        self.transform = transform
        self._open(ImageCache.open(self.root))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        ((image, label),) = Batch(*self._read([index]))
        return (image if self.transform is None else self.transform(image)), label

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], Batch] | None:
        # None where there is a transform: whoever keys random numbers a sample then asks for samples one by one.
        return self._items if self.transform is None else None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "transform": self.transform, "info": self._info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root, self.transform = state["root"], state["transform"]
        cache = ImageCache.open(self.root)
        if cache.info != state["info"]:
            raise ValueError(
                f"{self.root} has been rebuilt since this dataset was made; make the dataset again"
            )
        self._open(cache)

    @staticmethod
    def collate(samples: Sequence[Sample]) -> Any:
        """Collate for a DataLoader (`collate_fn=CachedImageDataset.collate`) that does not copy a batch read as a whole.

        The images (N, C, H, W) uint8 of such a batch are channels-last in memory. Other samples go to torch's own collate.
        """
        return (
            [samples.images, samples.labels] if isinstance(samples, Batch) else default_collate(list(samples))
        )

    def _open(self, cache: ImageCache) -> None:
        self._info = cache.info
        self.data: npt.NDArray[np.uint8] = np.asarray(cache.images)
        self.targets: npt.NDArray[Any] = cache.labels

    def _items(self, indices: Sequence[int]) -> Batch:
        return Batch(*self._read(indices))

    def _read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = np.asarray(indices, dtype=np.intp)
        size = len(self)
        if rows.size and (rows.min() < -size or rows.max() >= size):
            raise IndexError(
                f"index {rows.min() if rows.min() < -size else rows.max()} is out of range for {size} images"
            )
        rows = np.where(rows < 0, rows + size, rows)
        pixels = np.empty((len(rows), *self.data.shape[1:]), np.uint8)
        # "clip" as the rows are checked: "raise" makes NumPy gather into a second buffer first
        np.take(self.data, rows, axis=0, out=pixels, mode="clip")
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), _label_tensor(self.targets[rows])


def _label_tensor(labels: npt.NDArray[Any]) -> Tensor:
    """Whole numbers become int64, as torch's own collate makes of ints; the rest keeps its dtype where torch has it."""
    if labels.dtype.kind == "u" or (labels.dtype.kind == "i" and labels.ndim == 1):
        labels = labels.astype(np.int64)
    elif labels.dtype.kind == "f" and labels.dtype.itemsize > 8:
        labels = labels.astype(np.float64)
    return torch.from_numpy(labels)
