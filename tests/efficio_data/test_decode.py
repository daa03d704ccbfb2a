from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from efficio_data._decode import decode_image, make_recipe


def file_of(image, kind="png", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photograph(width, height, grain=16):
    """Smooth noise: what JPEG is made for."""
    small = np.random.default_rng(0).integers(0, 256, (height // grain, width // grain, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_orientation_in_the_file_is_applied_at_native_size(kind, orientation):
    image = photograph(64, 32)
    options = {"lossless": True} if kind == "webp" else {}
    data = file_of(image, kind, exif=exif_of(orientation), **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    pixels, _ = decode_image(data, make_recipe((upright.height, upright.width)))
    assert np.array_equal(pixels, np.asarray(upright))
    assert pixels.shape == ((64, 32, 3) if orientation >= 5 else (32, 64, 3))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_oriented_image_is_turned_before_it_is_stretched(orientation):
    data = file_of(photograph(160, 96), exif=exif_of(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    expected = np.asarray(upright.resize((20, 30), Image.Resampling.BILINEAR)).astype(int)
    pixels, _ = decode_image(data, make_recipe((30, 20), quality="exact"))
    assert (
        abs(pixels - expected).max() <= 1
    )  # Pillow rounds between its two passes, whose order the turn exchanges


def test_orientation_can_be_left_alone():
    image = photograph(64, 32)
    pixels, _ = decode_image(file_of(image, exif=exif_of(6)), make_recipe((32, 64), exif=False))
    assert np.array_equal(pixels, np.asarray(image))


def test_broken_exif_leaves_the_pixels_as_they_are_stored():
    image = photograph(64, 32)
    data = file_of(image, "png", exif=b"Exif\0\0MM\0*broken")
    assert np.array_equal(decode_image(data, make_recipe((32, 64)))[0], np.asarray(image))


@pytest.mark.parametrize("grayscale", [False, True], ids=["rgb", "gray"])
@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_16_bits_are_scaled_and_rounded(kind, grayscale):
    levels = np.array([[0, 128, 255, 1000, 30000, 65535]], np.uint16)
    pixels, deep = decode_image(
        file_of(Image.fromarray(levels), kind), make_recipe((1, 6), grayscale=grayscale)
    )
    assert deep
    assert pixels.shape == (1, 6, 1 if grayscale else 3)
    for channel in range(pixels.shape[2]):
        assert pixels[0, :, channel].tolist() == [0, 0, 1, 4, 117, 255]


def test_every_16_bit_value_is_its_257th_part_rounded():
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels, _ = decode_image(file_of(Image.fromarray(levels)), make_recipe((256, 256), grayscale=True))
    assert np.array_equal(pixels[..., 0], np.rint(levels / 257).astype(np.uint8))


def test_12_bit_data_are_scaled_by_what_is_white():
    levels = np.array([[0, 2048, 4095, 5000]], np.uint16)
    recipe = make_recipe((1, 4), grayscale=True, bit16_max=4095)
    assert decode_image(file_of(Image.fromarray(levels)), recipe)[0].ravel().tolist() == [0, 128, 255, 255]


def test_8_bit_files_are_not_counted_as_16():
    assert decode_image(file_of(Image.new("L", (2, 2), 9)), make_recipe((2, 2)))[1] is False


def png16_rgb(levels):
    """PNG of 16 bits in three channels, which Pillow reads but does not write."""
    import struct
    import zlib

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    height, width, _ = levels.shape
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in levels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def test_16_bits_in_colour_are_counted_and_at_most_one_level_off():
    levels = np.random.default_rng(0).integers(0, 65536, (8, 8, 3), np.uint16)
    pixels, deep = decode_image(png16_rgb(levels), make_recipe((8, 8)))
    assert deep
    assert abs(pixels - np.rint(levels / 257)).max() <= 1  # Pillow gives the upper byte only


def test_12_bits_in_colour_are_refused_rather_than_made_black():
    levels = np.full((2, 2, 3), 4095, np.uint16)
    with pytest.raises(ValueError, match="bit16_max=4095 is for gray"):
        decode_image(png16_rgb(levels), make_recipe((2, 2), bit16_max=4095))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("RGBA", (2, 2), (200, 100, 50, 0)), (10, 20, 30)),
        (Image.new("RGBA", (2, 2), (200, 100, 50, 255)), (200, 100, 50)),
        (Image.new("RGBA", (2, 2), (210, 120, 230, 51)), (50, 40, 70)),
        (Image.new("LA", (2, 2), (90, 0)), (10, 20, 30)),
        (Image.new("LA", (2, 2), (90, 255)), (90, 90, 90)),
        (Image.new("L", (2, 2), 90), (90, 90, 90)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGB", (2, 2), (1, 2, 3)), (1, 2, 3)),
        (Image.new("RGB", (2, 2), (1, 2, 3)).quantize(2), (1, 2, 3)),
    ],
    ids=["clear", "opaque", "a-fifth", "LA-clear", "LA-opaque", "L", "bits", "RGB", "palette"],
)
def test_each_mode_becomes_rgb_on_the_background(image, expected):
    pixels, _ = decode_image(file_of(image), make_recipe((2, 2), background=(10, 20, 30)))
    assert pixels.reshape(-1, 3).tolist() == [list(expected)] * 4


@pytest.mark.parametrize("kind", ["gif", "png"])
def test_a_transparent_palette_entry_shows_the_background(kind):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    pixels, _ = decode_image(file_of(image, kind, transparency=0), make_recipe((1, 2), background=77))
    assert pixels.tolist() == [[[77, 77, 77], [0, 255, 0]]]


def test_a_gray_level_as_background_holds_in_a_gray_cache():
    pixels, _ = decode_image(
        file_of(Image.new("LA", (1, 1), (9, 0))), make_recipe((1, 1), grayscale=True, background=200)
    )
    assert pixels.tolist() == [[[200]]]


@pytest.mark.parametrize("grayscale", [False, True], ids=["rgb", "gray"])
def test_cmyk_is_converted(grayscale):
    data = file_of(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "jpeg", quality=100)
    pixels, _ = decode_image(data, make_recipe((16, 16), grayscale=grayscale))
    expected = [76] if grayscale else [255, 0, 0]
    assert abs(pixels.reshape(256, -1).astype(int) - expected).max() <= 3  # JPEG is lossy


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (4, 4), (level, level, level)) for level in (10, 200)]
    data = file_of(frames[0], "gif", save_all=True, append_images=frames[1:])
    assert set(decode_image(data, make_recipe((4, 4)))[0].ravel().tolist()) == {10}


def test_exact_quality_is_pillows_full_decode_and_antialiased_resize():
    data = file_of(photograph(640, 480), "jpeg", quality=90)
    expected = Image.open(io.BytesIO(data)).convert("RGB").resize((48, 40), Image.Resampling.BILINEAR)
    pixels, _ = decode_image(data, make_recipe((40, 48), quality="exact"))
    assert np.array_equal(pixels, np.asarray(expected))


@pytest.mark.parametrize("grayscale", [False, True], ids=["rgb", "gray"])
def test_fast_quality_differs_but_by_less_than_anyone_sees(grayscale):
    data = file_of(photograph(1280, 960, grain=64), "jpeg", quality=90)
    exact, _ = decode_image(data, make_recipe((96, 128), quality="exact", grayscale=grayscale))
    fast, _ = decode_image(data, make_recipe((96, 128), grayscale=grayscale))
    error = ((exact.astype(float) - fast) ** 2).mean()
    assert error > 0
    assert 10 * np.log10(255**2 / error) > 50


def test_fast_quality_never_enlarges():
    data = file_of(photograph(320, 240), "jpeg", quality=90)
    for quality in ("exact", "fast"):
        pixels, _ = decode_image(data, make_recipe((240, 320), quality=quality))
        assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", r"it begins with b'<!DOCTYPE html><"),
        (file_of(photograph(320, 240), "jpeg")[:2000], "truncated"),
        (file_of(photograph(320, 240), "png")[:2000], "truncated"),
        (file_of(Image.new("F", (2, 2), 0.5), "tiff"), "floats"),
        (file_of(Image.new("I", (2, 2), 70000), "tiff"), "70000"),
    ],
    ids=["empty", "html", "jpeg-cut", "png-cut", "floats", "32-bit"],
)
def test_what_is_no_good_image_is_refused_with_the_reason(data, reason):
    with pytest.raises(Exception, match=reason):
        decode_image(data, make_recipe((8, 8)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"size": 224}, "size=224 is not"),
        ({"size": (224,)}, "size"),
        ({"size": (0, 5)}, "size"),
        ({"size": (5.5, 5)}, "size"),
        ({"size": (True, 5)}, "size"),
        ({"size": (5, 5), "background": 256}, "background=256"),
        ({"size": (5, 5), "background": (1, 2)}, "background"),
        ({"size": (5, 5), "background": "red"}, "background='red'"),
        ({"size": (5, 5), "quality": "best"}, "quality='best'"),
        ({"size": (5, 5), "bit16_max": 0}, "bit16_max=0"),
        ({"size": (5, 5), "bit16_max": 70000}, "bit16_max=70000"),
    ],
)
def test_a_recipe_out_of_range_is_refused_by_name(options, reason):
    with pytest.raises(ValueError, match=reason):
        make_recipe(**options)
