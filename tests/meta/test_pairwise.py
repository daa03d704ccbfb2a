"""Kinds of data, arithmetic, optimizers and schedulers, each pair of them in some training, ended in every way at every step.

The rows are made by a greedy choice that is the same each time. A run that was ended and resumed must be, bit for bit, the run of
its row that was not. `make test` takes a slice; `make torture` takes all, goes on where it was stopped, and keeps its result.
"""

import dataclasses
import datetime
import hashlib
import itertools
import json
import platform
import random
from pathlib import Path

import pytest
import torch
from training import BATCH, EPOCHS, SAMPLES, Case, End, surviving

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "torture" / "pairwise"
STEPS = EPOCHS * -(-SAMPLES // BATCH)  # 96 bodies
SOURCES = {
    "gpu-loader": {"data": "gpu"},
    "loader": {"data": "loader"},
    "loader-2-workers": {"data": "loader", "workers": 2},
    "loader-changed-workers": {"data": "loader", "workers": 2},  # none after the resume
    "weighted": {"data": "loader", "weighted": True},
    "batch-sampler": {"data": "batches"},
    "stream": {"data": "stream"},
}
FACTORS = {
    "source": tuple(SOURCES),
    "optimizer": ("sgd", "adamw", "lbfgs", *(("adafactor",) if hasattr(torch.optim, "Adafactor") else ())),
    "scheduler": ("onecycle", "step", "sequential"),
    "accumulated": (1, 3),
    "precision": ("fp32", *(("fp16",) if hasattr(torch.amp, "GradScaler") else ())),
    "ema": (False, True),
    "augment": (False, True),
}
ENDS = (
    "sigterm",
    "group-sigterm",
    "sigint",
    "second-sigint",
    "raise",
    "raise-late",
    "break",
    "sigkill",
    "sigkill-late",
)
MOST_ROWS = 30


def allowed(row):
    """LBFGS evaluates the loss itself: it takes neither a group of batches nor a loss scale. A GPULoader augments by itself."""
    if row.get("optimizer") == "lbfgs" and (row.get("accumulated") == 3 or row.get("precision") == "fp16"):
        return False
    return not (row.get("source") == "gpu-loader" and row.get("augment"))


def all_pairs():
    pairs = set()
    for (one, values), (two, others) in itertools.combinations(FACTORS.items(), 2):
        pairs |= {((one, a), (two, b)) for a in values for b in others if allowed({one: a, two: b})}
    return pairs


def covered(row):
    return set(itertools.combinations(row.items(), 2))


def covering_rows():
    """Rows in which each allowed pair of values comes together at least once."""
    left, rows = all_pairs(), []
    draw = random.Random(0)
    while left:
        best, gain = None, 0
        for _ in range(400):
            row = {name: draw.choice(values) for name, values in FACTORS.items()}
            if allowed(row) and (new := len(covered(row) & left)) > gain:
                best, gain = row, new
        if best is None:  # the last few are seldom drawn
            ((one, a), (two, b)) = min(left, key=repr)
            best = next(
                row
                for row in (
                    {name: draw.choice(v) for name, v in FACTORS.items()} | {one: a, two: b}
                    for _ in range(10_000)
                )
                if allowed(row)
            )
        rows.append(best)
        left -= covered(best)
    return rows


ROWS = covering_rows()


def case_of(row, *, resumed=False):
    options = {name: value for name, value in row.items() if name not in ("source",)}
    case = Case(**SOURCES[row["source"]], **options)
    if resumed and row["source"] == "loader-changed-workers":
        return dataclasses.replace(case, workers=0)
    return case


def test_each_pair_is_in_one_of_few_rows():
    found = set().union(*(covered(row) for row in ROWS))
    assert found == all_pairs()
    assert len(ROWS) <= MOST_ROWS
    assert covering_rows() == ROWS


def outcome(nursery, folder, row, kind=None, body=0, nth=0):
    """What a run of a row ends with, after a session that was ended, or after none; and whether that session was ended."""
    files = {"storage": folder / "run", "notes": folder / "notes"}
    was_ended = kind is None
    if kind is not None:
        code, result = nursery.run(case_of(row), End(kind, body, nth), save_every=7, **files)
        was_ended = code != 0 or not result["finished"]
    code, result = nursery.run(case_of(row, resumed=True), End(), **files)
    assert code == 0
    assert result["finished"]
    state = {name: value for name, value in result["state"].items() if name != "generators"}
    return [state, surviving(folder / "notes")], was_ended


def numbered(row):
    return f"{ROWS.index(row):02d} " + ", ".join(str(value) for value in row.values())


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS[::10], ids=numbered)
def test_a_slice_of_the_rows_is_exact(nursery, quick_path, row):
    draw = random.Random(numbered(row))
    expected = None
    for number, kind in enumerate((None, *draw.sample(ENDS, 2))):
        folder = quick_path / str(number)
        folder.mkdir()
        found, was_ended = outcome(nursery, folder, row, kind, draw.randrange(1, STEPS))
        expected = expected or found
        assert was_ended
        assert found == expected, (kind, row)


@pytest.mark.torture
def test_all_rows_are_exact_however_and_wherever_they_are_ended(nursery, quick_path):
    record = Record()
    number = 0
    for place, row in enumerate(ROWS):
        part = numbered(row)
        if part in record.content["rows"]:
            continue
        draw = random.Random(part)
        (quick_path / f"whole-{place}").mkdir()
        expected, _ = outcome(nursery, quick_path / f"whole-{place}", row)
        ends = [(kind, draw.randrange(1, STEPS), 0) for kind in ENDS]
        ends += [
            ("sigkill", body, 0) for body in range(place, STEPS, len(ROWS))
        ]  # each of the bodies, in some row
        ends += [("kill-in-save", 0, draw.randrange(20, 300)) for _ in range(3)]
        if row["optimizer"] != "lbfgs":  # whose step runs the model in it
            ends += [("kill-in-step", draw.randrange(1, 20), draw.randrange(0, 12)) for _ in range(3)]
        count = {}
        for kind, body, nth in ends:
            number += 1
            folder = quick_path / f"{place}-{number}"
            folder.mkdir()
            found, was_ended = outcome(nursery, folder, row, kind, body, nth)
            assert found == expected, (kind, body, nth, row)
            if was_ended:
                count[kind] = count.get(kind, 0) + 1
        record.add(part, {"ends": count, "model": expected[0]["model"]})
    rows = record.content["rows"].values()
    assert len(rows) == len(ROWS)
    assert sum(row["ends"].get("sigkill", 0) for row in rows) >= STEPS
    print(record.path, record.content["ends"])


class Record:
    """The rows that were found exact, in a file that the next run goes on with if nothing has changed since."""

    def __init__(self):
        sha = hashlib.sha256()
        for path in sorted([*ROOT.glob("packages/*/src/**/*.py"), *Path(__file__).parent.glob("*.py")]):
            sha.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
        self.path = RESULT / f"{platform.system()}-{platform.machine()}.json".lower()
        self.content = {
            "proof": "pairwise",
            "sources": sha.hexdigest()[:16],
            "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
            "settings": {
                "samples": SAMPLES,
                "batch": BATCH,
                "epochs": EPOCHS,
                "factors": {k: list(v) for k, v in FACTORS.items()},
            },
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "ends": 0,
            "rows": {},
        }
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["sources"] == self.content["sources"]:
                self.content = stored

    def add(self, part, found):
        self.content["rows"][part] = found
        self.content["ends"] = sum(sum(row["ends"].values()) for row in self.content["rows"].values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
