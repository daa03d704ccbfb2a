import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from efficio_precision import Device, Policy, evaluating


def flags(model):
    return {name: module.training for name, module in model.named_modules()}


def test_every_module_gets_its_own_flag_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.BatchNorm1d(2))
    model[1][0].eval()
    model[2].eval()
    before = flags(model)
    with evaluating(model):
        assert not any(flags(model).values())
    assert flags(model) == before


@pytest.mark.parametrize("training", [True, False])
def test_flags_under_an_unlike_parent_come_back(training):
    model = nn.Sequential(nn.Sequential(nn.Dropout()), nn.Dropout()).train(training)
    model[0].train(not training)
    before = flags(model)
    with evaluating(model):
        pass
    assert flags(model) == before


def test_a_train_method_that_acts_is_called_on_the_way_back():
    class Adapter(nn.Module):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Adapter())
    with evaluating(model):
        assert model[0].merged
    assert not model[0].merged
    assert model[0].training


def test_a_train_method_that_refuses_is_overruled_at_the_end():
    class Stubborn(nn.Module):
        def train(self, mode=True):
            return super().train(False)

    model = nn.Sequential(Stubborn())
    model[0].training = True
    with evaluating(model):
        assert not model[0].training
    assert model[0].training


def test_several_models_and_none(fp32):
    one, two = nn.Dropout(), nn.Dropout().eval()
    with evaluating(one, two):
        assert not one.training
    assert one.training
    assert not two.training
    with evaluating():
        assert not torch.is_grad_enabled()


def test_no_gradients_inside_and_the_outer_setting_after():
    weight = torch.ones(2, requires_grad=True)
    with evaluating():
        result = weight * 2
        assert not result.requires_grad
    assert torch.is_grad_enabled()
    (result * weight).sum().backward()  # an inference tensor could not be used here
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


def test_an_exception_puts_all_back():
    model = nn.Dropout()
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        torch.rand(1).fill_(1 / 0)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_the_policy_autocasts_the_body():
    with evaluating(policy=Policy(Device("cpu", "test CPU"), torch.bfloat16)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_draws_of_all_generators_are_as_if_there_had_been_no_validation():
    def draws():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]

    def seed():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    seed()
    expected = draws()
    seed()
    with evaluating():
        assert draws() == expected
        draws()
    assert draws() == expected


def test_training_order_does_not_depend_on_validation():
    train = DataLoader(TensorDataset(torch.arange(10)), batch_size=1, shuffle=True)
    valid = DataLoader(TensorDataset(torch.arange(2)))

    def order(validate):
        torch.manual_seed(2022)
        seen = []
        for _ in range(2):
            seen += [int(x) for (x,) in train]
            if validate:
                with evaluating():
                    list(valid)
        return seen

    assert order(True) == order(False)


def test_validations_nest():
    model = nn.Dropout()
    with evaluating(model):
        with evaluating(model):
            pass
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training


def test_something_else_than_a_module_is_named():
    with (
        pytest.raises(TypeError, match=r"takes modules, got list; pass the model itself"),
        evaluating([nn.Dropout()]),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpus_generator_is_put_back_without_a_synchronisation():
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with evaluating():
            torch.rand(4, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.rand(4, device="cuda"), expected)
