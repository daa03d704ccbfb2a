"""The moves of a training step: backward, divide, clip, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer


def backward(loss: torch.Tensor, scaler: GradScaler, *, scale: float | torch.Tensor = 1.0) -> None:
    """Add a loss's gradients to those that are there.

    Args:
        loss: A scalar.
        scaler: Of `make_scaler`; a disabled one costs nothing.
        scale: A factor on the loss: 1 / k for each of k accumulated batches of equal size. A scalar tensor on the loss's
            device is not read by the host.

    Raises:
        TypeError: The loss is not a tensor.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"loss is a {type(loss).__name__}, expected a scalar tensor: give the loss, not loss.item()"
        )
    if isinstance(scale, torch.Tensor) or scale != 1.0:
        loss = loss * scale
    if scaler.is_enabled():
        loss = scaler.scale(loss)
    loss.backward()  # type: ignore[no-untyped-call]


def divide_gradients(optimizer: Optimizer, divisor: float | torch.Tensor, *, scaler: GradScaler) -> None:
    """Divide an optimizer's gradients, once the sum of an accumulation group's weights is known.

    For a loss that is the mean over so many tokens, and batches with unlike numbers of them: `backward` with their number as
    the scale, and after the last one of the group this with the sum of the numbers, before clipping and the step.

    Args:
        optimizer: Its gradients are unscaled, and divided in place.
        divisor: Not zero. A scalar tensor is not read by the host.
        scaler: Of `make_scaler`.

    Raises:
        RuntimeError: The scaler is enabled, and there was no backward in this process.
    """
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for gradient in gradients:
        factor = divisor
        if isinstance(factor, torch.Tensor) and factor.device != gradient.device:
            factor = factor.to(gradient.device, non_blocking=True)
        gradient.div_(factor)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    *,
    optimizer: Optimizer | Iterable[Optimizer],
    scaler: GradScaler,
) -> torch.Tensor:
    """Clip the norm of all gradients together, after dividing them by the loss scale.

    Call it after the last backward of the optimizer step. A second call in the same step clips, and
    returns the norm of, the gradients as they then are. A call in the middle of an accumulation group
    clips what has been accumulated so far, with a scaler just as without one.

    Args:
        parameters: One tensor or several; their gradients are changed in place.
        max_norm: The largest norm that is left; `float("inf")` only measures.
        optimizer: The optimizer that holds the parameters, or all those that do.
        scaler: Of `make_scaler`.

    Returns:
        The norm before clipping, in true units, a scalar tensor on the gradients' device: nothing waits for
        the device. It is inf or NaN in a step that the scaler will skip.

    Raises:
        ValueError: `max_norm` is negative or NaN, or the parameters are float16.
        RuntimeError: The scaler is enabled, and there was no backward in this process.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm!r} is not a norm; give a number of at least 0")
    if scaler.is_enabled():
        for each in optimizer if isinstance(optimizer, Iterable) else [optimizer]:
            scaler.unscale_(each)
    # A list, because torch warns about an empty generator.
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return torch.nn.utils.clip_grad_norm_([_with_dense_gradient(tensor) for tensor in tensors], max_norm)


def step_optimizer(
    optimizer: Optimizer, scaler: GradScaler, closure: Callable[[], Any] | None = None
) -> bool:
    """Step an optimizer, unless the loss scale was too high for its gradients.

    `scaler.update()` is not called: call it once an iteration, after the steps of all optimizers.
    On False, the scheduler, averaged weights and step counters stand still as well. Nothing waits
    for the device beyond what GradScaler does itself; fused optimizers, for which it does not, cost one read.

    Args:
        optimizer: Any optimizer. If none of its parameters has a gradient, this is True, with a
            scaler as without one, and nothing changes.
        scaler: Of `make_scaler`.
        closure: For optimizers that evaluate the loss themselves, as LBFGS does.

    Returns:
        False if the step was skipped because of inf or NaN in the gradients.

    Raises:
        RuntimeError: A closure with an enabled scaler, which torch does not support; or LBFGS without a closure.
    """
    if closure is None and isinstance(optimizer, torch.optim.LBFGS):
        raise RuntimeError(
            "LBFGS evaluates the loss itself and needs a closure: give a function that does so and returns it"
        )
    if not scaler.is_enabled():
        optimizer.step() if closure is None else optimizer.step(closure)
        return True
    if closure is not None:
        raise RuntimeError(
            "a closure cannot be used with loss scaling; train in 'fp32' or 'bf16', or without it"
        )
    return _scaled_step(optimizer, scaler)


def _with_dense_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in whose gradient is the values of a sparse one: torch 2.0 raises on those, or leaves them unclipped."""
    if tensor.grad is None or not tensor.grad.is_sparse:
        return tensor
    tensor.grad = tensor.grad.coalesce()  # rows that come twice count with their sum
    values = tensor.grad._values()
    stand_in = values.detach()
    stand_in.grad = values
    return stand_in


def _scaled_step(optimizer: Optimizer, scaler: GradScaler) -> bool:
    ran: list[torch.Tensor | None] = []

    def note(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Fused optimizers decide on the device; GradScaler lends them this attribute for the step.
        ran.append(getattr(optimizer, "found_inf", None))

    hook = (
        optimizer.register_step_post_hook(note) if hasattr(optimizer, "_optimizer_step_post_hooks") else None
    )
    try:
        scaler.step(optimizer)
    finally:
        if hook is not None:
            hook.remove()
    if ran:
        return ran[0] is None or not ran[0].item()
    # Skipped, or a wrapper around an optimizer that calls no hooks: then the scaler's own finding decides.
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return not any(value.item() for value in found.values())
