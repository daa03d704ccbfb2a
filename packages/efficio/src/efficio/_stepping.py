"""Stepping: the arithmetic of one accumulation group, from the first loss to the optimizers' step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from efficio_precision import Policy, backward, clip_grad_norm, divide_gradients, make_scaler, step_optimizer

from ._live import Live
from ._losses import TOGETHER, Losses
from ._schedulers import Schedulers

_MIXED: Final = "run.backward came with a weight and without one in one accumulation group: give a weight each time, or never"


class Stepping:
    """Adds gradients, averages and clips them, and steps, as the batches of a group come.

    A group's gradient is the mean over its samples. Where losses come without a weight, each batch of the group counts the same,
    and a part of a batch by its samples. Where they come with one, the sum of the weights is known at the step only: losses are
    multiplied by about the right factor before, so that nothing overflows, and the gradients are divided by the rest then.

    Args:
        policy: For the loss scaler.
        live: Where the run is; its counters of steps move.
        schedulers: Stepped with the optimizers.
        mark: Called when something moved that gives no sign.

    Attributes:
        scaler: Of the losses; stored with the run.
        optimizers: All prepared ones.
        losses: Watches for losses that are not finite.
    """

    def __init__(
        self, policy: Policy, live: Live, schedulers: Schedulers, *, mark: Callable[[], None], losses: Losses
    ) -> None:
        self.scaler = make_scaler(policy)
        self.optimizers: list[Optimizer] = []
        self.losses = losses
        self._live = live
        self._schedulers = schedulers
        self._mark = mark
        self._group = -1  # whose weights these are
        self._body = -1
        self._plain_group = -1  # whose losses have none
        self._weight: Any = None  # of the body
        self._total: Any = 0.0
        self._unit: Any = 1.0
        self._divided: list[tuple[Optimizer, Any]] = []
        self._stepped_group = -1

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped in this group, or has begun to."""
        return self._stepped_group == self._live.group

    def backward(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Add the gradients of a loss, by its share in the group."""
        live = self._live
        if weight is None:
            if self._group == live.group:
                raise ValueError(_MIXED)
            self._plain_group = live.group
            backward(loss, self.scaler, scale=live.share)
        elif not self._backward_weighted(loss, weight):
            return
        if loss.is_cpu:  # where a number is read at once
            value = loss.item()
            if value - value != 0.0:
                self.losses.found([(live.step, live.epoch, live.position)])
            return
        seen = self.losses.seen
        seen.append((loss.detach(), live.step, live.epoch, live.position))
        if len(seen) >= TOGETHER:
            self.losses.look()

    def _backward_weighted(self, loss: Tensor, weight: float | Tensor) -> bool:
        """Add the gradients of a loss that counts so much; False where that is nothing, and the loss may be 0 / 0."""
        self._weigh(weight)
        if self._divided:
            self._multiply_back()
        if not isinstance(weight, Tensor) and not weight:
            return False
        backward(loss, self.scaler, scale=weight / (self._unit * self._live.group_size))
        return True

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip the gradients of all optimizers together; None before the group is whole."""
        if not self._live.group_ends:
            return None
        if self._group == self._live.group:
            self._divide(self.optimizers)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return clip_grad_norm(parameters, max_norm, optimizer=self.optimizers, scaler=self.scaler)

    def step(self, optimizers: Sequence[Optimizer], closure: Callable[[], Any] | None) -> bool:
        """Step optimizers and schedulers and clear the gradients, if the group is whole; whether that was done."""
        live = self._live
        if not live.group_ends:
            return False
        chosen = optimizers or self.optimizers
        if not chosen:
            raise RuntimeError("no torch optimizer was prepared: call run.prepare(model, optimizer)")
        if self._group == live.group:
            self._divide(chosen)
        self._stepped_group = live.group
        stepped = True
        for optimizer in chosen:
            stepped &= step_optimizer(optimizer, self.scaler, closure)
            optimizer.zero_grad(set_to_none=True)
        if self._divided:
            self._divided = [pair for pair in self._divided if not any(pair[0] is done for done in chosen)]
        self.scaler.update()
        if not stepped:
            live.skipped += 1
            self._mark()  # the loss scale has moved, and no optimizer with it
            return False
        live.step += 1
        self._schedulers.step("step", optimizers)
        return True

    def drop_gradients(self) -> None:
        """Throw away what the group has added so far."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.scaler.drop_step()
        self._divided.clear()
        self._group = -1

    def _weigh(self, weight: float | Tensor) -> None:
        """Note what a body counts: once, however many losses it has."""
        live = self._live
        _check_weight(weight)
        if self._plain_group == live.group:
            raise ValueError(_MIXED)
        if self._group != live.group:
            self._group, self._body = live.group, -1
            self._total, self._unit = 0.0, None
            self._divided.clear()
        if self._body == live.body:
            if not isinstance(weight, Tensor) and weight != self._weight:
                raise ValueError(
                    f"two losses of one batch came with the weights {self._weight!r} and {weight!r}; add them up by hand, or give "
                    "both the same"
                )
            return
        self._body, self._weight = live.body, weight
        self._total = self._total + weight
        if self._unit is None:
            self._unit = weight.detach().clamp(min=1) if isinstance(weight, Tensor) else weight or 1.0

    def _divide(self, optimizers: Sequence[Optimizer]) -> None:
        """Divide by what the losses were not divided by before, once for each optimizer."""
        divisor = self._total / (self._unit * self._live.group_size)
        if isinstance(divisor, Tensor):
            divisor = torch.where(divisor > 0, divisor, 1.0)
        elif divisor in (0.0, 1.0):  # nothing was added at all, or all weights are the same
            return
        for optimizer in optimizers:
            if not any(optimizer is done for done, _ in self._divided) and _has_gradients(optimizer):
                divide_gradients(optimizer, divisor, scaler=self.scaler)
                self._divided.append((optimizer, divisor))

    def _multiply_back(self) -> None:
        """A loss comes after clipping: what has not stepped yet is divided again then, with it."""
        for optimizer, divisor in self._divided:
            divide_gradients(optimizer, 1.0 / divisor, scaler=self.scaler)
        self._divided.clear()


def _check_weight(weight: Any) -> None:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, expected one number, such as mask.sum()"
            )
    elif isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise ValueError(
            f"weight={weight!r}, expected a number of at least 0: how many tokens or samples the loss is the mean of"
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
