"""Builds that are killed at a call of the system, each in a child of its own, and called again."""

from __future__ import annotations

import os
import signal
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efficio_data._cache_journal import parse_journal
from efficio_data._image_cache import ImageCache

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")

COUNT, SIZE, WORKERS = 150, (4, 5), 2
CALLS = ("pwrite", "fdatasync", "fsync", "replace", "ftruncate")


def in_child(work):
    """Run work in a fork and return how that ended: an exit status, or minus a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of the test process are idle
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interrupt_at(call, before):
    """Make the process die at the given call, counted over all of CALLS, just before it is made or just after."""
    count = [0]

    def guarded(really):
        def made(*arguments, **options):
            count[0] += 1
            if count[0] == call and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = really(*arguments, **options)
            if count[0] >= call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return made

    for name in CALLS:
        if hasattr(os, name):
            setattr(os, name, guarded(getattr(os, name)))
    return count


def contents(root):
    """Every file but the lock of a dead process; an empty folder may be left, too."""
    assert not (root / "building").exists() or not list((root / "building").iterdir())
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file() and path.name != "lock"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of random pixels, 3 of them damaged: (all paths, good paths, the work folder)."""
    root = tmp_path_factory.mktemp("kill")
    rng = np.random.default_rng(0)
    paths = []
    for number in range(COUNT):
        paths.append(str(root / f"{number}.png"))
        Image.fromarray(rng.integers(0, 256, (6, 7, 3), np.uint8)).save(paths[-1])
    bad = [str(root / f"bad{number}.png") for number in range(3)]
    for path in bad:
        Path(path).write_bytes(b"nothing")
    return [*paths[:5], bad[0], *paths[5:90], *bad[1:], *paths[90:]], paths, root


@pytest.fixture
def decodes(monkeypatch):
    calls = []
    really_open = Image.open
    monkeypatch.setattr(Image, "open", lambda file: calls.append(file) or really_open(file))
    return calls


def build(paths, root, **options):
    return ImageCache.build(paths, range(len(paths)), root, size=SIZE, workers=WORKERS, **options)


def journaled(root):
    try:
        return len(parse_journal((root / "building" / "journal").read_bytes()).rows)
    except FileNotFoundError:
        return 0


@cache
def calls_of_a_build(paths, root, on_error):
    """How many of CALLS a build makes when nothing stops it."""
    out = root / f"counted-{on_error}"
    told = root / f"count-{on_error}"

    def work():
        count = interrupt_at(10**9, before=True)
        build(paths, out, on_error=on_error)
        told.write_text(str(count[0]))

    assert in_child(work) == 0
    return int(told.read_text())


EARLY = [0.0, 0.02, 0.1, 0.3, 0.42, 0.44, 0.46, 0.5, 0.6, 0.7, 0.8]
PLACES = [(place, "skip") for place in (*EARLY, *(1 - k / 100 for k in range(14, -1, -1)))]
PLACES += [(place, "raise") for place in (0.0, 0.4, 0.6, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)]
PLACES = [(place, kind, number % 2 == 0) for number, (place, kind) in enumerate(PLACES)]
NAMES = [f"{place:.2f}-{kind}-{'before' if before else 'after'}" for place, kind, before in PLACES]


@pytest.mark.parametrize(("place", "on_error", "before"), PLACES, ids=NAMES)
def test_a_killed_build_is_continued_to_the_same_bytes(place, on_error, before, folder, tmp_path, decodes):
    everything, good, root = folder
    paths = everything if on_error == "skip" else good
    total = calls_of_a_build(tuple(paths), root, on_error)
    call = 1 + round(place * (total - 1))
    out = tmp_path / "out"

    def work():
        interrupt_at(call, before)
        build(paths, out, on_error=on_error)

    assert in_child(work) == -signal.SIGKILL
    kept, ready = journaled(out), (out / "building" / "meta.json").exists() or (out / "meta.json").exists()
    result = build(paths, out, on_error=on_error)
    result.verify()
    assert contents(out) == contents(root / f"counted-{on_error}")
    closing = kept == COUNT and on_error == "skip"
    assert len(decodes) in ([0] if ready else [0, 3] if closing else [len(paths) - kept])


def test_a_build_that_is_killed_again_and_again_ends(folder, tmp_path, decodes):
    everything, _, root = folder
    calls_of_a_build(tuple(everything), root, "skip")
    out, deaths = tmp_path / "out", 0

    def work():
        interrupt_at(
            40 + 30 * (deaths % 3), before=True
        )  # more than a group of rows takes, or nothing would be gained
        build(everything, out, on_error="skip")

    while in_child(work) != 0:
        deaths += 1
        assert deaths < 50
    assert deaths >= 3
    assert contents(out) == contents(root / "counted-skip")


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0])
def test_the_old_cache_lives_until_the_new_one_is_whole(place, folder, tmp_path):
    _, good, root = folder
    old = build(good, tmp_path / "out")
    old_bytes = old.images.tobytes()
    total = calls_of_a_build(tuple(good), root, "raise")

    def work():
        interrupt_at(1 + round(place * (total - 1)), before=True)
        ImageCache.build(
            good, range(COUNT), tmp_path / "out", size=SIZE, grayscale=True, workers=1, rebuild=True
        )

    in_child(work)
    if (
        not (tmp_path / "out" / "building" / "meta.json").exists()
        and not (tmp_path / "out" / "meta.json").exists()
    ):
        pytest.fail("neither the old nor the new cache is whole")
    try:
        now = ImageCache.open(tmp_path / "out")
        assert now.images.shape[3] == 1 or now.images.tobytes() == old_bytes
        now.verify()
    except FileNotFoundError:
        assert (tmp_path / "out" / "building" / "meta.json").exists()
    new = ImageCache.build(good, range(COUNT), tmp_path / "out", size=SIZE, grayscale=True, rebuild=True)
    new.verify()
    assert new.images.shape == (COUNT, *SIZE, 1)


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_new_labels_that_are_cut_off_are_never_taken_for_the_old_ones(call, folder, tmp_path):
    _, good, _ = folder
    build(good, tmp_path / "out")
    labels = np.arange(COUNT)[::-1].copy()

    def work():
        interrupt_at(call, before=True)
        ImageCache.build(good, labels, tmp_path / "out", size=SIZE)

    in_child(work)
    try:
        found = ImageCache.open(tmp_path / "out").labels.tolist()
    except ValueError:
        found = None  # told to be damaged: the next build mends it
    assert found in (None, list(range(COUNT)), labels.tolist())
    assert np.array_equal(ImageCache.build(good, labels, tmp_path / "out", size=SIZE).labels, labels)


