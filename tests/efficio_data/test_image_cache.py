from __future__ import annotations

import errno
import os
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from efficio_data._cache_request import FailedImagesError
from efficio_data._image_cache import ImageCache

SIZE = (4, 5)


def write_images(folder, count, size=(10, 12), start=0):
    """PNG files of one gray level each: the level is the number of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(start, start + count):
        paths.append(folder / f"{number:03d}.png")
        Image.new("RGB", size[::-1], (number % 256,) * 3).save(paths[-1])
    return paths


@pytest.fixture
def decodes(monkeypatch):
    """Names of the files that Pillow has been given, by the level of their pixels being unknown: only how many."""
    calls = []
    really_open = Image.open
    monkeypatch.setattr(Image, "open", lambda file: calls.append(file) or really_open(file))
    return calls


def levels(cache):
    assert (cache.images == cache.images[:, :1, :1, :1]).all()
    return cache.images[:, 0, 0, 0].tolist()


def snapshot(root):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path(root).iterdir()}


def test_row_and_label_are_those_of_the_path(tmp_path):
    paths = write_images(tmp_path / "in", 150)
    cache = ImageCache.build(paths, range(150), tmp_path / "out", size=SIZE, workers=3)
    assert levels(cache) == list(range(150))
    assert cache.labels.tolist() == list(range(150))
    assert cache.images.shape == (150, 4, 5, 3)
    assert cache.images.dtype == np.uint8
    assert isinstance(cache.images, np.memmap)
    assert not cache.images.flags.writeable
    assert len(cache) == 150
    assert cache.info.kept.tolist() == list(range(150))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "images.u8",
        "labels.npy",
        "manifest.jsonl",
        "meta.json",
        "rows.crc",
    ]
    cache.verify()


def test_pixels_are_those_of_pillow(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    paths = [str(tmp_path / "in" / f"{number}.png") for number in range(5)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (31, 17, 3), np.uint8)).save(path)
    cache = ImageCache.build(paths, range(5), tmp_path / "out", size=(9, 13))
    for row, path in zip(cache.images, paths, strict=True):
        assert np.array_equal(row, np.asarray(Image.open(path).resize((13, 9), Image.Resampling.BILINEAR)))


def test_any_number_of_workers_gives_the_same_files(tmp_path):
    paths = write_images(tmp_path / "in", 70)
    for workers in (1, 5):
        ImageCache.build(paths, range(70), tmp_path / str(workers), size=SIZE, workers=workers)
    one, five = (tmp_path / "1", tmp_path / "5")
    assert all((five / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())


def test_a_grayscale_cache_has_one_channel(tmp_path):
    cache = ImageCache.build(
        write_images(tmp_path / "in", 3), [0, 0, 0], tmp_path / "out", size=SIZE, grayscale=True
    )
    assert cache.images.shape == (3, 4, 5, 1)
    assert levels(cache) == [0, 1, 2]


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 2],
        [0.5, 1.5, float("nan")],
        np.array([1, 2, 3], np.uint8),
        np.array([1, 2, 3], ">i4"),
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.array([[True, False]] * 3),
        torch.tensor([3, 4, 5], dtype=torch.int16),
        (label for label in ()),
    ],
    ids=["ints", "floats", "uint8", "big-endian", "rows", "bools", "tensor", "generator"],
)
def test_labels_keep_their_dtype_and_shape(labels, tmp_path):
    paths = write_images(tmp_path / "in", 3)
    if not hasattr(labels, "__len__"):
        with pytest.raises(ValueError, match="objects"):
            ImageCache.build(paths, labels, tmp_path / "out", size=SIZE)
        return
    cache = ImageCache.build(paths, labels, tmp_path / "out", size=SIZE)
    expected = np.asarray(labels)
    assert cache.labels.dtype == expected.dtype.newbyteorder("=")
    assert np.array_equal(cache.labels, expected, equal_nan=expected.dtype.kind == "f")


@pytest.mark.parametrize(
    ("paths", "labels", "options", "reason"),
    [
        (["a", "b"], [1, 2, 3], {}, "2 paths and 3 labels"),
        ([], [], {}, "paths is empty"),
        ("a.png", [1], {}, "'a.png' is one path"),
        (["a"], ["cat"], {}, r"text or objects; give numbers, for example names = sorted"),
        (["a", "b"], [[1], [1, 2]], {}, "unequal lengths|objects"),
        (["a"], [1j], {}, "complex128"),
        (["a"], 3, {}, "shape"),
        (["a"], [1], {"size": 224}, "size=224"),
        (["a"], [1], {"background": -1}, "background=-1"),
        (["a"], [1], {"on_error": "zero"}, "on_error='zero'"),
        (["a"], [1], {"check": "hash"}, "check='hash'"),
        (["a"], [1], {"workers": 0}, "workers=0"),
        (["a"], [1], {"quality": "good"}, "quality='good'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_touched(paths, labels, options, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        ImageCache.build(paths, labels, tmp_path / "out", **{"size": SIZE, **options})
    assert not (tmp_path / "out").exists()


def test_a_root_that_cannot_be_made_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ImageCache.build(write_images(tmp_path / "in", 1), [0], tmp_path / "file" / "out", size=SIZE)
    with pytest.raises(OSError, match="file"):
        ImageCache.build(write_images(tmp_path / "in", 1), [0], tmp_path / "file", size=SIZE)


def test_names_in_any_script_are_read(tmp_path):
    plain = write_images(tmp_path / "in", 5)
    names = ["é.png", "א/猫.png", "with space.png", "a#b.png", "%41?.png" if os.name != "nt" else "%41.png"]
    paths = [tmp_path / "odd" / name for name in names]
    for path, source in zip(paths, plain, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, path)
    odd = ImageCache.build(paths, range(5), tmp_path / "a", size=SIZE)
    assert np.array_equal(odd.images, ImageCache.build(plain, range(5), tmp_path / "b", size=SIZE).images)
    ImageCache.open(tmp_path / "a").verify()


def test_names_that_are_no_unicode_are_read(tmp_path, decodes):
    name = os.fsencode(tmp_path) + b"/\xff.png"
    try:
        shutil.copy(write_images(tmp_path / "in", 1)[0], os.fsdecode(name))
    except (OSError, ValueError):
        pytest.skip("this file system wants Unicode names")
    for _ in range(2):
        ImageCache.build([name], [0], tmp_path / "out", size=SIZE)
    assert len(decodes) == 1


def test_the_number_of_16_bit_files_is_told(tmp_path):
    paths = write_images(tmp_path / "in", 4)
    for path in paths[:3]:
        Image.fromarray(np.full((3, 3), 30000, np.uint16)).save(path)
    cache = ImageCache.build(paths, range(4), tmp_path / "out", size=SIZE)
    assert levels(cache) == [117, 117, 117, 3]
    assert cache.info.bit16 == 3


# ---- files that cannot be read


def break_three(paths):
    """Cut one in half, empty one, replace one by a page; returns their places."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(paths[3], "jpeg")
    paths[3].write_bytes(paths[3].read_bytes()[: paths[3].stat().st_size // 2])
    paths[7].write_bytes(b"")
    paths[11].write_text("<!DOCTYPE html><p>404")
    return [3, 7, 11]


def test_all_bad_files_are_reported_at_the_end_with_reasons(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 20)
    break_three(paths)
    paths[15].unlink()
    with pytest.raises(FailedImagesError, match="4 images cannot be read") as caught:
        ImageCache.build(paths, range(20), tmp_path / "out", size=SIZE)
    failed = dict(caught.value.failed)
    assert list(failed) == [str(paths[place]) for place in (3, 7, 11, 15)]
    for place, reason in zip((3, 7, 11, 15), ("truncated", "empty", "DOCTYPE", "No such file"), strict=True):
        assert reason in failed[str(paths[place])]
        assert str(paths[place]) in str(caught.value)
    assert len(decodes) == 18
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert "\n" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).failed == caught.value.failed
    with pytest.raises(FileNotFoundError, match="unfinished"):
        ImageCache.open(tmp_path / "out")


def test_after_mending_only_the_mended_files_are_decoded(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 100)
    places = break_three(paths)
    with pytest.raises(FailedImagesError):
        ImageCache.build(paths, range(100), tmp_path / "out", size=SIZE)
    decodes.clear()
    for place in places:
        Image.new("RGB", (9, 9), (place,) * 3).save(paths[place], "png")
    cache = ImageCache.build(paths, range(100), tmp_path / "out", size=SIZE)
    assert levels(cache) == list(range(100))
    assert len(decodes) == 3
    cache.verify()


def test_a_long_list_of_failures_is_cut_in_the_message_only(tmp_path):
    with pytest.raises(FailedImagesError, match="and 15 more") as caught:
        ImageCache.build(
            [tmp_path / str(number) for number in range(25)], range(25), tmp_path / "out", size=SIZE
        )
    assert len(caught.value.failed) == 25


@pytest.mark.parametrize("bad", [[3], [0], [9], [0, 1, 2], [2, 5, 9]], ids=str)
def test_skipped_images_leave_images_and_labels_in_step(bad, tmp_path):
    paths = write_images(tmp_path / "in", 10)
    for place in bad:
        paths[place].write_bytes(b"no image")
    labels = np.stack([np.arange(10), -np.arange(10)], 1)
    cache = ImageCache.build(paths, labels, tmp_path / "out", size=SIZE, on_error="skip")
    kept = [place for place in range(10) if place not in bad]
    assert levels(cache) == kept
    assert cache.labels[:, 0].tolist() == kept
    assert cache.labels[:, 1].tolist() == [-place for place in kept]
    assert cache.info.kept.tolist() == kept
    assert [path for path, _ in cache.info.failed] == [str(paths[place]) for place in bad]
    cache.verify()


def test_a_skipping_cache_is_reused_and_takes_new_labels(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 10)
    paths[3].write_bytes(b"no image")
    paths[4].unlink()
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE, on_error="skip")
    decodes.clear()
    cache = ImageCache.build(paths, range(10, 20), tmp_path / "out", size=SIZE, on_error="skip")
    assert cache.labels.tolist() == [10, 11, 12, 15, 16, 17, 18, 19]
    assert decodes == []
    with pytest.raises(FailedImagesError, match="built without them"):
        ImageCache.build(paths, range(10, 20), tmp_path / "out", size=SIZE)
    Image.new("RGB", (9, 9), (3, 3, 3)).save(paths[3])
    with pytest.raises(ValueError, match="1 files have changed"):
        ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE, on_error="skip")


