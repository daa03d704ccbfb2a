import threading

import pytest
import torch
from torch import nn

from efficio_precision import Device, Policy, autocast, unsafe_under_autocast


def product_dtype():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


BF16 = Policy(Device("cpu", "test CPU"), torch.bfloat16)


def test_fp32_changes_nothing_and_shares_one_object(fp32):
    with autocast(fp32), autocast(fp32):
        assert product_dtype() is torch.float32
    assert autocast(fp32) is autocast(fp32)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        pytest.param(
            torch.float16,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.3", reason="torch has fp16 autocast on a CPU from version 2.3 on"
            ),
        ),
    ],
)
def test_matmuls_run_in_the_policys_dtype_and_the_outer_state_returns(dtype):
    with autocast(Policy(Device("cpu", "test CPU"), dtype)):
        assert product_dtype() is dtype
    assert product_dtype() is torch.float32


def test_regions_nest_and_return_to_the_outer_one():
    with autocast(BF16):
        with autocast(BF16):
            assert product_dtype() is torch.bfloat16
        assert product_dtype() is torch.bfloat16
    assert product_dtype() is torch.float32


def test_regions_may_be_switched_off_in_between():
    with autocast(BF16):
        with torch.autocast("cpu", enabled=False):
            assert product_dtype() is torch.float32
            with autocast(BF16):
                assert product_dtype() is torch.bfloat16
            assert product_dtype() is torch.float32
    assert product_dtype() is torch.float32


def test_an_exception_leaves_no_region_behind():
    with pytest.raises(ZeroDivisionError), autocast(BF16):
        1 / 0  # noqa: B018
    assert product_dtype() is torch.float32


def test_a_region_in_another_thread_does_not_disturb_this_one():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with autocast(BF16):
            entered.set()
            leave.wait(10)

    with autocast(BF16):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    leave.set()
    thread.join()
    assert product_dtype() is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_policy_for_a_missing_gpu_is_an_error_and_not_a_warning(t4):
    with pytest.raises(
        RuntimeError, match=r"for a CUDA device and there is none; make it with precision_policy"
    ):
        autocast(Policy(t4, torch.float16))


def test_bce_losses_are_found_by_type_at_any_depth():
    class Own(nn.BCELoss):
        pass

    model = nn.ModuleDict(
        {"head": nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), "loss": nn.ModuleList([nn.BCELoss()])}
    )
    assert unsafe_under_autocast(model, Own(), nn.BCEWithLogitsLoss()) == ("loss.0", "Own")
    assert unsafe_under_autocast(nn.Sequential(nn.Linear(2, 1)), nn.BCEWithLogitsLoss()) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_called_unsafe_fails_on_a_gpu_and_the_rest_does_not():
    policy = Policy(Device("cuda", "the card"), torch.float16)
    logits, target = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    with autocast(policy):
        nn.BCEWithLogitsLoss()(logits, target)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.BCELoss()(logits.sigmoid(), target)
