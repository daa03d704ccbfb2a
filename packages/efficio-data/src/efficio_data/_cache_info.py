"""Info: what a complete cache says of itself, in `meta.json` and `manifest.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._cache_source import Source
from ._decode import Recipe

FORMAT = 1
META, IMAGES, LABELS, CRCS, MANIFEST = "meta.json", "images.u8", "labels.npy", "rows.crc", "manifest.jsonl"


@dataclass(frozen=True)
class CacheInfo:
    """What a cache was built from, and how.

    Attributes:
        recipe: How each file became a row.
        sources: Number of paths given to the build.
        failed: (path, reason) of each file that gave no row.
        failed_rows: Their places in the paths given.
        bit16: Number of files with 16 bits a channel, scaled to 8.
        decoder: Name and version of what decoded the files.
        labels_crc: crc32 of `labels.npy`.
    """

    recipe: Recipe
    sources: int
    failed: tuple[tuple[str, str], ...]
    failed_rows: tuple[int, ...]
    bit16: int
    decoder: str
    labels_crc: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (N, H, W, C) of the images."""
        return (self.sources - len(self.failed), *self.recipe.shape)

    @property
    def kept(self) -> npt.NDArray[np.int64]:
        """For each row, the place of its path among the paths given; shape (N,)."""
        return np.delete(
            np.arange(self.sources, dtype=np.int64), np.asarray(self.failed_rows, dtype=np.int64)
        )


def format_info(info: CacheInfo) -> bytes:
    """Bytes of `meta.json`; `parse_info` is the way back."""
    return json.dumps({"format": FORMAT, **asdict(info)}, indent=1).encode()


def parse_info(data: bytes) -> CacheInfo:
    """Read the bytes of `meta.json`.

    Raises:
        ValueError: They are damaged, or of a format that this version does not know.
    """
    try:
        record = json.loads(data)
        version = record.pop("format")
        if version == FORMAT:
            recipe = dict(record.pop("recipe"))
            recipe["background"] = tuple(recipe["background"])
            failed = tuple((str(path), str(reason)) for path, reason in record.pop("failed"))
            return CacheInfo(
                recipe=Recipe(**recipe), failed=failed, failed_rows=tuple(record.pop("failed_rows")), **record
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"damaged ({error!r}); call ImageCache.build with rebuild=True to mend it"
        ) from error
    raise ValueError(
        f"format {version!r}, and this version of efficio-data reads format {FORMAT}; upgrade it"
    )


def read_info(root: Path) -> CacheInfo:
    """Read `meta.json` of a complete cache.

    Raises:
        FileNotFoundError: There is no complete cache.
        ValueError: The file is damaged, or newer than this version.
    """
    data = (root / META).read_bytes()
    try:
        return parse_info(data)
    except ValueError as error:
        raise ValueError(f"{root / META} cannot be used: {error}") from error


def format_manifest(paths: Sequence[str], entries: Sequence[tuple[Source, bool]]) -> bytes:
    """Bytes of `manifest.jsonl`: a line for each path given, in order, with its source and whether it has 16 bits a channel.

    >>> parse_manifest(format_manifest(["a b.png"], [(Source(1, 2, "f"), False)]))
    [('a b.png', Source(size=1, mtime_ns=2, digest='f'), False)]
    """
    lines = (
        json.dumps({"path": path, **source._asdict(), "bit16": deep}) + "\n"
        for path, (source, deep) in zip(paths, entries, strict=True)
    )
    return "".join(lines).encode()


def parse_manifest(data: bytes) -> list[tuple[str, Source, bool]]:
    """Path, source and depth of each line of `manifest.jsonl`.

    Raises:
        ValueError: The bytes are damaged.
    """
    try:
        records = [json.loads(line) for line in data.splitlines()]
        return [
            (record["path"], Source(record["size"], record["mtime_ns"], record["digest"]), record["bit16"])
            for record in records
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged ({error!r})") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say in words what two plans differ in.

    >>> differences({"height": 224, "exif": True}, {"height": 128, "exif": True})
    ['height was 224 and is 128']
    """
    return [
        f"{name} was {old.get(name)} and is {value}" for name, value in new.items() if old.get(name) != value
    ]
