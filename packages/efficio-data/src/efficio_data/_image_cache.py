"""Image cache: decoded images of one size in one file that is memory-mapped, built once and noticed when it is out of date."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ._cache_build import STAGE, build_rows, labels_file, publish
from ._cache_file import replace_file
from ._cache_info import (
    CRCS,
    IMAGES,
    LABELS,
    MANIFEST,
    META,
    CacheInfo,
    differences,
    format_info,
    format_manifest,
    parse_manifest,
    read_info,
)
from ._cache_lock import hold_lock
from ._cache_request import FailedImagesError, Request, make_request
from ._cache_source import Source, same_source
from ._decode import make_recipe

_SHOWN = 5
_REMEDY = "call ImageCache.build with rebuild=True to mend it"


@dataclass(frozen=True)
class _Changes:
    """What a complete cache differs in from a request; `entries` is its manifest when only times of files have changed."""

    pixels: tuple[str, ...]
    labels: bool
    entries: tuple[tuple[Source, bool], ...] | None


class ImageCache:
    """A complete cache, open for reading.

    Attributes:
        root: Its folder.
        images: (N, H, W, C) uint8, memory-mapped, read-only.
        labels: One entry a row, in the dtype in which they were given.
        info: What it was built from, and how.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.info: CacheInfo = _readable_info(self.root)
        size = (self.root / IMAGES).stat().st_size if (self.root / IMAGES).exists() else 0
        rows, *shape = self.info.shape
        if (
            size != rows * self.info.recipe.row_bytes
        ):  # reading past the end of a mapped file kills the process
            raise ValueError(
                f"{self.root / IMAGES} has {size} bytes where {rows} rows of {shape} belong; {_REMEDY}"
            )
        if not _labels_are_good(self.root, self.info):
            raise ValueError(f"{self.root / LABELS} is damaged, or was being changed; {_REMEDY}")
        self.labels: npt.NDArray[Any] = np.load(self.root / LABELS, allow_pickle=False)
        self.images: np.memmap[Any, np.dtype[np.uint8]] = np.memmap(
            self.root / IMAGES, dtype=np.uint8, mode="r", shape=self.info.shape
        )

    def __len__(self) -> int:
        return self.info.shape[0]

    def __repr__(self) -> str:
        return f"ImageCache({str(self.root)!r}, shape={self.info.shape})"

    def __reduce__(self) -> tuple[object, ...]:
        return ImageCache, (self.root.absolute(),)  # NumPy would copy all the images

    @classmethod
    def open(cls, root: str | os.PathLike[str]) -> ImageCache:
        """Open a complete cache without looking at the files it was built from.

        Raises:
            FileNotFoundError: There is none, or it is unfinished.
            ValueError: Its files do not fit together.
        """
        return cls(root)

    @classmethod
    def build(
        cls,
        paths: Iterable[str | os.PathLike[str]],
        labels: npt.ArrayLike,
        root: str | os.PathLike[str],
        *,
        size: tuple[int, int],
        grayscale: bool = False,
        background: int | tuple[int, int, int] = 0,
        exif: bool = True,
        quality: Literal["exact", "fast"] = "fast",
        bit16_max: int = 65535,
        workers: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        check: Literal["stat", "content"] = "stat",
        rebuild: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ImageCache:
        """Decode images into a folder once, and open them; a complete cache of the same is opened without decoding anything.

        A build that was killed is continued: nothing on the disk is decoded again, and the bytes are those of a build that was
        not killed. New labels alone are written without decoding. Images are stretched to `size` with antialias; the first frame
        of an animation counts; files of 16 bits are scaled to 8 and counted in `info.bit16`; palettes, 1-bit and CMYK are
        converted. The paths are compared as they are written.

        Args:
            paths: Image files of any kind that Pillow reads.
            labels: A number or a row of numbers for each path; (N,) or (N, K, ...). Their dtype is kept.
            root: Folder of the cache, made when it is missing. It should be on a local disk while it is built.
            size: (height, width) in pixels.
            grayscale: One channel instead of three.
            background: What shows through transparent pixels: a gray level or (red, green, blue), 0 to 255.
            exif: Whether the orientation stored in a file is applied (TIFF: always).
            quality: "fast" decodes JPEG at a fraction of its size that is still at least twice `size`: twice as fast on 3-megapixel
                photographs and 57.6 dB from "exact", which is what rounding to 8 bits once more costs.
            bit16_max: The value of a 16-bit gray pixel that becomes 255; 4095 for 12-bit data.
            workers: Threads; None for one a core.
            on_error: What to do with files that cannot be read, after all have been tried: "raise", keeping the good rows for the
                next call, or "skip", leaving them out of images and labels alike; `info.kept` then has the places of the others.
            check: How changed files are found: "stat" by size and time (the content decides when only the time has changed), "content"
                by reading every file.
            rebuild: Replace a cache that holds something else, or has damaged rows. Rows whose file and options are the same are
                copied. The old cache stays until the new one is complete, so there must be room for both.
            on_progress: Called in this thread with (rows done, rows in all), at most ten times a second and at the end.

        Returns:
            The cache.

        Raises:
            ValueError: An argument is wrong, or the folder holds a cache of other files or options and `rebuild` is false.
            FailedImagesError: Images cannot be read; a ValueError, `failed` has all of them with the reasons.
            OSError: The folder cannot be written, or the disk is full.
            RuntimeError: Another process builds in this folder.
        """
        recipe = make_recipe(
            size, grayscale=grayscale, background=background, exif=exif, quality=quality, bit16_max=bit16_max
        )
        request = make_request(paths, labels, recipe, workers=workers, on_error=on_error, check=check)
        folder = Path(root)
        if rebuild or not _is_current(folder, request):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _bring_up_to_date(folder, request, rebuild, on_progress)
            except OSError as error:
                if error.filename is None or error.errno is None:
                    raise
                raise OSError(
                    error.errno, f"cannot build an image cache: {error.strerror}", error.filename
                ) from error
        cache = cls(folder)
        if on_error == "raise" and cache.info.failed:
            raise FailedImagesError(
                cache.info.failed,
                "the cache was built without them; mend them and pass rebuild=True, or on_error='skip'",
            )
        return cache

    def verify(self, rows: Iterable[int] | None = None) -> None:
        """Compare rows with the checksums that were taken when they were decoded.

        Args:
            rows: Which; None for all.

        Raises:
            ValueError: The first bad row, with its number and path.
        """
        path = self.root / CRCS
        data = path.read_bytes() if path.exists() else b""
        if len(data) != 4 * len(self):
            raise ValueError(f"{path} has {len(data)} bytes of checksums for {len(self)} rows; {_REMEDY}")
        crcs = np.frombuffer(data, "<u4")
        images = np.asarray(self.images)
        for row in range(len(self)) if rows is None else rows:
            if zlib.crc32(images[row]) != crcs[row]:
                source = parse_manifest((self.root / MANIFEST).read_bytes())[self.info.kept[row]][0]
                raise ValueError(f"row {row} of {self.root} ({source}) is damaged; {_REMEDY}")


def _readable_info(root: Path) -> CacheInfo:
    try:
        return read_info(root)
    except FileNotFoundError as error:
        found = "an unfinished image cache" if (root / STAGE).exists() else "no image cache"
        raise FileNotFoundError(
            error.errno,
            f"{found}; call ImageCache.build to {'finish' if (root / STAGE).exists() else 'make'} it",
            str(root),
        ) from error


def _bring_up_to_date(
    root: Path, request: Request, rebuild: bool, on_progress: Callable[[int, int], None] | None
) -> None:
    """Do, as the only builder in the folder, whatever it lacks."""
    with hold_lock(root / "lock") as lock:
        publish(root)  # a build that was cut off in its last moment
        changes = None if rebuild else _find_changes(root, request)
        if rebuild or changes is None:
            build_rows(root, request, lock, rebuild=rebuild, on_progress=on_progress)
            return
        _refuse_pixels(root, changes)
        if changes.labels:
            _rewrite_labels(root, request)
        if changes.entries is not None:
            replace_file(root / MANIFEST, format_manifest(request.paths, changes.entries))


def _is_current(root: Path, request: Request) -> bool:
    """Say whether a folder needs nothing at all, without writing: it may be read-only.

    Raises:
        ValueError: It holds a cache of something else.
    """
    if (root / STAGE / META).exists():
        return False
    changes = _find_changes(root, request)
    if changes is None:
        return False
    _refuse_pixels(root, changes)
    writable = os.access(root, os.W_OK)
    return not changes.labels and (changes.entries is None or not writable)


def _find_changes(root: Path, request: Request) -> _Changes | None:
    """Compare a complete cache with a request; None when there is no complete cache."""
    try:
        info = read_info(root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    changed = differences(asdict(info.recipe), asdict(request.recipe))
    try:
        manifest = parse_manifest((root / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{root / MANIFEST} cannot be used: {error}; {_REMEDY}") from error
    if len(manifest) != len(request.paths):
        changed.append(f"{len(manifest)} paths were given and {len(request.paths)} are")
    elif moved := [row for row, path in enumerate(request.paths) if manifest[row][0] != path]:
        row = moved[0]
        changed.append(f"{len(moved)} paths are others, first {manifest[row][0]!r} is {request.paths[row]!r}")
    if changed:
        return _Changes(tuple(changed), labels=False, entries=None)
    now = [same_source(path, source, request.check) for path, source, _ in manifest]
    lost = [path for (path, _, _), source in zip(manifest, now, strict=True) if source is None]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        changed.append(f"{len(lost)} files have changed or are gone: {', '.join(lost[:_SHOWN])}{more}")
    entries = tuple(
        (source, deep) for source, (_, _, deep) in zip(now, manifest, strict=True) if source is not None
    )
    touched = any(entry[0] != known for entry, (_, known, _) in zip(entries, manifest, strict=False))
    labels = zlib.crc32(labels_file(request.labels[info.kept])) != info.labels_crc
    labels = labels or not _labels_are_good(root, info)
    return _Changes(tuple(changed), labels, entries if touched and not lost else None)


def _labels_are_good(root: Path, info: CacheInfo) -> bool:
    path = root / LABELS
    return path.exists() and zlib.crc32(path.read_bytes()) == info.labels_crc


def _refuse_pixels(root: Path, changes: _Changes) -> None:
    if changes.pixels:
        raise ValueError(
            f"{root} holds a cache of something else ({'; '.join(changes.pixels)}); "
            "pass rebuild=True to replace it, or read it as it is with ImageCache.open"
        )


def _rewrite_labels(root: Path, request: Request) -> None:
    """Write new labels, then the checksum of them: cut off in between, opening fails and the next build does it again."""
    info = read_info(root)
    labels = labels_file(request.labels[info.kept])
    replace_file(root / LABELS, labels)
    replace_file(root / META, format_info(CacheInfo(**{**info.__dict__, "labels_crc": zlib.crc32(labels)})))
