"""Source: a loader as the loop reads it, tuned for the machine and able to start anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from efficio_data import GPULoader, Position, Resumable, measure_loader, resumable, tune_loader

from ._fit import empty_loader_text


def open_source(loader: Any, *, seed: int, device: torch.device) -> tuple[Resumable, tuple[str, ...]]:
    """Tune a loader, make it resumable, and see that it gives something.

    Args:
        loader: A `DataLoader`, a `GPULoader`, or batches in a list.
        seed: The loop's own.
        device: Where the batches go.

    Returns:
        The source, and what was done to the loader in plain words.

    Raises:
        TypeError: It cannot be iterated once an epoch.
        ValueError: It has no batches.
    """
    applied: tuple[str, ...] = ()
    given = loader
    if isinstance(loader, DataLoader):
        settings = measure_loader(loader, device=device, rekeyed=True)
        loader, applied = tune_loader(loader, settings), (settings.reason,)
    elif isinstance(loader, GPULoader):
        applied = (f"the data set lives on {loader.x.device.type}",)
    source = resumable(loader, seed=seed)
    if length(source) == 0:
        raise ValueError(empty_loader_text(given))
    return source, applied


def length(source: Resumable) -> int | None:
    """Batches in an epoch, None where that is not known before."""
    try:
        return len(source)
    except TypeError:
        return None


def epoch_samples(source: Resumable) -> int | None:
    """Samples that an epoch draws from, None where that is not known."""
    size: int | None = getattr(source, "epoch_samples", None)
    return size


def next_epoch(source: Resumable, epoch: int) -> Position:
    """The begin of the epoch behind this one, with what the source remembers from epoch to epoch."""
    state = getattr(source, "epoch_state", None)
    return Position(epoch + 1, state=None if state is None else state())


def source_notes(source: Resumable) -> tuple[str, ...]:
    """What is not exact about a source, in plain words."""
    notes: tuple[str, ...] = getattr(source, "notes", ())
    if not repeats(source):
        notes += (
            "one sample came out differently when it was built twice: its randomness comes from where no key reaches (a clock, the "
            "system's entropy, a generator hidden in a closure), so a resume will not repeat it",
        )
    return notes


def repeats(source: Resumable) -> bool:
    """Whether a sample comes out the same twice under one key; True where that cannot be tried."""
    probe = getattr(source, "repeats", None)
    return bool(probe()) if probe is not None else True
