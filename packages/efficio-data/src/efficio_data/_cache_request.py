"""Request: what a cache is asked to hold, checked before anything is touched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ._cache_info import FORMAT
from ._decode import Recipe, decoder_name

_SHOWN = 10


class FailedImagesError(ValueError):
    """Some images could not be read.

    Attributes:
        failed: (path, reason) of each; the message has the first ten.
    """

    def __init__(self, failed: Iterable[tuple[str, str]], advice: str) -> None:
        self.failed = tuple(failed)
        self.advice = advice
        listed = "; ".join(f"{path}: {reason}" for path, reason in self.failed[:_SHOWN])
        more = f"; and {len(self.failed) - _SHOWN} more" if len(self.failed) > _SHOWN else ""
        super().__init__(f"{len(self.failed)} images cannot be read ({listed}{more}); {advice}")

    def __reduce__(self) -> tuple[object, ...]:
        return FailedImagesError, (self.failed, self.advice)


@dataclass(frozen=True)
class Request:
    """Paths in order, a label for each, and how to make the rows."""

    paths: tuple[str, ...]
    labels: npt.NDArray[np.generic]
    recipe: Recipe
    workers: int
    on_error: Literal["raise", "skip"]
    check: Literal["stat", "content"]

    def plan(self) -> dict[str, object]:
        """What the rows of an unfinished build depend on, as JSON gives it back."""
        names = "\0".join(self.paths).encode(errors="surrogateescape")
        return {
            "format": FORMAT,
            "decoder": decoder_name(),
            "number of paths": len(self.paths),
            "digest of the paths": hashlib.blake2b(names, digest_size=16).hexdigest(),
            **asdict(self.recipe),
            "background": list(self.recipe.background),
        }


def make_request(
    paths: Iterable[str | os.PathLike[str]],
    labels: npt.ArrayLike,
    recipe: Recipe,
    *,
    workers: int | None,
    on_error: Literal["raise", "skip"],
    check: Literal["stat", "content"],
) -> Request:
    """Check paths, labels and choices.

    Raises:
        ValueError: They do not fit together, are empty, or are of a kind that a cache does not hold.
    """
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise ValueError(f"paths={os.fspath(paths)!r} is one path; give a list of image files")
    names = tuple(os.fsdecode(path) for path in paths)
    if not names:
        raise ValueError("paths is empty; give at least one image file")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} is unknown; give 'raise' or 'skip'")
    if check not in ("stat", "content"):
        raise ValueError(f"check={check!r} is unknown; give 'stat' or 'content'")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(
            f"workers={workers!r} is not a number of threads; give 1 or more, or None for one a core"
        )
    array = _label_array(labels)
    if len(array) != len(names):
        raise ValueError(
            f"{len(names)} paths and {len(array)} labels were given; give one label for each path"
        )
    return Request(names, array, recipe, workers or _cores(), on_error, check)


def _label_array(labels: npt.ArrayLike) -> npt.NDArray[np.generic]:
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise ValueError(
            f"labels have unequal lengths ({error}); give one number or one equal row of numbers each"
        ) from error
    if array.dtype.kind in "OUS":
        raise ValueError(
            f"labels of dtype {array.dtype} are text or objects; give numbers, "
            "for example names = sorted(set(labels)); labels = [names.index(label) for label in labels]"
        )
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise ValueError(
            f"labels of dtype {array.dtype} and shape {array.shape} cannot be kept; give integers, floats or bools, one entry a path"
        )
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 32)
