"""Console: the progress bar of a loop, and lines that do not break it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

_SECONDS_WITHOUT_TERMINAL = 10.0  # a log file or a pipe gets a line now and then, not one an update


def say(text: str) -> None:
    """Write a line where the bar is written to."""
    from tqdm import tqdm

    tqdm.write(text)
    sys.stdout.flush()


class Notes:
    """What was told to the user, each thing once, kept for the report.

    Attributes:
        told: Sentences that were shown.
        applied: Optimisations in use, for the report only.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.applied: list[str] = []

    def tell(self, *texts: str | None) -> None:
        """Show what was not shown before; None is nothing."""
        for text in texts:
            if text and text not in self.told:
                self.told.append(text)
                say(f"efficio: {text}")

    def use(self, *texts: str) -> None:
        """Note an optimisation."""
        self.applied.extend(text for text in texts if text and text not in self.applied)


def progress_bar(*, total: int | None, done: int, title: str, shown: bool) -> Any:
    """A tqdm bar over the batches of a loop; in a notebook the widget, where widgets are installed."""
    from tqdm import tqdm

    bar: Any = (_notebook_bar() if shown else None) or tqdm
    return bar(
        total=total,
        initial=done,
        desc=title,
        unit="batch",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr is not None and sys.stderr.isatty() else _SECONDS_WITHOUT_TERMINAL,
        disable=not shown,
    )


def _notebook_bar() -> Any:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    if find_spec("ipywidgets") is None:  # without it tqdm's notebook bar prints a warning and fails
        return None
    from tqdm.notebook import tqdm

    return tqdm
