import pytest
import torch

from efficio_data.gpu_augment import Normalize, RepeatChannels, ToFloat

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEVELS = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(1, 3, 16, 16)


def test_uint8_is_divided_by_255_and_floats_keep_their_values():
    assert torch.equal(ToFloat()(LEVELS), LEVELS.to(torch.float32) / 255)
    doubles = torch.full((1, 1, 1, 1), 7.5, dtype=torch.float64)
    assert ToFloat()(doubles) is doubles
    assert torch.equal(ToFloat(torch.float16)(doubles), doubles.half())
    assert ToFloat(torch.bfloat16)(LEVELS).dtype == torch.bfloat16


def test_normalize_equals_torchvision_in_exact_arithmetic():
    functional = pytest.importorskip("torchvision.transforms.functional")
    expected = functional.normalize(LEVELS.double() / 255, MEAN, STD)
    for batch in (LEVELS, LEVELS.float() / 255, LEVELS.double() / 255):
        # The result goes up to 2.6: a few units in the last place of float32.
        torch.testing.assert_close(Normalize(MEAN, STD)(batch).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "option", "dtype"),
    [
        (torch.uint8, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float16, None, torch.float16),
        (torch.uint8, torch.float16, torch.float16),
        (torch.float64, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_normalize_gives_the_dtype_asked_for(batch, option, dtype):
    assert Normalize(0.5, 0.5, dtype=option)(torch.ones(1, 2, 3, 3, dtype=batch)).dtype == dtype


def test_half_precision_images_are_normalized_in_full_precision():
    halves = (LEVELS.float() / 255).half()
    assert torch.equal(Normalize(MEAN, STD)(halves), Normalize(MEAN, STD)(halves.float()).half())


def test_one_number_stands_for_all_channels():
    assert torch.equal(Normalize(0.5, 0.25)(LEVELS), Normalize([0.5] * 3, [0.25] * 3)(LEVELS))
    assert torch.equal(Normalize(0.5, STD)(LEVELS), Normalize([0.5] * 3, STD)(LEVELS))


def test_a_list_changed_later_changes_no_transform():
    mean = [0.5, 0.5, 0.5]
    normalize = Normalize(mean, 1.0)
    mean[0] = 9.0
    assert normalize == Normalize((0.5, 0.5, 0.5), 1.0)


def test_grey_is_shown_as_colour_without_a_copy():
    grey = torch.rand(2, 1, 4, 4)
    colour = RepeatChannels(3)(grey)
    assert torch.equal(colour, torch.cat([grey] * 3, dim=1))
    assert colour.data_ptr() == grey.data_ptr()
    assert Normalize(MEAN, STD)(colour).is_contiguous()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        pytest.param(lambda: ToFloat(torch.int32), TypeError, "torch.int32 is not a floating", id="int32"),
        pytest.param(lambda: ToFloat("float16"), TypeError, "'float16' is not a floating", id="text"),
        pytest.param(lambda: Normalize(0.5, 0), ValueError, "std=.*not positive", id="std 0"),
        pytest.param(lambda: Normalize(0.5, (1, -1)), ValueError, "std=.*not positive", id="std -1"),
        pytest.param(lambda: Normalize("a", 1), ValueError, "mean='a'", id="text mean"),
        pytest.param(lambda: Normalize(float("nan"), 1), ValueError, "mean=nan", id="nan mean"),
        pytest.param(lambda: Normalize(0, 1, dtype=torch.uint8), TypeError, "torch.uint8", id="uint8 out"),
        pytest.param(
            lambda: Normalize((0.1, 0.2), 1)(LEVELS),
            ValueError,
            "mean has 2 values and the batch 3",
            id="2 means",
        ),
        pytest.param(lambda: Normalize(0, (1, 2, 3, 4))(LEVELS), ValueError, "std has 4 values", id="4 stds"),
        pytest.param(lambda: RepeatChannels(0), ValueError, "channels=0", id="no channels"),
        pytest.param(
            lambda: RepeatChannels(3)(LEVELS),
            ValueError,
            r"shape \(1, 3, 16, 16\).*\(N, 1, H, W\)",
            id="colour",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
