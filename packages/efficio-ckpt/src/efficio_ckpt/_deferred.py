"""Copies that are made after the call which asked for them, and before anyone may change what they are copies of."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._tensor import is_dense

_PIECE_BYTES: Final = 2**23
"""What one thread copies at a time: a few milliseconds at most, which is how long another one may have to wait."""

_LEAST_BYTES: Final = 4096
"""Less is copied at once in the time that it takes to note it down."""

_WITNESSES: Final = 4
"""Elements of each tensor that are compared."""

_PLAIN: Final = (Tensor, nn.Parameter)
"""Of a tensor of another class, nobody knows what changes its memory."""

Span = tuple[int, int]
"""Address and size of memory, in bytes."""


def spans_of(optimizers: Iterable[Optimizer]) -> frozenset[Span]:
    """Return the memory that optimizers change when they step, and only then: their parameters and their state.

    Args:
        optimizers: Read only.
    """
    spans: set[Span] = set()
    for optimizer in optimizers:
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                owned.extend(state.values())
        spans.update(
            _span(tensor) for tensor in owned if type(tensor) in _PLAIN and tensor.layout == torch.strided
        )
    return frozenset(spans)


def is_deferrable(source: Tensor, spans: frozenset[Span]) -> bool:
    """Tell whether a tensor may be copied later: it is whole memory of an optimizer's, on the CPU, and large enough.

    Args:
        source: Shares its memory with what is trained.
        spans: From `spans_of`.
    """
    return (
        bool(spans)
        and source.device.type == "cpu"
        and source.numel() * source.element_size() >= _LEAST_BYTES
        and is_dense(source.shape, source.stride())
        and _span(source) in spans
    )


class DeferredCopies:
    """Copies that are made by whoever comes first: the thread that saves, or the one that is about to change the sources.

    Sources that have changed nevertheless are found, though not each change: in place by torch, each; behind its back (through
    ``.data``, by a kernel of one's own), each that touches one of a few elements of every tensor, as a change of all does.

    Args:
        names: What to call each pair.
        pairs: Source and copy, dense and with the same strides, on the CPU.

    Attributes:
        done: Whether all copies are made.
    """

    def __init__(self, names: Sequence[str], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._names = names
        self._pairs = list(pairs)
        self._versions = [source._version for source, _ in pairs]
        self._witness = _witness([source for source, _ in pairs])
        self._lock = threading.RLock()  # a signal handler may save in the middle of this
        self._place = 0
        self._offset = 0
        self._changed: tuple[str, ...] = ()
        self.done = not pairs

    def finish(self) -> tuple[str, ...]:
        """Copy what is not copied yet, and return when all of it is.

        Returns:
            Names of the pairs whose source had changed before it was copied.
        """
        while not self.done:
            with self._lock:
                if self._place < len(self._pairs):
                    self._copy_piece(*self._pairs[self._place])
                elif not self.done:
                    self._changed = self._compare()
                    self._pairs = []
                    self.done = True
        return self._changed

    def _copy_piece(self, source: Tensor, copy: Tensor) -> None:
        # Not Tensor.copy_, which would start threads of its own beside those that compute.
        memory = _bytes_of(source)
        end = self._offset + _PIECE_BYTES
        np.copyto(_bytes_of(copy)[self._offset : end], memory[self._offset : end])
        if end < len(memory):
            self._offset = end
        else:
            self._place, self._offset = self._place + 1, 0

    def _compare(self) -> tuple[str, ...]:
        changed = {
            index
            for index, ((source, _), version) in enumerate(zip(self._pairs, self._versions, strict=True))
            if source._version != version
        }
        now = _witness([copy for _, copy in self._pairs])
        for members, then in self._witness.items():
            if not torch.equal(then, now[members]):
                rows = (then != now[members]).view(len(members), -1).any(dim=1).tolist()
                changed.update(index for index, differs in zip(members, rows, strict=True) if differs)
        return tuple(self._names[index] for index in sorted(changed))


def _witness(tensors: Sequence[Tensor]) -> dict[tuple[int, ...], Tensor]:
    """The bytes of a few elements of each tensor, by the numbers of the tensors of one dtype."""
    kinds: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        kinds[tensor.dtype].append(index)
    witness = {}
    for members in kinds.values():
        few = [
            tensors[index].as_strided((_WITNESSES,), (tensors[index].numel() // _WITNESSES,))
            for index in members
        ]
        witness[tuple(members)] = torch.cat(few).view(torch.uint8)
    return witness


def _span(tensor: Tensor) -> Span:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _bytes_of(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()
