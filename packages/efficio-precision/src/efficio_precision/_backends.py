"""torch's global switches for speed, set for a while and put back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ._policy import Policy

_logger = logging.getLogger(__name__)


class TunedBackends:
    """What `tuned_backends` has set, and a watch on the shapes that it was set for.

    Attributes:
        note: What was set, and what was switched off again, in plain words.
    """

    def __init__(self, *, benchmark: bool, max_shapes: int, note: str) -> None:
        self.note = note
        self._benchmark = benchmark
        self._max_shapes = max_shapes
        self._last: object = None
        self._seen: set[tuple[int, ...]] = set()

    def observe(self, shape: Sequence[int]) -> None:
        """Take note of a batch's shape, and switch cudnn.benchmark off when shapes keep changing.

        cudnn.benchmark tries all algorithms for each new shape, which costs more than it gains
        when the next batch has yet another one. The first entry, the batch size, does not count: a
        smaller last batch is no change. Costs nothing worth measuring while the shape stays.

        Args:
            shape: The shape of the model's input, (N, C, H, W) for images.
        """
        if shape == self._last:
            return
        self._last = shape
        if len(self._seen) > self._max_shapes:
            return
        self._seen.add(tuple(shape[1:]))
        if len(self._seen) > self._max_shapes:
            self._give_up()

    def _give_up(self) -> None:
        found = f"{len(self._seen)} input shapes so far"
        if self._benchmark:
            self._benchmark = False
            torch.backends.cudnn.benchmark = False
            self.note = f"cudnn.benchmark switched off: {found}, and it tries all algorithms for each"
            _logger.info(self.note)
        elif torch.backends.cudnn.benchmark:
            self.note = (
                f"cudnn.benchmark is on by your own setting: {found}, and it tries all algorithms for each"
            )
            _logger.info(self.note)


@contextmanager
def tuned_backends(
    policy: Policy, *, benchmark: bool | None = None, max_shapes: int = 4
) -> Iterator[TunedBackends]:
    """Set cudnn.benchmark and TF32 as the policy says, and put both back at the end.

    A setting of your own is never overridden: a benchmark that is on, deterministic algorithms, a
    matmul precision other than torch's default. What you change inside the `with` stays as you
    set it. The switches are global to the process.

    Args:
        policy: cudnn.benchmark is for NVIDIA cards only; `policy.tf32` allows TF32 in float32 matmuls. Without it, a policy of
            float32 takes TF32 out of convolutions too, where torch has it on.
        benchmark: None lets this function decide; False leaves cudnn.benchmark off, as an exact
            repetition needs it: the algorithms that it picks depend on measured times.
        max_shapes: With more input shapes than these, cudnn.benchmark is switched off (see `observe`).

    Yields:
        The object whose `observe(shape)` watches the shapes and whose `note` says what was done.

    Raises:
        ValueError: `max_shapes` is below 1.
    """
    if max_shapes < 1:
        raise ValueError(f"max_shapes={max_shapes} is not a number of shapes; give at least 1")
    cudnn = torch.backends.cudnn
    ours = _wants_benchmark(policy) if benchmark is None else benchmark and not cudnn.benchmark
    precision = _changeable_matmul_precision() if policy.tf32 else None
    exact = _rounds_convolutions(policy)
    changes = ["cudnn.benchmark on"] * ours + ["TF32 in float32 matmuls"] * (precision is not None)
    changes += ["no TF32 in convolutions"] * exact
    tuned = TunedBackends(benchmark=ours, max_shapes=max_shapes, note=", ".join(changes) or "nothing changed")
    try:
        if ours:
            cudnn.benchmark = True
        if precision is not None:
            torch.set_float32_matmul_precision("high")
        if exact:
            cudnn.allow_tf32 = False
        yield tuned
    finally:
        if tuned._benchmark and cudnn.benchmark:
            cudnn.benchmark = False
        if precision is not None and _matmul_precision() == "high":
            torch.set_float32_matmul_precision(precision)
        if exact and _convolutions_in_tf32() is False:
            cudnn.allow_tf32 = True


def _rounds_convolutions(policy: Policy) -> bool:
    """Whether torch would compute convolutions in TF32 on a card that is to compute in float32."""
    capability = policy.device.capability
    able = policy.device.type == "cuda" and capability is not None and capability >= (8, 0)
    return able and policy.dtype is torch.float32 and not policy.tf32 and _convolutions_in_tf32() is True


def _convolutions_in_tf32() -> bool | None:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # convolutions and RNNs were set apart through the newer attributes
        return None


def _wants_benchmark(policy: Policy) -> bool:
    cudnn = torch.backends.cudnn
    if policy.device.type != "cuda" or policy.device.capability is None:
        return False
    return not (cudnn.benchmark or cudnn.deterministic or torch.are_deterministic_algorithms_enabled())


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except (
        RuntimeError
    ):  # set through the newer fp32_precision attributes, which must not be mixed with this one
        return None


def _changeable_matmul_precision() -> str | None:
    precision = _matmul_precision()
    return precision if precision == "highest" else None
