"""What save_state promises its caller."""

import logging
import shutil
import threading

import pytest
import torch

from efficio_ckpt import background_saver, list_checkpoints, load_checkpoint, load_state, save_state, verify
from efficio_ckpt._manifest import MANIFEST


def test_metadata_step_run_and_size_come_back(tmp_path):
    metadata = {"loss": 0.1, "names": ["a", None], "nested": {"x": True}}
    saved = save_state(tmp_path, {"w": torch.ones(3)}, step=7, metadata=metadata, run_id="r")
    checkpoint, tree = load_checkpoint(tmp_path)
    assert checkpoint == saved == list_checkpoints(tmp_path)[0] == verify(tmp_path)[0]
    assert (checkpoint.step, checkpoint.run_id, checkpoint.metadata, checkpoint.mode) == (
        7,
        "r",
        metadata,
        "exact",
    )
    files = [path for path in (tmp_path / saved.name).iterdir() if path.name != MANIFEST]
    assert checkpoint.bytes == sum(path.stat().st_size for path in files)
    assert torch.equal(tree["w"], torch.ones(3))


@pytest.mark.parametrize(
    "metadata",
    [{"a": (1,)}, {1: 2}, {"a": torch.ones(1)}, {"a": float("nan")}, {"a": {1, 2}}],
    ids=["tuple", "int key", "tensor", "nan", "set"],
)
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata):
    with pytest.raises(TypeError, match="metadata"):
        save_state(tmp_path, {}, step=1, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"step": -1}, ValueError),
        ({"step": 1.5}, TypeError),
        ({"step": True}, TypeError),
        ({"step": 1, "keep": 0}, ValueError),
        ({"step": 1, "keep": "2"}, TypeError),
        ({"step": 1, "mode": "light"}, ValueError),
        ({"step": 1, "run_id": 3}, TypeError),
        ({"step": 1, "shard_bytes": 0}, ValueError),
    ],
    ids=str,
)
def test_bad_arguments_are_told_before_anything_is_written(tmp_path, options, error):
    with pytest.raises(error, match=next(name for name in reversed(options))):
        save_state(tmp_path / "run", {}, **options)
    assert not (tmp_path / "run").exists()


def test_an_unstorable_tree_writes_nothing(tmp_path):
    with pytest.raises(TypeError, match="hook is a"):
        save_state(tmp_path / "run", {"w": torch.ones(2), "hook": print}, step=1)
    assert not (tmp_path / "run").exists()


def test_tensors_are_divided_among_files_of_a_given_size(tmp_path):
    tree = {f"t{i}": torch.full((10,), i, dtype=torch.uint8) for i in range(10)}
    tree["large"] = torch.arange(100, dtype=torch.uint8)
    folder = tmp_path / save_state(tmp_path, tree, step=1, shard_bytes=35).name
    assert len(list(folder.glob("tensors-*"))) == 5
    loaded = load_state(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tree.items())


def test_a_tree_without_tensors_is_one_file(tmp_path):
    folder = tmp_path / save_state(tmp_path, [1, "two"], step=0).name
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "state.json"]
    assert load_state(tmp_path) == [1, "two"]


def test_keep_leaves_the_newest(tmp_path):
    for step in range(6):
        save_state(tmp_path, step, step=step, keep=3)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [5, 4, 3]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(("times", "keep", "warns"), [(1.5, 2, True), (1.5, 1, True), (10, 2, False)])
def test_too_little_room_is_told_at_the_first_save(tmp_path, monkeypatch, caplog, times, keep, warns):
    tree = {"w": torch.zeros(10_000)}
    free = int(40_000 * times)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free))
    with caplog.at_level(logging.WARNING):
        save_state(tmp_path, tree, step=1, keep=keep)
    assert (f"{free} bytes free" in caplog.text) is warns


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (0,), (3, 0)], ids=str)
def test_odd_strides_of_small_tensors_are_no_obstacle(tmp_path, shape):
    tensor = torch.arange(12.0).as_strided(shape, tuple(5 for _ in shape))
    with background_saver(tmp_path) as saver:
        saver.save({"t": tensor}, step=1, wait=True)
    save_state(tmp_path, {"t": tensor}, step=2)
    for step in (1, 2):
        assert torch.equal(load_state(tmp_path, step=step)["t"], tensor)


def test_a_default_device_of_the_users_changes_nothing(tmp_path):
    tree = {"t": torch.arange(6.0).reshape(2, 3).t(), "v": torch.ones(2, dtype=torch.complex64)}
    with torch.device("meta"), background_saver(tmp_path) as saver:
        save_state(tmp_path, tree, step=1)
        saver.save(tree, step=2, wait=True)
        loaded = load_state(tmp_path)
    assert torch.equal(loaded["t"], tree["t"])
    assert torch.equal(loaded["v"], tree["v"])


def test_saving_and_loading_need_no_thread(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with background_saver(tmp_path) as saver:
        assert saver.save({"w": torch.ones(3)}, step=1)
        assert saver.status.last_step == 1
    assert torch.equal(load_state(tmp_path)["w"], torch.ones(3))


def test_loading_shares_no_memory_between_tensors(tmp_path):
    save_state(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)}, step=1)
    tree = load_state(tmp_path)
    assert tree["a"].untyped_storage().nbytes() == 16
    tree["a"].zero_()
    assert torch.equal(tree["b"], torch.ones(4))
