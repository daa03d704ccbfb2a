"""A trial of training that leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._evaluation import kept_generators


@contextmanager
def without_trace(*objects: Any) -> Iterator[None]:
    """Put objects and random generators back to what they were, whatever the body trains and however it ends.

    Parameters and the tensors of optimizers keep their identity, their memory and their gradients. Copies are made on the CPU
    meanwhile: they take no memory on the device.

    Args:
        objects: Modules (all parameters and buffers, and the training flag of each part), optimizers, and whatever else has
            `state_dict` and `load_state_dict`, such as schedulers and loss scalers.

    Raises:
        TypeError: An object is none of these.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        >>> before = layer.weight.item()
        >>> with without_trace(layer, optimizer):
        ...     layer(torch.ones(1)).backward()
        ...     optimizer.step()
        >>> layer.weight.item() == before, layer.weight.grad
        (True, None)
    """
    with ExitStack() as stack:
        stack.enter_context(kept_generators())
        inside = {id(p) for thing in objects if isinstance(thing, nn.Module) for p in thing.parameters()}
        for thing in objects:
            stack.callback(_remembered(thing, inside))
        yield


def _remembered(thing: Any, inside: set[int]) -> Callable[[], object]:
    if isinstance(thing, nn.Module):
        return _remembered_module(thing)
    if isinstance(thing, Optimizer):
        return _remembered_optimizer(thing, inside)
    if not (
        callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    ):
        raise TypeError(
            f"{type(thing).__name__} has no state_dict and load_state_dict, so it could not be put back; leave it out"
        )
    state = copy.deepcopy(thing.state_dict())
    drop: Callable[[], None] | None = getattr(thing, "drop_step", None)

    def put_back() -> None:
        if drop is not None:
            drop()
        thing.load_state_dict(state)

    return put_back


def _remembered_module(module: nn.Module) -> Callable[[], object]:
    tensors = [*module.parameters(), *module.buffers()]
    kept = [_copy_of(tensor) for tensor in tensors]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    flags = [(part, part.training) for part in module.modules()]
    for parameter in module.parameters():
        parameter.grad = None  # a trial that added to it could not be taken away exactly

    def put_back() -> None:
        with torch.no_grad():
            for tensor, copied in zip(tensors, kept, strict=True):
                tensor.copy_(copied)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for part, training in flags:
            part.training = training

    return put_back


def _remembered_optimizer(optimizer: Optimizer, inside: set[int]) -> Callable[[], object]:
    """Remember the state, the hyperparameters, and the parameters that are in none of the modules."""
    # The tensors of the state stay the same objects: others may hold them.
    live: dict[Any, Any] = optimizer.state
    state = {key: _remembered_entry(entry) for key, entry in live.items()}
    groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    owned = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in inside]
    kept = [(parameter, _copy_of(parameter), parameter.grad) for parameter in owned]

    def put_back() -> None:
        for key in [key for key in live if key not in state]:
            del live[key]
        for key, restore in state.items():
            live[key] = restore()
        for group, stored in zip(optimizer.param_groups, groups, strict=True):
            for key in [key for key in group if key != "params" and key not in stored]:
                del group[key]
            for key, value in stored.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)  # a learning rate that a compiled step holds
                else:
                    group[key] = value
        with torch.no_grad():
            for parameter, copied, gradient in kept:
                parameter.copy_(copied)
                parameter.grad = gradient

    return put_back


def _remembered_entry(entry: Any) -> Callable[[], Any]:
    if isinstance(entry, Tensor):
        copied = _copy_of(entry)

        def put_back() -> Tensor:
            with torch.no_grad():
                entry.copy_(copied)
            return entry

        return put_back
    if isinstance(entry, dict):
        parts = {key: _remembered_entry(value) for key, value in entry.items()}

        def put_all_back() -> Any:
            entry.clear()
            entry.update({key: part() for key, part in parts.items()})
            return entry

        return put_all_back
    value = copy.deepcopy(entry)
    return lambda: value


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
