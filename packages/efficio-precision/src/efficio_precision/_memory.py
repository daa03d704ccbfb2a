"""Out-of-memory errors, told from the rest."""

from __future__ import annotations

import torch

_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")


def is_oom(error: BaseException) -> bool:
    """Tell whether an error means that a device, or torch on the host, ran out of memory.

    The error itself is judged, not its cause or context, and nothing keeps a reference to it. To
    retry, leave the `except` block first: until then the error holds the frames that hold the tensors.

    Args:
        error: Any exception.

    Returns:
        True for torch's OutOfMemoryError and for a RuntimeError with the text of CUDA, ROCm, XPU,
        MPS or torch's CPU allocator.

    Example:
        >>> is_oom(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
        True
        >>> is_oom(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):  # torch.OutOfMemoryError from 2.5 on, the same class
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if "out of memory" in text.lower():
        return True
    return "DefaultCPUAllocator" in text and any(words in text for words in _CPU_ALLOCATOR)
