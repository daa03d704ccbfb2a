"""Results of benchmarks: what every result file says about its machine, and the statistics that the tables use."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join((found[1] if found else platform.processor() or platform.machine()).split())


def hardware() -> dict[str, Any]:
    """What the figures depend on; no host name, no path."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cpus": usable,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*distributions: str) -> dict[str, str]:
    """Python's version and those of distributions, which must be installed."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in distributions},
    }


def peer_versions(*distributions: str) -> dict[str, str]:
    """The versions of the libraries that are measured beside ours.

    Raises:
        SystemExit: One is not installed.
    """
    try:
        return {name: importlib.metadata.version(name) for name in distributions}
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(
            f"{error}; install the peers first: pip install -r requirements-bench.txt"
        ) from error


def commit() -> str:
    """The commit that is measured, with `+changes` if tracked files differ from it; `unknown` outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "packages", "benchmarks/*.py")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_result(
    name: str, *, settings: dict[str, Any], versions: dict[str, str], repeats: list[Any]
) -> Path:
    """Write `results/<name>/<machine>-<date>.json` and return its path; a run on the same day replaces it."""
    now = datetime.datetime.now(datetime.timezone.utc)
    machine = re.sub(r"[^a-z0-9]+", "-", cpu_model().lower().replace("(r)", "").replace("(tm)", "")).strip(
        "-"
    )
    path = RESULTS / name / f"{machine}-{now:%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "benchmark": name,
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit(),
        "settings": settings,
        "versions": versions,
        "hardware": hardware(),
        "repeats": repeats,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def newest_result(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """The result of a benchmark that was written last.

    Raises:
        FileNotFoundError: It has none.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((results / name).glob("*.json"))]
    if not found:
        raise FileNotFoundError(f"benchmarks/results/{name} has no result; run benchmarks/{name}.py")
    return max(found, key=lambda result: result["date"])


def mean_and_interval(
    values: np.ndarray | list[float], *, resamples: int = 10_000
) -> tuple[float, float, float]:
    """The mean of paired differences, and its bootstrap interval of 95 %, the same at each call."""
    sample = np.asarray(values)
    drawn = np.random.default_rng(0).integers(len(sample), size=(resamples, len(sample)))
    low, high = np.percentile(sample[drawn].mean(axis=1), [2.5, 97.5])
    return float(sample.mean()), float(low), float(high)
