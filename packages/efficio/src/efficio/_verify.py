"""Verification: whether a training that is killed and resumed is the one that was not, found by doing it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from efficio_ckpt import rng_state, set_rng_state, snapshot_tree
from efficio_data import Position, leaves, seed_generators

_WITHOUT_KEYS = (
    "something in the data set, its transforms, the sampler or collate_fn draws where no key reaches: the clock, the system's entropy, a "
    "generator in a closure, a counter of its own"
)


@dataclass(frozen=True)
class Verification:
    """What came out when a training was killed and resumed.

    Attributes:
        is_exact: Whether batches and every tensor were the same, bit for bit, at each step after the resume.
        steps: Optimizer steps that were compared in all.
        killed_at: Optimizer steps after which the process was killed.
        resumed_from: Optimizer steps in the checkpoint that the next process went on from.
        killed: Whether by SIGKILL in a process of its own; else the training was left and begun anew in this process.
        step: The first step that differs.
        differs: What differs there: `"batch"`, or names of tensors.
        cause: Where to look, in words.
    """

    is_exact: bool
    steps: int
    killed_at: int
    resumed_from: int
    killed: bool
    step: int | None = None
    differs: tuple[str, ...] = ()
    cause: str | None = None

    def __str__(self) -> str:
        how = "killed" if self.killed else "left"
        if self.is_exact:
            return (
                f"exact: {how} after step {self.killed_at}, resumed from step {self.resumed_from}, and at step {self.steps} all batches "
                "and tensors are those of the training that was not stopped"
            )
        names = ", ".join(self.differs[:3]) + (
            f" and {len(self.differs) - 3} more" if len(self.differs) > 3 else ""
        )
        return f"not exact: step {self.step} differs in {names}. {self.cause}"


class Killed(BaseException):
    """Ends a session at once, as the death of its process would."""


class Trace:
    """Writes down what each step of a session takes and leaves, and ends it.

    Args:
        path: A file; a line of JSON for each step.
        objects: Returns what is trained, by name.
        stop: Called to end the session after a step, as the budget would.
        settle: Returns when the save in flight is durable, so that a kill does not throw all of them away.
        last: Steps after which it is ended so.
        kill_at: Steps after which the process is killed; None for never.
        in_child: Whether this process is there for this session only.
    """

    def __init__(
        self,
        path: Path,
        objects: Callable[[], Mapping[str, Any]],
        stop: Callable[[], None],
        settle: Callable[[], None],
        *,
        last: int,
        kill_at: int | None,
        in_child: bool,
    ) -> None:
        self._path = path
        self._objects = objects
        self._stop = stop
        self._settle = settle
        self._last = last
        self._kill_at = kill_at
        self._in_child = in_child
        self._batches = hashlib.sha256()

    def begin(self, step: int, place: tuple[str, Position]) -> None:
        """A loop goes on: note the state that it begins with."""
        self._write(step, place, batch=None)

    def batch(self, batch: Any) -> None:
        """Note what a body gets."""
        for leaf in leaves(batch):
            _feed(self._batches, leaf)

    def commit(self, step: int, place: tuple[str, Position]) -> None:
        """Note what was taken and what it left at a place between two steps; the last step of the session ends it."""
        self._write(step, place, batch=self._batches.hexdigest()[:16])
        self._batches = hashlib.sha256()
        if step == self._kill_at:
            self._settle()
            if self._in_child:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed
        if step >= self._last:
            self._stop()

    def _write(self, step: int, place: tuple[str, Position], *, batch: str | None) -> None:
        states = {}
        for name, tree in snapshot_tree(self._objects()).items():
            states.update(_digests(tree, name))
        with self._path.open("a", encoding="utf-8") as file:
            at = [place[0], place[1].epoch, place[1].samples]
            file.write(json.dumps({"step": step, "place": at, "batch": batch, "state": states}) + "\n")


def verify(
    train: Callable[[Any], object],
    make_run: Callable[[Path], Any],
    *,
    steps: int,
    tell: Callable[[str], None],
) -> Verification:
    """Train without a stop, twice; then again with a kill in the middle and a resume; and compare.

    Args:
        train: Takes a run; builds everything, prepares it and trains, as a script does.
        make_run: Makes a run on a storage.
        steps: Optimizer steps to compare.
        tell: Takes the sentence that says how it came out.

    Raises:
        ValueError: The training takes fewer than three steps.
        RuntimeError: A session failed; the message ends with its traceback.
    """
    forks = can_fork()
    with tempfile.TemporaryDirectory(prefix="efficio-verify-") as name:
        folder = Path(name)

        def session(
            label: str, storage: str, *, kill_at: int | None = None, fresh: bool = False
        ) -> list[Any]:
            path = folder / f"{label}.jsonl"

            def work() -> None:
                if fresh:  # as another process would have
                    seed_generators(int.from_bytes(os.urandom(8), "little"))
                run = make_run(folder / storage)
                run._trace_steps(path, last=steps, kill_at=kill_at, in_child=forks)
                train(run)

            (_in_child if forks else _in_this_process)(work, folder / f"{label}.error")
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            return [json.loads(line) for line in lines]

        state = rng_state()
        whole = session("whole", "a")
        count = max((line["step"] for line in whole), default=0)
        if count < 3:
            raise ValueError(
                f"the training took {count} optimizer steps: give one of at least 3, that calls run.step()"
            )
        kill_at = (count + 1) // 2
        set_rng_state(state)
        again = session("again", "b")
        set_rng_state(state)
        session("killed", "c", kill_at=kill_at)
        resumed = session("resumed", "c", fresh=True)
        set_rng_state(state)
    result = _compare(whole, again, resumed, kill_at=kill_at, killed=forks, steps=count)
    tell(str(result))
    return result


def can_fork() -> bool:
    """Whether a session may have a process of its own: a forked one cannot use a GPU that its parent uses."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _compare(
    whole: list[Any], again: list[Any], resumed: list[Any], *, kill_at: int, killed: bool, steps: int
) -> Verification:
    started = resumed[0]["step"] if resumed else 0
    exact = Verification(True, steps, kill_at, started, killed)
    found = _first_difference(whole, again)
    if found is not None:
        cause = (
            f"Two trainings that were not stopped differ already: {_WITHOUT_KEYS}"
            if found.names == ("batch",)
            else "Two trainings that were not stopped differ already, with the same batches: give Run(deterministic=True), or look for a "
            "draw or a clock in the body that is not torch's, NumPy's or Python's own generator"
        )
        return replace(exact, is_exact=False, step=found.step, differs=found.names, cause=cause)
    found = _first_difference(whole, resumed)
    if found is not None:
        if found.names == ("batch",):
            cause = f"The batches after the resume are others: {_WITHOUT_KEYS}"
        elif found.is_at_begin:
            cause = (
                "What was restored is not what was saved: something changes these after run.prepare, or they were made anew; prepare "
                "them, or change them before"
            )
        else:
            cause = (
                "The same state and the same batches gave other weights: the body, or an object that is not prepared, remembers something "
                "that is not stored (a counter, an average, a buffer that is not persistent)"
            )
        return replace(exact, is_exact=False, step=found.step, differs=found.names, cause=cause)
    last = max((line["step"] for line in resumed), default=0)
    if last < steps:
        cause = f"The resumed training ended after {last} of {steps} steps"
        return replace(exact, is_exact=False, step=last + 1, differs=("number of steps",), cause=cause)
    return exact


