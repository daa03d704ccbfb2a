"""Places are named by paths and URLs; no secret of a URL is ever shown."""

import logging

import pytest
import torch
from stored import chain_of

from efficio_ckpt import (
    CheckpointError,
    list_checkpoints,
    load_state,
    open_storage,
    prune,
    save_state,
    verify,
)
from efficio_ckpt._folder import Folder
from efficio_ckpt._objects import Objects


def test_a_path_a_file_url_and_a_path_object_are_one_place(tmp_path):
    places = [open_storage(text) for text in (str(tmp_path), tmp_path, f"file://{tmp_path}")]
    assert places == [Folder(str(tmp_path))] * 3
    assert open_storage(places[0]) is places[0]
    assert not tmp_path.joinpath("run").exists()


def test_opening_a_place_makes_nothing(tmp_path):
    open_storage(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://buckets/me", "names no repository"),
        ("nowhere://x", "unknown scheme; choose a path, file://, hf://, memory://, gs://"),
        ("http://user:word@host/x?token=abc", "'http://host/x' has an unknown scheme"),
        ("", "is no place"),
        (b"x", "is a bytes and no place"),
    ],
    ids=str,
)
def test_what_is_no_place_is_told(url, message):
    with pytest.raises((ValueError, CheckpointError, TypeError), match=message.replace("(", r"\(")):
        open_storage(url)


def test_options_for_a_path_are_refused_without_their_values(tmp_path):
    with pytest.raises(ValueError, match="takes no options; token given") as caught:
        open_storage(tmp_path, token="s3cret")
    assert "s3cret" not in str(caught.value)


COLAB = {"COLAB_RELEASE_TAG": "x"}


def test_an_unmounted_drive_on_colab_is_an_error_and_elsewhere_a_folder():
    path = "/content/drive/MyDrive/run"
    assert open_storage(path, environ=COLAB, ismount=lambda path: True) == Folder(path, drive=True)
    with pytest.raises(CheckpointError, match="Google Drive is not mounted"):
        open_storage(path, environ=COLAB, ismount=lambda path: False)
    assert open_storage(path, environ={}, ismount=lambda path: False) == Folder(path, drive=True)
    assert open_storage("/content/run", environ=COLAB, ismount=lambda path: False) == Folder("/content/run")


def test_a_link_to_the_drive_is_the_drive(tmp_path):
    try:
        (tmp_path / "link").symlink_to("/content/drive/MyDrive")
    except OSError:
        pytest.skip("no links here")
    assert open_storage(tmp_path / "link" / "run", environ={}).drive


def test_memory_keeps_retention_damage_and_fallback():
    import fsspec

    url = "memory://objects/run"
    for step in range(4):
        save_state(url, {"w": torch.full((9,), float(step)), "step": step}, step=step, keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(url)] == [3, 2]
    system = fsspec.filesystem("memory")
    (newest,) = system.glob("/objects/run/step-000000000003-*")
    assert len(system.ls("/objects/run")) == 2
    assert sorted(path.rpartition("/")[2] for path in system.ls(newest, detail=False)) == [
        "MANIFEST.json",
        "state.json",
        "tensors-00001.safetensors",
    ]
    data = f"{newest}/tensors-00001.safetensors"
    system.pipe_file(data, system.cat_file(data)[:-1] + b"x")
    assert load_state(url)["step"] == 2
    with pytest.raises(CheckpointError, match="step-000000000003"):
        verify(url)
    prune(url, keep=1)
    assert [checkpoint.step for checkpoint in list_checkpoints(url)] == [2]


def test_nothing_in_memory_is_file_not_found():
    with pytest.raises(FileNotFoundError):
        load_state("memory://objects/nothing")
    assert list_checkpoints("memory://objects/nothing") == []


class Client:
    """A file system whose client names its secret in every error."""

    protocol = "s3"

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        def fail(*arguments, **options):
            raise self.error

        return fail


@pytest.mark.parametrize(
    "error",
    [ValueError("url s3://key:s3cret@host failed"), OSError(5, "token s3cret"), RuntimeError("s3cret")],
    ids=["value", "os", "runtime"],
)
@pytest.mark.parametrize(
    "call",
    [load_state, list_checkpoints, lambda s: save_state(s, {"w": torch.ones(3)}, step=1)],
    ids=["load", "list", "save"],
)
def test_secrets_are_in_no_message_chain_or_repr(error, call, caplog):
    storage = Objects(Client(error), "run", "s3://host/run", frozenset({"s3cret"}))
    with caplog.at_level(logging.DEBUG), pytest.raises(CheckpointError) as caught:
        call(storage)
    assert "s3cret" not in chain_of(caught.value) + repr(storage) + caplog.text
    assert "s3://host/run" in str(caught.value)


def test_a_client_that_is_not_installed_is_told_by_scheme_without_secrets():
    pytest.importorskip("fsspec")
    try:
        import adlfs  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="needs a package that is not installed") as caught:
            open_storage("abfs://user:s3cret@host/run", account_key="s3cret")
        assert "s3cret" not in chain_of(caught.value)


@pytest.mark.parametrize("fail_at", range(12))
def test_an_error_of_an_object_store_costs_no_older_checkpoint(fail_at):
    import fsspec

    inner = fsspec.filesystem("memory")
    count = [0]

    class Flaky:
        def __getattr__(self, name):
            call = getattr(inner, name)
            if name not in {"pipe_file", "open", "rm_file", "makedirs", "ls"}:
                return call

            def counted(*arguments, **options):
                count[0] += 1
                if count[0] == fail_at + 1:
                    raise ConnectionError("reset by peer")
                return call(*arguments, **options)

            return counted

    root = f"/flaky/{fail_at}"
    good = Objects(inner, root, f"memory:/{root}")
    save_state(good, {"n": 1}, step=1, keep=1)
    try:
        save_state(Objects(Flaky(), root, f"memory:/{root}"), {"n": 2, "w": torch.ones(3)}, step=2, keep=1)
    except CheckpointError:
        assert load_state(good) == {"n": 1}
    else:
        assert load_state(good)["n"] == 2
    save_state(good, {"n": 3}, step=3, keep=1)
    assert load_state(good) == {"n": 3}


def test_a_path_with_a_null_byte_is_named():
    with pytest.raises(ValueError, match="is no place; give"):
        open_storage("a\0b")
