"""What the body of a loop calls, from the forward pass to the optimizers' step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from efficio_precision import Policy, autocast

from ._arguments import whole_number
from ._recovery import Recovery
from ._stepping import Stepping


class StepMethods:
    """The part of `Run` that is used in each body."""

    policy: Policy
    _stepping: Stepping
    _recovery: Recovery

    def autocast(self) -> AbstractContextManager[object]:
        """The region in which forward and loss are computed in the policy's number format."""
        return autocast(self.policy)

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add the loss's gradients, scaled for fp16, by the batch's share in the accumulation group.

        Args:
            loss: A scalar, the mean over its batch.
            weight: How many tokens, pixels or samples the loss is the mean of, where these differ from batch to batch: the step
                is then that of the mean over all of the group's. A number or a scalar tensor; for each loss of a group, or for none.

        Raises:
            TypeError: The loss is not a tensor.
            ValueError: The weight is no such number, or some losses of a group have one and others have not.
        """
        self._stepping.backward(loss, weight)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of all prepared optimizers together, once per optimizer step.

        Args:
            max_norm: The largest norm left.

        Returns:
            The norm before clipping, a scalar tensor; None in the middle of an accumulation group, where nothing is done.
        """
        return self._stepping.clip(max_norm)

    def step(self, *optimizers: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step the optimizers and the schedulers and clear the gradients, when the accumulation group is whole.

        Args:
            *optimizers: Those to step, with the schedulers that follow them; all prepared ones by default.
            closure: For optimizers that compute the loss themselves (LBFGS): clears gradients, calls `backward`, returns the loss.

        Returns:
            Whether the optimizers stepped: False in the middle of a group, and when the scaler skipped a step.

        Raises:
            RuntimeError: No optimizer was prepared, or LBFGS came without a closure.
        """
        return self._stepping.step(optimizers, closure)

    def recover_oom(self, *, floor: int = 1) -> AbstractContextManager[None]:
        """Survive running out of memory: the group's batches come again in halves, quarters and so on, and no sample is lost.

        Put it around the whole body of the loop, each time: `with run.recover_oom(): ...`. The step is that of the whole batches
        within rounding, if losses are means over their samples (or have a `weight`) and are added with `run.backward`; dropout
        and BatchNorm see parts. The split is kept for the rest of the run and by its resumes. `run.step()` is False until
        the last part. Code below the `with` is run for a failed body as well, and finds the variables of it.

        It costs a copy of the models' buffers at each group's first body, and the group's batches stay until its step.

        Args:
            floor: Halves of fewer samples are not tried: running out of memory is an error then.

        Returns:
            A context for one body.

        Raises:
            RuntimeError: On entering, outside of the body of a loop. On leaving, when the floor is reached.
        """
        self._recovery.floor = whole_number("floor", floor, at_least=1)
        return self._recovery
