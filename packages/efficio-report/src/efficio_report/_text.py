"""The report as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ._facts import gpu_lines, phase_lines, run_lines, title
from ._figures import duration_text
from ._tips import tips

if TYPE_CHECKING:
    from ._report import Report

_COLUMNS = 78
_NAME_COLUMNS = 24
_BAR_COLUMNS = 24
_INDENT = "  "


def report_text(report: Report) -> str:
    """The whole report, in lines of at most 78 columns, without a line end after the last."""
    lines = [*_wrapped(title(report)), "", "Where the time went", *_phases(report), "", "What was done"]
    facts = run_lines(report) + ([] if report.gpu is None else gpu_lines(report.gpu))
    lines += [line for name, text in facts for line in _wrapped(text, first=_name(name))]
    for heading, texts in (
        ("Applied", report.applied),
        ("Notes", report.notes),
        ("What to change", map(str, tips(report))),
    ):
        lines += _listed(heading, texts)
    return "\n".join(line.rstrip() for line in lines)


def _phases(report: Report) -> Iterator[str]:
    lines = phase_lines(report)
    for words, duration, percentage in lines:
        bar = "#" * round(percentage / 100.0 * _BAR_COLUMNS)
        yield f"{_name(words)}{duration:>14}{percentage:>6.1f} %  {bar}"
    whole = f"{100.0:>6.1f} %" if lines else ""
    yield f"{_name('in all')}{duration_text(report.wall_seconds):>14}{whole}"


def _listed(heading: str, texts: Iterable[str]) -> list[str]:
    items = [line for text in texts for line in _wrapped(text, first=f"{_INDENT}- ")]
    return ["", heading, *items] if items else []


def _wrapped(text: str, *, first: str = "") -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent=first, subsequent_indent=" " * len(first))


def _name(words: str) -> str:
    """A name in its column, cut where it is too long for it and put on one line."""
    shown = " ".join(words.split())[: _NAME_COLUMNS - 3]
    return f"{_INDENT}{shown:<{_NAME_COLUMNS - 2}}"
