import pytest
import torch

from efficio_precision import Policy, backward, make_scaler, step_optimizer


def train(scaler, steps, *, loss_factor=1.0):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(weight.sum() * loss_factor, scaler)
        step_optimizer(optimizer, scaler)
        scaler.update()
    return weight


def test_it_is_torchs_scaler_and_enabled_only_when_the_loss_is_scaled(fp16, fp32):
    assert isinstance(make_scaler(fp16), torch.amp.GradScaler)
    assert make_scaler(fp16).is_enabled()
    assert make_scaler(fp16).get_scale() == 65536.0
    assert not make_scaler(fp32).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_scaling_for_a_missing_gpu_is_an_error_and_not_a_warning(t4):
    with pytest.raises(
        RuntimeError, match=r"for a CUDA device and there is none; make it with precision_policy"
    ):
        make_scaler(Policy(t4, torch.float16, scale_loss=True))


def test_scale_and_growth_continue_after_a_resume(fp16):
    first = make_scaler(fp16, init_scale=256.0, growth_interval=3)
    train(first, 7)
    second = make_scaler(fp16)
    second.load_state_dict(first.state_dict())
    assert second.get_scale() == 1024.0
    assert second.state_dict()["_growth_tracker"] == 1
    for scaler in (first, second):
        train(scaler, 1)
        assert scaler.get_scale() == 1024.0
        train(scaler, 1)
        assert scaler.get_scale() == 2048.0


def test_a_session_without_scaling_carries_the_scale_to_the_next_with_it(fp16, fp32):
    first = make_scaler(fp16, init_scale=1024.0)
    middle = make_scaler(fp32)
    middle.load_state_dict(first.state_dict())
    train(middle, 2)
    third = make_scaler(fp16)
    third.load_state_dict(middle.state_dict())
    assert third.get_scale() == 1024.0
    assert third.state_dict() == first.state_dict()


def test_the_empty_state_of_a_disabled_scaler_leaves_a_fresh_scale(fp16, fp32, caplog):
    scaler = make_scaler(fp16)
    with caplog.at_level("INFO"):
        scaler.load_state_dict(make_scaler(fp32).state_dict())
    assert scaler.get_scale() == 65536.0
    assert "no state; starting from a scale of 65536" in caplog.text
    train(scaler, 1)


def test_the_carried_state_is_a_copy(fp32):
    scaler, state = make_scaler(fp32), {"scale": 8.0}
    scaler.load_state_dict(state)
    state["scale"] = 1.0
    scaler.state_dict()["scale"] = 2.0
    assert scaler.state_dict() == {"scale": 8.0}


def test_an_update_without_any_step_leaves_the_scale(scaler, no_scaler):
    scaler.update()
    no_scaler.update()
    assert scaler.get_scale() == 1024.0
    train(scaler, 1)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_the_scale_can_be_set_by_hand(scaler):
    train(scaler, 1)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0


def test_gradients_without_a_scaled_loss_are_an_error_that_says_so(scaler):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.sum().backward()
    for optimizer in (torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight])):
        with pytest.raises(
            RuntimeError, match=r"no loss was scaled in this process yet; call backward\(loss, scaler\)"
        ):
            step_optimizer(optimizer, scaler)


def test_float16_parameters_are_told_with_the_remedy(scaler):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    backward(weight.sum(), scaler)
    with pytest.raises(ValueError, match=r"float16 parameters.*keep them in float32 \(model.float\(\)\)"):
        step_optimizer(torch.optim.SGD([weight], lr=0.1), scaler)


def test_complex_parameters_are_told_with_the_remedy(scaler):
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    backward(weight.abs().sum(), scaler)
    with pytest.raises(RuntimeError, match=r"complex\?\); train in 'bf16' or 'fp32'"):
        step_optimizer(torch.optim.SGD([weight], lr=0.1), scaler)


def test_several_losses_are_scaled_at_once(scaler):
    one, two = scaler.scale([torch.ones(()), torch.full((), 2.0)])
    assert (one.item(), two.item()) == (1024.0, 2048.0)
