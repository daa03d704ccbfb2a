"""Cases of kind C: where checkpoints are kept."""

import errno
import logging
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import efficio
from efficio_ckpt import CheckpointError, list_checkpoints, load_state, open_storage, save_state


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full as soon as an error is put in here: files of over a thousand bytes are refused half-way."""
    really, full = os.write, []

    def write(file, data):
        if full and len(data) > 1000:
            really(file, data[:500])
            raise full[0]
        return really(file, data)

    monkeypatch.setattr(os, "write", write)
    return full


def train_until_the_disk_is_full(run, model, disk, error):
    """Forty steps; the disk is full once the checkpoint of the fifth is there, whose weights are returned by reference."""
    fifth = torch.empty_like(model.weight)
    try:
        for x in run.loop([torch.ones(1, 100)] * 40, 1):
            run.backward(model(x).sum())
            run.step()
            if run.step_count == 5:
                fifth.copy_(model.weight.detach())
            elif run.step_count == 6:
                while run.report().saves < 2:
                    time.sleep(0.001)
                disk.append(error)
    except CheckpointError as raised:
        return fifth, raised
    return fifth, None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("unexpected pos 576 vs 534"),
    ],
    ids=["full", "quota", "as-torch-says-it"],
)
@torch.no_grad()
def test_a_full_disk_costs_neither_the_training_nor_the_checkpoint_before_it(error, disk, tmp_path):
    """C06: a failed periodic save is told with path, needed and free bytes; the last one raises; nothing is left lying about."""
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    run = efficio.Run(storage=tmp_path, progress=False, save_every=5)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with torch.enable_grad():
        fifth, raised = train_until_the_disk_is_full(run, model, disk, error)
    disk.clear()

    assert run.step_count == 40
    told = [note for note in run.report().notes if "a save failed" in note]
    assert told
    for text in (str(raised), *told):
        assert all(part in text for part in (str(tmp_path), str(error), "needed", "free"))
    stored = load_state(tmp_path)
    assert stored["progress"]["step"] == 5
    assert torch.equal(stored["objects"]["model"]["weight"], fifth)
    assert {path.name for path in tmp_path.glob("step-*")} == {at.name for at in list_checkpoints(tmp_path)}


@pytest.mark.parametrize(("keep", "times"), [(2, 3), (1, 2)])
def test_the_warning_of_too_little_room_has_both_numbers(keep, times, tmp_path, monkeypatch, caplog):
    """C07: so many are on the disk while one more than is kept is being written."""
    free = 60_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    with caplog.at_level(logging.WARNING):
        saved = save_state(tmp_path, {"weight": torch.zeros(10_000)}, step=1, keep=keep)
    (record,) = caplog.records
    free_told, needed, size = (int(word) for word in record.getMessage().split() if word.isdigit())
    assert free_told == free
    assert needed == times * size
    assert 40_000 < size <= saved.bytes


def test_a_run_never_mounts_a_drive_and_refuses_one_that_is_not_mounted(monkeypatch):
    """C18: before anything is touched; where it is mounted it is used as it is."""
    path, mounts = "/content/drive/MyDrive/run", []
    if os.path.ismount("/content/drive"):
        pytest.skip("a Drive is mounted here")
    drive = SimpleNamespace(mount=lambda *given, **options: mounts.append(given))
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(drive=drive))
    monkeypatch.setitem(sys.modules, "google.colab.drive", drive)
    existed = os.path.exists(path)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    with pytest.raises(CheckpointError, match="Drive is not mounted"):
        efficio.Run(storage=path, progress=False)
    assert open_storage(path, ismount=lambda _: True).place == path
    for name in [name for name in os.environ if name.startswith("COLAB_")]:
        monkeypatch.delenv(name)
    efficio.Run(
        storage=path, progress=False
    )  # elsewhere it is a folder like any other, and made when something is saved
    assert mounts == []
    assert os.path.exists(path) == existed
