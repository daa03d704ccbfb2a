"""Words: what a run tells its user, made from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

_SURVIVING = {"colab": ("/content/drive",), "kaggle": ("/kaggle/working",)}


def start_line(
    *,
    resumed_from: int | None,
    seconds: float,
    place: str,
    precision: str,
    stops_at: datetime | None,
) -> str:
    """How a run begins, in one line.

    >>> start_line(resumed_from=None, seconds=0, place="run", precision="fp32: a CPU", stops_at=None)
    'efficio: new run in run, fp32: a CPU'
    """
    begin = (
        f"new run in {place}"
        if resumed_from is None
        else f"resumed at step {resumed_from:,} ({seconds / 3600:.2f} h so far) from {place}"
    )
    end = f", stops at {stops_at:%H:%M}" if stops_at else ""
    return f"efficio: {begin}, {precision}{end}"


def storage_note(host: str, place: str) -> str | None:
    """A warning when checkpoints would go with the machine.

    >>> storage_note("local", "/mnt/run") is None
    True
    >>> storage_note("colab", "/content/run")
    "checkpoints in /content/run go when this colab machine goes: give storage='/content/drive/...' instead"
    """
    if place.startswith("memory://"):
        return f"checkpoints in {place} go when this process ends: give storage a folder or a URL instead"
    kept = _SURVIVING.get(host, ())
    if not kept or "://" in place or any(f"{place}/".startswith(f"{folder}/") for folder in kept):
        return None
    return f"checkpoints in {place} go when this {host} machine goes: give storage='{kept[0]}/...' instead"


def environment_note(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What differs from where the checkpoint was written, as far as it can change bits.

    >>> environment_note({"device": "cpu", "threads": 2}, {"device": "cpu", "threads": 4})
    'threads: 2 when saved, 4 now; samples, order and augmentations stay the same, bits may not'
    """
    moved = [
        f"{name}: {stored[name]} when saved, {now[name]} now"
        for name in now
        if stored.get(name, now[name]) != now[name]
    ]
    return (
        f"{', '.join(moved)}; samples, order and augmentations stay the same, bits may not" if moved else None
    )


def scheduler_note(names: list[str], interval: str | None) -> str | None:
    """When the prepared schedulers are stepped, and by whom.

    >>> scheduler_note(["scheduler"], "step")
    'scheduler is stepped by run.step(), once per optimizer step: do not step it yourself'
    """
    if not names:
        return None
    listed = ", ".join(names)
    if interval == "step":
        return f"{listed} is stepped by run.step(), once per optimizer step: do not step it yourself"
    if interval == "epoch":
        return f"{listed} is stepped by run.loop, when an epoch ends: do not step it yourself"
    return f"{listed} is left to you to step"


def length_note(
    name: str, batches: tuple[int | None, int | None], samples: tuple[int | None, int | None]
) -> str | None:
    """What it means that an epoch of a loop is not as long as it was when the checkpoint was written.

    Args:
        name: Of the loop.
        batches: In an epoch, stored and now; None where not known.
        samples: That an epoch draws from, stored and now; None where not known.

    >>> length_note("0", (10, 5), (100, 100))
    "loop '0' had 10 batches an epoch and now has 5, of the same 100 samples: it goes on at the same sample"
    """
    if None not in samples and samples[0] != samples[1]:
        return (
            f"loop {name!r} had {samples[0]:,} samples an epoch and now has {samples[1]:,}: this is another data set, so it is not "
            "the run that was stopped; it goes on at the same place of a new order, where samples may come twice or not at all"
        )
    if None in batches or batches[0] == batches[1]:
        return None
    found = f"loop {name!r} had {batches[0]:,} batches an epoch and now has {batches[1]:,}"
    if None in samples:
        return (
            f"{found}: it goes on at the same sample, which is the same run only if the data set is the same"
        )
    return f"{found}, of the same {samples[0]:,} samples: it goes on at the same sample"


def files_note(name: str, stored: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What it means that as many files as before are not the same ones.

    Args:
        name: Of the loop.
        stored: Identity of the data set in the checkpoint.
        now: Identity of the data set here.

    >>> files_note("0", {"files": "a"}, {"files": "a"}) is None
    True
    """
    if stored.get("files", now.get("files")) == now.get("files"):
        return None
    return (
        f"the files of loop {name!r}, or their labels or order, are not those of the checkpoint, though as many: this is another data "
        "set, so it is not the run that was stopped"
    )


def bce_note(names: tuple[str, ...]) -> str | None:
    """A warning about losses that torch refuses in 16 bit on a GPU."""
    if not names:
        return None
    return (
        f"BCELoss ({', '.join(names)}) fails in 16 bit on a GPU: use BCEWithLogitsLoss without the sigmoid, or compute this loss "
        "outside run.autocast() from values in float32"
    )


def weights_alone_hint(place: str) -> str:
    """How to begin a new run with no more than those weights of a checkpoint that fit.

    >>> weights_alone_hint("run")[:47]
    'to begin another run with those of its weights '
    """
    return (
        "to begin another run with those of its weights that fit, give that run another storage, and before prepare: "
        f"stored = efficio_ckpt.load_state({place!r})['objects']['model']; own = model.state_dict(); "
        "model.load_state_dict({k: v for k, v in stored.items() if k in own and own[k].shape == v.shape}, strict=False)"
    )


def closing_notes(*, failed_saves: int, upload_error: str | None, losses_not_finite: int) -> tuple[str, ...]:
    """What the report says about what went wrong more than once, or is still wrong.

    Args:
        failed_saves: Saves that failed; one alone was told when it happened.
        upload_error: Text of the last failure, if no upload has succeeded since.
        losses_not_finite: Losses that were NaN or infinite; the first was told.

    >>> closing_notes(failed_saves=3, upload_error=None, losses_not_finite=1)
    ('3 saves failed in all',)
    """
    notes = [f"{failed_saves} saves failed in all"] if failed_saves > 1 else []
    if upload_error is not None:
        notes.append(f"the newest checkpoint is on this machine only, its upload failed: {upload_error}")
    if losses_not_finite > 1:
        notes.append(f"{losses_not_finite:,} losses were NaN or infinite in all")
    return tuple(notes)
