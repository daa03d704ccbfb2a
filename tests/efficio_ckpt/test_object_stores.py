"""Checkpoints in Google Cloud Storage and S3: the real clients, an emulator of each, and a proxy between them that breaks things."""

import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from emulators import gcs_server, s3_server
from fault_proxy import fault_proxy
from trees import same

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    copy_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_state,
    open_storage,
    prune,
    save_state,
    verify,
)

# The client, not efficio, hands aiohttp its bodies in a way that it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

SECRET = "s3cr3t-key-of-the-user"
TREE = {"w": torch.arange(60_000.0).reshape(200, 300), "n": 1}


class Store:
    """An emulator behind a proxy, and what it takes to open a place in it."""

    def __init__(self, scheme, upstream, proxy):
        self.scheme, self.upstream, self.proxy = scheme, upstream, proxy
        self.bucket = "efficio-test"
        self.count = 0

    def options(self, url=None):
        address = url or self.proxy.url
        if self.scheme == "gs":
            return {"token": "anon", "endpoint_url": address, "project": "p", "retries": 2}
        return {
            "key": "some-key-id",
            "secret": SECRET,
            "endpoint_url": address,
            "config_kwargs": {"retries": {"max_attempts": 1}, "read_timeout": 5, "connect_timeout": 5},
        }

    def open(self, folder, **more):
        return open_storage(f"{self.scheme}://{self.bucket}/{folder}", **self.options(), **more)

    def new(self):
        self.count += 1
        return f"run-{self.count}"

    @property
    def put(self):
        """Method of a request that writes an object."""
        return "POST" if self.scheme == "gs" else "PUT"


@pytest.fixture(scope="module", params=["gs", "s3"])
def server(request):
    make = {"gs": gcs_server, "s3": s3_server}[request.param]
    with make() as upstream, fault_proxy(upstream) as proxy:
        store = Store(request.param, upstream, proxy)
        system = store.open("x").system
        system.mkdir(store.bucket)
        yield store


@pytest.fixture
def store(server, monkeypatch):
    """The clients wait between their tries; here that takes no time."""
    server.proxy.heal()
    if server.scheme == "gs":
        import gcsfs.retry

        async def at_once(seconds):
            return None

        monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", at_once)
    else:
        import s3fs.core

        real = s3fs.core.asyncio.sleep
        monkeypatch.setattr(s3fs.core.asyncio, "sleep", lambda seconds, *more: real(0))
    yield server
    server.proxy.heal()


def tree_of(step):
    return {**TREE, "w": TREE["w"] + step, "n": step}


def save(storage, step, **options):
    return save_state(storage, tree_of(step), step=step, **options)


def steps(storage):
    return [checkpoint.step for checkpoint in list_checkpoints(storage)]


# When all is well


def test_what_is_saved_is_loaded_from_another_client_bit_for_bit(store):
    folder = store.new()
    for step in range(4):
        save(store.open(folder), step, keep=2)
    checkpoint, tree = load_checkpoint(store.open(folder))
    assert checkpoint.step == 3
    assert same(tree, tree_of(3))
    assert steps(store.open(folder)) == [3, 2]
    assert [checkpoint.step for checkpoint in verify(store.open(folder))] == [3, 2]
    assert [checkpoint.step for checkpoint in prune(store.open(folder), keep=1)] == [2]
    assert steps(store.open(folder)) == [3]


def test_nothing_is_left_of_what_expired(store):
    folder = store.new()
    for step in range(3):
        save(store.open(folder), step, keep=1)
    storage = store.open(folder)
    storage.system.invalidate_cache()
    names = storage.system.find(f"{store.bucket}/{folder}")
    assert {name.split("/")[2][:17] for name in names} == {"step-000000000002"}
    assert not [name for name in names if "WRITER" in name]


