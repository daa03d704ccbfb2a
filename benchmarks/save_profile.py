"""Where the time of a checkpoint goes: the parts of the call that the training waits for, and of a durable save and a load.

For the two trainings of `checkpoints.py`. The parts of the call are timed one by one inside real saves; what a durable save and a load
cannot be faster than is measured beside them on the same bytes: the write with its flush, the reading, the checksums.

    python benchmarks/save_profile.py            the result goes to benchmarks/results/save_profile/
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from _results import ROOT, versions, write_result
from checkpoints import MODELS, Training, warm_up
from efficio_ckpt import (
    _placement,
    _saver,
    _snapshot,
    _staging,
    background_saver,
    load_state,
    put_snapshot,
    save_state,
    snapshot_tree,
)
from efficio_ckpt._tree import flatten

NAME = "save_profile"
PARTS: dict[str, tuple[Any, str]] = {
    "names of the parameters": (_snapshot, "parameter_names"),
    "state dict of the model": (_snapshot, "module_state"),
    "state dict of the optimizer": (_snapshot, "optimizer_state"),
    "memory of the optimizer": (_saver, "spans_of"),
    "the tree, with where its tensors lie": (_saver, "flatten"),
    "of which where they lie": (_placement.Places, "place"),
    "copies, and noting those to be made later": (_saver, "stage"),
    "of which noting those": (_staging, "DeferredCopies"),
    "a thread": (_saver.Saver, "_start"),
}


@contextmanager
def timed(times: dict[str, list[float]]) -> Iterator[None]:
    """Time each part whenever it is called."""
    kept = {label: getattr(owner, name) for label, (owner, name) in PARTS.items()}

    def wrapped(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = function(*arguments, **options)
            times[label].append(time.perf_counter() - begun)
            return result

        return call

    for label, (owner, name) in PARTS.items():
        setattr(owner, name, wrapped(label, kept[label]))
    try:
        yield
    finally:
        for label, (owner, name) in PARTS.items():
            setattr(owner, name, kept[label])


def call_parts(training: Training, saves: int) -> dict[str, float]:
    """Seconds of each part of the call that the training waits for."""
    times: dict[str, list[float]] = defaultdict(list)
    objects = {"model": training.model, "optimizer": training.optimizer}
    with tempfile.TemporaryDirectory() as folder, background_saver(folder) as saver, timed(times):
        for step in range(saves):
            begun = time.perf_counter()
            tree = _snapshot.snapshot_tree(objects)
            saver.save(tree, step=step, optimizers=[training.optimizer])
            times["the whole call"].append(time.perf_counter() - begun)
            training.backward()
            training.optimizer.step()
            saver.wait()
    return {label: median(values[1:]) for label, values in times.items()}


def seconds(work: Callable[[], object], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return median(took)


def floors(training: Training, repeats: int) -> dict[str, float]:
    """Seconds of a durable save and a verified load, and of what they are made of, on the same bytes."""
    objects = {"model": training.model, "optimizer": training.optimizer}
    parts = [
        source.reshape(-1).view(torch.uint8).numpy() for source in flatten(snapshot_tree(objects)).sources
    ]

    def sha256() -> None:
        sha = hashlib.sha256()
        for part in parts:
            sha.update(part)

    def crc32() -> None:
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write() -> None:
            with (folder / "bytes").open("wb", buffering=0) as file:
                for part in parts:
                    file.write(part)
                os.fsync(file.fileno())

        found = {
            "write and flush": seconds(write, repeats),
            "read": seconds(lambda: (folder / "bytes").read_bytes(), repeats),
            "sha256": seconds(sha256, repeats),
            "crc32": seconds(crc32, repeats),
            "save_state": seconds(
                lambda: save_state(folder / "run", snapshot_tree(objects), step=0, keep=1), repeats
            ),
            "load_state": seconds(lambda: load_state(folder / "run"), repeats),
        }
        tree = load_state(folder / "run")
        found["put_snapshot"] = seconds(lambda: put_snapshot(tree, objects), repeats)
    found["bytes"] = float(sum(part.nbytes for part in parts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dry-run", action="store_true", help="write no result")
    arguments = parser.parse_args()
    row: dict[str, Any] = {}
    for model, make in MODELS.items():
        training = make()
        warm_up(training, steps=2)
        row[model] = {
            "call": call_parts(training, arguments.saves),
            "durable": floors(training, arguments.repeats),
        }
    settings = {
        "saves": arguments.saves,
        "readings": arguments.repeats,
        "repeats": 1,
        "models": list(MODELS),
    }
    if not arguments.dry_run:
        path = write_result(
            NAME, settings=settings, versions=versions("torch", "efficio-ckpt"), repeats=[row]
        )
        print(f"wrote {path.relative_to(ROOT)}")
    from table import save_profile_table

    print(save_profile_table({"repeats": [row], "settings": settings}))


if __name__ == "__main__":
    main()