@dataclass(frozen=True)
class _Difference:
    """Where two traces differ first, in what, and whether that was where a loop began."""

    step: int
    names: tuple[str, ...]
    is_at_begin: bool


def _first_difference(one: list[Any], two: list[Any]) -> _Difference | None:
    """What is not in the second trace as it is in the first one, by the places in the data that both passed."""
    known = {tuple(line["place"]): line for line in one}
    for line in two:
        expected = known.get(tuple(line["place"]))
        step, is_begin = line["step"], line["batch"] is None
        if expected is None:
            if is_begin:
                continue
            return _Difference(step, ("batch",), False)  # other batches, as they end elsewhere
        if not is_begin and expected["batch"] not in (None, line["batch"]):
            return _Difference(step, ("batch",), False)
        if expected["state"] != line["state"]:
            return _Difference(step, _changed(expected["state"], line["state"]), is_begin)
    return None


def _changed(one: Mapping[str, str], two: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in {**one, **two} if one.get(name) != two.get(name))


def _in_child(work: Callable[[], None], report: Path) -> None:
    """Run in a forked process, which may be killed."""
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at each fork; those of torch are not used in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  the process ends with it
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            torch.set_num_threads(1)  # the threads of OpenMP do not outlive a fork, and would be waited for
            work()
            code = 0
        except BaseException:  # noqa: BLE001  told by the parent
            report.write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if report.exists() or (status and not os.WIFSIGNALED(status)):
        text = report.read_text(encoding="utf-8") if report.exists() else f"it ended with status {status}"
        raise RuntimeError(f"a session of the training failed:\n{text}")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"a session of the training was ended by signal {os.WTERMSIG(status)}")


def _in_this_process(work: Callable[[], None], _: Path) -> None:
    with contextlib.suppress(Killed), contextlib.redirect_stdout(io.StringIO()):
        work()


def _digests(tree: Any, name: str) -> dict[str, str]:
    """A digest of each tensor, number and text in a tree, by its path."""
    if isinstance(tree, Mapping):
        return {k: v for key, value in tree.items() for k, v in _digests(value, f"{name}.{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {
            k: v for place, value in enumerate(tree) for k, v in _digests(value, f"{name}[{place}]").items()
        }
    sha = hashlib.sha256()
    _feed(sha, tree)
    return {name: sha.hexdigest()[:16]}


def _feed(sha: Any, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        sha.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        dense = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
        flat = dense.cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif hasattr(leaf, "dtype") and hasattr(leaf, "tobytes"):  # NumPy's arrays and scalars
        sha.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    elif isinstance(leaf, (str, bytes, int, float, complex, bool, type(None))):
        sha.update(repr(leaf).encode())
    # Of other objects nothing is known that would be the same in two processes.
