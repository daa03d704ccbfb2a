import pytest
import torch

from efficio_data.gpu_augment import RandomBrightness, RandomContrast


@pytest.fixture(autouse=True)
def seeded_generator():
    torch.default_generator.manual_seed(0)


def images(channels, dtype):
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (24, channels, 17, 13), dtype=torch.uint8, generator=generator)
    return pixels if dtype == torch.uint8 else pixels.to(dtype) / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("transform", "name"),
    [(RandomBrightness(0.9), "adjust_brightness"), (RandomContrast(0.9), "adjust_contrast")],
    ids=["brightness", "contrast"],
)
def test_the_pixels_equal_torchvision(transform, name, channels, dtype):
    functional = pytest.importorskip("torchvision.transforms.functional")
    batch = images(channels, dtype)
    factors = transform.draw(batch.shape)
    result = transform.apply(batch, factors)
    expected = torch.stack(
        [
            getattr(functional, name)(image, factor.item())
            for image, factor in zip(batch, factors, strict=True)
        ]
    )
    difference = (result.double() - expected.double()).abs()
    if dtype == torch.uint8:
        # Cut to integers: a last-place difference of the mean may show as one level in single pixels.
        assert difference.max() <= 1
        assert (difference > 0).double().mean() < 1e-3
    else:
        assert difference.max() <= 1e-6


@pytest.mark.parametrize("transform", [RandomBrightness, RandomContrast], ids=["brightness", "contrast"])
def test_factors_lie_in_the_range_asked_for(transform):
    for amount, low, high in ((0.3, 0.7, 1.3), (2.0, 0.0, 3.0), ((0.5, 0.6), 0.5, 0.6)):
        factors = transform(amount).draw((2000, 3, 1, 1))
        assert low <= factors.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < factors.max() <= high


def test_a_factor_of_one_changes_nothing():
    for dtype in (torch.uint8, torch.float32):
        batch = images(3, dtype)
        assert torch.equal(RandomBrightness(0)(batch), batch)
        assert torch.equal(RandomContrast(0)(batch), batch)


def test_brightness_takes_any_number_of_channels_and_contrast_one_or_three():
    batch = images(4, torch.uint8)
    assert RandomBrightness(0.2)(batch).shape == batch.shape
    with pytest.raises(ValueError, match=r"shape \(24, 4, 17, 13\); RandomContrast expects 1 or 3 channels"):
        RandomContrast(0.2)(batch)


@pytest.mark.parametrize(
    "amount", [-0.1, (-0.5, 1.0), (2.0, 1.0), (1.0,), "much", float("inf"), True], ids=repr
)
@pytest.mark.parametrize("transform", [RandomBrightness, RandomContrast], ids=["brightness", "contrast"])
def test_an_amount_that_is_none_is_refused(transform, amount):
    with pytest.raises(ValueError, match="amount="):
        transform(amount)
