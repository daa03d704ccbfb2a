"""Probe: how large a batch the prepared objects can be trained with, found by training and undone afterwards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from efficio_precision import find_batch_size, without_trace

from ._live import Live
from ._losses import Losses
from ._session import Session
from ._stepping import Stepping


def probe_batch_size(
    train: Callable[[int], Any],
    *,
    session: Session,
    stepping: Stepping,
    live: Live,
    device: torch.device,
    tell: Callable[[str], None],
    start: int,
    limit: int,
    headroom: float,
) -> int:
    """Find the largest batch that fits, and say what it would gain.

    Args:
        train: Trains one step on a batch of so many samples, as a body does.
        session: Whose objects are put back.
        stepping: Of the run; what it has added is thrown away.
        live: Of the run; put back.
        device: Waited for when a step is timed.
        tell: Takes a sentence for the user.
        start: As for `find_batch_size`, like the rest.
        limit: The largest answer.
        headroom: Room beyond the answer.

    Raises:
        RuntimeError: In the body of a loop, or not even one sample fits.
        ValueError: An argument makes no sense.
    """
    if live.loop is not None:
        raise RuntimeError(f"a batch size cannot be tried inside loop {live.loop!r}: call it before the loop")
    rates: dict[int, float] = {}
    moved, before = session.changes.seen, dataclasses.replace(live)
    losses, stepping.losses = stepping.losses, Losses(tell=lambda _: None)

    def fits(size: int) -> None:
        live.group += 1
        live.group_size, live.group_ends, live.share = 1, True, 1.0
        train(size)  # makes what is made once
        live.group += 1
        begun = time.perf_counter()
        train(size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates[size] = size / max(time.perf_counter() - begun, 1e-9)

    session.fence()
    try:
        with without_trace(*session.objects.values()):
            try:
                found = find_batch_size(fits, start=start, limit=limit, headroom=headroom)
            finally:
                stepping.drop_gradients()
    finally:
        stepping.losses = losses
        for field in dataclasses.fields(live):
            if field.name != "group":  # whose numbers must not come twice
                setattr(live, field.name, getattr(before, field.name))
        if not moved:
            session.changes.settle()
    tell(_finding(found, rates, limit=limit, headroom=headroom))
    return found


def _finding(found: int, rates: dict[int, float], *, limit: int, headroom: float) -> str:
    room = "the limit" if found == limit else f"with {headroom:.0%} to spare"
    text = f"batches of {found} samples fit ({room})"
    smallest, nearest = min(rates), min(rates, key=lambda size: abs(size - found))
    if nearest == smallest:
        return text
    return (
        f"{text}: {rates[nearest] / rates[smallest]:.2g} times the samples a second of batches of {smallest}"
    )
