"""The names of a module's tensors, whatever it is wrapped in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]


def wrapped_name(module: nn.Module) -> str | None:
    """Return the attribute under which a wrapper holds the module that it wraps; None for a plain module.

    Known are `torch.compile`'s module, DataParallel and DistributedDataParallel. A module of the user's that happens to
    have a child of that name is no wrapper.

    Args:
        module: Any module.

    Example:
        >>> wrapped_name(DataParallel(nn.Linear(2, 2))), wrapped_name(nn.Linear(2, 2))
        ('module', None)
    """
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        return "module"
    # torch._dynamo takes a second to import, and its class is only there when someone has compiled something.
    if type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo"):
        return "_orig_mod"
    return None


def clean_prefixes(module: nn.Module) -> dict[str, str]:
    """Return for the prefix of each submodule the one it would have without wrappers.

    Args:
        module: The whole tree below it is walked.

    Example:
        >>> clean_prefixes(DataParallel(nn.Sequential(nn.Linear(2, 2))))
        {'': '', 'module.': '', 'module.0.': '0.'}
    """
    prefixes: dict[str, str] = {}

    def visit(part: nn.Module, raw: str, clean: str) -> None:
        prefixes[raw] = clean
        inner = wrapped_name(part)
        for name, child in part._modules.items():
            if child is not None:
                visit(child, f"{raw}{name}.", clean if name == inner else f"{clean}{name}.")

    visit(module, "", "")
    return prefixes


def clean_names(names: Any, prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return for each name that a module gives its clean one.

    Args:
        names: Keys of a state dict, or names of parameters.
        prefixes: From `clean_prefixes`.

    Example:
        >>> clean_names(["module.0.weight"], {"": "", "module.": "", "module.0.": "0."})
        {'module.0.weight': '0.weight'}
    """
    cleaned = {}
    for name in names:
        end = name.rfind(".") + 1
        while name[:end] not in prefixes:
            end = name.rfind(".", 0, end - 1) + 1
        cleaned[name] = prefixes[name[:end]] + name[end:]
    return cleaned


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict with clean names; its tensors are the live ones.

    Args:
        module: Wrapped or not. Buffers that are not persistent are not in it, as in torch.
    """
    state = module.state_dict()
    names = clean_names(state, clean_prefixes(module))
    return {names[name]: value for name, value in state.items()}


def module_problems(module: nn.Module, stored: Any) -> list[str]:
    """Return what keeps a stored state from fitting a module; nothing is changed.

    Args:
        module: Wrapped or not.
        stored: What `module_state` returned, on the CPU.
    """
    if not isinstance(stored, Mapping):
        return [f"the checkpoint holds a {type(stored).__name__} and no state of a module"]
    live = module_state(module)
    problems: list[str] = []
    cast: list[str] = []
    missing = sorted(live.keys() - stored.keys())
    unexpected = sorted(map(str, stored.keys() - live.keys()))
    if missing:
        problems.append(f"not in the checkpoint: {_some(missing)}")
    if unexpected:
        problems.append(f"not in the module: {_some(unexpected)}")
    for name in sorted(live.keys() & stored.keys()):
        here, there = live[name], stored[name]
        if isinstance(here, UninitializedTensorMixin):
            continue
        if isinstance(here, Tensor) and (not isinstance(there, Tensor) or here.shape != there.shape):
            shape = tuple(there.shape) if isinstance(there, Tensor) else type(there).__name__
            problems.append(f"{name} is {tuple(here.shape)} here and {shape} in the checkpoint")
        elif isinstance(here, Tensor) and here.dtype != there.dtype:
            cast.append(f"{name} is {_dtype(here)} here and {_dtype(there)} in the checkpoint")
    if cast:
        # Rounding in silence would be another run; which cast is meant is the caller's to say.
        problems.append(f"{_some(cast)}: load it in the stored dtype, and cast the module afterwards")
    return problems


def load_module(module: nn.Module, stored: Mapping[str, Any]) -> None:
    """Copy a stored state into a module; parameters keep their device, dtype and memory format.

    Args:
        module: Its parameters and buffers are overwritten.
        stored: Fits it: `module_problems` found nothing.
    """
    live = module.state_dict()
    names = clean_names(live, clean_prefixes(module))
    state: OrderedDict[str, Any] = OrderedDict((name, stored[names[name]]) for name in live)
    # Versions of modules travel in this attribute; without it torch takes a state for one of an old version.
    state._metadata = getattr(live, "_metadata", None)  # type: ignore[attr-defined]
    with torch.no_grad():
        module.load_state_dict(state, strict=True)


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return every name of every parameter, ``<object>.<clean name>``; tied ones have several.

    Args:
        modules: By the name of the object.

    Example:
        >>> list(parameter_names({"model": nn.Linear(2, 2)}))
        ['model.weight', 'model.bias']
    """
    named: dict[str, Tensor] = {}
    for owner, module in modules.items():
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, clean in clean_names(parameters, clean_prefixes(module)).items():
            named[f"{owner}.{clean}"] = parameters[name]
    return named


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
