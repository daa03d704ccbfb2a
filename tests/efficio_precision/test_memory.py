import gc
import weakref

import pytest
import torch

from efficio_precision import is_oom


@pytest.mark.parametrize("error", [
    torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)"),
    torch.cuda.OutOfMemoryError("any text"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: not enough memory: you tried ..."),
], ids=str)  # fmt: skip
def test_out_of_memory_is_recognised(error):
    assert is_oom(error)


@pytest.mark.parametrize("error", [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("can't allocate memory for the joke"),
    ValueError("out of memory"),
    MemoryError(),
    KeyboardInterrupt(),
], ids=repr)  # fmt: skip
def test_other_errors_are_not(error):
    assert not is_oom(error)


def test_only_the_error_itself_counts_and_not_its_cause():
    try:
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as cause:
            raise RuntimeError("the model is broken") from cause
    except RuntimeError as error:
        chained = error
    assert not is_oom(chained)
    assert is_oom(chained.__cause__)


def test_torchs_cpu_allocator_is_recognised_for_real():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_oom(caught.value)


def test_nothing_is_held_when_the_retry_starts():
    class Activation:
        pass

    seen = []

    def step(size):
        activation = Activation()
        seen.append(weakref.ref(activation))
        if size > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)")
        return size

    gc.disable()
    try:
        size, text = 16, ""
        while True:
            try:
                done = step(size)
                break
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                text = str(error)
            assert seen[-1]() is None
            size //= 2
    finally:
        gc.enable()
    assert (done, text) == (8, "CUDA out of memory (simulated)")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert is_oom(caught.value)
