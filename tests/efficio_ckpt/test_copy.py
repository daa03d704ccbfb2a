"""A copy is the same checkpoint in another place: checked on the way, never over something, and a run goes on from it."""

import os
import threading
import zlib
from dataclasses import replace

import pytest
import torch

from efficio_ckpt import (
    CheckpointError,
    copy_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_state,
    open_storage,
    remove_checkpoint,
    save_state,
    take_inventory,
    verify,
)
from efficio_ckpt._folder import DAMAGE, EXPIRED, Folder
from efficio_ckpt._manifest import MANIFEST, read_manifest, write_manifest

DATA = "tensors-00001.safetensors"


def tree(step):
    return {"w": torch.full((50, 20), float(step)), "tied": torch.arange(7), "step": step}


def save(root, step, **options):
    return save_state(root, tree(step), step=step, **{"metadata": {"device": "cpu"}, **options})


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def manifest_of(root, name):
    return read_manifest((root / name / MANIFEST).read_bytes(), folder=name)


def test_a_copy_has_the_same_manifest_and_data_under_a_name_of_its_own(tmp_path):
    original = save(tmp_path / "a", 3, run_id="monday", shard_bytes=2000)
    before = contents(tmp_path / "a")

    copy = copy_checkpoint(tmp_path / "a", tmp_path / "b")

    assert copy.name != original.name
    assert replace(copy, name=original.name) == original
    first, second = manifest_of(tmp_path / "a", original.name), manifest_of(tmp_path / "b", copy.name)
    assert second.files == first.files
    assert len(second.files) == 3
    assert second.writer == first.writer
    assert "torch" in first.writer
    assert list_checkpoints(tmp_path / "b") == verify(tmp_path / "b") == [copy]
    assert torch.equal(load_state(tmp_path / "b")["w"], tree(3)["w"])
    assert contents(tmp_path / "a") == before


def test_the_newest_is_copied_unless_a_step_or_a_run_is_given(tmp_path):
    for step, run_id in ((1, "a"), (2, "b"), (5, "a"), (4, "b")):
        save(tmp_path / "from", step, run_id=run_id)
    assert copy_checkpoint(tmp_path / "from", tmp_path / "to").step == 4
    assert copy_checkpoint(tmp_path / "from", tmp_path / "to", run_id="a").step == 5
    assert copy_checkpoint(tmp_path / "from", tmp_path / "to", step=1).step == 1
    with pytest.raises(FileNotFoundError, match="of step 1 of run 'b'"):
        copy_checkpoint(tmp_path / "from", tmp_path / "to", step=1, run_id="b")
    # What was copied last is what is gone on from.
    assert [at.step for at in list_checkpoints(tmp_path / "to")] == [1, 5, 4]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("folder", "memory", id="folder-to-memory"),
        pytest.param("memory", "folder", id="memory-to-folder"),
    ],
)
def test_it_goes_between_kinds_of_storage(tmp_path, source, target):
    places = {"folder": str(tmp_path / "run"), "memory": f"memory://copy-{tmp_path.name}-{source}"}
    save(places[source], 2)
    copy_checkpoint(places[source], places[target])
    assert torch.equal(load_state(places[target])["w"], tree(2)["w"])
    assert len(verify(places[target])) == 1


def test_a_target_that_holds_it_says_so_and_stays_as_it_is(tmp_path):
    save(tmp_path / "a", 1)
    first = copy_checkpoint(tmp_path / "a", tmp_path / "b")
    before = contents(tmp_path / "b")
    with pytest.raises(FileExistsError, match=first.name):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FileExistsError, match="already"):
        copy_checkpoint(tmp_path / "a", tmp_path / "a")
    assert contents(tmp_path / "b") == before


def test_a_damaged_copy_does_not_stand_in_the_way_of_a_good_one(tmp_path):
    save(tmp_path / "a", 1)
    first = copy_checkpoint(tmp_path / "a", tmp_path / "b")
    flip(tmp_path / "b" / first.name / DATA)
    with pytest.raises(CheckpointError, match=first.name):
        verify(tmp_path / "b")
    copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert torch.equal(load_state(tmp_path / "b")["w"], tree(1)["w"])


@pytest.mark.parametrize("target", ["folder", "memory"])
@pytest.mark.parametrize("name", [DATA, "state.json"])
def test_damage_is_found_on_the_way_and_the_next_older_one_is_copied(tmp_path, caplog, target, name):
    place = str(tmp_path / "b") if target == "folder" else f"memory://damaged-{tmp_path.name}"
    save(tmp_path / "a", 1)
    newest = save(tmp_path / "a", 2)
    flip(tmp_path / "a" / newest.name / name)

    assert copy_checkpoint(tmp_path / "a", place).step == 1

    assert f"{newest.name}/{name}" in caplog.text
    inventory = take_inventory(place)
    assert [at.step for at in inventory.checkpoints] == [1]
    assert inventory.unfinished == ()
    assert list(take_inventory(tmp_path / "a").damaged) == [newest.name]
    assert (tmp_path / "a" / newest.name / DAMAGE).exists()


