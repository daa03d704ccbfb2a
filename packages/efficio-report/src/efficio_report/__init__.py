"""Where the training time went, what the GPU did, and what to change."""

from ._card import GPUSample
from ._report import Report, collect_report
from ._sampling import GPUSummary, sample_gpu
from ._tips import Tip, tips
from ._totals import Totals, span, timed

__all__ = [
    "GPUSample",
    "GPUSummary",
    "Report",
    "Tip",
    "Totals",
    "collect_report",
    "sample_gpu",
    "span",
    "timed",
    "tips",
]
__version__ = "0.3.0"
