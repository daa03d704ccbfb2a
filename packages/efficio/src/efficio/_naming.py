"""Naming: under which name each prepared object is stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def object_names(
    objects: Sequence[Any], named: Mapping[str, Any], *, taken: Mapping[str, Any]
) -> dict[str, Any]:
    """The objects by name: the keyword they came with, or their kind with an ordinal.

    The first module is `model`, then `model_2` and so on; likewise `optimizer` and `scheduler`; anything else goes by its type in
    lower case. An object that has a name already keeps it.

    Args:
        objects: Given by position.
        named: Given by keyword.
        taken: Names in use and their objects.

    Raises:
        TypeError: Something has no state to store, or a name stands for another object already.

    >>> layer = nn.Linear(1, 1)
    >>> list(object_names([layer, nn.Linear(2, 2)], {"ema": nn.Linear(1, 1)}, taken={}))
    ['model', 'model_2', 'ema']
    """
    if not objects and not named:
        raise TypeError("nothing was given to prepare: call run.prepare(model, optimizer)")
    known = {id(thing): name for name, thing in taken.items()}
    result: dict[str, Any] = {}
    for thing in objects:
        _check(thing, type(thing).__name__)
        result[known.get(id(thing)) or _free_name(_kind(thing), {*taken, *result, *named})] = thing
    for name, thing in named.items():
        _check(thing, name)
        if name in taken and taken[name] is not thing:
            raise TypeError(
                f"{name!r} was prepared before with another object; give this one another keyword"
            )
        result[known.get(id(thing), name)] = thing
    return result


def loop_name(begun: Mapping[str, int], complete: Collection[str]) -> str:
    """The name of a loop that was not given one: that of the last loop while it is unfinished, else its ordinal.

    Args:
        begun: Epochs of each loop that this process has begun, in order.
        complete: Names of those whose last epoch is trained and stored.

    >>> loop_name({}, ()), loop_name({"0": 2}, ()), loop_name({"0": 2}, {"0"})
    ('0', '0', '1')
    """
    last = list(begun)[-1:]
    if last and last[0] not in complete:
        return last[0]
    ordinal = len(begun)
    while str(ordinal) in begun:  # a name that was given to another loop
        ordinal += 1
    return str(ordinal)


def _kind(thing: Any) -> str:
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, Optimizer):
        return "optimizer"
    if is_scheduler(thing) or isinstance(thing, ReduceLROnPlateau):
        return "scheduler"
    return type(thing).__name__.lower()


def is_scheduler(thing: Any) -> bool:
    """Whether it is a learning-rate scheduler that steps without being told a metric."""
    return isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)


def _free_name(kind: str, taken: set[str]) -> str:
    name, ordinal = kind, 1
    while name in taken:
        ordinal += 1
        name = f"{kind}_{ordinal}"
    return name


def _check(thing: Any, name: str) -> None:
    pair = (getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None))
    if isinstance(thing, type) or not all(map(callable, pair)):
        what = (
            f"the class {thing.__name__} itself" if isinstance(thing, type) else f"a {type(thing).__name__}"
        )
        raise TypeError(
            f"{name} is {what}, which has no state_dict and load_state_dict: prepare models, optimizers, "
            "schedulers and other objects with that pair; loaders go to run.loop"
        )