def test_a_cache_of_no_image_is_an_error(tmp_path):
    with pytest.raises(FailedImagesError, match="none is left"):
        ImageCache.build([tmp_path / "a"], [0], tmp_path / "out", size=SIZE, on_error="skip")


def test_an_image_over_pillows_limit_is_listed(tmp_path, monkeypatch):
    paths = write_images(tmp_path / "in", 3)
    Image.new("L", (100, 100)).save(paths[1])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    cache = ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE, on_error="skip")
    assert "DecompressionBomb" in cache.info.failed[0][1]


# ---- the second call


def test_the_same_again_decodes_and_writes_nothing(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 10)
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    before = snapshot(tmp_path / "out")
    decodes.clear()
    cache = ImageCache.build(map(str, paths), np.arange(10), str(tmp_path / "out"), size=SIZE, workers=1)
    assert levels(cache) == list(range(10))
    assert decodes == []
    assert snapshot(tmp_path / "out") == before


def test_new_labels_are_written_without_decoding(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 10)
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    decodes.clear()
    labels = [*range(9), 0]
    assert ImageCache.build(paths, labels, tmp_path / "out", size=SIZE).labels.tolist() == labels
    as_float = ImageCache.build(paths, np.array(labels, np.float32), tmp_path / "out", size=SIZE)
    assert as_float.labels.dtype == np.float32
    assert ImageCache.open(tmp_path / "out").labels.dtype == np.float32
    assert decodes == []


