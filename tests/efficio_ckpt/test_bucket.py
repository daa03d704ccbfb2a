"""Buckets of the Hub, through a stand-in for the client's functions: no server speaks what they speak."""

import inspect
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trees import same

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_state,
    open_storage,
    save_state,
)

pytest.importorskip("huggingface_hub")
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
TREE = {"w": torch.arange(300.0), "n": 1}


class Buckets:
    """What the client's functions for buckets do, in memory; a batch that fails has done its first half."""

    def __init__(self):
        self.files, self.calls, self.faults = {"other.txt": b"x", "running/step/a": b"y"}, [], {}
        self.lasting = None

    def suffer(self, name):
        self.calls.append(name)
        error = self.lasting or self.faults.pop(len(self.calls) - 1, None)
        if error:
            raise error

    def list_bucket_tree(self, bucket_id, prefix=None, *, recursive=None, token=None):
        self.suffer("list")
        assert recursive
        return [
            SimpleNamespace(type="file", path=path, size=len(data), mtime=None, uploaded_at=NOW)
            for path, data in sorted(self.files.items())
            if path.startswith(prefix or "")
        ]

    def batch_bucket_files(self, bucket_id, *, add=None, copy=None, delete=None, token=None):
        for source, path in add or []:
            self.files[path] = source if isinstance(source, bytes) else Path(source).read_bytes()
        for path in delete or []:
            self.files.pop(path)
        self.suffer(" ".join(["add", *(path for _, path in add)] if add else ["delete", *delete]))

    def download_bucket_files(self, bucket_id, files, *, raise_on_missing_files=False, token=None):
        for source, target in files:
            Path(target).write_bytes(self.files[source])
        self.suffer("download")


@pytest.fixture
def buckets():
    return Buckets()


@pytest.fixture
def place(buckets):
    waits = []

    def opened():
        storage = open_storage("hf://buckets/me/all/run", token="hf_secret", sleep=waits.append)
        storage._client._api = buckets
        return storage

    return opened


def save(storage, step, **options):
    return save_state(storage, {**TREE, "n": step}, step=step, **options)


def test_the_stand_in_has_the_signatures_of_the_client():
    from huggingface_hub import HfApi

    if not hasattr(HfApi, "batch_bucket_files"):
        pytest.skip("this client knows no buckets")
    for name in ("list_bucket_tree", "batch_bucket_files", "download_bucket_files"):
        real = [(p.name, p.kind) for p in inspect.signature(getattr(HfApi, name)).parameters.values()]
        assert [
            (p.name, p.kind) for p in inspect.signature(getattr(Buckets, name)).parameters.values()
        ] == real


def test_what_is_saved_is_loaded_and_what_expires_goes(buckets, place):
    with pytest.raises(FileNotFoundError):
        load_state(place())
    for step in range(4):
        save(place(), step, keep=2)
    assert same(load_state(place()), {**TREE, "n": 3})
    assert [checkpoint.step for checkpoint in list_checkpoints(place())] == [3, 2]
    assert len(buckets.files) == 2 + 2 * 3
    with background_saver(place(), keep=1) as saver:
        saver.save({"n": 9}, step=9, wait=True)
    assert load_state(place()) == {"n": 9}
    assert len(buckets.files) == 2 + 2  # without tensors there is no file of them


def test_the_manifest_goes_up_alone_and_after_all_data(buckets, place):
    save(place(), 1)
    writes = [call.rpartition("/")[2] for call in buckets.calls if call.startswith("add")]
    assert writes == ["WRITER.json", "tensors-00001.safetensors", "state.json", "MANIFEST.json"]


@pytest.mark.parametrize("after", [ConnectionResetError(104, "reset"), PermissionError("no")])
def test_an_error_at_any_call_costs_no_older_checkpoint(buckets, place, after):
    save(place(), 1, keep=1)
    start = len(buckets.calls)
    save(place(), 2, keep=1)
    for call in range(len(buckets.calls) - start):
        save(place(), 2, keep=1)
        buckets.faults = {len(buckets.calls) + call: after}
        text = ""
        try:
            save(place(), 3, keep=1)
        except CheckpointError as error:
            text = str(error)
        assert "hf_secret" not in text
        assert load_state(place())["n"] in ({2, 3} if text else {3})
        buckets.faults = {}


class NotFound(OSError):
    """As the client's: a bucket that is not there, or not for this token."""

    response = SimpleNamespace(status_code=404, headers={})


@pytest.mark.parametrize(
    "error",
    [NotFound("404"), ConnectionResetError(104, "reset"), PermissionError("no"), KeyError("x")],
    ids=repr,
)
def test_a_bucket_that_is_not_shown_or_cannot_be_asked_is_no_fresh_start(buckets, place, error):
    buckets.lasting = error
    for call in (load_state, list_checkpoints, background_saver, lambda storage: save(storage, 1)):
        with pytest.raises(CheckpointError):
            call(place())
