"""Order: which sample comes when in an epoch, as a function of seed and epoch alone."""

from __future__ import annotations

import numpy as np
import torch

from ._keys import derive_seed

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def epoch_order(size: int, *, seed: int, epoch: int) -> torch.Tensor:
    """A random order of `range(size)` that depends on nothing but its arguments.

    Each index gets a distinct 64-bit hash and the indices are sorted by it. No library's generator is involved, so the order is
    the same with every version of torch and NumPy, on every platform, which a resume on another machine needs.

    Args:
        size: Number of samples, 0 or more.
        seed: Any int; a loop's own seed when there are several loops.
        epoch: 0 or more.

    Returns:
        (size,) int64 on the CPU, a permutation. About 0.1 s and 24 bytes a sample at a million samples.

    >>> epoch_order(5, seed=0, epoch=0).tolist() == epoch_order(5, seed=0, epoch=0).tolist()
    True
    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    if size < 0 or epoch < 0:
        raise ValueError(f"size={size}, epoch={epoch}: both must be 0 or more")
    start = np.uint64(derive_seed(seed, "order", epoch))
    with np.errstate(over="ignore"):
        keys = np.arange(1, size + 1, dtype=np.uint64)
        keys *= _GAMMA
        keys += start
        keys ^= keys >> np.uint64(30)
        keys *= _M1
        keys ^= keys >> np.uint64(27)
        keys *= _M2
        keys ^= keys >> np.uint64(31)
    return torch.from_numpy(np.argsort(keys))
