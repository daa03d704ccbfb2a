"""Decode: the bytes of one image file to one row of a cache. The same bytes, recipe and Pillow give the same pixels."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

_ORIENTATION = 0x0112
_BROKEN_EXIF = (OSError, SyntaxError, ValueError, KeyError, TypeError, struct.error, UserWarning)


@dataclass(frozen=True)
class Recipe:
    """How an image file becomes a row: everything that the pixels depend on besides the file and the decoder."""

    height: int
    width: int
    grayscale: bool
    background: tuple[int, int, int]
    exif: bool
    quality: Literal["exact", "fast"]
    bit16_max: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a row."""
        return self.height, self.width, 1 if self.grayscale else 3

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        height, width, channels = self.shape
        return height * width * channels


def make_recipe(
    size: tuple[int, int],
    *,
    grayscale: bool = False,
    background: int | tuple[int, int, int] = 0,
    exif: bool = True,
    quality: Literal["exact", "fast"] = "fast",
    bit16_max: int = 65535,
) -> Recipe:
    """Check what a user gave and put it into one value.

    Args:
        size: (height, width) of every row, in pixels. Images are stretched to it.
        grayscale: One channel instead of three.
        background: What shows through transparent pixels: a gray level or (red, green, blue), 0 to 255.
        exif: Whether the orientation that the file asks for is applied.
        quality: "fast" lets JPEG files be decoded at 1/2, 1/4 or 1/8 of their size while that is at least twice the target.
        bit16_max: The value of a 16-bit pixel that becomes 255; 4095 for 12-bit data in 16-bit files.

    Raises:
        ValueError: One of them is out of range.

    >>> make_recipe((224, 160), background=255).shape
    (224, 160, 3)
    """
    if not (
        isinstance(size, Sequence) and len(size) == 2 and all(_is_whole(side) and side > 0 for side in size)
    ):
        raise ValueError(f"size={size!r} is not (height, width) in pixels; write for example size=(224, 224)")
    rgb: Any = (background,) * 3 if _is_whole(background) else background
    if not (
        isinstance(rgb, Sequence)
        and len(rgb) == 3
        and all(_is_whole(level) and 0 <= level <= 255 for level in rgb)
    ):
        raise ValueError(
            f"background={background!r} is not a gray level or (red, green, blue); give values from 0 to 255"
        )
    if quality not in ("exact", "fast"):
        raise ValueError(f"quality={quality!r} is unknown; give 'fast' or 'exact'")
    if not (_is_whole(bit16_max) and 0 < bit16_max <= 65535):
        raise ValueError(f"bit16_max={bit16_max!r} is not from 1 to 65535; give 4095 for 12-bit data")
    height, width = (int(side) for side in size)
    red, green, blue = (int(level) for level in rgb)
    return Recipe(height, width, bool(grayscale), (red, green, blue), bool(exif), quality, int(bit16_max))


def decode_image(data: bytes, recipe: Recipe) -> tuple[npt.NDArray[np.uint8], bool]:
    """Decode the first frame of an image file, make it opaque, and stretch it to the recipe's size.

    Resizing is bilinear with antialias. With quality "fast", a JPEG is decoded at the smallest scale that is still twice the
    target: twice as fast on photographs, at 57.6 dB from the full decode, which is the noise of rounding to 8 bits once more.

    Args:
        data: The whole file.
        recipe: What to make of it.

    Returns:
        Pixels (H, W, C) uint8, and whether the file holds 16 bits a channel.

    Raises:
        Exception: Whatever Pillow's readers raise on a file that is damaged, or no image, or larger than Pillow's limit.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (3, 2), 7).save(file, "png")
    >>> pixels, deep = decode_image(file.getvalue(), make_recipe((1, 2)))
    >>> pixels.tolist(), deep
    ([[[7, 7, 7], [7, 7, 7]]], False)
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ValueError("the file is empty")
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise ValueError(f"not an image that Pillow reads; it begins with {data[:16]!r}") from error
    with image:
        deep = any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))  # loading empties the list
        if recipe.quality == "fast":
            side = 2 * max(recipe.height, recipe.width)  # a square, as the orientation is not known yet
            image.draft("L" if recipe.grayscale else None, (side, side))
        image.load()
        orientation = _orientation(image) if recipe.exif else 1
        deep = deep or image.mode.startswith("I")
        image = _opaque(_eight_bits(image, deep, recipe.bit16_max), recipe.background)
        if image.mode not in ("1", "L", "P", "RGB"):
            image = image.convert("RGB")
        image = image.convert("L" if recipe.grayscale else "RGB")
        image = _upright(image, orientation, recipe.height, recipe.width)
        return np.asarray(image, dtype=np.uint8).reshape(recipe.shape), deep


def decoder_name() -> str:
    """Name and version of what decodes: pixels may differ by a level between versions."""
    import PIL

    return f"Pillow {PIL.__version__}"


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except _BROKEN_EXIF:  # the pixels are good; viewers show such a file as it is, too
        return 1
    return orientation if orientation in range(1, 9) else 1


def _eight_bits(image: Image.Image, deep: bool, bit16_max: int) -> Image.Image:
    from PIL import Image

    if image.mode == "F":
        raise ValueError("pixels are floats, which have no known range; convert the file to 8 or 16 bits")
    if not image.mode.startswith("I"):
        if deep and bit16_max != 65535:  # Pillow keeps only the upper byte of each channel
            raise ValueError(
                f"16 bits in each of several channels: bit16_max={bit16_max} is for gray images only"
            )
        return image
    levels = np.asarray(image).astype(np.int64)
    if levels.min() < 0 or levels.max() > 65535:
        raise ValueError(
            f"pixels from {levels.min()} to {levels.max()} are neither 8 nor 16 bits; convert the file"
        )
    scaled = (np.minimum(levels, bit16_max) * 255 + bit16_max // 2) // bit16_max  # rounded, not cut
    return Image.fromarray(scaled.astype(np.uint8))


def _opaque(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    from PIL import Image

    palette_alpha = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    if not (
        image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info or palette_alpha
    ):
        return image
    canvas = Image.new("RGBA", image.size, (*background, 255))
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


def _upright(image: Image.Image, orientation: int, height: int, width: int) -> Image.Image:
    """Stretch, then turn: the small image is turned in no time, and the result is the same to one level."""
    from PIL import Image

    stored = (height, width) if orientation >= 5 else (width, height)
    if image.size != stored:
        image = image.resize(stored, Image.Resampling.BILINEAR)
    turns = Image.Transpose
    turn = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(orientation)
    return image if turn is None else image.transpose(turn)
