"""Loss scaling for fp16 that can be stopped, resumed and clipped at any place of a step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch

from ._policy import Policy

if TYPE_CHECKING or hasattr(torch.amp, "GradScaler"):
    from torch.amp import GradScaler
else:  # before torch 2.3
    from torch.cuda.amp import GradScaler

_logger = logging.getLogger(__name__)


class Scaler(GradScaler):
    """torch's GradScaler, with the states handled that it meets with an assertion or an error.

    - Disabled, it carries the state that it was given, so that a session on a CPU or in bf16 does
      not lose the scale of the fp16 sessions before and after it.
    - Enabled, it takes the empty state of a disabled one and keeps its fresh scale.
    - `unscale_` may be called again within a step. If another loss is scaled after it, the
      gradients are scaled again first, so that a backward never adds scaled to unscaled ones.
    - A step that was begun can be dropped, with `drop_step`.
    - An optimizer none of whose parameters has a gradient is stepped as without a scaler, and
      `update` without any checked gradient leaves the scale.
    """

    def __init__(self, device_type: str, *, enabled: bool, init_scale: float, growth_interval: int) -> None:
        options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_interval": growth_interval,
            "enabled": enabled,
        }
        if hasattr(torch.amp, "GradScaler"):
            options["device"] = device_type
        super().__init__(**options)
        self._carried: dict[str, Any] = {}
        self._unscaled: dict[int, torch.optim.Optimizer] = {}

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several, by the scale."""
        if self._unscaled:
            self._scale_gradients_again()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, unless that was done in this step.

        Raises:
            RuntimeError: No loss was scaled before, or a parameter is complex.
            ValueError: The optimizer holds fp16 parameters.
        """
        if not self._enabled or id(optimizer) in self._unscaled:
            return
        self._check_scaled()
        try:
            super().unscale_(optimizer)
        except ValueError as error:
            raise ValueError(
                "the optimizer holds float16 parameters, whose gradients cannot be unscaled;"
                " keep them in float32 (model.float()), autocast makes the float16 copies"
            ) from error
        except NotImplementedError as error:
            raise RuntimeError(
                "the gradients hold a dtype that cannot be unscaled (complex?); train in 'bf16' or 'fp32'"
            ) from error
        self._unscaled[id(optimizer)] = optimizer

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer if its gradients are finite."""
        if not self._enabled or not _has_gradients(optimizer):
            return optimizer.step(*args, **kwargs)
        self._check_scaled()
        result = super().step(optimizer, *args, **kwargs)
        self._unscaled.pop(id(optimizer), None)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the steps since the last update found."""
        if self._enabled and (new_scale is not None or self._checked_anything()):
            super().update(new_scale)

    def drop_step(self) -> None:
        """Forget what was found in gradients that are thrown away, as after running out of memory: the step begins anew."""
        if self._enabled:
            self._unscaled.clear()
            self._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth; disabled, the state that was loaded."""
        return super().state_dict() if self._enabled else dict(self._carried)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state. Empty ones leave an enabled scaler as it is."""
        if not self._enabled:
            self._carried = dict(state_dict)
        elif state_dict:
            super().load_state_dict(state_dict)
        else:
            _logger.info("the stored loss scaler has no state; starting from a scale of %g", self.get_scale())

    def _check_scaled(self) -> None:
        if self._scale is None:
            raise RuntimeError("no loss was scaled in this process yet; call backward(loss, scaler) first")

    def _checked_anything(self) -> bool:
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def _scale_gradients_again(self) -> None:
        scale = cast(torch.Tensor, self._scale)
        for key, optimizer in self._unscaled.items():
            for gradient in _gradients(optimizer):
                values = gradient._values() if gradient.is_sparse else gradient
                values.mul_(scale.to(values.device, non_blocking=True))
            self._per_optimizer_states.pop(key, None)
        self._unscaled.clear()


def make_scaler(policy: Policy, *, init_scale: float = 2.0**16, growth_interval: int = 2000) -> Scaler:
    """Make the loss scaler of a run: enabled for fp16, else one that only carries its state.

    Its life in a step: `backward`, perhaps `clip_grad_norm`, `step_optimizer` for each optimizer,
    then `scaler.update()` once. Store its `state_dict()` whatever the format is.

    Args:
        policy: `policy.scale_loss` enables it.
        init_scale: The first factor.
        growth_interval: Good steps after which the factor is doubled.

    Returns:
        A subclass of torch's GradScaler.

    Raises:
        RuntimeError: The loss is to be scaled on a device that is not there, or for which this torch
            has no scaler.
    """
    kind = policy.device.type
    if policy.scale_loss:
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "the policy is for a CUDA device and there is none; make it with precision_policy()"
            )
        if kind != "cuda" and not hasattr(torch.amp, "GradScaler"):
            raise RuntimeError(
                f"loss scaling on {kind} needs torch 2.3 or newer, this is {torch.__version__}"
            )
    return Scaler(kind, enabled=policy.scale_loss, init_scale=init_scale, growth_interval=growth_interval)


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
