"""A validation that leaves no trace in the training."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.mps
from torch import nn

from ._autocast import autocast
from ._policy import Policy


@contextmanager
def evaluating(*models: nn.Module, policy: Policy | None = None) -> Iterator[None]:
    """Evaluate models inside this `with`: eval mode, no gradients, and afterwards all as it was.

    Each module gets its own training flag back, so a BatchNorm that was frozen in eval mode stays
    frozen. Modes are changed through `train()`, so modules that act on it (merging adapters, say)
    act on the way back as well. The states of `random`, NumPy and torch's generators, on CPU and on
    the accelerators in use, are put back too: how often a run is validated does not change what it
    trains.

    Args:
        models: The models that are evaluated.
        policy: With one, the body runs under its autocast.

    Raises:
        TypeError: A model is not an nn.Module.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"evaluating() takes modules, got {type(model).__name__}; pass the model itself")
    flags = [(module, module.training) for model in models for module in model.modules()]
    with kept_generators():
        try:
            for model in models:
                model.eval()
            with torch.no_grad(), nullcontext() if policy is None else autocast(policy):
                yield
        finally:
            _restore_flags(flags)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put `random`, NumPy's and torch's generators, on CPU and on the accelerators in use, back to what they were."""
    put_generators_back = _remember_generators()
    try:
        yield
    finally:
        for put_back in put_generators_back:
            put_back()


def _restore_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    # Parents come before their children: train() on a parent sets these too, and each is then corrected.
    for module, training in flags:
        if module.training != training:
            module.train(training)
    for module, training in flags:
        if module.training != training:
            module.training = training


def _remember_generators() -> list[Callable[[], object]]:
    restore: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    # Looked up, not imported: who has not loaded NumPy's generators draws nothing from them.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        restore.append(partial(numpy_random.set_state, numpy_random.get_state()))
    # A CUDA or XPU generator is a seed and an offset kept on the host: no synchronisation.
    for backend in (torch.cuda, getattr(torch, "xpu", None)):
        if backend is not None and backend.is_initialized():
            restore += [
                partial(backend.set_rng_state, backend.get_rng_state(index), index)
                for index in range(backend.device_count())
            ]
    if torch.backends.mps.is_available():
        restore.append(partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    return restore
