"""The lines of a report, whatever they are shown on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ._figures import duration_text, number_text, percent_text, percentages, size_text
from ._sampling import GPUSummary

if TYPE_CHECKING:
    from ._report import Report

_PHASE_WORDS = {
    "setup": "setting up",
    "data": "waiting for data",
    "train": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "other": "everything else",
}


def title(report: Report) -> str:
    """How long it took and how it ended, in one line."""
    ending = "" if report.stopped is None else f", stopped: {report.stopped}"
    return f"efficio report: {duration_text(report.wall_seconds)}{ending}"


def phase_lines(report: Report) -> list[tuple[str, str, float]]:
    """Words, duration and percentage of each phase that took any time; the percentages add up to 100."""
    ran = [(phase, seconds) for phase, seconds in report.phases if seconds > 0.0]
    parts = percentages([seconds for _, seconds in ran])
    return [
        (_PHASE_WORDS.get(phase, phase), duration_text(seconds), part)
        for (phase, seconds), part in zip(ran, parts, strict=True)
    ]


def run_lines(report: Report) -> list[tuple[str, str]]:
    """What the run did and on what; what is not known is left out."""
    return [(name, text) for name, text in (*_progress(report), *_place(report)) if text]


def gpu_lines(gpu: GPUSummary) -> list[tuple[str, str]]:
    """What the GPU did; what it did not tell is `n/a`."""
    peak, total = gpu.memory_peak_bytes, gpu.memory_total_bytes
    memory = "" if peak is None else f"{size_text(peak)} at most"
    if peak is not None and total:
        memory += f", {percent_text(peak / total)} of {size_text(total)}"
    lines = [
        ("GPU busy", _mean_and_peak(gpu.utilization_mean, gpu.utilization_max, percent_text)),
        ("GPU memory", memory),
        (
            "GPU power",
            _mean_and_peak(gpu.power_mean_watts, gpu.power_max_watts, lambda watts: f"{watts:.0f} W"),
        ),
        ("GPU clock", "" if gpu.clock_mean_mhz is None else f"{gpu.clock_mean_mhz:.0f} MHz on average"),
        (
            "GPU heat",
            "" if gpu.temperature_max_celsius is None else f"{gpu.temperature_max_celsius} °C at most",
        ),
    ]
    return [(name, text or "n/a") for name, text in lines]


def _progress(report: Report) -> Iterator[tuple[str, str]]:
    steps = number_text(report.steps)
    if report.steps_per_second is not None and report.steps:
        steps += f" ({number_text(report.steps_per_second)} a second)"
    if report.skipped_steps:
        steps += f", {number_text(report.skipped_steps)} more skipped"
    yield "steps", steps
    samples = "" if report.samples_seen is None else number_text(report.samples_seen)
    if report.samples_per_second:
        samples += f" ({number_text(report.samples_per_second)} a second)"
    yield "samples", samples
    yield "epochs", "" if report.epochs is None else number_text(round(report.epochs, 2))
    yield "resumed", "" if report.resumed_from is None else f"from step {number_text(report.resumed_from)}"
    saves = "" if report.saves is None else number_text(report.saves)
    if report.saves and report.save_bytes is not None:
        saves += f", {size_text(report.save_bytes)}"
    if report.saves and report.save_seconds is not None:
        saves += f", {duration_text(report.save_seconds)} in all"
    yield "saves", saves


def _place(report: Report) -> Iterator[tuple[str, str]]:
    yield "host", report.host or ""
    yield "device", ", ".join(text for text in (report.device, report.device_name) if text)
    yield "precision", report.precision or ""


def _mean_and_peak(mean: float | None, peak: float | None, text: Callable[[float], str]) -> str:
    return "" if mean is None or peak is None else f"{text(mean)} on average, {text(peak)} at most"