def test_a_wrong_sha256_is_found_although_the_crc32_is_right(tmp_path):
    only = save(tmp_path / "a", 1)
    file = tmp_path / "a" / only.name / DATA
    flip(file)
    manifest = manifest_of(tmp_path / "a", only.name)
    files = {**manifest.files, DATA: replace(manifest.files[DATA], crc32=zlib.crc32(file.read_bytes()))}
    sealed = write_manifest(replace(manifest, files=files), writer=manifest.writer)
    (tmp_path / "a" / only.name / MANIFEST).write_bytes(sealed)
    with pytest.raises(CheckpointError, match=f"{only.name}/{DATA}: its checksum differs"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")


def test_nothing_good_is_an_error_and_nothing_at_all_another_one(tmp_path):
    only = save(tmp_path / "a", 1)
    os.truncate(tmp_path / "a" / only.name / DATA, 10)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good.*has 10 bytes instead"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "missing"):
        with pytest.raises(FileNotFoundError):
            copy_checkpoint(tmp_path / nothing, tmp_path / "b")
    assert not (tmp_path / "b").exists()


class Full(Folder):
    """A folder on a disk that takes no second data file."""

    def write(self, folder, name, chunks):
        if name == "state.json":
            next(iter(chunks))
            raise OSError(28, "no space left")
        super().write(folder, name, chunks)


def test_a_target_that_is_full_keeps_what_it_had(tmp_path):
    save(tmp_path / "b", 1, run_id="other")
    save(tmp_path / "a", 9)
    before = contents(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"could not copy step-0+9-.*no space left; needed \d+ bytes"):
        copy_checkpoint(tmp_path / "a", Full(str(tmp_path / "b")))
    assert contents(tmp_path / "b") == before
    assert not [thread for thread in threading.enumerate() if "digest" in thread.name]


class Locked(Folder):
    """A folder whose data cannot be asked for."""

    def open(self, folder, name):
        if name == DATA:
            raise PermissionError(13, "permission denied")
        return super().open(folder, name)


def test_a_source_that_cannot_be_asked_is_no_damage(tmp_path):
    only = save(tmp_path / "a", 1)
    with pytest.raises(CheckpointError, match="permission denied; nothing was changed there"):
        copy_checkpoint(Locked(str(tmp_path / "a")), tmp_path / "b")
    assert not (tmp_path / "a" / only.name / DAMAGE).exists()
    assert list((tmp_path / "b").iterdir()) == []


class Moving(Folder):
    """A run replaces its checkpoint when somebody begins to read it."""

    def open(self, folder, name):
        if name == DATA and "-000000000001-" in f"-{folder.partition('-')[2]}":
            save(self.root, 2, keep=1)
        return super().open(folder, name)


def test_a_checkpoint_that_is_replaced_meanwhile_gives_way_to_the_new_one(tmp_path):
    save(tmp_path / "a", 1)
    assert copy_checkpoint(Moving(str(tmp_path / "a")), tmp_path / "b").step == 2
    assert take_inventory(tmp_path / "b").unfinished == ()


def test_an_inventory_names_the_damaged_and_the_unfinished(tmp_path):
    good, short, torn = (save(tmp_path, step, keep=9) for step in (1, 2, 3))
    os.truncate(tmp_path / short.name / DATA, 10)
    (tmp_path / torn.name / MANIFEST).write_text("{")
    (tmp_path / "step-000000000004-00000000").mkdir()

    inventory = take_inventory(tmp_path)

    assert inventory.checkpoints == (good,)
    assert inventory.damaged.keys() == {short.name, torn.name}
    assert "instead of" in inventory.damaged[short.name]
    assert inventory.unfinished == ("step-000000000004-00000000",)
    with pytest.raises(FileNotFoundError):
        take_inventory(tmp_path / "missing")


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_removed_checkpoint_is_gone_and_the_others_stay(tmp_path, kind):
    place = str(tmp_path / "run") if kind == "folder" else f"memory://remove-{tmp_path.name}"
    first, second = save(place, 1), save(place, 2)
    remove_checkpoint(place, second.name)
    assert list_checkpoints(place) == [first]
    assert load_checkpoint(place)[0] == first
    with pytest.raises(FileNotFoundError, match=second.name):
        remove_checkpoint(place, second.name)


def test_a_damaged_one_can_be_removed(tmp_path):
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    (tmp_path / bad.name / MANIFEST).write_text("{")
    remove_checkpoint(tmp_path, bad.name)
    assert not (tmp_path / bad.name).exists()


def test_the_manifest_goes_first_and_an_interrupted_removal_can_be_finished(tmp_path, monkeypatch):
    only = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_unlink", lambda *_: (_ for _ in ()).throw(OSError(5, "input/output error")))
        with pytest.raises(CheckpointError, match=f"could not remove {only.name}"):
            remove_checkpoint(tmp_path, only.name)
    assert not (tmp_path / only.name / MANIFEST).exists()
    assert (tmp_path / only.name / EXPIRED).exists()
    assert list_checkpoints(tmp_path) == []
    remove_checkpoint(tmp_path, only.name)
    assert not (tmp_path / only.name).exists()


@pytest.mark.parametrize("name", ["", ".", "..", "notes", "step-1", "step-000000000001-abcdef01/..", None])
def test_what_is_no_name_of_a_checkpoint_is_refused(tmp_path, name):
    (tmp_path / "notes").mkdir()
    save(tmp_path, 1)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="no checkpoint's"):
        remove_checkpoint(tmp_path, name)
    assert contents(tmp_path) == before
    assert (tmp_path / "notes").exists()


def test_an_attempt_that_is_being_written_is_not_removed(tmp_path):
    storage = open_storage(tmp_path)
    storage.begin("step-000000000001-abcdef01", b"{}")
    storage.write("step-000000000001-abcdef01", DATA, iter([memoryview(b"half")]))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="unfinished save"):
        remove_checkpoint(tmp_path, "step-000000000001-abcdef01")
    assert contents(tmp_path) == before