def test_the_manifest_is_written_after_all_data(store):
    save(store.open(store.new()), 1)
    writes = [path for method, path in store.proxy.requests if method in ("PUT", "POST")]
    manifest = max(index for index, path in enumerate(writes) if "MANIFEST" in path or "uploadType" in path)
    assert not [path for path in writes[manifest + 1 :] if "tensors" in path or "state.json" in path]


def test_large_files_go_up_in_parts(store):
    folder = store.new()
    tree = {"w": torch.randn(8_000_000, generator=torch.Generator().manual_seed(0))}  # 32 MB
    save_state(store.open(folder), tree, step=1)
    assert same(load_state(store.open(folder)), tree)


def test_checkpoints_are_copied_there_and_back(store, tmp_path):
    folder = store.new()
    save(tmp_path / "here", 5)
    copy_checkpoint(tmp_path / "here", store.open(folder))
    copy_checkpoint(store.open(folder), tmp_path / "back")
    assert same(load_state(tmp_path / "back"), tree_of(5))


def test_the_background_saver_has_a_spool_in_front(store):
    folder = store.new()
    with background_saver(store.open(folder), run_id="r", keep=1) as saver:
        for step in range(3):
            saver.save(tree_of(step), step=step, wait=True)
        assert saver.status.upload.count == 3
    assert same(load_state(store.open(folder)), tree_of(2))
    assert steps(store.open(folder)) == [2]


def test_another_process_goes_on_from_an_empty_machine(store, tmp_path):
    folder = store.new()
    code = textwrap.dedent(f"""
        import os, sys, torch
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import emulators
        from efficio_ckpt import background_saver, load_state, open_storage
        options = {store.options()!r}
        storage = open_storage("{store.scheme}://{store.bucket}/{folder}", **options)
        try:
            w = load_state(storage)["w"]
        except FileNotFoundError:
            w = torch.zeros(4)
        with background_saver(storage, run_id="r") as saver:
            saver.save({{"w": w + 1}}, step=int(w[0]) + 1, wait=True)
        print(int(w[0]))
    """)
    seen = []
    for number in range(3):
        environ = {**os.environ, "EFFICIO_SPOOL": str(tmp_path / f"machine-{number}")}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True
        )
        seen.append(done.stdout.split()[-1])
    assert seen == ["0", "1", "2"]


# What goes wrong


def test_a_bucket_that_is_not_there_is_told_before_training_and_none_is_made(store):
    url = f"{store.scheme}://no-such-bucket-here/run"
    storage = open_storage(url, **store.options())
    with pytest.raises(FileNotFoundError):
        load_state(storage)
    with pytest.raises(
        CheckpointError, match=r"takes no checkpoints.*no bucket 'no-such-bucket-here'.*make it first"
    ):
        background_saver(storage)
    with pytest.raises(CheckpointError, match="no bucket"):
        save(storage, 1)
    assert not storage.system.exists("no-such-bucket-here")


@pytest.mark.parametrize("status", [401, 403])
def test_without_access_nothing_begins_anew(store, status):
    folder = store.new()
    save(store.open(folder), 1)
    store.proxy.fail(status, times=None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(store.open(folder))
    with pytest.raises(CheckpointError, match="takes no checkpoints"):
        background_saver(store.open(folder))
    store.proxy.heal()
    assert same(load_state(store.open(folder)), tree_of(1))


def test_damage_that_stays_is_told_and_the_one_before_it_is_taken(store, caplog):
    folder = store.new()
    save(store.open(folder), 1)
    name = save(store.open(folder), 2).name
    storage = store.open(folder)
    path = f"{store.bucket}/{folder}/{name}/tensors-00001.safetensors"
    data = bytearray(storage.system.cat_file(path))
    data[5000] ^= 1
    storage.system.pipe_file(path, bytes(data))
    with caplog.at_level(logging.WARNING):
        assert same(load_state(store.open(folder)), tree_of(1))
    assert "checksum differs" in caplog.text
    assert "next older" in caplog.text
    with pytest.raises(CheckpointError, match="damaged"):
        verify(store.open(folder))
