"""The calls of `os` that touch a disk, so that a test can end, refuse or record each of them; shared by the tests of faults."""

import datetime
import hashlib
import json
import os
import platform
import signal
import threading
from pathlib import Path

import torch

WRITING = ("mkdir", "open", "write", "fsync", "close", "replace", "unlink", "rmdir", "truncate")
PARTS = 10
ROOT = Path(__file__).parents[2]


def tree_of(step):
    """A tree of which every value says its step."""
    return {
        "step": step,
        "w": torch.full((300,), float(step)),
        "b": torch.full((7,), step, dtype=torch.int64),
        "words": [f"step {step}"] * 3,
        "parts": [torch.full((20,), step, dtype=torch.int32) for _ in range(PARTS)],
    }


def step_of(tree):
    """The one step of a tree; an error for a mixture."""
    step = tree["step"]
    assert torch.equal(tree["w"], torch.full((300,), float(step))), step
    assert torch.equal(tree["b"], torch.full((7,), step, dtype=torch.int64)), step
    assert tree["words"] == [f"step {step}"] * 3, step
    assert [part.unique().tolist() for part in tree["parts"]] == [[step]] * PARTS, step
    return step


class Intercepted:
    """Within the block, calls of `os` go through `action(name, call, arguments)`; from all threads, one at a time."""

    def __init__(self, action, names=WRITING):
        self._action = action
        self._names = names
        self._lock = threading.RLock()

    def __enter__(self):
        self._originals = {name: getattr(os, name) for name in self._names}
        for name, call in self._originals.items():
            setattr(os, name, self._route(name, call))

    def _route(self, name, call):
        def routed(*arguments, **options):
            with self._lock:
                return self._action(name, lambda: call(*arguments, **options), arguments)

        return routed

    def __exit__(self, *exception):
        for name, call in self._originals.items():
            setattr(os, name, call)


def child_that_dies(work, point):
    """Run `work` in a forked child that kills itself at a point; returns what it was about to do, None if it ended before.

    A point lies before each call that changes the disk, and another one half-way through each write.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            place = file.read().decode()
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == bool(place), (status, place)
        return place or None
    count = 0
    send = os.write

    def die(what):
        send(writing, what.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def action(name, call, arguments):
        nonlocal count
        if count == point:
            die(name)
        count += 1
        if name == "write":
            if count == point:
                os.pwrite(arguments[0], arguments[1][: len(arguments[1]) // 2], 0)
                die("half a write")
            count += 1
        return call()

    status = 1
    try:
        with Intercepted(action):
            work()
        status = 0
    finally:
        os._exit(status)


def sources():
    """A fingerprint of what is proven."""
    sha = hashlib.sha256()
    names = ROOT.glob("packages/efficio-ckpt/src/**/*.py")
    for path in sorted([*names, *Path(__file__).parent.glob("test_torture_*.py"), Path(__file__)]):
        sha.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()[:16]


class Record:
    """The result of a long proof, in a file that the next run goes on with if nothing has changed since."""

    def __init__(self, proof, settings):
        machine = f"{platform.system()}-{platform.machine()}".lower()
        self.path = ROOT / "benchmarks" / "results" / "torture" / proof / f"{machine}.json"
        self.content = {
            "proof": proof,
            "sources": sources(),
            "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
            "settings": settings,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
            "points": 0,
            "failures": [],
            "parts": {},
        }
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if (stored["sources"], stored["settings"]) == (self.content["sources"], settings):
                self.content = stored

    def has(self, part):
        return part in self.content["parts"]

    def add(self, part, points, outcomes, failures=()):
        """Keep what a part of the proof found: how many points, and how often each outcome."""
        self.content["parts"][part] = {"points": points, **outcomes}
        self.content["points"] = sum(part["points"] for part in self.content["parts"].values())
        self.content["failures"] += [f"{part}: {failure}" for failure in failures]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".new")
        lines = [
            f" {json.dumps(key)}: {json.dumps(value)}"
            for key, value in self.content.items()
            if key != "parts"
        ]
        parts = [
            f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in self.content["parts"].items()
        ]
        text = "{\n" + ",\n".join([*lines, ' "parts": {\n' + ",\n".join(parts) + "\n }"]) + "\n}"
        scratch.write_text(text + "\n", encoding="utf-8")
        os.replace(scratch, self.path)
