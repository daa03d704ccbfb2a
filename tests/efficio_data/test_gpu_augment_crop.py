import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from efficio_data.gpu_augment import RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from efficio_data.gpu_augment._window import show, through, whole_window, window_indices


@pytest.fixture(autouse=True)
def seeded_generator():
    torch.default_generator.manual_seed(0)


def numbered(n, channels, height, width, dtype=torch.float32):
    return torch.arange(n * channels * height * width).view(n, channels, height, width).to(dtype) + 1


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 5),
    channels=st.integers(1, 4),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=st.integers(0, 3),
    last=st.booleans(),
)
def test_a_crop_is_the_box_cut_from_the_padded_image(n, channels, sides, size, padding, last):
    size = tuple(min(a, b + 2 * padding) for a, b in zip(size, sides, strict=True))
    batch = numbered(n, channels, *sides)
    if last:
        batch = batch.contiguous(memory_format=torch.channels_last)
    crop = RandomCrop(size, padding, fill=-1)
    places = crop.draw(batch.shape)
    padded = F.pad(batch, (padding,) * 4, value=-1.0)
    for result, image, (top, left) in zip(
        crop.apply(batch, places), padded, places.long() + padding, strict=True
    ):
        assert torch.equal(result, image[:, top : top + size[0], left : left + size[1]])


def test_every_place_is_drawn_and_equally_often():
    places = RandomCrop(4, 1).draw((9000, 3, 4, 4))
    seen, counts = places.unique(dim=0, return_counts=True)
    assert seen.tolist() == [[top, left] for top in (-1, 0, 1) for left in (-1, 0, 1)]
    # 1000 expected with a deviation of 30.
    assert (counts - 1000).abs().max() < 180


def test_the_border_has_the_value_of_each_channel():
    batch = torch.full((4, 3, 4, 4), 9, dtype=torch.uint8)
    result = RandomCrop(8, 2, fill=(1, 2, 3))(batch)
    assert result[:, :, 0, 0].tolist() == [[1, 2, 3]] * 4
    assert torch.equal(result[:, :, 2:6, 2:6], batch)


def test_a_flip_reverses_exactly_those_that_were_drawn():
    batch = numbered(64, 3, 5, 6)
    for flip, axis in ((RandomHorizontalFlip(0.3), 3), (RandomVerticalFlip(0.3), 2)):
        flags = flip.draw(batch.shape)
        assert 0 < flags.sum() < 64
        expected = torch.where(flags.view(-1, 1, 1, 1) == 1, batch.flip(axis), batch)
        assert torch.equal(flip.apply(batch, flags), expected)


@pytest.mark.parametrize(("p", "flips"), [(0.0, 0), (1.0, 1000)], ids=["never", "always"])
def test_a_certain_flip_is_certain(p, flips):
    assert RandomHorizontalFlip(p).draw((1000, 1, 1, 1)).sum() == flips


def test_about_p_of_the_samples_are_flipped():
    # 2500 expected with a deviation of 43.
    assert abs(RandomVerticalFlip(0.25).draw((10_000, 1, 1, 1)).sum() - 2500) < 260


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["crop", "rows", "columns"]), max_size=6), st.integers(0, 2**31))
def test_a_chain_of_windows_is_one_window(kinds, seed):
    torch.manual_seed(seed)
    batch = numbered(3, 2, 9, 8)
    stepwise, window, shape = batch, whole_window(3), tuple(batch.shape)
    for kind in kinds:
        smaller = (max(shape[2] - 1, 1), max(shape[3] - 1, 1))
        move = {"crop": RandomCrop(smaller), "rows": RandomVerticalFlip(), "columns": RandomHorizontalFlip()}[
            kind
        ]
        parameters = move.draw(shape)
        window = through(window, move.window(parameters, shape))
        stepwise, shape = move.apply(stepwise, parameters), move.result_shape(shape)
    assert torch.equal(show(batch, window, shape[2:]), stepwise)


def test_indices_have_the_dtype_of_their_window():
    rows, columns = window_indices(torch.tensor([[3, -1, 0, 1]]), (4, 2))
    assert rows.tolist() == [[3, 2, 1, 0]]
    assert columns.tolist() == [[0, 1]]


def test_a_crop_that_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match="crop of 32x33 does not fit images of 28x28 with padding=2"):
        RandomCrop((32, 33), 2)(torch.zeros(1, 1, 28, 28))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda: RandomCrop(0), "size=0", id="size 0"),
        pytest.param(lambda: RandomCrop((3, 4, 5)), r"size=\(3, 4, 5\)", id="three sides"),
        pytest.param(lambda: RandomCrop(2.5), r"size=2\.5", id="float size"),
        pytest.param(lambda: RandomCrop("32"), "size='32'", id="text size"),
        pytest.param(lambda: RandomCrop(True), "size=True", id="bool size"),
        pytest.param(lambda: RandomCrop(32, -1), "padding=-1", id="negative padding"),
        pytest.param(lambda: RandomCrop(32, 1.5), r"padding=1\.5", id="float padding"),
        pytest.param(lambda: RandomCrop(32, fill="red"), "fill='red'", id="text fill"),
        pytest.param(lambda: RandomCrop(32, fill=()), r"fill=\(\)", id="no fill"),
        pytest.param(lambda: RandomHorizontalFlip(1.5), r"p=1\.5", id="p over 1"),
        pytest.param(lambda: RandomVerticalFlip(-0.1), r"p=-0\.1", id="p under 0"),
        pytest.param(lambda: RandomVerticalFlip(float("nan")), "p=nan", id="p nan"),
    ],
)
def test_wrong_arguments_are_refused_when_made(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("fill", "dtype", "says"),
    [
        ((1, 2), torch.float32, "fill has 2 values and the batch 3 channels"),
        (256, torch.uint8, "does not fit a uint8 batch"),
        ((0, 0, -1), torch.uint8, "does not fit a uint8 batch"),
    ],
    ids=["two of three", "over 255", "negative"],
)
def test_a_border_that_the_batch_cannot_hold_is_refused(fill, dtype, says):
    with pytest.raises(ValueError, match=says):
        RandomCrop(4, 1, fill=fill)(torch.zeros(1, 3, 4, 4, dtype=dtype))
