"""What to change, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._figures import duration_text, number_text, percent_text, size_text

if TYPE_CHECKING:
    from ._report import Report

# Less than this is not worth a person's time, and shares of so short a time say little.
_WORTH_SECONDS = 10.0
# A loader that keeps up costs a few percent: the hand-over of ready batches.
_DATA_SHARE = 0.15
# At nine tenths the GPU is fed, whatever the host waits for: it has kernels queued.
_BUSY_UTILIZATION = 0.9
# Below one half, most of the time passes between kernels.
_IDLE_UTILIZATION = 0.5
# The utilisation is of the whole run; it describes training only if the run is mostly training.
_TRAIN_SHARE = 0.6
# Below one half, twice the batch is likely to fit: memory grows at most in proportion.
_MEMORY_SHARE = 0.5
# Means over fewer than ten seconds of samples are chance.
_GPU_SAMPLES = 10
# A quarter of the time is what a validation of a fifth of the data after each epoch stays well below.
_EVALUATE_SHARE = 0.25
# A save every ten minutes that takes ten seconds is under two percent.
_SAVE_SHARE = 0.05
# Importing, downloading and starting workers take a minute; beyond that it is worth caching.
_SETUP_SHARE = 0.25
_SETUP_SECONDS = 60.0
# The scaler probes a larger scale every 2,000 steps, and looks for its first one in about ten steps.
_SKIPPED_SHARE = 0.05
_SKIPPED_STEPS = 10
# A run of a few minutes on the CPU is a try-out.
_CPU_SECONDS = 300.0


@dataclass(frozen=True)
class Tip:
    """One thing to change.

    Attributes:
        topic: One word: `"cpu"`, `"data"`, `"utilization"`, `"memory"`, `"evaluate"`, `"save"`, `"setup"` or
            `"skipped"`.
        measured: What was measured, with its figure.
        change: What to change.
    """

    topic: str
    measured: str
    change: str

    def __str__(self) -> str:
        return f"{self.measured}: {self.change}"


def tips(report: Report) -> tuple[Tip, ...]:
    """What to change so that the next run makes more of its time.

    Args:
        report: A report of a run that has ended, or still goes on.

    Returns:
        The tips, those about training first; none for a run without anything to gain.

    Examples:
        >>> from efficio_report import collect_report
        >>> slow = collect_report({"train": 59.0, "data": 41.0}, steps=100, device="cuda")
        >>> print(*tips(slow))  # doctest: +NORMALIZE_WHITESPACE
        the GPU waited for data 41 % of the time (41.0s): put the data into a GPULoader or an ImageCache,
        or raise num_workers
    """
    return (*_training_tips(report), *_memory_tips(report), *_other_tips(report))


def _training_tips(report: Report) -> Iterator[Tip]:
    train, data = report.seconds("train"), report.seconds("data")
    gpu = report.gpu if report.gpu is not None and report.gpu.samples >= _GPU_SAMPLES else None
    utilization = None if gpu is None else gpu.utilization_mean
    if report.device == "cpu" and train >= _CPU_SECONDS:
        yield Tip(
            "cpu",
            f"training ran on the CPU for {duration_text(train)}, {percent_text(report.share('train'))} of the time",
            "choose a runtime with a GPU; if there is one, check that torch.cuda.is_available()",
        )
    waits = data >= _WORTH_SECONDS and data > _DATA_SHARE * (train + data)
    if waits and (utilization is None or utilization < _BUSY_UTILIZATION):
        who = "training" if report.device == "cpu" else "the GPU"
        yield Tip(
            "data",
            f"{who} waited for data {percent_text(data / (train + data))} of the time ({duration_text(data)})",
            "put the data into a GPULoader or an ImageCache, or raise num_workers",
        )
    mostly_training = report.share("train") >= _TRAIN_SHARE and train >= _WORTH_SECONDS
    if not waits and mostly_training and utilization is not None and utilization < _IDLE_UTILIZATION:
        yield Tip(
            "utilization",
            f"the GPU was busy {percent_text(utilization)} of the time, although its data was there",
            "give it more work at once with a larger batch or torch.compile, and keep .item(), printing and "
            "Python loops out of the step",
        )


def _memory_tips(report: Report) -> Iterator[Tip]:
    gpu = report.gpu
    if gpu is None or gpu.samples < _GPU_SAMPLES or report.seconds("train") < _WORTH_SECONDS:
        return
    peak, total = gpu.memory_peak_bytes, gpu.memory_total_bytes
    if peak is not None and total and peak < _MEMORY_SHARE * total:
        yield Tip(
            "memory",
            f"at most {percent_text(peak / total)} of the GPU's memory was in use "
            f"({size_text(peak)} of {size_text(total)})",
            "try a larger batch, with the learning rate to match",
        )


def _other_tips(report: Report) -> Iterator[Tip]:
    evaluate, save, setup = (report.seconds(phase) for phase in ("evaluate", "save", "setup"))
    if evaluate >= _WORTH_SECONDS and report.share("evaluate") > _EVALUATE_SHARE:
        yield Tip(
            "evaluate",
            f"evaluating took {percent_text(report.share('evaluate'))} of the time ({duration_text(evaluate)})",
            "evaluate less often, on fewer samples, or in larger batches",
        )
    if save >= _WORTH_SECONDS and report.share("save") > _SAVE_SHARE:
        often = "" if report.saves is None else f" in {number_text(report.saves)} saves"
        yield Tip(
            "save",
            f"saving took {percent_text(report.share('save'))} of the time ({duration_text(save)}{often})",
            "save less often, or store a smaller checkpoint",
        )
    if setup >= _SETUP_SECONDS and report.share("setup") > _SETUP_SHARE:
        yield Tip(
            "setup",
            f"setting up took {percent_text(report.share('setup'))} of the time ({duration_text(setup)})",
            "keep downloads and decoded images for the next session, and leave torch.compile to long runs",
        )
    skipped = report.skipped_steps or 0
    if skipped >= _SKIPPED_STEPS and skipped > _SKIPPED_SHARE * (report.steps + skipped):
        yield Tip(
            "skipped",
            f"{number_text(skipped)} of {number_text(report.steps + skipped)} optimizer steps were skipped because "
            "their gradients overflowed",
            "lower the learning rate, clip the gradient, look for inf and nan in the data, or train in float32",
        )
