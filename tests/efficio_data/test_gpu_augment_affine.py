import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efficio_data.gpu_augment import RandomAffine


@pytest.fixture(autouse=True)
def seeded_generator():
    torch.default_generator.manual_seed(0)


def moved(batch, amounts, interpolation="bilinear"):
    functional = pytest.importorskip("torchvision.transforms.functional")
    mode = functional.InterpolationMode(interpolation)
    return torch.stack(
        [
            functional.affine(image, angle, [int(across), int(down)], zoom, shear, interpolation=mode)
            for image, (angle, across, down, zoom, *shear) in zip(batch, amounts.tolist(), strict=True)
        ]
    )


@settings(max_examples=40, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    degrees=st.floats(0, 180),
    shear=st.tuples(st.floats(0, 60), st.floats(0, 60)),
    seed=st.integers(0, 2**31),
)
def test_any_map_of_noise_equals_torchvision(sides, degrees, shear, seed):
    torch.manual_seed(seed)
    batch = torch.rand(4, 3, *sides)
    (x, y) = shear
    transform = RandomAffine(degrees, (0.3, 0.2), scale=(0.5, 2.0), shear=(-x, x, -y, y))
    amounts = transform.draw(batch.shape)
    # float32 places of zoomed and sheared pixels carry their last place; float64 shows that the map is the same.
    torch.testing.assert_close(transform.apply(batch, amounts), moved(batch, amounts), rtol=0, atol=5e-5)
    doubles = batch.double()
    torch.testing.assert_close(transform.apply(doubles, amounts), moved(doubles, amounts), rtol=0, atol=1e-11)


def test_usual_maps_equal_torchvision():
    batch = torch.rand(16, 3, 32, 32)
    transform = RandomAffine(15, (0.1, 0.1), scale=(0.9, 1.1), shear=10)
    amounts = transform.draw(batch.shape)
    torch.testing.assert_close(transform.apply(batch, amounts), moved(batch, amounts), rtol=0, atol=1e-5)


def test_nearest_pixels_are_those_of_torchvision():
    batch = torch.rand(16, 3, 31, 29, dtype=torch.float64)
    transform = RandomAffine(40, (0.2, 0.2), scale=(0.7, 1.3), shear=10, interpolation="nearest")
    amounts = transform.draw(batch.shape)
    assert torch.equal(transform.apply(batch, amounts), moved(batch, amounts, "nearest"))


def test_uint8_is_rounded_as_torchvision_rounds():
    batch = torch.randint(0, 256, (16, 3, 24, 24), dtype=torch.uint8)
    transform = RandomAffine(30, (0.1, 0.1))
    amounts = transform.draw(batch.shape)
    difference = (transform.apply(batch, amounts).int() - moved(batch, amounts).int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 1e-3


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
def test_a_fill_shifts_the_values_and_nothing_else(interpolation):
    batch = torch.rand(8, 3, 20, 20, dtype=torch.float64)
    fill = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64).view(1, 3, 1, 1)
    transform = RandomAffine(45, fill=(0.2, 0.4, 0.6), interpolation=interpolation)
    amounts = transform.draw(batch.shape)
    expected = moved(batch - fill, amounts, interpolation) + fill
    torch.testing.assert_close(transform.apply(batch, amounts), expected, rtol=0, atol=1e-12)


def test_what_lies_wholly_outside_is_exactly_the_fill():
    batch = torch.full((1, 3, 8, 8), 200, dtype=torch.uint8)
    amounts = torch.tensor([[0.0, 5.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    result = RandomAffine(0, fill=(1, 2, 3)).apply(batch, amounts)
    assert result[0, :, :, :5].unique(dim=2).squeeze().tolist() == [[1] * 8, [2] * 8, [3] * 8]
    assert torch.equal(result[..., 5:], batch[..., 5:])


def test_no_amounts_change_nothing():
    batch = torch.randint(0, 256, (4, 3, 33, 57), dtype=torch.uint8)
    assert torch.equal(RandomAffine(0)(batch), batch)


def test_amounts_lie_in_their_ranges_and_shifts_are_whole_pixels():
    transform = RandomAffine((-5, 20), (0.5, 0.1), scale=(0.8, 1.5), shear=(1, 2, -4, -3))
    amounts = transform.draw((4000, 3, 30, 40))
    low, high = (torch.tensor(v) for v in ([-5, -20, -3, 0.8, 1, -4], [20, 20, 3, 1.5, 2, -3]))
    spread = 0.05 * (high - low)
    assert ((amounts.amin(0) >= low) & (amounts.amin(0) < low + spread)).all()
    assert ((amounts.amax(0) <= high) & (amounts.amax(0) > high - spread)).all()
    assert torch.equal(amounts[:, 1:3], amounts[:, 1:3].round())


@pytest.mark.parametrize(
    ("shear", "x", "y"),
    [
        (None, (0, 0), (0, 0)),
        (10, (-10, 10), (0, 0)),
        ((2, 3), (2, 3), (0, 0)),
        ((2, 3, 4, 5), (2, 3), (4, 5)),
    ],
    ids=["none", "one", "two", "four"],
)
def test_shear_is_read_as_torchvision_reads_it(shear, x, y):
    amounts = RandomAffine(0, shear=shear).draw((500, 1, 8, 8))
    for column, (low, high) in ((4, x), (5, y)):
        assert low <= amounts[:, column].min() <= amounts[:, column].max() <= high


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda: RandomAffine(-5), "degrees=-5", id="negative degrees"),
        pytest.param(lambda: RandomAffine((20, 5)), r"degrees=\(20, 5\)", id="falling degrees"),
        pytest.param(lambda: RandomAffine("a"), "degrees='a'", id="text"),
        pytest.param(lambda: RandomAffine(5, 0.1), r"translate=0\.1 is not a shift", id="one shift"),
        pytest.param(lambda: RandomAffine(5, (0.1, 1.1)), "translate=.*from 0 to 1", id="large shift"),
        pytest.param(lambda: RandomAffine(5, (0.1, 0.1, 0.1)), "translate=", id="three shifts"),
        pytest.param(lambda: RandomAffine(5, scale=(0, 1)), "scale=.*greater than 0", id="zoom 0"),
        pytest.param(lambda: RandomAffine(5, shear=(1, 2, 3)), "shear=", id="three shears"),
        pytest.param(lambda: RandomAffine(5, fill=None), "fill=None", id="no fill"),
        pytest.param(lambda: RandomAffine(5, interpolation="cubic"), "interpolation='cubic'", id="cubic"),
    ],
)
def test_wrong_arguments_are_refused_when_made(make, says):
    with pytest.raises(ValueError, match=says):
        make()