def repaint(path, level):
    """Other pixels in a file of the same number of bytes."""
    before = path.stat()
    Image.new("RGB", (12, 10), (level,) * 3).save(path, compress_level=0)
    assert path.stat().st_size == before.st_size
    return before


def change(what, paths, options):
    if what == "file":
        repaint(paths[2], 99)
    elif what == "gone":
        paths[2].unlink()
    elif what == "order":
        paths.reverse()
    elif what == "fewer":
        del paths[-1]
    else:
        options[what] = {
            "size": (5, 4),
            "grayscale": True,
            "background": 9,
            "exif": False,
            "quality": "exact",
            "bit16_max": 4095,
        }[what]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("file", "1 files have changed or are gone: .*002.png"),
        ("gone", "1 files have changed or are gone: .*002.png"),
        ("order", "10 paths are others, first .*000.png' is .*009.png"),
        ("fewer", "10 paths were given and 9 are"),
        ("size", "height was 4 and is 5; width was 5 and is 4"),
        ("grayscale", "grayscale was False and is True"),
        ("background", r"background was \(0, 0, 0\) and is \(9, 9, 9\)"),
        ("exif", "exif was True and is False"),
        ("quality", "quality was fast and is exact"),
        ("bit16_max", "bit16_max was 65535 and is 4095"),
    ],
)
def test_what_has_changed_is_said_and_nothing_is_lost(what, said, tmp_path):
    paths = write_images(tmp_path / "in", 10)
    for path in paths:
        Image.open(path).save(path, compress_level=0)
    options = {"size": SIZE}
    ImageCache.build(paths, range(10), tmp_path / "out", **options)
    before = snapshot(tmp_path / "out")
    change(what, paths, options)
    with pytest.raises(ValueError, match=said):
        ImageCache.build(paths, range(len(paths)), tmp_path / "out", **options)
    assert snapshot(tmp_path / "out") == before
    if what != "gone":
        again = ImageCache.build(paths, range(len(paths)), tmp_path / "out", **options, rebuild=True)
        fresh = ImageCache.build(paths, range(len(paths)), tmp_path / "fresh", **options)
        assert np.array_equal(again.images, fresh.images)
        assert snapshot(tmp_path / "out").keys() == snapshot(tmp_path / "fresh").keys()
        again.verify()


