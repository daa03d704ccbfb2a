"""The state of live objects as a tree, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ._checkpoint import CheckpointError
from ._module import load_module, module_problems, module_state, parameter_names
from ._optimizer import load_optimizer, optimizer_problems, optimizer_state, outside_names
from ._tree import Tree, copied

logger = logging.getLogger(__name__)

_CODE: Final = (FunctionType, MethodType, BuiltinFunctionType)


@dataclass(frozen=True)
class Placed:
    """What `put_snapshot` did.

    Args:
        restored: Names of the objects that were loaded.
        left_alone: Objects that the tree does not hold; they are as they were.
        unused: Names in the tree without an object.
        by_place: Optimizer parameters outside all modules, which were matched by group and place only.
    """

    restored: tuple[str, ...]
    left_alone: tuple[str, ...]
    unused: tuple[str, ...]
    by_place: tuple[str, ...]


def snapshot_tree(objects: Mapping[str, object]) -> dict[str, Tree]:
    """Return the states of objects as one tree whose tensors are the live ones.

    For a saver that copies them itself: the tree changes with the next step of training.

    Args:
        objects: By name: modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: An object has no such pair of methods.
    """
    named = parameter_names(_modules(objects))
    return {name: _state_of(name, thing, named) for name, thing in objects.items()}


def take_snapshot(objects: Mapping[str, object]) -> dict[str, Tree]:
    """Return a copy of the states of objects on the CPU; nothing that is trained later changes it.

    Names of modules carry no prefix of `torch.compile`, DataParallel or DistributedDataParallel. The state of an optimizer
    goes by the names of its parameters.

    Args:
        objects: By name: modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: An object has no such pair of methods, or its state holds what cannot be stored; the message names it.
    """
    return cast("dict[str, Tree]", copied(snapshot_tree(objects)))


def put_snapshot(
    tree: Mapping[str, Tree],
    objects: Mapping[str, object],
    *,
    beside: Mapping[str, object] | None = None,
) -> Placed:
    """Load the states of a tree into objects of the same names.

    All of it is checked before any object is touched. Modules come first, then other objects and schedulers, and optimizers
    last, so that learning rates are the stored ones also when a new scheduler has written its own into the optimizer. The
    tree is not changed and shares no memory with the objects afterwards.

    Args:
        tree: From `take_snapshot`, or loaded.
        objects: By name, as for `take_snapshot`; loaded in place.
        beside: Objects that are not loaded, such as a model that was restored before its optimizer was made: their modules
            give parameters the names under which they were stored.

    Raises:
        CheckpointError: Something does not fit, listed in one message, and nothing was touched; or an object refused its
            state half-way, and the message names it and those that were loaded before it.
        TypeError: An object has no ``state_dict`` and ``load_state_dict``.
    """
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"a snapshot is a dict of states by name, not a {type(tree).__name__}")
    named = parameter_names(_modules({**(beside or {}), **objects}))
    chosen = {name: thing for name, thing in objects.items() if name in tree}
    problems = []
    for name, thing in objects.items():
        _check_stateful(name, thing)
        if name in chosen:
            problems += [f"{name}: {problem}" for problem in _problems(thing, tree[name], named)]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit, and nothing was changed: {'; '.join(problems)}")
    loaded: list[str] = []
    for name in sorted(chosen, key=lambda name: _rank(chosen[name])):
        try:
            _loader(chosen[name], named)(tree[name])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            before = (
                f"; loaded before it: {', '.join(loaded)}" if loaded else "; nothing was loaded before it"
            )
            raise CheckpointError(
                f"{name} ({type(chosen[name]).__name__}) refused its state: {error}{before}"
            ) from error
        loaded.append(name)
    return Placed(
        restored=tuple(loaded),
        left_alone=tuple(name for name in objects if name not in tree),
        unused=tuple(name for name in tree if name not in objects),
        by_place=tuple(
            f"{name}: {parameter}"
            for name, thing in chosen.items()
            if isinstance(thing, Optimizer)
            for parameter in outside_names(thing, named)
        ),
    )


def _state_of(name: str, thing: object, named: Mapping[str, Tensor]) -> Tree:
    _check_stateful(name, thing)
    if isinstance(thing, nn.Module):
        return module_state(thing)
    if isinstance(thing, Optimizer):
        return optimizer_state(thing, named)
    state = thing.state_dict()  # type: ignore[attr-defined]
    if isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
        # Functions are code: the scheduler's constructor makes them again.
        plain = {key: value for key, value in state.items() if not isinstance(value, _CODE)}
        return {"scheduler": type(thing).__name__, "state": plain}
    return state


def _problems(thing: object, stored: Tree, named: Mapping[str, Tensor]) -> list[str]:
    if isinstance(thing, nn.Module):
        return module_problems(thing, stored)
    if isinstance(thing, Optimizer):
        return optimizer_problems(thing, stored, named)
    if isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
        if not isinstance(stored, Mapping) or not {"scheduler", "state"} <= stored.keys():
            return ["the checkpoint holds no state of a scheduler"]
        if stored["scheduler"] != type(thing).__name__:
            return [f"it is {type(thing).__name__} here and {stored['scheduler']} in the checkpoint"]
    return []


def _loader(thing: Any, named: Mapping[str, Tensor]) -> Callable[[Tree], None]:
    if isinstance(thing, nn.Module):
        return lambda stored: load_module(thing, stored)
    if isinstance(thing, Optimizer):
        return lambda stored: load_optimizer(thing, stored, named)
    if isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
        return lambda stored: thing.load_state_dict(copied(stored["state"]))
    return lambda stored: _load_other(thing, stored)


def _load_other(thing: Any, stored: Tree) -> None:
    if stored == {} and _is_scaler(thing):
        # A disabled scaler stores nothing, and an enabled one refuses that.
        logger.info("the checkpoint holds no state of a gradient scaler; it starts with its own scale")
        return
    thing.load_state_dict(copied(stored))


def _is_scaler(thing: object) -> bool:
    return any(
        kind.__name__ == "GradScaler" and kind.__module__.startswith("torch.") for kind in type(thing).__mro__
    )


def _rank(thing: object) -> int:
    if isinstance(thing, nn.Module):
        return 0
    if isinstance(thing, Optimizer):
        return 3
    return 2 if isinstance(thing, (LRScheduler, ReduceLROnPlateau)) else 1


def _modules(objects: Mapping[str, object]) -> dict[str, nn.Module]:
    return {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}


def _check_stateful(name: str, thing: object) -> None:
    if not (
        callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    ):
        raise TypeError(
            f"{name} is a {type(thing).__name__} without state_dict and load_state_dict; leave it out"
        )
