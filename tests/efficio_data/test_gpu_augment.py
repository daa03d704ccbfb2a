import pickle

import pytest
import torch

from efficio_data import gpu_augment
from efficio_data.gpu_augment import (
    Compose,
    Normalize,
    RandomAffine,
    RandomBrightness,
    RandomContrast,
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


RANDOM = [
    RandomCrop(16, 4),
    RandomCrop((12, 20), fill=3),
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    RandomResizedCrop(16),
    RandomResizedCrop(8, antialias=False),
    RandomAffine(20, (0.1, 0.2), scale=(0.8, 1.2), shear=(-5, 5, -10, 10)),
    RandomAffine(20, fill=1, interpolation="nearest"),
    RandomBrightness(0.4),
    RandomContrast(0.4),
    Compose([RandomCrop(16, 4), RandomHorizontalFlip(), ToFloat(), Normalize(0.5, 0.5)]),
]
FIXED = [ToFloat(), ToFloat(torch.float16), Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), Normalize(0.5, 0.5)]
DTYPES = [torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16]
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def images(n=6, channels=3, height=20, width=24, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=generator)
    return pixels if dtype == torch.uint8 else pixels.to(dtype).div(255)


def seeded(transform, batch, seed=0):
    torch.default_generator.manual_seed(seed)
    return transform(batch)


