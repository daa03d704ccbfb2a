"""Tests each package alone: from its wheel, in an environment without its siblings.

For each package a fresh environment gets the wheel, what the wheel declares and what that requires, and the test
tools; nothing else, so that a missing declaration is an ImportError. What is third-party is linked from the environment
that runs this file, not installed again: all share one torch. The tests run from a copy outside the repository.

    python tests/repo/isolation.py [package ...]
"""

import argparse
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
TEST_TOOLS = ("pytest", "hypothesis")
# Linked without what they require, so that they stand in for no declaration.
TEST_EXTRAS = {
    "efficio-budget": (
        "numpy",
    ),  # its scalars are given as durations; deptry sees an import of it in the sources
    "efficio-data": ("torchvision",),  # the reference that augmentations are compared with
    "efficio-precision": ("numpy",),  # torch warns at import where there is none, and warnings are errors
    "efficio-report": ("numpy",),  # as for efficio-budget
}
TEST_FOLDERS = {"efficio": ("tests/efficio", "tests/meta")}
BESIDE_TESTS = {"efficio": ("examples",)}  # tests/meta runs the examples


@dataclass(frozen=True)
class Outcome:
    passed: int
    skipped: int
    failed: int
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="*", metavar="package", help="distributions; all by default")
    chosen = parser.parse_args(arguments).package or list(DISTRIBUTIONS)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background; the tests would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if unknown := set(chosen) - set(DISTRIBUTIONS):
        parser.error(f"{', '.join(sorted(unknown))} is not among {', '.join(DISTRIBUTIONS)}")

    problems = []
    with tempfile.TemporaryDirectory(prefix="efficio-alone-") as name:
        folder = Path(name)
        wheels = {
            distribution: build_wheel(distribution, folder / "wheels") for distribution in DISTRIBUTIONS
        }
        for distribution in chosen:
            print(f"\n-- {distribution}, alone --", flush=True)
            try:
                check_contents(distribution, wheels[distribution])
                outcome = check_alone(distribution, wheels, folder / distribution)
            except ValueError as error:
                print(error, flush=True)
                problems.append(f"{distribution}: {error}")
                continue
            counts = f"{outcome.passed} passed, {outcome.skipped} skipped, {outcome.failed} failed"
            print(f"{distribution}: {counts} in {outcome.seconds:.0f} s, alone from its wheel", flush=True)
            if outcome.failed or not outcome.passed:
                problems.append(f"{distribution}: {counts}")
    print()
    for problem in problems:
        print(problem)
    print(
        f"{len(chosen) - len(problems)} of {len(chosen)} packages pass alone, from their wheels", flush=True
    )
    return 1 if problems else 0


def build_wheel(distribution: str, folder: Path) -> Path:
    target = folder / distribution
    command = [
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(target),
        f"packages/{distribution}",
    ]
    run([sys.executable, *command], cwd=ROOT)
    (wheel,) = target.glob("*.whl")
    return wheel


def check_contents(distribution: str, wheel: Path) -> None:
    """Holds the sources, py.typed and the licence; nothing else, and nothing less."""
    module = distribution.replace("-", "_")
    source = ROOT / "packages" / distribution / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / module).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    if extra := sorted(names - metadata - wanted):
        raise ValueError(f"the wheel holds {', '.join(extra)}, which is no source of {module}")
    if missing := sorted(wanted - names):
        raise ValueError(f"the wheel lacks {', '.join(missing)}")
    if f"{module}/py.typed" not in names:
        raise ValueError(f"the wheel lacks {module}/py.typed")
    if not any(PurePosixPath(name).name == "LICENSE" for name in metadata):
        raise ValueError("the wheel lacks LICENSE")


def check_alone(distribution: str, wheels: dict[str, Path], folder: Path) -> Outcome:
    own = {canonicalize_name(name) for name in DISTRIBUTIONS}
    requirements = [*wheel_requirements(wheels[distribution]), *map(Requirement, TEST_TOOLS)]
    installed = [wheels[distribution]]
    for sibling in [r.name for r in requirements if canonicalize_name(r.name) in own]:
        installed.append(wheels[sibling])
        requirements += wheel_requirements(wheels[sibling])
    foreign = closure(
        requirement for requirement in requirements if canonicalize_name(requirement.name) not in own
    )
    declared = frozenset(foreign)
    foreign |= set(TEST_EXTRAS.get(distribution, ()))

    python, site_packages = make_environment(folder / "environment")
    link_distributions(foreign, site_packages)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    run([*pip, *map(str, installed)])

    present = {wheel.name.split("-")[0] for wheel in installed} | ({"torch"} & declared)
    absent = {name.replace("-", "_") for name in DISTRIBUTIONS} | {"torch"}
    check_importable(python, present, absent - present)

    place = copy_tests(distribution, folder / "copy")
    return run_tests(python, place)


