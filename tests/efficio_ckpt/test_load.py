"""Damage is found before anything is returned; the newest good checkpoint is used; nothing is a silent fresh start."""

import errno
import hashlib
import json
import logging
import os
import pickle
import shutil

import pytest
import torch

from efficio_ckpt import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_state,
    prune,
    save_state,
    verify,
)
from efficio_ckpt._folder import DAMAGE as NOTE
from efficio_ckpt._folder import Folder
from efficio_ckpt._json import to_json
from efficio_ckpt._manifest import MANIFEST, STATE

DATA = "tensors-00001.safetensors"


def tree(step):
    return {"model": {"w": torch.full((50, 20), float(step))}, "step": step, "words": ["a"] * 50}


def two(root):
    """Save steps 1 and 2; returns the folder of the newer."""
    save_state(root, tree(1), step=1)
    return root / save_state(root, tree(2), step=2).name


def reseal(path, change):
    """Change a manifest as an attacker would: with a right digest."""
    content = json.loads(path.read_bytes())
    change(content)
    content.pop("digest")
    path.write_bytes(to_json({**content, "digest": hashlib.sha256(to_json(content)).hexdigest()}))


def rewrite(folder, name, data):
    """Replace a data file and make the manifest agree."""
    import zlib

    (folder / name).write_bytes(data)
    reseal(
        folder / MANIFEST,
        lambda content: content["files"].__setitem__(
            name,
            {
                "size": len(data),
                "crc32": f"{zlib.crc32(data):08x}",
                "sha256": hashlib.sha256(data).hexdigest(),
            },
        ),
    )


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