def test_a_rebuild_decodes_changed_files_only(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 100)
    Image.fromarray(np.full((3, 3), 30000, np.uint16)).save(paths[50])
    ImageCache.build(paths, range(100), tmp_path / "out", size=SIZE)
    decodes.clear()
    Image.new("RGB", (7, 7), (200,) * 3).save(paths[20])
    more = [*reversed(paths), *write_images(tmp_path / "in", 5, start=100)]
    cache = ImageCache.build(more, range(105), tmp_path / "out", size=SIZE, rebuild=True)
    expected = [*reversed(range(100)), *range(100, 105)]
    expected[79], expected[49] = 200, 117
    assert levels(cache) == expected
    assert len(decodes) == 6
    assert cache.info.bit16 == 1


def test_a_new_time_with_the_same_content_is_no_change(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 10)
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    decodes.clear()
    os.utime(paths[3], ns=(10**18, 10**18))
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    assert decodes == []
    os.utime(paths[3], ns=(2 * 10**18, 2 * 10**18))
    ImageCache.build(paths, [5] * 10, tmp_path / "out", size=SIZE)
    before = snapshot(tmp_path / "out")
    ImageCache.build(paths, [5] * 10, tmp_path / "out", size=SIZE)  # the new time has been noted
    assert snapshot(tmp_path / "out") == before
    assert b"2000000000000000000" in before["manifest.jsonl"][0]