def wheel_requirements(wheel: Path) -> list[Requirement]:
    """What the wheel declares, for this platform, without its extras."""
    (metadata,) = importlib.metadata.MetadataPathFinder.find_distributions(
        importlib.metadata.DistributionFinder.Context(name=wheel.name.split("-")[0], path=[str(wheel)])
    )
    return list(applying(metadata.requires or [], extras=()))


def applying(lines: Iterable[str], *, extras: Iterable[str]) -> Iterator[Requirement]:
    environments = [{"extra": extra} for extra in ("", *extras)]
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate(environment) for environment in environments):
            yield requirement


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """Names of the distributions that these requirements need here, with those that they need in turn."""
    waiting = list(requirements)
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        wanted = {(name, extra) for extra in ("", *requirement.extras)} - seen
        if not wanted:
            continue
        seen |= wanted
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"{requirement} is declared and not installed here; run make setup") from None
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise ValueError(f"{requirement} is declared, and {distribution.version} is installed here")
        waiting += applying(distribution.requires or [], extras=requirement.extras)
    return {name for name, _ in seen}


def make_environment(folder: Path) -> tuple[Path, Path]:
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    windows = sys.platform == "win32"
    python = folder / ("Scripts/python.exe" if windows else "bin/python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return python, Path(run([str(python), "-c", code]).strip())


def link_distributions(names: Iterable[str], site_packages: Path) -> None:
    """Links the files of these distributions, as few links as possible: a folder that one distribution has to itself is
    one link, a namespace shared with others is a folder."""
    owners: dict[PurePosixPath, set[str]] = {}
    sources: dict[PurePosixPath, Path] = {}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        for file in distribution.files or []:
            if file.parts[0] == ".." or file.parts[0] == "__pycache__":
                continue  # commands, and bytecode of single modules
            for path in (file, *file.parents[:-1]):
                owners.setdefault(path, set()).add(name)
                sources.setdefault(path, Path(str(distribution.locate_file(path))))
    wanted, linked = set(names), set()
    for path in sorted(owners, key=lambda path: len(path.parts)):
        inside = any(parent in linked for parent in path.parents)
        if inside or not owners[path] & wanted or not sources[path].exists():
            continue
        if owners[path] <= wanted or not sources[path].is_dir():
            (site_packages / path).symlink_to(sources[path])
            linked.add(path)
        else:
            (site_packages / path).mkdir()


def check_importable(python: Path, present: set[str], absent: set[str]) -> None:
    code = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
    found = set(run([str(python), "-I", "-c", code, *sorted(present | absent)]).split())
    if leaked := sorted(found & absent):
        raise ValueError(f"{', '.join(leaked)} can be imported where it must not be")
    if missing := sorted(present - found):
        raise ValueError(f"{', '.join(missing)} cannot be imported")


def copy_tests(distribution: str, folder: Path) -> Path:
    tests = TEST_FOLDERS.get(distribution, (f"tests/{distribution.replace('-', '_')}",))
    if not any((ROOT / name).is_dir() and any((ROOT / name).rglob("test_*.py")) for name in tests):
        raise ValueError(f"no tests lie in {' or '.join(tests)}")
    for name in (*tests, *BESIDE_TESTS.get(distribution, ())):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(python: Path, place: Path) -> Outcome:
    report = place.parent / "report.xml"
    began = time.monotonic()
    # sources could come in by PYTHONPATH, also into what the tests start
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PYTHONNOUSERSITE"] = "1"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "tests"]
    subprocess.run(command, cwd=place, env=environ, stdin=subprocess.DEVNULL, check=False)
    seconds = time.monotonic() - began
    if not report.is_file():
        raise ValueError("pytest ended without a report")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ET.parse(report).getroot().iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.get(key, 0))
    failed = counts["failures"] + counts["errors"]
    return Outcome(counts["tests"] - failed - counts["skipped"], counts["skipped"], failed, seconds)


def run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
