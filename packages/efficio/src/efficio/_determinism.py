"""Determinism: torch's switches for runs that repeat bit for bit, set for a while and put back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def reserve_workspace(on: bool) -> None:
    """Choose cuBLAS's deterministic workspace for the process, unless one is chosen.

    torch looks at the choice at the first matrix product of the process and never again: an evaluation before the first loop would
    make each product in the loop raise.

    Args:
        on: False changes nothing.
    """
    if on:
        os.environ.setdefault(_WORKSPACE, ":4096:8")


@contextmanager
def deterministic_kernels(on: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only, and raise where there is none.

    Costs speed on a GPU (typically 5 to 30 %: deterministic convolutions, no autotuning); on a CPU nothing.

    Args:
        on: False changes nothing.

    Source:
        PyTorch's notes on reproducibility; cuBLAS needs `CUBLAS_WORKSPACE_CONFIG` before its first use in the process.
    """
    if not on:
        yield
        return
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    try:
        reserve_workspace(on)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