def journal_of_a_killed_build(folder, out, rows=64):
    def work():
        interrupt_at(100, before=True)
        build(folder[1], out)

    assert in_child(work) == -signal.SIGKILL
    assert journaled(out) == rows
    return out / "building" / "journal"


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="the calls of Linux are watched")
def test_no_line_of_the_journal_is_about_rows_that_a_power_cut_can_lose(folder, tmp_path, monkeypatch):
    everything, _, _ = folder
    written, synced, seen = set(), set(), set()
    really_write, really_sync, really_fsync = os.pwrite, os.fdatasync, os.fsync

    def write(descriptor, data, start):
        written.add(start // 60)
        return really_write(descriptor, data, start)

    def sync(descriptor):
        before = set(written)
        really_sync(descriptor)
        synced.update(before)

    def fsync(descriptor):
        journal = tmp_path / "out" / "building" / "journal"
        if journal.exists():
            seen.update(parse_journal(journal.read_bytes()).rows)
        assert seen <= synced
        really_fsync(descriptor)

    for name, stand_in in (("pwrite", write), ("fdatasync", sync), ("fsync", fsync)):
        monkeypatch.setattr(os, name, stand_in)
    build(everything, tmp_path / "out", on_error="skip")
    assert len(seen) == COUNT


def test_a_torn_line_of_the_journal_counts_for_nothing(folder, tmp_path, decodes):
    journal = journal_of_a_killed_build(folder, tmp_path / "out")
    with open(journal, "ab") as file:
        file.write(journal.read_bytes()[:200])
    journal_of_a_killed_build(folder, tmp_path / "out", rows=COUNT)  # what is written after it is found
    build(folder[1], tmp_path / "out").verify()
    assert decodes == []


def test_rows_that_the_disk_lost_in_spite_of_the_journal_are_made_again(folder, tmp_path, decodes):
    images = journal_of_a_killed_build(folder, tmp_path / "out").with_name("images.u8")
    with open(images, "r+b") as file:
        file.seek(10 * 60)
        file.write(bytes(60))
    build(folder[1], tmp_path / "out").verify()
    assert len(decodes) == COUNT - 63


def test_images_cut_short_begin_the_build_anew(folder, tmp_path, decodes):
    images = journal_of_a_killed_build(folder, tmp_path / "out").with_name("images.u8")
    os.truncate(images, 1000)
    build(folder[1], tmp_path / "out").verify()
    assert len(decodes) == COUNT


def test_a_file_that_changed_after_the_kill_is_decoded_again(folder, tmp_path, decodes):
    _, good, _ = folder
    journal_of_a_killed_build(folder, tmp_path / "out")
    kept, stat = Path(good[7]).read_bytes(), os.stat(good[7])
    try:
        Image.new("RGB", (3, 3), (250, 250, 250)).save(good[7])
        result = build(good, tmp_path / "out")
        assert (result.images[7] == 250).all()
        assert len(decodes) == COUNT - 63
    finally:
        Path(good[7]).write_bytes(kept)
        os.utime(good[7], ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_lost_while_the_gaps_are_closed_is_decoded_once_more(folder, tmp_path, decodes):
    everything, _, root = folder
    calls_of_a_build(tuple(everything), root, "skip")

    def work():
        interrupt_at(COUNT + 3 * 3 + 15, before=False)  # some rows have been moved
        build(everything, tmp_path / "out", on_error="skip")

    assert in_child(work) == -signal.SIGKILL
    stage = tmp_path / "out" / "building"
    assert parse_journal((stage / "journal").read_bytes()).failed is not None
    with open(stage / "images.u8", "r+b") as file:
        file.seek(100 * 60)
        file.write(bytes(60))
    build(everything, tmp_path / "out", on_error="skip").verify()
    assert len(decodes) == 1
    assert contents(tmp_path / "out") == contents(root / "counted-skip")


def test_a_file_that_changed_while_the_gaps_are_closed_is_not_served_as_it_was(folder, tmp_path):
    everything, _, _ = folder
    copies = [str(tmp_path / f"{number:03d}") for number in range(len(everything))]
    for copy, path in zip(copies, everything, strict=True):
        Path(copy).write_bytes(Path(path).read_bytes())

    def work():
        interrupt_at(COUNT + 3 * 3 + 15, before=False)
        build(copies, tmp_path / "out", on_error="skip")

    assert in_child(work) == -signal.SIGKILL
    assert parse_journal((tmp_path / "out" / "building" / "journal").read_bytes()).failed is not None
    Image.new("RGB", (9, 9), (250, 250, 250)).save(copies[0], "png")
    Image.new("RGB", (9, 9), (240, 240, 240)).save(copies[5], "png")
    result = build(copies, tmp_path / "out", on_error="skip")
    assert result.images[[0, 5], 0, 0, 0].tolist() == [250, 240]
    assert len(result) == COUNT + 1
