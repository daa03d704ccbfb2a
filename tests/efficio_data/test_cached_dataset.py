from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from efficio_data._cached_dataset import CachedImageDataset
from efficio_data._gpu_loader import GPULoader
from efficio_data._image_cache import ImageCache
from efficio_data._resumable import resumable

COUNT, SIZE = 24, (6, 8)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("in")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        Image.fromarray(rng.integers(0, 256, (*SIZE, 3), np.uint8)).save(folder / f"{number:02d}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def root(paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    ImageCache.build(paths, range(COUNT), folder, size=SIZE)
    return folder


@pytest.fixture(scope="module")
def expected(paths):
    return torch.stack([torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in paths])


def invert(image):
    return 255 - image


def test_an_item_is_the_image_and_its_label(root, expected):
    dataset = CachedImageDataset(root)
    assert len(dataset) == COUNT
    for index in (0, 5, COUNT - 1, -1):
        image, label = dataset[index]
        assert torch.equal(image, expected[index])
        assert image.dtype == torch.uint8
        assert (type(label), label) == (int, index % COUNT)


def test_a_batch_is_its_items_in_order(root, expected):
    dataset = CachedImageDataset(root)
    indices = [3, 3, 20, 0, -1, 7]
    batch = dataset.__getitems__(indices)
    for (image, label), index in zip(batch, indices, strict=True):
        assert torch.equal(image, expected[index])
        assert label == index % COUNT


@pytest.mark.parametrize("index", [COUNT, -COUNT - 1, 10**6])
def test_an_index_out_of_range_is_an_error_and_not_another_image(index, root):
    dataset = CachedImageDataset(root)
    with pytest.raises(IndexError, match=f"index {index} is out of range for {COUNT}"):
        dataset[index]
    with pytest.raises(IndexError, match=f"index {index} "):
        dataset.__getitems__([0, index])


def test_iterating_ends(root):
    assert len(list(CachedImageDataset(root))) == COUNT


def test_a_changed_item_changes_neither_cache_nor_later_items(root, expected):
    dataset = CachedImageDataset(root)
    dataset[0][0].zero_()
    assert torch.equal(dataset[0][0], expected[0])
    assert not dataset.data.flags.writeable


@pytest.mark.parametrize(
    "collate", [None, CachedImageDataset.collate], ids=["torch's collate", "own collate"]
)
@pytest.mark.parametrize("transform", [None, invert], ids=["plain", "transform"])
@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_a_loader_gives_the_same_batches_in_each_way(workers, transform, collate, root, expected):
    dataset = CachedImageDataset(root, transform)
    loader = DataLoader(dataset, 5, num_workers=workers, collate_fn=collate)
    images, labels = zip(*loader, strict=True)
    assert torch.equal(torch.cat(images), expected if transform is None else 255 - expected)
    assert torch.equal(torch.cat(labels), torch.arange(COUNT))
    assert labels[0].dtype == torch.int64


def test_the_own_collate_does_not_copy_a_whole_batch(root):
    dataset = CachedImageDataset(root)
    batch = dataset.__getitems__([0, 1, 2])
    images, _ = dataset.collate(batch)
    assert images.data_ptr() == batch[0][0].data_ptr()
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_with_a_transform_samples_are_asked_for_one_by_one(root):
    assert CachedImageDataset(root, invert).__getitems__ is None


def test_a_subset_is_read_in_whole_batches(root, expected):
    loader = DataLoader(Subset(CachedImageDataset(root), [5, 9, 1]), 3)
    assert torch.equal(next(iter(loader))[0], expected[[5, 9, 1]])


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (np.arange(COUNT, dtype=np.uint8), torch.int64),
        (np.arange(COUNT, dtype=np.int32), torch.int64),
        (np.arange(COUNT, dtype=np.uint16), torch.int64),
        (np.arange(COUNT) % 2 == 0, torch.bool),
        (np.arange(COUNT, dtype=np.float32), torch.float32),
        (np.arange(COUNT, dtype=np.float64), torch.float64),
        (np.arange(2 * COUNT, dtype=np.float32).reshape(COUNT, 2), torch.float32),
        (np.arange(2 * COUNT, dtype=np.int32).reshape(COUNT, 2), torch.int32),
    ],
    ids=lambda value: f"{value.dtype}{value.shape[1:]}" if isinstance(value, np.ndarray) else "",
)
@pytest.mark.parametrize("collate", [None, CachedImageDataset.collate], ids=["torch's", "own"])
def test_labels_come_in_a_dtype_that_losses_take(collate, labels, dtype, paths, tmp_path):
    ImageCache.build(paths, labels, tmp_path, size=SIZE)
    got = torch.cat([batch for _, batch in DataLoader(CachedImageDataset(tmp_path), 7, collate_fn=collate)])
    assert got.dtype == dtype
    assert np.array_equal(got.numpy(), labels)


def first_image(dataset):
    return dataset[0][0].numpy()


def test_a_spawned_process_opens_the_cache_for_itself(root, expected):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert np.array_equal(pool.apply(first_image, (CachedImageDataset(root),)), expected[0].numpy())


def test_a_pickled_dataset_holds_no_images(root, expected):
    data = pickle.dumps(CachedImageDataset(root, invert))
    assert len(data) < 1500
    assert torch.equal(pickle.loads(data)[2][0], 255 - expected[2])


def test_a_relative_root_is_found_from_another_folder(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root.parent)
    data = pickle.dumps(CachedImageDataset(root.name))
    monkeypatch.chdir(tmp_path)
    assert len(pickle.loads(data)) == COUNT


def test_a_cache_that_was_rebuilt_is_not_taken_for_the_old_one(paths, tmp_path):
    ImageCache.build(paths, range(COUNT), tmp_path, size=SIZE)
    data = pickle.dumps(CachedImageDataset(tmp_path))
    ImageCache.build(paths[:5], range(5), tmp_path, size=SIZE, rebuild=True)
    with pytest.raises(ValueError, match="has been rebuilt"):
        pickle.loads(data)


def test_a_missing_cache_is_an_error_with_its_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="no image cache"):
        CachedImageDataset(tmp_path / "none")


def test_gpu_loader_takes_it_as_it_takes_a_torchvision_dataset(root, expected):
    images, labels = zip(*GPULoader.from_torchvision(CachedImageDataset(root), 7, device="cpu"), strict=True)
    assert torch.equal(torch.cat(images), expected)
    assert torch.cat(labels).tolist() == list(range(COUNT))


def jitter(image):
    return image + torch.randint(0, 9, (1,), dtype=torch.uint8)


@pytest.mark.parametrize("transform", [None, jitter], ids=["plain", "random transform"])
def test_a_resumable_loader_over_it_starts_anywhere(transform, root):
    from efficio_data import Position

    def batches(samples):
        loader = DataLoader(
            CachedImageDataset(root, transform), 4, shuffle=True, collate_fn=CachedImageDataset.collate
        )
        return [batch for batch, _ in resumable(loader, seed=3).iter_from(Position(1, samples))]

    whole, rest = batches(0), batches(8)
    for (images, labels), (again, labels_again) in zip(whole[2:], rest, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, labels_again)
