import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efficio_data.gpu_augment import (
    Compose,
    Normalize,
    RandomAffine,
    RandomBrightness,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    RepeatChannels,
    ToFloat,
)


@pytest.fixture(autouse=True)
def seeded_generator():
    torch.default_generator.manual_seed(0)


STEPS = {
    "crop": RandomCrop(14, 2, fill=7),
    "small crop": RandomCrop(9),
    "flip": RandomHorizontalFlip(),
    "turn": RandomVerticalFlip(),
    "resize": RandomResizedCrop(14),
    "affine": RandomAffine(30, fill=9),
    "brighter": RandomBrightness(0.5),
    "own": lambda batch: batch + torch.randint(0, 2, (1,), dtype=batch.dtype),
}


def run(transforms, batch, fuse, seed=0):
    torch.default_generator.manual_seed(seed)
    result = Compose(transforms, fuse=fuse)(batch)
    return result, torch.rand(4)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from([name for name in STEPS if name != "small crop"]), max_size=6),
    last=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_joined_geometry_gives_the_same_bits_and_draws(names, last, seed):
    batch = torch.randint(0, 256, (5, 3, 14, 14), dtype=torch.uint8)
    if last:
        batch = batch.contiguous(memory_format=torch.channels_last)
    transforms = [STEPS[name] for name in names]
    joined, after_joined = run(transforms, batch, True, seed)
    single, after_single = run(transforms, batch, False, seed)
    assert torch.equal(joined, single)
    assert torch.equal(after_joined, after_single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "first", [RandomResizedCrop(24), RandomResizedCrop(12), RandomAffine(30, (0.1, 0.1))], ids=repr
)
def test_a_flip_folded_into_the_sampling_gives_the_same_bits(first, dtype):
    batch = torch.rand(16, 3, 20, 20, dtype=dtype)
    transforms = [first, RandomHorizontalFlip(), RandomVerticalFlip()]
    assert torch.equal(run(transforms, batch, True)[0], run(transforms, batch, False)[0])


@pytest.mark.parametrize("repeat", [[], [RepeatChannels(3)]], ids=["alone", "repeated"])
@pytest.mark.parametrize("convert", [ToFloat(), ToFloat(torch.float32)], ids=repr)
def test_conversion_and_normalization_in_one_pass_agree_to_the_last_places(convert, repeat):
    batch = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    transforms = [convert, *repeat, Normalize((0.485, 0.456, 0.406)[: 3 if repeat else 1], 0.225)]
    joined, single = (run(transforms, batch, fuse)[0] for fuse in (True, False))
    assert joined.dtype == single.dtype == torch.float32
    # The result reaches 2.6, whose last place is 2.4e-7.
    torch.testing.assert_close(joined, single, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "convert", [ToFloat(torch.float16), ToFloat(torch.float64), ToFloat(torch.bfloat16)], ids=repr
)
def test_conversion_to_another_dtype_is_not_skipped(convert):
    batch = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    joined, single = (run([convert, Normalize(0.5, 0.25)], batch, fuse)[0] for fuse in (True, False))
    assert joined.dtype == convert.dtype
    assert torch.equal(joined, single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_floating_point_batches_pass_the_joined_conversion(dtype):
    batch = torch.rand(2, 3, 4, 4).to(dtype)
    joined, single = (
        run([ToFloat(torch.float32), Normalize(0.5, 0.25)], batch, fuse)[0] for fuse in (True, False)
    )
    assert joined.dtype == torch.float32
    assert torch.equal(joined, single)


def test_neighbours_are_joined_and_others_are_not():
    def joined(*names):
        return len(Compose([STEPS[name] for name in names])._steps)

    assert joined("crop", "flip") == 1
    assert joined("flip", "turn", "crop", "flip") == 1
    assert joined("crop", "small crop") == 2
    assert joined("resize", "flip", "turn") == 1
    assert joined("flip", "resize") == 2
    assert joined("resize", "crop") == 2
    assert joined("resize", "affine") == 2
    assert joined("crop", "brighter", "flip") == 3
    assert len(Compose([ToFloat(), RepeatChannels(3), Normalize(0, 1)])._steps) == 1
    assert len(Compose([RepeatChannels(3), Normalize(0, 1)])._steps) == 2


def test_a_subclass_is_applied_as_it_is():
    class Twice(RandomHorizontalFlip):
        def __call__(self, batch):
            return batch * 2

    batch = torch.ones(2, 1, 4, 4)
    assert torch.equal(Compose([RandomCrop(4), Twice()])(batch), batch * 2)


def test_no_transforms_give_the_batch_back():
    batch = torch.rand(2, 3, 4, 4)
    assert Compose([])(batch) is batch


def test_the_repr_shows_what_was_given():
    assert (
        repr(Compose([ToFloat(), RandomHorizontalFlip()]))
        == "Compose([ToFloat(dtype=None), RandomHorizontalFlip(p=0.5)])"
    )
    assert repr(Compose((ToFloat(),), fuse=False)) == "Compose([ToFloat(dtype=None)], fuse=False)"


@pytest.mark.parametrize(
    ("transforms", "says"),
    [
        pytest.param(ToFloat(), r"ToFloat\(dtype=None\) is no list", id="one transform"),
        pytest.param(
            [RandomHorizontalFlip],
            r"transform 0 is the class .*; write RandomHorizontalFlip\(\)",
            id="a class",
        ),
        pytest.param([ToFloat(), None], "transform 1 is None; expected a callable", id="None"),
        pytest.param("flip", "transform 0 is 'f'", id="text"),
    ],
)
def test_what_is_no_list_of_transforms_is_refused(transforms, says):
    with pytest.raises(TypeError, match=says):
        Compose(transforms)
