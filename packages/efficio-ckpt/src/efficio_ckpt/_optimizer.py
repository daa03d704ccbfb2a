"""The state of an optimizer, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

_GROUP_NAMES: Final = frozenset({"params", "param_names"})

_MACHINE_KEYS = ("fused", "foreach", "capturable")


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return an optimizer's state with names in the place of numbers; its tensors are the live ones.

    The values of parameters that belong to none of the modules come along, as nothing else stores them.

    Args:
        optimizer: Any torch optimizer.
        named: Parameters of the modules by all their names.
    """
    state = optimizer.state_dict()
    names = group_names(optimizer, named)
    flat = [name for group in names for name in group]
    inside = {id(parameter) for parameter in named.values()}
    groups = [
        {"params": members, **{key: value for key, value in group.items() if key not in _GROUP_NAMES}}
        for members, group in zip(names, state["param_groups"], strict=True)
    ]
    return {
        "optimizer": type(optimizer).__name__,
        "param_groups": groups,
        "state": {flat[key] if isinstance(key, int) else key: value for key, value in state["state"].items()},
        "outside": {
            name: parameter
            for name, parameter in zip(flat, _parameters(optimizer), strict=True)
            if id(parameter) not in inside
        },
        "more": {key: value for key, value in state.items() if key not in {"state", "param_groups"}},
    }


def group_names(optimizer: Optimizer, named: Mapping[str, Tensor]) -> list[list[str]]:
    """Return a name for each parameter of each group.

    A parameter outside the modules is called ``@name`` if the optimizer was given names, else ``@<group>.<place>``.

    Args:
        optimizer: Any torch optimizer.
        named: Parameters of the modules by all their names; the first name of each is taken.
    """
    first: dict[int, str] = {}
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    names = []
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        names.append(
            [
                first.get(id(parameter)) or (f"@{given[place]}" if given else f"@{number}.{place}")
                for place, parameter in enumerate(group["params"])
            ]
        )
    return names


def optimizer_problems(optimizer: Optimizer, stored: Any, named: Mapping[str, Tensor]) -> list[str]:
    """Return what keeps a stored state from fitting an optimizer; nothing is changed.

    Args:
        optimizer: Any torch optimizer.
        stored: What `optimizer_state` returned, on the CPU.
        named: Parameters of the modules by all their names.
    """
    if (
        not isinstance(stored, Mapping)
        or not {"optimizer", "param_groups", "state", "outside"} <= stored.keys()
    ):
        return ["the checkpoint holds no state of an optimizer"]
    kind = type(optimizer).__name__
    if stored["optimizer"] != kind:
        return [f"it is {kind} here and {stored['optimizer']} in the checkpoint"]
    groups = stored["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        return [
            f"it has {len(optimizer.param_groups)} parameter groups here and {len(groups)} in the checkpoint"
        ]
    problems = []
    known = _by_name(optimizer, named)
    for number, (group, names) in enumerate(zip(groups, group_names(optimizer, named), strict=True)):
        members = {id(parameter) for parameter in optimizer.param_groups[number]["params"]}
        stored_members = {name: known.get(name) for name in group["params"]}
        strangers = [
            name
            for name, parameter in stored_members.items()
            if parameter is None or id(parameter) not in members
        ]
        covered = {id(parameter) for parameter in stored_members.values() if parameter is not None}
        missing = [name for name in names if id(known[name]) not in covered]
        if strangers:
            problems.append(
                f"group {number} has no parameter {strangers[0]} here, as it has in the checkpoint"
            )
        if missing:
            problems.append(f"group {number} has a parameter {missing[0]} here, which the checkpoint lacks")
    for name, value in stored["outside"].items():
        if name in known and known[name].shape != value.shape:
            problems.append(
                f"{name} is {tuple(known[name].shape)} here and {tuple(value.shape)} in the checkpoint"
            )
    return problems


def load_optimizer(optimizer: Optimizer, stored: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
    """Put a stored state into an optimizer: state by parameter, hyperparameters by group.

    Args:
        optimizer: Its state and the hyperparameters of its groups are replaced, as are the values of parameters outside
            the modules.
        stored: Fits it: `optimizer_problems` found nothing. It is not changed and shares no memory afterwards.
        named: Parameters of the modules by all their names.
    """
    known = _by_name(optimizer, named)
    place = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
    groups = []
    start = 0
    for live, group in zip(optimizer.param_groups, stored["param_groups"], strict=True):
        # A hyperparameter that a newer torch has and the stored group has not keeps its value.
        merged = {**live, **{key: _like(value, live.get(key)) for key, value in group.items()}}
        # How an optimizer computes is of the machine it runs on: what it was made with here holds.
        merged.update({key: live[key] for key in _MACHINE_KEYS if key in live})
        merged["params"] = list(range(start, start + len(live["params"])))
        start += len(live["params"])
        groups.append(merged)
    state: dict[Any, Any] = {}
    for name, entry in stored["state"].items():
        if name in known:
            state[place[id(known[name])]] = _owned(entry, known[name].device)
        else:
            state[name] = _owned(entry, torch.device("cpu"))
    optimizer.load_state_dict({**stored.get("more", {}), "state": state, "param_groups": groups})
    for name, entry in stored["state"].items():
        if name in known and isinstance(entry, Mapping):
            _restore_dtypes(optimizer.state[known[name]], entry)
    _place_counters(optimizer)
    with torch.no_grad():
        for name, value in stored["outside"].items():
            known[name].copy_(value)


def outside_names(optimizer: Optimizer, named: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that belong to none of the modules.

    Args:
        optimizer: Any torch optimizer.
        named: Parameters of the modules by all their names.
    """
    names = [name for group in group_names(optimizer, named) for name in group]
    inside = {id(parameter) for parameter in named.values()}
    return [
        name
        for name, parameter in zip(names, _parameters(optimizer), strict=True)
        if id(parameter) not in inside
    ]


def _restore_dtypes(live: Any, stored: Mapping[str, Any]) -> None:
    """Undo torch's cast of the state to the dtype of the parameter; only the counter of steps is torch's to place."""
    for key, value in stored.items():
        here = live.get(key) if isinstance(live, Mapping) else None
        if (
            key != "step"
            and isinstance(value, Tensor)
            and isinstance(here, Tensor)
            and here.dtype != value.dtype
        ):
            live[key] = value.to(here.device, copy=True)


def _place_counters(optimizer: Optimizer) -> None:
    """Put the counters of steps that the device reads where it reads them, which torch 2.0 leaves on the CPU."""
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            entry = optimizer.state.get(parameter)
            if isinstance(entry, dict) and isinstance(entry.get("step"), Tensor):
                entry["step"] = entry["step"].to(parameter.device, torch.float32)


def _owned(value: Any, device: torch.device) -> Any:
    """Return a copy of what torch would otherwise take over without copying."""
    if isinstance(value, Tensor):
        return value.clone() if device.type == "cpu" else value
    if isinstance(value, dict):
        # torch leaves the counter of steps where it is, on the CPU, for parameters on any device.
        return {
            key: _owned(item, torch.device("cpu") if key == "step" else device) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_owned(item, device) for item in value)
    return value


def _like(value: Any, live: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(live.device if isinstance(live, Tensor) else value.device, copy=True)
    return value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _by_name(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's parameters by every name that they have."""
    parameters = _parameters(optimizer)
    own = {id(parameter) for parameter in parameters}
    known = {name: parameter for name, parameter in named.items() if id(parameter) in own}
    names = [name for group in group_names(optimizer, named) for name in group]
    return {**known, **dict(zip(names, parameters, strict=True))}
