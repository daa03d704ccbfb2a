"""Identity: what tells one data set from another of the same size, as far as the data set says it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Subset


def data_identity(loader: Any) -> dict[str, Any]:
    """The names of the classes, and a digest of the files and their labels, of the data set behind a loader.

    Args:
        loader: Its `dataset` is read, through `Subset`: `classes` or `class_to_idx`, and `samples` as torchvision's folders have it.

    Returns:
        `classes`, a list of names, and `files`, a hash of the paths below the data set's root with their labels; each only if known.
    """
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found: dict[str, Any] = {}
    classes = _classes(dataset)
    if classes:
        found["classes"] = classes
    files = _files(dataset)
    if files:
        found["files"] = files
    return found


def moved_classes(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Which classes have another number than when the checkpoint was written; None if that is not so, or not known.

    Args:
        stored: Identity in the checkpoint.
        now: Identity of the data set here.

    >>> moved_classes({"classes": ["cat", "dog"]}, {"classes": ["dog", "cat"]})
    "'cat' was class 0 and is 1, 'dog' was class 1 and is 0"
    """
    before, here = stored.get("classes"), now.get("classes")
    if before is None or here is None or list(before) == list(here):
        return None
    places = {name: number for number, name in enumerate(here)}
    moved = [
        f"{name!r} was class {number} and is {places.get(name, 'none')}"
        for number, name in enumerate(before)
        if places.get(name) != number
    ]
    new = [f"{name!r} is new" for name in here if name not in before]
    changed = [*moved, *new]
    return ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")


def _classes(dataset: Any) -> list[str]:
    by_name = getattr(dataset, "class_to_idx", None)
    if isinstance(by_name, Mapping) and all(isinstance(number, int) for number in by_name.values()):
        return [str(name) for name, _ in sorted(by_name.items(), key=lambda item: item[1])]
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes):
        return list(classes)
    return []


def _files(dataset: Any) -> str | None:
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", None)
    if not isinstance(samples, list) or not isinstance(root, (str, os.PathLike)):
        return None
    sha = hashlib.sha256()
    start = os.fspath(root)
    for sample in samples:
        if not (isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str)):
            return None
        path, label = sample
        # Below the root, which is another one on another platform.
        name = path[len(start) :] if path.startswith(start) else path
        sha.update(f"{name.replace(os.sep, '/').lstrip('/')}\0{label}\n".encode("utf-8", "surrogateescape"))
    return sha.hexdigest()[:16]
