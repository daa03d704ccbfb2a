"""The report as HTML, for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ._facts import gpu_lines, phase_lines, run_lines, title
from ._figures import duration_text
from ._tips import tips

if TYPE_CHECKING:
    from ._report import Report

# Colours that are read on white and on black: notebooks have both.
_BAR_STYLE = "display:inline-block;height:0.7em;background:#4a90d9"
_BAR_EMS = 14.0
_CELL = 'style="text-align:left"'
_NUMBER = 'style="text-align:right"'


def report_page(report: Report) -> str:
    """The whole report as one HTML element: nothing is loaded from elsewhere, all text is escaped."""
    facts = run_lines(report) + ([] if report.gpu is None else gpu_lines(report.gpu))
    rows = "".join(
        f"<tr><td {_CELL}>{escape(name)}</td><td {_CELL}>{escape(text)}</td></tr>" for name, text in facts
    )
    return (
        f"<div><p><b>{escape(title(report))}</b></p>"
        f"<table>{_phases(report)}</table><table>{rows}</table>"
        f"{_listed('Applied', report.applied)}{_listed('Notes', report.notes)}"
        f"{_listed('What to change', map(str, tips(report)))}</div>"
    )


def _phases(report: Report) -> str:
    rows = [
        f"<tr><td {_CELL}>{escape(words)}</td><td {_NUMBER}>{duration}</td><td {_NUMBER}>{percentage:.1f} %</td>"
        f'<td {_CELL}><span style="{_BAR_STYLE};width:{percentage / 100.0 * _BAR_EMS:.2f}em"></span></td></tr>'
        for words, duration, percentage in phase_lines(report)
    ]
    whole = f"<tr><td {_CELL}>in all</td><td {_NUMBER}>{duration_text(report.wall_seconds)}</td><td></td><td></td></tr>"
    return "".join(rows) + whole


def _listed(heading: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<p>{heading}</p><ul>{items}</ul>" if items else ""
