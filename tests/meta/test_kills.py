"""Runs that are killed with SIGKILL at any moment and resumed end as the run that was never stopped.

Where each kill landed is known afterwards: a training leaves its phase in two bytes of a shared file, which its death freezes, and
an uncommitted checkpoint in the storage is a save that was cut. Moments are drawn at random; but since a step of the optimizer or
the writing of a small file is short, others are aimed: before a certain operation inside `optimizer.step()`, or before a certain
file operation of a save. `pytest -s` shows the landings.
"""

import datetime
import hashlib
import json
import os
import platform
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from training import BATCH, PHASES, SAMPLES, Case, End, surviving

RESULTS = Path(__file__).parent / "torture-result"
ROOT = Path(__file__).parents[2]
OPERATIONS = 40  # inside one step of AdamW, at least
WHOLE_KILLS = 240  # of the long proof
CASES = {
    "gpu-loader": Case(evaluate=True),
    "augmented": Case(data="loader", augment=True, evaluate=True),
    "accumulated-average": Case(accumulated=3, ema=True, evaluate=True),
    "weighted-epoch-scheduler": Case(data="loader", augment=True, weighted=True, interval="epoch"),
    "2-workers": Case(data="loader", augment=True, workers=2),
}
SAVE_EVERY = (2, 9)  # steps: nearly always while a save is written, and seldom


def killed_session(nursery, case, folder, end, seconds, save_every):
    """Run a session and kill it: at its aimed place, or after some seconds; where the kill landed, None if it was too late."""
    places = folder / "places"
    places.write_bytes(b"\0\0")
    before = {path.name for path in (folder / "run").glob("step-*")} if (folder / "run").is_dir() else set()
    files = {"storage": folder / "run", "notes": folder / "notes", "places_file": places}
    pid = nursery.start(case, end, save_every=save_every, **files)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    code, result = nursery.wait(pid)
    if code == 0:
        return None, result
    phase, saving = places.read_bytes()
    cut = [p.name for p in (folder / "run").glob("step-*") if not (p / "MANIFEST.json").exists()]
    landing = {
        "aimed": end.kind if seconds is None else None,
        "nth": end.nth if seconds is None else None,
        "phase": PHASES[phase],
        "saving": bool(saving),
        "cut": len(set(cut) - before),
    }
    return landing, result


def one_run(nursery, case, folder, draw, *, most, longest=None, save_every=SAVE_EVERY[0]):
    """Kill a run up to `most` times and let it go on to its end; the landings, and what it ended with.

    Args:
        draw: Random numbers of this run.
        most: Kills.
        longest: Kill at random moments up to this many seconds; None aims at places inside saves and steps, in turn.
        save_every: Steps between two saves.
    """
    landings, result = [], None
    while len(landings) < most:
        if longest is not None:
            end, seconds = End(), draw.uniform(0.0, longest)
        elif len(landings) % 2:
            end, seconds = End("kill-in-step", draw.randrange(3, 12), draw.randrange(1, OPERATIONS)), None
        else:
            end, seconds = End("kill-in-save", nth=draw.randrange(20, 120)), None
        landing, result = killed_session(nursery, case, folder, end, seconds, save_every)
        if landing is None:
            break
        landings.append(landing)
    if result is None:
        _, result = nursery.run(case, End(), storage=folder / "run", notes=folder / "notes")
    return landings, result["state"], surviving(folder / "notes")


def in_step(landing):
    return landing["phase"] == "step"


def in_save(landing):
    return landing["saving"] or landing["cut"] > 0


def table(landings):
    """How many kills landed where, in words."""
    rows = Counter((mark["phase"], "while a save was written" if in_save(mark) else "") for mark in landings)
    lines = [f"{count:5}  {phase:11} {saving}" for (phase, saving), count in rows.most_common()]
    return "\n".join([f"\n{len(landings)} kills landed in", *lines])


@pytest.fixture
def whole(nursery, quick_path):
    """What the uninterrupted run of a case ends with, and how many seconds it takes here and now."""
    known = {}

    def of(name):
        if name not in known:
            (quick_path / name).mkdir()
            begun = time.monotonic()
            _, *ended = one_run(nursery, CASES[name], quick_path / name, None, most=0)
            known[name] = ended, time.monotonic() - begun
        return known[name]

    return of


@pytest.mark.slow
def test_twenty_runs_that_were_killed_end_as_the_run_that_was_not(nursery, quick_path, whole):
    draw = random.Random(os.urandom(8))  # other moments each time
    landings = []
    for number in range(20):
        name = list(CASES)[number % 4]
        ended, seconds = whole(name)
        for attempt in range(5):
            folder = quick_path / f"{number}-{attempt}"
            folder.mkdir()
            # Twelve at random moments, earlier if that was too late; the others once inside a save, and once inside a step.
            how = {"most": 1, "longest": seconds * 0.6**attempt} if number < 12 else {"most": 2}
            killed, *resumed = one_run(
                nursery, CASES[name], folder, draw, save_every=SAVE_EVERY[number < 6], **how
            )
            assert resumed == ended, (name, killed)
            landings += killed
            if killed:
                break
        assert killed
    print(table(landings))
    assert sum(map(in_step, landings)) >= 3
    assert sum(map(in_save, landings)) >= 3
    assert len(landings) >= 20
    assert sum(mark["aimed"] is None for mark in landings) == 12


@pytest.mark.torture
def test_hundreds_of_killed_runs_end_as_the_run_that_was_not(nursery, quick_path, whole):
    path, record = open_record()
    while record["kills"] < WHOLE_KILLS:
        number = len(record["runs"])
        name = list(CASES)[number % len(CASES)]
        ended, seconds = whole(name)
        folder = quick_path / str(number)
        folder.mkdir()
        turn = number // len(CASES) % 3
        killed, state, samples = one_run(
            nursery,
            CASES[name],
            folder,
            random.Random(os.urandom(8)),
            most=4,
            longest=None if turn == 2 else seconds,
            save_every=SAVE_EVERY[turn % 2],
        )
        same = [state, samples] == ended
        record["runs"].append({"case": name, "same": same, "model": state["model"], "kills": killed})
        record["kills"] += len(killed)
        write_record(path, record)
        assert same, (name, killed)
    landings = [mark for run in record["runs"] for mark in run["kills"]]
    print(f"{table(landings)}\nin {len(record['runs'])} runs, of which {record['kills']}", path)
    assert all(run["same"] for run in record["runs"])
    assert sum(map(in_step, landings)) >= 20
    assert sum(map(in_save, landings)) >= 20
    assert {mark["phase"] for mark in landings} >= set(PHASES) - {"end"}


def sources():
    """A fingerprint of what is proven."""
    sha = hashlib.sha256()
    for path in sorted([*ROOT.glob("packages/*/src/**/*.py"), *Path(__file__).parent.glob("*.py")]):
        sha.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def open_record():
    """The record of this machine and these sources, where it ended; a new one if there is none."""
    settings = {
        "samples": SAMPLES,
        "batch": BATCH,
        "save_every": list(SAVE_EVERY),
        "kills": WHOLE_KILLS,
        "threads": 1,
    }
    record = {
        "proof": "kills",
        "sources": sources(),
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "settings": settings,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "kills": 0,
        "runs": [],
    }
    path = RESULTS / f"{platform.system()}-{platform.machine()}-{record['date']}.json".lower()
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["sources"] == record["sources"] and stored["settings"] == settings:
            return path, stored
    return path, record


def write_record(path, record):
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)
