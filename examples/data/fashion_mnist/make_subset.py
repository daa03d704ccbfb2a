"""Make train.npz and test.npz from the four original FashionMNIST files.

    python make_subset.py FOLDER [OUTPUT]

FOLDER holds the four original ``*-ubyte.gz`` files. Two ways to get them:

- Debian and Ubuntu: ``apt-get download dataset-fashion-mnist`` and ``dpkg -x dataset-fashion-mnist_*.deb x``;
  they are in ``x/usr/share/datasets/fashion-mnist``.
- torchvision: ``torchvision.datasets.FashionMNIST("x", download=True)``; they are in ``x/FashionMNIST/raw``.

Of each class the first 1,000 training images and the first 200 test images are taken, in their original order,
with their original pixels. The same input gives the same bytes again, with the same zlib; the digests that are
printed are those of the pixels and labels, so they do not depend on the compression at all.
"""

import gzip
import hashlib
import sys
from pathlib import Path

import numpy as np

PARTS = {"train": ("train", 1000), "test": ("t10k", 200)}
CLASSES = 10


def read_idx(path: Path) -> np.ndarray:
    """Read one gzipped IDX file of unsigned bytes; the magic number says how many dimensions follow."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\x00\x00\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes; give the original FashionMNIST files")
    dimensions = data[3]
    shape = np.frombuffer(data, dtype=">u4", count=dimensions, offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape.astype(int))


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted indices of the first ``count`` samples of every class."""
    chosen = [np.flatnonzero(labels == label)[:count] for label in range(CLASSES)]
    short = [label for label, indices in enumerate(chosen) if len(indices) < count]
    if short:
        raise ValueError(
            f"classes {short} have fewer than {count} images; give the original FashionMNIST files"
        )
    return np.sort(np.concatenate(chosen))


def digest(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the SHA-256 of the pixels followed by the labels."""
    return hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()


def main(source: Path, output: Path) -> None:
    """Write both files to ``output`` and print their digests."""
    for split, (prefix, count) in PARTS.items():
        images = read_idx(source / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(source / f"{prefix}-labels-idx1-ubyte.gz")
        chosen = first_of_each_class(labels, count)
        images, labels = images[chosen], labels[chosen]
        path = output / f"{split}.npz"
        np.savez_compressed(path, images=images, labels=labels)
        print(f"{path.name}  {images.shape}  {path.stat().st_size} bytes  {digest(images, labels)}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[-1]) if len(sys.argv) == 3 else Path(__file__).parent)