def test_a_change_that_keeps_size_and_time_is_found_by_content(tmp_path):
    paths = write_images(tmp_path / "in", 3)
    for path in paths:
        Image.open(path).save(path, compress_level=0)
    ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE)
    before = repaint(paths[1], 88)
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"001\.png"):
        ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE, check="content")
    cache = ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE, check="content", rebuild=True)
    assert levels(cache) == [0, 88, 2]


def test_an_unfinished_build_of_something_else_is_not_thrown_away_unasked(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 5)
    with pytest.raises(FailedImagesError):
        ImageCache.build([*paths, "none"], range(6), tmp_path / "out", size=SIZE)
    with pytest.raises(ValueError, match=r"unfinished build of something else \(height was 4 and is 5"):
        ImageCache.build([*paths, "none"], range(6), tmp_path / "out", size=(5, 5))
    with pytest.raises(ValueError, match="number of paths was 6 and is 5"):
        ImageCache.build(paths, range(5), tmp_path / "out", size=SIZE)
    decodes.clear()
    with pytest.raises(FailedImagesError):
        ImageCache.build([*paths, "none"], range(6), tmp_path / "out", size=SIZE)
    assert decodes == []
    assert len(ImageCache.build(paths, range(5), tmp_path / "out", size=(5, 5), rebuild=True)) == 5


# ---- damage


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_verify_names_the_first_bad_row_and_its_path_and_a_rebuild_mends_it(tmp_path, decodes):
    paths = write_images(tmp_path / "in", 10)
    paths[0].write_bytes(b"")
    cache = ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE, on_error="skip")
    flip(tmp_path / "out" / "images.u8", 4 * 60 + 7)
    flip(tmp_path / "out" / "images.u8", 6 * 60 + 7)
    with pytest.raises(ValueError, match=r"row 4 of .*005.png"):
        cache.verify()
    with pytest.raises(ValueError, match=r"row 6 of .*007.png"):
        cache.verify([0, 6, 4])
    cache.verify([0, 1])
    decodes.clear()
    cache = ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE, on_error="skip", rebuild=True)
    assert len(decodes) == 2
    assert levels(cache) == list(range(1, 10))
    cache.verify()


@pytest.mark.parametrize("lost", [False, True], ids=["cut", "lost"])
@pytest.mark.parametrize("name", ["images.u8", "labels.npy", "meta.json", "rows.crc", "manifest.jsonl"])
def test_a_file_that_was_cut_or_lost_is_noticed_and_mended(name, lost, tmp_path):
    paths = write_images(tmp_path / "in", 10)
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    path = tmp_path / "out" / name
    if lost:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 2)
    if name == "manifest.jsonl":
        with pytest.raises(ValueError, match=r"manifest.jsonl .* rebuild=True"):
            ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    else:
        with pytest.raises((ValueError, FileNotFoundError), match=r"rebuild=True|no image cache"):
            ImageCache.open(tmp_path / "out").verify()
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE, rebuild=True).verify()


def test_a_pickled_cache_is_its_folder(tmp_path):
    cache = ImageCache.build(write_images(tmp_path / "in", 100), range(100), tmp_path / "out", size=(40, 40))
    data = pickle.dumps(cache)
    assert len(data) < 500
    assert levels(pickle.loads(data)) == list(range(100))


def test_damaged_labels_are_noticed_on_opening(tmp_path):
    paths = write_images(tmp_path / "in", 10)
    ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
    flip(tmp_path / "out" / "labels.npy", (tmp_path / "out" / "labels.npy").stat().st_size - 8)
    with pytest.raises(ValueError, match=r"labels.npy is damaged"):
        ImageCache.open(tmp_path / "out")
    assert ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE).labels.tolist() == list(range(10))


