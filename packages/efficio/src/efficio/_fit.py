"""Fit: whether the prepared objects belong together, as far as a training that learns nothing can be told from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from efficio_precision import (
    Policy,
    example_of,
    is_channels_last,
    runs_channels_last,
    to_channels_last,
    unsafe_under_autocast,
)

from ._naming import is_scheduler
from ._words import bce_note, scheduler_note


def fit_notes(objects: Mapping[str, Any]) -> list[str]:
    """What looks wrong about objects that are trained together, in plain words.

    Args:
        objects: All prepared ones by name.

    >>> layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> import torch
    >>> fit_notes({"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), 0.1)})
    []
    >>> len(fit_notes({"model": layer, "optimizer": torch.optim.SGD(other.parameters(), 0.1)}))
    1
    """
    notes = []
    models = [thing for thing in objects.values() if isinstance(thing, nn.Module)]
    owned = {id(parameter) for model in models for parameter in model.parameters()}
    for name, thing in objects.items():
        if isinstance(thing, Optimizer):
            parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
            strange = sum(id(parameter) not in owned for parameter in parameters)
            if strange:
                notes.append(
                    f"{strange} of {len(parameters)} parameters of {name} belong to no prepared model: they are stored by their "
                    "place; make the optimizer from the model that you prepare, if that is not meant"
                )
        elif not isinstance(thing, nn.Module) and callable(getattr(thing, "zero_grad", None)):
            notes.append(
                f"{name} ({type(thing).__name__}) is no torch.optim.Optimizer: run.step() does not step it, do so yourself"
            )
    return notes


def prepared_notes(
    objects: Mapping[str, Any],
    added: Mapping[str, Any],
    unknown: Sequence[str],
    *,
    interval: str | None,
    policy: Policy,
) -> list[str | None]:
    """What there is to say about objects that were just prepared, in plain words; None is nothing.

    Args:
        objects: All prepared ones by name.
        added: Those that are new among them.
        unknown: Names of those that the checkpoint does not hold.
        interval: When schedulers are stepped.
        policy: The number format.
    """
    notes: list[str | None] = [f"not in the checkpoint, so new: {', '.join(unknown)}"] if unknown else []
    notes += fit_notes(objects)
    notes.append(scheduler_note([name for name, thing in added.items() if is_scheduler(thing)], interval))
    notes += number_notes({k: v for k, v in added.items() if isinstance(v, nn.Module)}, policy)
    if policy.dtype != torch.float32:
        models = [thing for thing in objects.values() if isinstance(thing, nn.Module)]
        notes.append(bce_note(unsafe_under_autocast(*models)))
    return notes


def place_models(objects: Mapping[str, Any], device: torch.device, policy: Policy) -> list[nn.Module]:
    """Move the models among objects to the device, and to channels_last where that helps.

    Args:
        objects: By name; models are changed in place, others are left alone.
        device: Where to.
        policy: Whether channels_last may help.

    Returns:
        Those that were put into channels_last here.
    """
    converted = []
    for thing in objects.values():
        if isinstance(thing, nn.Module):
            before = is_channels_last(thing.to(device))
            if is_channels_last(to_channels_last(thing, policy)) and not before:
                converted.append(thing)
    return converted


def try_layout(models: list[nn.Module], batch: Any, policy: Policy) -> list[str]:
    """Put models back that cannot compute in channels_last; each is tried once, with the first batch of images.

    Args:
        models: Those that were converted; emptied.
        batch: On the device.
        policy: For autocast.

    Returns:
        What to say about it.
    """
    example = example_of(batch)
    if example is None:
        return []
    notes = []
    for model in models:
        if not runs_channels_last(model, policy, example):
            model.to(memory_format=torch.contiguous_format)
            notes.append(f"{type(model).__name__} does not run in channels_last and stays contiguous")
    models.clear()
    return notes


def number_notes(models: Mapping[str, nn.Module], policy: Policy) -> list[str]:
    """What is wrong about the number formats of parameters that are to be trained.

    Args:
        models: By name.
        policy: The number format to compute in.

    >>> from efficio_precision import Device
    >>> fp16 = Policy(Device("cpu", "a CPU", None), torch.float16, scale_loss=True)
    >>> number_notes({"model": nn.Linear(1, 1).half()}, fp16)[0][:46]
    'model holds float16 parameters (weight): the l'
    """
    notes = []
    for name, model in models.items():
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        half = [key for key, p in trained.items() if p.dtype == torch.float16]
        brain = [key for key, p in trained.items() if p.dtype == torch.bfloat16]
        complexes = [key for key, p in trained.items() if p.dtype.is_complex]
        if half:
            notes.append(
                f"{name} holds float16 parameters ({half[0]}): "
                + (
                    "the loss scaler cannot unscale their gradients, so the first step will fail"
                    if policy.scale_loss
                    else "small updates are rounded away"
                )
                + "; call .float() on it before run.prepare, run.autocast computes in 16 bit all the same"
            )
        if brain:
            notes.append(
                f"{name} holds bfloat16 parameters ({brain[0]}): updates smaller than 1/256 of a weight are rounded away; call "
                ".float() on it before run.prepare, run.autocast computes in 16 bit all the same"
            )
        if complexes and policy.scale_loss:
            notes.append(
                f"{name} holds complex parameters ({complexes[0]}), whose gradients the loss scaler cannot unscale: give "
                "precision='bf16' or 'fp32'"
            )
    return notes


def empty_loader_text(loader: Any) -> str:
    """Why a loader gives nothing, with the numbers that say so."""
    dataset: Any = getattr(loader, "dataset", None)
    numbers = [f"{len(dataset)} samples"] if hasattr(dataset, "__len__") else []
    numbers += [
        f"{name}={getattr(loader, name)}" for name in ("batch_size", "drop_last") if hasattr(loader, name)
    ]
    found = f" ({', '.join(numbers)})" if numbers else ""
    return f"the {type(loader).__name__} has no batches{found}: give it at least one batch of data"