def test_the_public_names_are_sorted_and_there():
    assert gpu_augment.__all__ == sorted(gpu_augment.__all__)
    assert all(hasattr(gpu_augment, name) for name in gpu_augment.__all__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", RANDOM + FIXED, ids=repr)
def test_the_input_is_never_changed_and_the_samples_stay_in_number(transform, dtype):
    batch = images(dtype=dtype)
    before = batch.clone()
    result = transform(batch)
    assert torch.equal(batch, before)
    assert result.shape[:2] == batch.shape[:2]
    assert result.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", RANDOM[:-1], ids=repr)
def test_random_transforms_keep_the_dtype(transform, dtype):
    assert transform(images(dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("transform", RANDOM + FIXED, ids=repr)
def test_channels_last_is_kept_and_changes_no_pixel(transform):
    batch = images()
    plain = seeded(transform, batch)
    last = seeded(transform, batch.contiguous(memory_format=torch.channels_last))
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, plain, rtol=0, atol=1 if plain.dtype == torch.uint8 else 1e-5)


@pytest.mark.parametrize("transform", RANDOM + FIXED, ids=repr)
def test_a_strided_view_gives_what_its_copy_gives(transform):
    view = images(n=12, height=40)[::2, :, ::2]
    assert torch.equal(seeded(transform, view), seeded(transform, view.contiguous()))


@pytest.mark.parametrize("transform", RANDOM + FIXED, ids=repr)
def test_an_empty_batch_stays_empty(transform):
    assert len(transform(images(n=0))) == 0


@pytest.mark.parametrize("transform", RANDOM, ids=repr)
def test_the_same_seed_gives_the_same_batch_and_another_seed_another(transform):
    batch = images(n=32)
    assert torch.equal(seeded(transform, batch), seeded(transform, batch))
    assert not torch.equal(seeded(transform, batch), seeded(transform, batch, seed=1))


@pytest.mark.parametrize("transform", RANDOM, ids=repr)
def test_samples_of_one_batch_get_parameters_of_their_own(transform):
    same = images(n=1).expand(32, -1, -1, -1).contiguous()
    assert len({sample.numpy().tobytes() for sample in transform(same)}) > 1


@pytest.mark.parametrize("transform", RANDOM, ids=repr)
def test_the_number_of_draws_depends_on_the_shape_alone(transform):
    states = set()
    for batch in (torch.zeros_like(images()), images(), images(dtype=torch.float32)):
        seeded(transform, batch)
        states.add(torch.rand(4).numpy().tobytes())
    assert len(states) == 1


@pytest.mark.parametrize("transform", RANDOM[:-1], ids=repr)
def test_draws_are_on_the_cpu_whatever_the_default_device_and_dtype(transform):
    torch.default_generator.manual_seed(0)
    expected = transform.draw((6, 3, 20, 24))
    torch.default_generator.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            drawn = transform.draw((6, 3, 20, 24))
    finally:
        torch.set_default_dtype(torch.float32)
    assert drawn.device.type == "cpu"
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("transform", RANDOM + FIXED, ids=repr)
def test_a_default_device_changes_nothing(transform):
    batch = images()
    expected = seeded(transform, batch)
    with torch.device("meta"):
        result = seeded(transform, batch)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("transform", RANDOM[:-1], ids=repr)
def test_calling_is_drawing_and_applying(transform):
    batch = images()
    torch.default_generator.manual_seed(0)
    assert torch.equal(transform.apply(batch, transform.draw(batch.shape)), seeded(transform, batch))


@pytest.mark.parametrize("transform", RANDOM[:-1], ids=repr)
def test_parameters_drawn_for_another_batch_are_refused(transform):
    with pytest.raises(ValueError, match=r"parameters have shape .* expected \(6, "):
        transform.apply(images(), transform.draw((5, 3, 20, 24)))


@pytest.mark.parametrize("transform", [RandomCrop(16), RandomResizedCrop(16)], ids=repr)
def test_places_drawn_for_larger_images_are_refused(transform):
    torch.default_generator.manual_seed(0)
    parameters = transform.draw((6, 3, 200, 240))
    with pytest.raises(ValueError, match="lie outside images of 20x24"):
        transform.apply(images(), parameters)


@pytest.mark.parametrize("transform", RANDOM + FIXED + [RepeatChannels(3)], ids=repr)
@pytest.mark.parametrize(
    ("batch", "error", "says"),
    [
        pytest.param(
            images()[0], ValueError, r"shape \(3, 20, 24\); expected \(N, C, H, W\).*image\[None\]", id="3-D"
        ),
        pytest.param(
            images()[None], ValueError, r"shape \(1, 6, 3, 20, 24\); expected \(N, C, H, W\)", id="5-D"
        ),
        pytest.param(torch.zeros(2, 3, 0, 4), ValueError, r"shape \(2, 3, 0, 4\)", id="no rows"),
        pytest.param(images().long(), TypeError, r"dtype torch.int64; expected uint8", id="int64"),
        pytest.param([1, 2], TypeError, r"is a list; expected a tensor", id="list"),
    ],
)
def test_what_is_no_batch_is_refused_in_one_line(transform, batch, error, says):
    with pytest.raises(error, match=says) as caught:
        transform(batch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("transform", RANDOM + FIXED + [RepeatChannels(3)], ids=repr)
def test_the_repr_makes_an_equal_transform_and_pickle_does_too(transform):
    names = {name: getattr(gpu_augment, name) for name in gpu_augment.__all__}
    made = eval(repr(transform), {"torch": torch, **names})
    assert made == transform
    assert hash(made) == hash(transform)
    assert pickle.loads(pickle.dumps(transform)) == transform


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("transform", RANDOM + FIXED, ids=repr)
def test_a_cuda_device_gives_what_the_cpu_gives(transform, dtype):
    batch = images(n=32, dtype=dtype)
    here = seeded(transform, batch)
    after_here = torch.rand(4)
    there = seeded(transform, batch.cuda())
    assert torch.equal(torch.rand(4), after_here)
    assert there.device.type == "cuda"
    # uint8: a last-place difference can fall on the other side of a rounding. float16: of its own last place.
    atol = {torch.uint8: 1, torch.float16: 1e-3}.get(here.dtype, 1e-5)
    difference = (there.cpu().to(torch.float64) - here.to(torch.float64)).abs()
    assert difference.max() <= atol
    # Equal draws leave no room for more than a few pixels on a half of uint8.
    assert (difference > 1e-3).to(torch.float64).mean() <= 1e-2


@gpu
@needs_cuda
@pytest.mark.parametrize("transform", RANDOM, ids=repr)
def test_the_device_generator_is_not_touched(transform):
    before = torch.cuda.get_rng_state()
    transform(images().cuda())
    assert torch.equal(torch.cuda.get_rng_state(), before)


@gpu
@needs_cuda
def test_full_precision_is_kept_when_tensor_cores_and_autocast_are_allowed():
    batch = images(n=32, dtype=torch.float32)
    transform = Compose([RandomResizedCrop(16), RandomAffine(20)])
    here = seeded(transform, batch)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            there = seeded(transform, batch.cuda())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-5)
