"""Recovery: out-of-memory inside a body, after which its batches come again in smaller parts."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from efficio_data import batch_samples
from efficio_precision import is_oom

from ._live import Live
from ._stepping import Stepping

_MOST_ITEMS: Final = 64
"""Longer lists and dicts of a body's variables are not looked through: that happens in each step."""


class Recovery:
    """The context around a body that may run out of memory; entered anew for each.

    When a body ran out, everything that the group has changed is taken back: gradients are dropped, buffers are put back from a
    copy that was taken at the group's first body, and what the failed body held is freed. The loop then gives the group's
    batches again, each in parts of at most `live.part_samples`.

    Args:
        live: Where the run is; `failed` and `part_samples` are set.
        stepping: Whose gradients are dropped.
        models: Returns the prepared ones.
        tell: Takes a sentence for the user.
    """

    def __init__(
        self,
        live: Live,
        stepping: Stepping,
        *,
        models: Callable[[], Sequence[nn.Module]],
        tell: Callable[[str], None],
    ) -> None:
        self.floor = 1
        self._live = live
        self._stepping = stepping
        self._models = models
        self._tell = tell
        self._group = -1
        self._buffers: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._known: list[set[Any]] = []
        self._versions: list[int] = []
        self._older: list[weakref.ref[Tensor]] = []

    def __enter__(self) -> None:
        live = self._live
        if not live.in_body:
            raise RuntimeError(
                "run.recover_oom() belongs around the body of run.loop: with run.recover_oom(): ..."
            )
        live.recovers = True
        if self._group != live.group:
            self._group = live.group
            self._keep()
        self._older = [weakref.ref(t) for t in graph_tensors(variables_of(sys._getframe(1)).values())]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not is_oom(error):
            return False
        live = self._live
        if self._stepping.has_stepped and not self._take_back_step():
            self._tell(
                "out of memory after an optimizer had changed its parameters in this body, which cannot be taken back: the last "
                "checkpoint counts; make the optimizer with foreach=False, or do less after run.step()"
            )
            return False
        size = batch_samples(live.batch)
        if size // 2 < self.floor:
            raise RuntimeError(
                f"out of memory with {size} samples at once, and no fewer may be tried (floor={self.floor}): make the model or the "
                f"samples smaller, or train in 16 bit. It was: {_first_line(error)}"
            ) from error
        live.part_samples = -(-size // 2)
        text = _first_line(error)
        free(error, trace, sys._getframe(1), older=self._older)
        self._stepping.drop_gradients()
        for model in self._models():
            model.zero_grad(set_to_none=True)  # of parameters that no optimizer has, too
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
        live.failed = True
        self._tell(
            f"out of memory with {size} samples at once after step {live.step:,}: from here on batches come in parts of "
            f"{live.part_samples} at most, and each step is that of the whole batch ({text})"
        )
        if any(isinstance(part, _BatchNorm) for model in self._models() for part in model.modules()):
            self._tell(
                "BatchNorm takes its statistics from each part now, so this is not the run of whole batches"
            )
        return True

    def _keep(self) -> None:
        self._buffers = [buffer for model in self._models() for buffer in model.buffers()]
        with torch.no_grad():
            self._kept = [buffer.clone() for buffer in self._buffers]
        # To tell afterwards whether a step that failed had moved anything.
        optimizers = self._stepping.optimizers
        self._known = [set(optimizer.state) for optimizer in optimizers]
        self._versions = [
            _version(optimizer, known) for optimizer, known in zip(optimizers, self._known, strict=True)
        ]

    def _take_back_step(self) -> bool:
        """Undo a step that ran out of memory before it changed a parameter or a state that was there; whether it could be."""
        optimizers = self._stepping.optimizers
        for optimizer, known, version in zip(optimizers, self._known, self._versions, strict=True):
            if _version(optimizer, known) != version:
                return False
        for optimizer, known in zip(optimizers, self._known, strict=True):
            for parameter in [parameter for parameter in optimizer.state if parameter not in known]:
                del optimizer.state[parameter]  # made in part
        return True


def graph_tensors(values: Iterable[Any], *, depth: int = 3) -> Iterator[Tensor]:
    """The tensors among values, and in small containers of theirs, that hold the graph which they were computed by.

    Args:
        values: Variables.
        depth: How deep containers are followed.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                yield value
        elif depth and isinstance(value, (dict, list, tuple)) and len(value) <= _MOST_ITEMS:
            inner = value.values() if isinstance(value, dict) else value
            yield from graph_tensors(list(inner), depth=depth - 1)


def free(
    error: BaseException,
    trace: TracebackType | None,
    body: FrameType,
    *,
    older: Sequence[weakref.ref[Tensor]] = (),
) -> None:
    """Let go of the memory that a failed body holds: through its exception, its frames, and the graphs of its variables.

    Args:
        error: What ended it.
        trace: Its traceback.
        body: The frame that goes on after it. Tensors among its variables lose their graphs and keep their values.
        older: Those that were there before, which others may go on with, and which are left alone.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    traceback.clear_frames(trace)
    error.__traceback__ = None
    spared = {id(tensor) for reference in older if (tensor := reference()) is not None}
    for name, value in variables_of(body).items():
        plain = _without_graph(value, spared, depth=3)
        if plain is not value:
            _set_variable(body, name, plain)
    gc.collect()


def _without_graph(value: Any, spared: set[int], *, depth: int) -> Any:
    if isinstance(value, Tensor):
        if value.grad_fn is None or id(value) in spared:
            return value
        try:
            return value.detach_()
        except RuntimeError:  # a view
            return value.detach()
    if not depth or not isinstance(value, (dict, list, tuple)) or len(value) > _MOST_ITEMS:
        return value
    keys = list(value) if isinstance(value, dict) else range(len(value))
    items: Any = value
    plain = {key: _without_graph(items[key], spared, depth=depth - 1) for key in keys}
    changed = {key: item for key, item in plain.items() if item is not items[key]}
    if type(value) is tuple:
        return tuple(plain.values()) if changed else value
    if not isinstance(value, tuple):  # a named one is left as it is
        for key, item in changed.items():
            items[key] = item
    return value


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables, of which the frame itself keeps none.

    Args:
        frame: Of a function, or of a module or a cell of a notebook.
    """
    found = frame.f_locals
    variables = dict(found)
    if _is_snapshot(frame):
        found.clear()
    return variables


def _is_snapshot(frame: FrameType) -> bool:
    """Whether `f_locals` is a copy, which the frame keeps, and with it what the variables meant when it was made."""
    return sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _set_variable(frame: FrameType, name: str, value: Any) -> None:
    found = frame.f_locals
    found[name] = value
    if _is_snapshot(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        found.clear()


def _version(optimizer: Optimizer, known: set[Any]) -> int:
    """A number that grows when a parameter, or a state that was there, is changed in place."""
    count: int = sum(p._version for group in optimizer.param_groups for p in group["params"])
    for parameter in known:
        entry: Any = optimizer.state[parameter]
        if isinstance(entry, dict):
            count += sum(value._version for value in entry.values() if isinstance(value, Tensor))
    return count


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
