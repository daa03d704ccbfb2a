import pytest
import torch
from torch import nn

from efficio_precision import Policy, to_channels_last


@pytest.fixture
def policy(t4):
    return Policy(t4, torch.float16, channels_last=True)


def is_channels_last(model):
    return [
        p.is_contiguous(memory_format=torch.channels_last)
        for p in model.parameters()
        if p.dim() == 4 and p.shape[1] > 1
    ]


def residual_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def test_a_convolutional_model_is_converted_in_place_with_its_values_and_parameters(policy):
    model = residual_net()
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    assert to_channels_last(model, policy) is model
    assert is_channels_last(model) == [True, True]
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(p, value) for p, value in zip(parameters, values, strict=True))


def test_a_contiguous_input_comes_out_in_channels_last(policy):
    model = to_channels_last(nn.Conv2d(3, 8, 3), policy)
    assert model(torch.zeros(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)


def test_the_policy_decides(fp32):
    assert is_channels_last(to_channels_last(residual_net(), fp32)) == [False, False]


def inverted_residual(width):
    return nn.Sequential(
        nn.Conv2d(width, 2 * width, 1),
        nn.Conv2d(2 * width, 2 * width, 3, groups=2 * width),
        nn.Conv2d(2 * width, width, 1),
    )


@pytest.mark.parametrize("model", [
    pytest.param(nn.Sequential(nn.Conv2d(3, 16, 3), inverted_residual(16), inverted_residual(16)), id="depthwise"),
    pytest.param(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=2)), id="grouped"),
    pytest.param(nn.Sequential(nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)), id="odd-channels"),
    pytest.param(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv3d(3, 16, 3)), id="3-D"),
    pytest.param(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), id="no-convolution"),
    pytest.param(nn.Conv1d(8, 8, 3), id="1-D"),
])  # fmt: skip
def test_models_that_lose_by_it_are_left_alone(policy, model):
    strides = [p.stride() for p in model.parameters()]
    to_channels_last(model, policy)
    assert [p.stride() for p in model.parameters()] == strides


def test_one_depthwise_layer_among_many_does_not_prevent_it(policy):
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(3)), nn.Conv2d(16, 16, 3, groups=16))
    assert all(is_channels_last(to_channels_last(model, policy)))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_are_left_for_later(policy):
    model = nn.Sequential(nn.LazyConv2d(8, 3))
    to_channels_last(model, policy)
    model(torch.zeros(1, 3, 8, 8))
    assert all(is_channels_last(to_channels_last(model, policy)))