def test_a_newer_format_is_refused(tmp_path):
    ImageCache.build(write_images(tmp_path / "in", 1), [0], tmp_path / "out", size=SIZE)
    meta = tmp_path / "out" / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format 2"):
        ImageCache.open(tmp_path / "out")


def test_there_is_nothing_to_open_before_a_build(tmp_path):
    with pytest.raises(FileNotFoundError, match="no image cache"):
        ImageCache.open(tmp_path)


# ---- disk


def test_too_small_a_disk_is_told_before_anything_is_decoded(tmp_path, decodes, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="need 600 bytes in all, 500 are free") as caught:
        ImageCache.build(write_images(tmp_path / "in", 10), range(10), tmp_path / "out", size=SIZE)
    assert caught.value.errno == errno.ENOSPC
    assert decodes == []


@pytest.mark.skipif(not hasattr(os, "pwrite"), reason="rows are written with pwrite only where there is one")
def test_a_disk_that_fills_up_is_an_error_and_the_build_goes_on_later(tmp_path, decodes, monkeypatch):
    paths = write_images(tmp_path / "in", 100)
    really_write, calls = os.pwrite, []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 80:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really_write(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="the images need 6000 bytes in all"):
        ImageCache.build(paths, range(100), tmp_path / "out", size=SIZE, workers=1)
    monkeypatch.setattr(os, "pwrite", really_write)
    decodes.clear()
    assert levels(ImageCache.build(paths, range(100), tmp_path / "out", size=SIZE)) == list(range(100))
    assert len(decodes) == 36


@pytest.mark.parametrize(
    "missing",
    [("pwrite", "pread"), ("fdatasync",), ("posix_fallocate",), ("sched_getaffinity",)],
    ids="+".join,
)
def test_a_platform_that_lacks_a_call_builds_the_same(missing, tmp_path, monkeypatch):
    paths = write_images(tmp_path / "in", 80)
    paths[40].write_bytes(b"")
    ImageCache.build(paths, range(80), tmp_path / "a", size=SIZE, on_error="skip")
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    cache = ImageCache.build(paths, range(80), tmp_path / "b", size=SIZE, on_error="skip", workers=4)
    cache.verify()
    assert all(
        (tmp_path / "b" / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "a").iterdir()
    )


def test_a_file_system_that_cannot_reserve_is_used_all_the_same(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    paths = write_images(tmp_path / "in", 3)
    assert levels(ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE)) == [0, 1, 2]


# ---- progress and company


def test_progress_ends_with_all_rows_and_never_falls(tmp_path):
    paths, seen, threads = write_images(tmp_path / "in", 100), [], set()

    def note(done, total):
        seen.append((done, total))
        threads.add(threading.get_ident())

    ImageCache.build(paths, range(100), tmp_path / "out", size=SIZE, on_progress=note)
    assert seen[-1] == (100, 100)
    assert seen == sorted(seen)
    assert threads == {threading.get_ident()}


def test_a_second_builder_is_refused_while_the_first_works(tmp_path):
    paths = write_images(tmp_path / "in", 10)
    refused = []

    def build_again(done, total):
        with pytest.raises(RuntimeError, match="held by another builder"):
            ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE)
        refused.append(done)

    cache = ImageCache.build(paths, range(10), tmp_path / "out", size=SIZE, on_progress=build_again)
    assert refused
    assert levels(cache) == list(range(10))
    assert not (tmp_path / "out" / "lock").exists()


def test_a_complete_cache_can_be_called_from_a_folder_that_is_read_only(tmp_path, monkeypatch):
    paths = write_images(tmp_path / "in", 3)
    ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE)
    os.utime(paths[0], ns=(10**18, 10**18))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anywhere
    before = snapshot(tmp_path / "out")
    assert levels(ImageCache.build(paths, range(3), tmp_path / "out", size=SIZE)) == [0, 1, 2]
    assert snapshot(tmp_path / "out") == before
