"""The states of the global random number generators."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._checkpoint import CheckpointError
from ._tree import Tree

logger = logging.getLogger(__name__)


def rng_state() -> Tree:
    """Return the states of torch's CPU generator, of every CUDA device once CUDA is in use, of `random` and of NumPy."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
        "random": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": dict(np.random.get_state(legacy=False)),
    }


def set_rng_state(tree: Tree) -> None:
    """Put generators back to stored states.

    A state of `random` or NumPy that is damaged is logged, and the others are restored. States of GPUs that are not here
    are left out and logged.

    Args:
        tree: From `rng_state`. Tensors may have changed device or integer type on the way.

    Raises:
        CheckpointError: The state of a torch generator is none; nothing was changed.
    """
    if not isinstance(tree, dict) or "torch" not in tree:
        raise CheckpointError(f"a {type(tree).__name__} without 'torch' is no state of the random generators")
    cpu = _bytes_of(tree["torch"], "torch", torch.get_rng_state().numel())
    stored = tree.get("cuda") or []
    devices = torch.cuda.device_count()
    size = torch.cuda.get_rng_state(0).numel() if _cuda_in_use() else None
    cuda = [_bytes_of(state, f"cuda:{index}", size) for index, state in enumerate(stored[:devices])]
    torch.set_rng_state(cpu)
    for index, state in enumerate(cuda):
        torch.cuda.set_rng_state(state, index)
    if stored and not devices:
        logger.warning("GPU RNG not restored: there is no GPU here")
    elif stored and len(stored) != devices:
        logger.warning(
            "the checkpoint has RNG states of %d GPUs, here are %d: restored those of both",
            len(stored),
            devices,
        )
    for name, restore in [("random", _set_random), ("numpy", _set_numpy)]:
        if name not in tree:
            continue
        try:
            restore(tree[name])
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError) as error:
            logger.warning(
                "RNG state '%s' of the checkpoint is damaged and was not restored: %s", name, error
            )


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _bytes_of(state: Any, name: str, size: int | None) -> Tensor:
    if not isinstance(state, Tensor) or state.is_floating_point() or state.is_complex():
        raise CheckpointError(
            f"RNG state '{name}' of the checkpoint is no tensor of bytes; nothing was changed"
        )
    if size is not None and state.numel() != size:
        raise CheckpointError(
            f"RNG state '{name}' of the checkpoint has {state.numel()} bytes instead of {size}; nothing was changed"
        )
    return state.to("cpu", torch.uint8)


def _set_random(state: Any) -> None:
    words = tuple(int(word) for word in state["words"])
    random.setstate((int(state["version"]), words, state["gauss"]))


def _set_numpy(state: Any) -> None:
    np.random.set_state(state)