def zero_tail(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def header_of(tensors, extra=b""):
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + extra


DEEP = b'{"format":1,"names":[],"tree":' + b"[" * 10**6 + b"]" * 10**6 + b"}"

DAMAGE = {
    "data half": lambda d: cut(d / DATA, (d / DATA).stat().st_size // 2),
    "data empty": lambda d: cut(d / DATA, 0),
    "data gone": lambda d: (d / DATA).unlink(),
    "data a page of HTML": lambda d: (d / DATA).write_bytes(b"<html>quota</html>"),
    "data HTML of the same size": lambda d: (d / DATA).write_bytes(
        b"<html>quota</html>".ljust((d / DATA).stat().st_size)
    ),
    "data a folder": lambda d: ((d / DATA).unlink(), (d / DATA).mkdir()),
    "tail zeroed": lambda d: zero_tail(d / DATA),
    "one more byte": lambda d: (d / DATA).write_bytes((d / DATA).read_bytes() + b"x"),
    "bit in the data": lambda d: flip(d / DATA, -700),
    "bit in the head": lambda d: flip(d / DATA, 20),
    "bit in the length of the head": lambda d: flip(d / DATA, 6, 7),
    "bit in the state": lambda d: flip(d / STATE, 100),
    "state empty": lambda d: cut(d / STATE, 0),
    "bit in the manifest": lambda d: flip(d / MANIFEST, 60),
    "manifest half": lambda d: cut(d / MANIFEST, 100),
    "manifest empty": lambda d: cut(d / MANIFEST, 0),
    "manifest HTML": lambda d: (d / MANIFEST).write_bytes(b"<html>quota</html>"),
    "manifest deep": lambda d: (d / MANIFEST).write_bytes(b"[" * 10**6),
    "manifest a list": lambda d: (d / MANIFEST).write_bytes(b"[]"),
    "manifest too large": lambda d: (d / MANIFEST).write_bytes(b" " * (2**24 + 1)),
    "another format": lambda d: reseal(d / MANIFEST, lambda c: c.update(format=2)),
    "another step": lambda d: reseal(d / MANIFEST, lambda c: c.update(step=7)),
    "no state": lambda d: reseal(d / MANIFEST, lambda c: c["files"].pop(STATE)),
    "name that climbs": lambda d: reseal(
        d / MANIFEST, lambda c: c["files"].update({"../x": c["files"][STATE]})
    ),
    "absolute name": lambda d: reseal(
        d / MANIFEST, lambda c: c["files"].update({"/etc/passwd": c["files"][STATE]})
    ),
    "negative size": lambda d: reseal(d / MANIFEST, lambda c: c["files"][DATA].update(size=-1)),
    "absurd size": lambda d: reseal(d / MANIFEST, lambda c: c["files"][DATA].update(size=10**18)),
    "size as text": lambda d: reseal(d / MANIFEST, lambda c: c["files"][DATA].update(size="1")),
    "files a list": lambda d: reseal(d / MANIFEST, lambda c: c.update(files=[])),
    "infinite time": lambda d: (d / MANIFEST).write_bytes(
        (d / MANIFEST).read_bytes().replace(b'"created":', b'"created":1e999,"x":')
    ),
    "state deep": lambda d: rewrite(d, STATE, DEEP),
    "state of another format": lambda d: rewrite(d, STATE, b'{"format":9}'),
    "state with other names": lambda d: rewrite(d, STATE, b'{"format":1,"names":["x"],"tree":1}'),
    "state names twice": lambda d: rewrite(d, STATE, b'{"format":1,"names":["model.w","model.w"],"tree":1}'),
    "state with names of no list": lambda d: rewrite(d, STATE, b'{"format":1,"names":7,"tree":1}'),
    "state with a strange node": lambda d: rewrite(
        d, STATE, b'{"format":1,"names":["model.w"],"tree":{"eval":"1"}}'
    ),
    "state with a number of a million digits": lambda d: rewrite(
        d, STATE, b'{"format":1,"names":["model.w"],"tree":' + b"9" * 10**6 + b"}"
    ),
    "state that is no text": lambda d: rewrite(d, STATE, b"\xff\xfe\x00"),
    "state a pickle": lambda d: rewrite(d, STATE, pickle.dumps({"format": 1})),
    "head absurdly long": lambda d: rewrite(d, DATA, (2**60).to_bytes(8, "little") + b"{}"),
    "head too short for itself": lambda d: rewrite(d, DATA, b"123"),
    "head no JSON": lambda d: rewrite(d, DATA, (4).to_bytes(8, "little") + b"abcd"),
    "head a list": lambda d: rewrite(d, DATA, (2).to_bytes(8, "little") + b"[]"),
    "head with a gap": lambda d: rewrite(
        d, DATA, header_of({"model.w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8))
    ),
    "head with an overlap": lambda d: rewrite(
        d,
        DATA,
        header_of(
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            bytes(12),
        ),
    ),
    "head beyond the end": lambda d: rewrite(
        d, DATA, header_of({"model.w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, bytes(8))
    ),
    "head of a petabyte": lambda d: rewrite(
        d, DATA, header_of({"model.w": {"dtype": "F32", "shape": [2**48], "data_offsets": [0, 2**50]}})
    ),
    "head with NaN offsets": lambda d: rewrite(
        d,
        DATA,
        header_of({"model.w": {"dtype": "F32", "shape": [1], "data_offsets": [float("nan"), 4]}}, bytes(4)),
    ),
    "head with text offsets": lambda d: rewrite(
        d, DATA, header_of({"model.w": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, bytes(4))
    ),
    "head with an unknown dtype": lambda d: rewrite(
        d, DATA, header_of({"model.w": {"dtype": "Q1", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    ),
    "tensor of another shape": lambda d: rewrite(
        d, DATA, header_of({"model.w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4))
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_told_and_kept_and_the_older_one_is_used(
    quick_path, damage, caplog, monkeypatch
):
    newer = two(quick_path)
    damage(newer)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    before = {path.name: path.read_bytes() for path in newer.iterdir() if path.is_file()}
    with caplog.at_level(logging.WARNING):
        checkpoint, loaded = load_checkpoint(quick_path)
    assert checkpoint.step == loaded["step"] == 1
    assert torch.equal(loaded["model"]["w"], tree(1)["model"]["w"])
    assert newer.name in caplog.text
    with pytest.raises(CheckpointError, match=newer.name):
        verify(quick_path)
    # Retention neither counts it nor removes it.
    for step in (3, 4, 5):
        save_state(quick_path, tree(step), step=step, keep=2)
    after = {path.name: path.read_bytes() for path in newer.iterdir() if path.is_file() and path.name != NOTE}
    assert after == before
    assert load_state(quick_path)["step"] == 5


def test_retention_counts_no_checkpoint_whose_files_are_cut(tmp_path):
    newer = two(tmp_path)
    cut(newer / DATA, 10)
    save_state(tmp_path, tree(3), step=3, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [3, 1]


def test_the_checkpoint_that_was_fallen_back_to_outlives_the_damaged_one(tmp_path):
    newer = two(tmp_path)
    flip(newer / DATA, -700)
    assert load_state(tmp_path)["step"] == 1
    third = tmp_path / save_state(tmp_path, tree(3), step=3, keep=2).name
    flip(third / DATA, -700)
    assert load_state(tmp_path)["step"] == 1
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1]


def test_damage_that_is_repaired_counts_no_more_when_all_is_read(tmp_path):
    newer = two(tmp_path)
    flip(newer / DATA, -700)
    assert load_state(tmp_path)["step"] == 1
    flip(newer / DATA, -700)
    assert load_state(tmp_path)["step"] == 2


def test_with_all_damaged_loading_is_an_error_that_names_each(tmp_path):
    newer = two(tmp_path)
    older = next(path for path in tmp_path.iterdir() if path != newer)
    cut(newer / DATA, 100)
    (older / MANIFEST).write_bytes(b"<html>quota</html>")
    for load in (load_state, verify):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path)
        assert f"{newer.name}/{DATA}" in str(caught.value)
        assert f"{older.name}/{MANIFEST}" in str(caught.value)


@pytest.mark.parametrize("name", [DATA, STATE, MANIFEST])
def test_any_single_flipped_bit_is_found(quick_path, name):
    folder = quick_path / save_state(quick_path, {"w": torch.arange(20), "s": "x"}, step=1).name
    whole = (folder / name).read_bytes()
    stride = max(1, len(whole) // 60)
    for position in range(0, len(whole), stride):
        flip(folder / name, position, position % 8)
        # The line end of the manifest is the only byte that says nothing.
        if not (name == MANIFEST and position == len(whole) - 1):
            with pytest.raises(CheckpointError):
                load_state(quick_path)
        (folder / name).write_bytes(whole)
    assert load_state(quick_path)["s"] == "x"


@pytest.mark.parametrize("name", [DATA, STATE, MANIFEST])
def test_any_truncation_is_found(quick_path, name):
    folder = quick_path / save_state(quick_path, {"w": torch.arange(20), "s": "x"}, step=1).name
    whole = (folder / name).read_bytes()
    for size in range(0, len(whole) - 1, max(1, len(whole) // 40)):
        cut(folder / name, size)
        with pytest.raises(CheckpointError):
            load_state(quick_path)
        (folder / name).write_bytes(whole)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", [DATA, STATE, MANIFEST])
def test_a_pipe_in_the_place_of_a_file_stops_nobody(tmp_path, name):
    newer = two(tmp_path)
    (newer / name).unlink()
    os.mkfifo(newer / name)
    assert load_state(tmp_path)["step"] == 1


def test_files_swapped_between_checkpoints_are_found(tmp_path):
    newer = two(tmp_path)
    older = next(path for path in tmp_path.iterdir() if path != newer)
    a, b = (newer / DATA).read_bytes(), (older / DATA).read_bytes()
    (newer / DATA).write_bytes(b)
    (older / DATA).write_bytes(a)
    with pytest.raises(CheckpointError, match="checksum"):
        load_state(tmp_path)


def test_swapped_manifests_are_found(tmp_path):
    newer = two(tmp_path)
    older = next(path for path in tmp_path.iterdir() if path != newer)
    shutil.copy(newer / MANIFEST, older / MANIFEST)
    assert load_state(tmp_path)["step"] == 2
    with pytest.raises(CheckpointError, match=older.name):
        verify(tmp_path)


def test_an_uncommitted_attempt_is_no_checkpoint(tmp_path):
    folder = tmp_path / save_state(tmp_path, tree(1), step=1).name
    (folder / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint was ever committed"):
        load_state(tmp_path)
    assert list_checkpoints(tmp_path) == []


def test_nothing_is_there_is_told_from_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_state(tmp_path / "none")
    assert (
        list_checkpoints(tmp_path / "none")
        == verify(tmp_path / "none")
        == prune(tmp_path / "none", keep=1)
        == []
    )
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path / "file")


class Broken(Folder):
    """A disk whose calls fail in a given way from some moment on."""

    failing = ()
    number = errno.EACCES

    def _maybe(self, what):
        if what in self.failing:
            raise OSError(self.number, "broken")

    def folders(self):
        self._maybe("folders")
        return super().folders()

    def files(self, folder):
        self._maybe("files")
        return super().files(folder)

    def open(self, folder, name):
        self._maybe(name)
        return super().open(folder, name)


@pytest.mark.parametrize("what", ["folders", "files", MANIFEST, STATE, DATA])
@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.ENOTCONN, errno.ETIMEDOUT, errno.EIO], ids=errno.errorcode.get
)
def test_a_storage_that_cannot_be_read_is_never_a_fresh_start(tmp_path, what, number):
    two(tmp_path)
    storage = Broken(str(tmp_path))
    object.__setattr__(storage, "failing", (what,))
    object.__setattr__(storage, "number", number)
    with pytest.raises(CheckpointError, match=r"cannot be read|no checkpoint in .* is good"):
        load_state(storage)


def test_a_checkpoint_that_another_process_replaces_meanwhile_is_no_damage(tmp_path):
    class Busy(Folder):
        def open(self, folder, name):
            if name == DATA and not done:
                done.append(1)
                save_state(tmp_path, tree(2), step=2, keep=1)
            return super().open(folder, name)

    done = []
    save_state(tmp_path, tree(1), step=1)
    assert load_state(Busy(str(tmp_path)))["step"] == 2


def test_newest_is_what_was_saved_last_whatever_step_and_clock_say(tmp_path, monkeypatch):
    import time

    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    for step, now in [(500, 1000.0), (300, 2000.0), (310, 50.0)]:
        clock[0] = now
        save_state(tmp_path, tree(step), step=step, keep=5)
    assert load_state(tmp_path)["step"] == 310
    assert load_state(tmp_path, step=500)["step"] == 500
    save_state(tmp_path, {"again": True}, step=500, keep=5)
    assert load_state(tmp_path, step=500) == {"again": True}
    with pytest.raises(FileNotFoundError, match="of step 7"):
        load_state(tmp_path, step=7)


def test_two_runs_in_one_folder_are_kept_apart(tmp_path):
    for step in (1, 2, 3):
        save_state(tmp_path, tree(step), step=step, keep=1, run_id="a")
    for step in (1, 2):
        save_state(tmp_path, tree(step * 10), step=step, keep=1, run_id="b")
    assert [(c.run_id, c.step) for c in list_checkpoints(tmp_path)] == [("b", 2), ("a", 3)]
    assert load_state(tmp_path, run_id="a")["step"] == 3
    assert load_state(tmp_path)["step"] == 20
    with pytest.raises(FileNotFoundError, match="of run 'c'"):
        load_state(tmp_path, run_id="c")


def test_prune_keeps_the_newest_of_each_run(tmp_path):
    for run_id in ("a", None):
        for step in (1, 2, 3):
            save_state(tmp_path, tree(step), step=step, keep=9, run_id=run_id)
    removed = prune(tmp_path, keep=2)
    assert sorted((str(c.run_id), c.step) for c in removed) == [("None", 1), ("a", 1)]
    assert len(list_checkpoints(tmp_path)) == 4
