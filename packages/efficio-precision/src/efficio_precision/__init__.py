"""The right number format on every GPU, and the training step done right."""

from ._autocast import autocast, unsafe_under_autocast
from ._backends import tuned_backends
from ._batch_size import find_batch_size
from ._device import Device, detect_device
from ._evaluation import evaluating
from ._layout import example_of, is_channels_last, runs_channels_last, to_channels_last
from ._memory import is_oom
from ._policy import Policy, precision_policy
from ._scaler import make_scaler
from ._step import backward, clip_grad_norm, divide_gradients, step_optimizer
from ._trial import without_trace

__all__ = [
    "Device",
    "Policy",
    "autocast",
    "backward",
    "clip_grad_norm",
    "detect_device",
    "divide_gradients",
    "evaluating",
    "example_of",
    "find_batch_size",
    "is_channels_last",
    "is_oom",
    "make_scaler",
    "precision_policy",
    "runs_channels_last",
    "step_optimizer",
    "to_channels_last",
    "tuned_backends",
    "unsafe_under_autocast",
    "without_trace",
]
__version__ = "0.3.0"
