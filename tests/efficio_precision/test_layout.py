import pytest
import torch
from torch import nn

from efficio_precision import Device, Policy, example_of, to_channels_last
from efficio_precision import is_channels_last as is_channels_last_model


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


# A trial


class Flattens(nn.Module):
    """Written for the usual format: `view` fails on what a convolution in channels_last gives."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x))).view(x.shape[0], -1)


IMAGES = torch.randn(2, 3, 8, 8)


def cpu_policy(t4):
    return Policy(Device("cpu", "a CPU", None), torch.float32, channels_last=True)


def test_a_model_that_cannot_compute_in_it_goes_back_and_the_trial_leaves_no_trace(t4, caplog):
    model = Flattens()
    model.norm.eval()
    before = [value.clone() for value in model.state_dict().values()]
    flags = [part.training for part in model.modules()]
    generator = torch.get_rng_state()
    to_channels_last(model, cpu_policy(t4), example=IMAGES)
    assert not is_channels_last_model(model)
    assert "does not run in channels_last and stays contiguous: view size is not compatible" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before, strict=True))
    assert [part.training for part in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), generator)
    model(IMAGES)


def test_a_model_that_computes_in_it_stays_so_and_its_statistics_do_not_move(t4):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Dropout(0.5))
    before = model[1].running_mean.clone()
    generator = torch.get_rng_state()
    to_channels_last(model, cpu_policy(t4), example=IMAGES)
    assert is_channels_last_model(model)
    assert torch.equal(model[1].running_mean, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_an_example_that_does_not_fit_decides_nothing(t4, caplog):
    model = nn.Sequential(nn.Conv2d(3, 16, 3))
    to_channels_last(model, cpu_policy(t4), example=torch.zeros(1, 5, 8, 8))
    assert is_channels_last_model(model)

    class Two(nn.Conv2d):
        def forward(self, x, mask):
            return super().forward(x * mask)

    other = nn.Sequential(Two(3, 16, 3))
    to_channels_last(other, cpu_policy(t4), example=IMAGES)
    assert is_channels_last_model(other)
    assert not caplog.text


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (IMAGES, True),
        ((IMAGES, torch.zeros(2)), True),
        ({"image": IMAGES}, True),
        ([[IMAGES], 3], True),
        (torch.zeros(2, 3), False),
        ((), False),
        ("text", False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_images_of_a_batch(batch, found):
    assert (example_of(batch) is IMAGES) is found


def test_a_kernel_of_one_is_in_both_formats_and_counts_as_the_usual_one():
    assert not is_channels_last_model(nn.Conv2d(3, 8, 1))
