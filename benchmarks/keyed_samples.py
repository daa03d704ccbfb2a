"""What keyed randomness costs a sample: a DataLoader read as it is, and through `resumable`, in the main process.

The data set does next to nothing, and is of a kind whose samples may draw, so that each is built under a key of its own. Both are read
in turn, several times; the cost is the difference of two readings of one turn.

    python benchmarks/keyed_samples.py            the result goes to benchmarks/results/keyed_samples/
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.utils.data import DataLoader, Dataset

from _results import ROOT, versions, write_result
from efficio_data import Position, resumable

NAME = "keyed_samples"


class Numbers(Dataset):
    """Samples that cost nothing to build."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def read(batches: Any) -> float:
    begun = time.process_time()
    for _ in batches:
        pass
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true", help="write no result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain = DataLoader(Numbers(arguments.samples), 64, shuffle=True)
    keyed = resumable(DataLoader(Numbers(arguments.samples), 64, shuffle=True), seed=1)
    repeats = []
    for repeat in range(arguments.repeats):
        row = {"plain": read(plain), "keyed": read(keyed.iter_from(Position(repeat)))}
        repeats.append({name: seconds / arguments.samples * 1e6 for name, seconds in row.items()})
    settings = {
        "samples": arguments.samples,
        "batch": 64,
        "repeats": arguments.repeats,
        "clock": "time.process_time",
    }
    if not arguments.dry_run:
        path = write_result(NAME, settings=settings, versions=versions("torch", "numpy"), repeats=repeats)
        print(f"wrote {path.relative_to(ROOT)}")
    from table import keyed_samples_table

    print(keyed_samples_table({"repeats": repeats, "settings": settings}))


if __name__ == "__main__":
    main()
