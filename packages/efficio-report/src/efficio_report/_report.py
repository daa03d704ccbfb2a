"""What is known about a run when it ends."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._card import GPUSample
from ._sampling import GPUSummary, summarize_gpu
from ._text import report_text
from ._tips import tips
from ._totals import Totals

_SCHEMA_VERSION = 1
_KNOWN_PHASES = ("setup", "data", "train", "evaluate", "save")
_REST = "other"


@dataclass(frozen=True)
class Report:
    """Where the time of a run went, what it did, and on what; made by `collect_report`.

    Figures are of this process only, not of the run's earlier sessions. What is not known is None. `str()` is
    the report as text of at most 78 columns; a notebook shows it as a table.

    Attributes:
        wall_seconds: The whole time; the phases add up to it.
        phases: Name and seconds of each phase, the known ones in the order of a run, `"other"` last.
        steps: Optimizer steps.
        samples_seen: Training samples.
        epochs: Epochs, a fraction for an unfinished one.
        skipped_steps: Optimizer steps that the gradient scaler skipped because of an overflow.
        saves: Checkpoints written.
        save_seconds: Time of the saves, background included; the time that training waited is a phase.
        save_bytes: Bytes of the saves together.
        resumed_from: The step of the checkpoint that the run went on from.
        stopped: Why the run stopped before its end.
        host: Platform.
        device: Kind of device, as torch calls it: `"cuda"`, `"cpu"`, `"mps"`.
        device_name: Name of the device.
        precision: Number format, and the reason for it.
        applied: Optimisations in use, in plain words.
        notes: What the run told its user.
        gpu: Figures of the GPU.
    """

    wall_seconds: float
    phases: tuple[tuple[str, float], ...]
    steps: int
    samples_seen: int | None = None
    epochs: float | None = None
    skipped_steps: int | None = None
    saves: int | None = None
    save_seconds: float | None = None
    save_bytes: int | None = None
    resumed_from: int | None = None
    stopped: str | None = None
    host: str | None = None
    device: str | None = None
    device_name: str | None = None
    precision: str | None = None
    applied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gpu: GPUSummary | None = None

    def seconds(self, phase: str) -> float:
        """Seconds of a phase, zero for one that never ran."""
        return dict(self.phases).get(phase, 0.0)

    def share(self, phase: str) -> float:
        """A phase's part of the whole time, 0 to 1."""
        return self.seconds(phase) / self.wall_seconds if self.wall_seconds > 0.0 else 0.0

    @property
    def steps_per_second(self) -> float | None:
        """Optimizer steps in a second of training and waiting for data; the other phases do not count."""
        return self._rate(self.steps)

    @property
    def samples_per_second(self) -> float | None:
        """Training samples in a second of training and waiting for data; the other phases do not count."""
        return None if self.samples_seen is None else self._rate(self.samples_seen)

    def _rate(self, count: int) -> float | None:
        seconds = self.seconds("train") + self.seconds("data")
        return count / seconds if seconds > 0.0 else None

    def to_json(self) -> str:
        """The report as a JSON object; `schema_version` changes when a name or a meaning does."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        fields["phases"] = dict(self.phases)
        fields["steps_per_second"] = self.steps_per_second
        fields["samples_per_second"] = self.samples_per_second
        fields["tips"] = [dataclasses.asdict(tip) for tip in tips(self)]
        return json.dumps({"schema_version": _SCHEMA_VERSION, **fields}, indent=2, allow_nan=False)

    def __str__(self) -> str:
        return report_text(self)

    def _repr_html_(self) -> str:
        # The standard library's html is half of this package's import time, and only notebooks need it.
        from ._page import report_page

        return report_page(self)


def collect_report(
    totals: Mapping[str, float],
    samples: Sequence[GPUSample] = (),
    *,
    steps: int,
    wall_seconds: float | None = None,
    samples_seen: int | None = None,
    epochs: float | None = None,
    skipped_steps: int | None = None,
    saves: int | None = None,
    save_seconds: float | None = None,
    save_bytes: int | None = None,
    resumed_from: int | None = None,
    stopped: str | None = None,
    host: str | None = None,
    device: str | None = None,
    device_name: str | None = None,
    precision: str | None = None,
    applied: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Report:
    """Puts the figures of a run together. Nothing is measured here, and no argument is changed.

    Args:
        totals: Seconds by phase. Call `settle()` on `Totals` before, so that the running phase is in it.
        samples: What `sample_gpu` saw.
        steps: Optimizer steps of this process.
        wall_seconds: The whole time. None takes that of `Totals`, or the sum of the phases. What is in no
            phase is `"other"`; phases that are longer than the whole count.
        samples_seen: Training samples of this process.
        epochs: Epochs of this process.
        skipped_steps: Optimizer steps skipped by the gradient scaler.
        saves: Checkpoints written by this process.
        save_seconds: Seconds of these, in the background or not.
        save_bytes: Bytes of these.
        resumed_from: Step of the checkpoint that the run went on from.
        stopped: Why the run stopped early, such as `"budget"` or `"SIGTERM"`.
        host: Platform, such as `"colab"`.
        device: Kind of device as torch calls it, such as `"cuda"`.
        device_name: Name of the device, such as `"Tesla T4"`.
        precision: Number format and the reason for it.
        applied: Optimisations in use.
        notes: What the user was told.

    Returns:
        The report. Negative times, which only a clock that goes back can give, are zero in it.

    Raises:
        ValueError: A count that is negative or no whole number, a time that is not finite, or one text where
            several are expected.

    Examples:
        >>> report = collect_report({"train": 6.0, "data": 2.0}, steps=40, wall_seconds=10.0)
        >>> report.phases
        (('data', 2.0), ('train', 6.0), ('other', 2.0))
        >>> report.share("data"), report.steps_per_second, report.samples_per_second
        (0.2, 5.0, None)
    """
    if wall_seconds is None:
        wall_seconds = totals.wall_seconds if isinstance(totals, Totals) else 0.0
    phases = _whole_phases(totals, _checked_seconds("wall_seconds", wall_seconds))
    return Report(
        wall_seconds=math.fsum(seconds for _, seconds in phases),
        phases=phases,
        steps=_checked_count("steps", steps),
        samples_seen=_known_count("samples_seen", samples_seen),
        epochs=None if epochs is None else _checked_seconds("epochs", epochs),
        skipped_steps=_known_count("skipped_steps", skipped_steps),
        saves=_known_count("saves", saves),
        save_seconds=None if save_seconds is None else _checked_seconds("save_seconds", save_seconds),
        save_bytes=_known_count("save_bytes", save_bytes),
        resumed_from=_known_count("resumed_from", resumed_from),
        stopped=stopped,
        host=host,
        device=device,
        device_name=device_name,
        precision=precision,
        applied=_texts("applied", applied),
        notes=_texts("notes", notes),
        gpu=summarize_gpu(samples),
    )


def _whole_phases(totals: Mapping[str, float], wall_seconds: float) -> tuple[tuple[str, float], ...]:
    seconds = {phase: _checked_seconds(f"totals[{phase!r}]", spent) for phase, spent in totals.items()}
    own = [phase for phase in seconds if phase not in (*_KNOWN_PHASES, _REST)]
    named = [(phase, seconds[phase]) for phase in (*_KNOWN_PHASES, *own) if phase in seconds]
    counted = math.fsum(spent for _, spent in named)
    return (*named, (_REST, max(seconds.get(_REST, 0.0), wall_seconds - counted, 0.0)))


def _checked_seconds(name: str, seconds: float) -> float:
    if not math.isfinite(seconds):
        msg = f"{name}={seconds!r} is not finite; give a number"
        raise ValueError(msg)
    return max(0.0, float(seconds))


def _known_count(name: str, count: int | None) -> int | None:
    return None if count is None else _checked_count(name, count)


def _checked_count(name: str, count: int) -> int:
    # The number of another library (NumPy, torch) becomes an int, or JSON could not hold it.
    if not 0 <= count < math.inf or int(count) != count:
        msg = f"{name}={count!r} is not a count; give a whole number, zero or more"
        raise ValueError(msg)
    return int(count)


def _texts(name: str, texts: Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        msg = f"{name}={texts!r} is one text; give a list of texts"
        raise ValueError(msg)
    return tuple(texts)
