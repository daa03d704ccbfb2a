"""Checkpoints in Google Cloud Storage and S3, through the real clients, against emulators, with a fault at each request."""

import gc
import itertools
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from clouds import SERVICES, TOKEN, Cloud, hurry
from faults import Fault
from stored import chain_of, save, steps, tree_of
from trees import same

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    copy_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_state,
    prune,
    remove_checkpoint,
    save_state,
    verify,
)

# The client for GCS, not efficio, sends bytes in a way that its HTTP library does not like.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


def each(*kinds, long=()):
    """Faults to go through; the long ones are left to `make torture`."""
    return pytest.mark.parametrize(
        "kind", [*kinds, *(pytest.param(kind, marks=pytest.mark.torture) for kind in long)]
    )


NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=SERVICES)
def service(request):
    with SERVICES[request.param]() as running:
        yield running


@pytest.fixture
def cloud(service, monkeypatch):
    hurry(monkeypatch)
    service.proxy.heal()
    bucket = f"bucket-{next(NUMBERS)}"
    service.make(bucket)
    yield Cloud(service, bucket)
    service.proxy.heal()


# What they do when all is well


def test_what_is_saved_is_loaded_from_another_place_bit_for_bit(cloud):
    storage = cloud.open()
    for step in range(4):
        save(storage, step, keep=2)
    checkpoint, tree = load_checkpoint(cloud.open(skip_instance_cache=True))
    assert checkpoint.step == 3
    assert same(tree, tree_of(3))
    assert steps(cloud.open()) == [3, 2]
    assert [checkpoint.step for checkpoint in verify(cloud.open())] == [3, 2]
    assert [checkpoint.step for checkpoint in prune(cloud.open(), keep=1)] == [2]
    remove_checkpoint(cloud.open(), checkpoint.name)
    assert cloud.look() == {}


def test_large_files_go_in_several_requests_and_come_back_the_same(cloud):
    tree = {"w": torch.randn(18_000_000, generator=torch.Generator().manual_seed(1))}
    save_state(cloud.open(), tree, step=1)
    assert same(load_state(cloud.open()), tree)
    sent = [
        line
        for line in cloud.proxy.log
        if re.match(r"PUT .*partNumber|(PUT|POST) /upload/resumable|POST .*upload_id", line)
    ]
    assert len(sent) >= 3


def test_a_save_writes_its_manifest_last_and_only_where_none_is(cloud):
    storage = cloud.open()
    save(storage, 1)
    cloud.proxy.log.clear()
    name = save(storage, 2, keep=1).name
    writes = [line for line in cloud.proxy.log if re.match("PUT|POST|DELETE", line)]
    last = next(
        index for index, line in enumerate(writes) if line.startswith("DELETE")
    )  # then come the removals
    assert not any(line.startswith("DELETE") for line in writes[:last])
    with pytest.raises(OSError, match=r"FileExists|pre-condition|412"):
        storage._create(storage._path(name, "MANIFEST.json"), b"another")
    assert load_state(cloud.open())["n"] == 2


def test_files_of_others_and_other_runs_stay(cloud):
    storage = cloud.open()
    system = storage.system
    system.pipe_file(f"{cloud.bucket}/run/notes.txt", b"mine")
    system.pipe_file(f"{cloud.bucket}/running/notes.txt", b"mine")
    first = save(storage, 1, keep=1).name
    system.pipe_file(f"{cloud.bucket}/run/{first}/notes.txt", b"mine")
    save(storage, 7, keep=1, run_id="other")
    save(storage, 2, keep=1)
    assert {"run/notes.txt", "running/notes.txt", f"run/{first}/notes.txt"} < cloud.look().keys()
    assert sorted(steps(cloud.open())) == [2, 7]


def test_a_whole_bucket_is_a_place(cloud):
    with pytest.raises(FileNotFoundError):
        load_state(cloud.open(""))
    save(cloud.open(""), 1)
    assert same(load_state(cloud.open("")), tree_of(1))


def test_a_prefix_with_nothing_in_it_is_a_fresh_start(cloud):
    with pytest.raises(FileNotFoundError):
        load_state(cloud.open("nothing/here"))
    assert list_checkpoints(cloud.open("nothing/here")) == []


def test_the_background_saver_leaves_all_in_the_bucket(cloud):
    with background_saver(cloud.open(), keep=2) as saver:
        for step in range(3):
            saver.save(tree_of(step), step=step, wait=True)
    assert same(load_state(cloud.open()), tree_of(2))
    assert not [name for name in cloud.look() if "efficio-write-check" in name]


def test_checkpoints_are_copied_there_and_back(cloud, tmp_path):
    save(tmp_path / "here", 5)
    copy_checkpoint(tmp_path / "here", cloud.open())
    copy_checkpoint(cloud.open(), tmp_path / "back")
    assert same(load_state(tmp_path / "back"), tree_of(5))


# What is not there, and who may not


@pytest.mark.parametrize(
    "call", [load_state, list_checkpoints, lambda storage: save(storage, 1), background_saver]
)
def test_a_bucket_that_is_not_there_is_an_error_and_no_fresh_start(cloud, call):
    with pytest.raises(CheckpointError, match=r"no bucket 'there-is-none'.*make it first"):
        call(cloud.open(bucket="there-is-none"))


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("call", [load_state, list_checkpoints, lambda s: save(s, 2), background_saver])
def test_without_access_there_is_an_error_that_says_so(cloud, call, status):
    save(cloud.open(), 1)
    cloud.fail(status, times=10**6)
    with pytest.raises(CheckpointError, match="check the credentials"):
        call(cloud.open())
    cloud.proxy.faults.clear()
    assert load_state(cloud.open())["n"] == 1


def test_credentials_that_may_only_read_are_found_before_there_is_anything_to_lose(cloud):
    save(cloud.open(), 1)
    for method in ("PUT", "POST", "DELETE"):
        cloud.fail(403, method=method, times=10**6)
    with pytest.raises(CheckpointError, match=r"takes no checkpoints.*check the credentials"):
        background_saver(cloud.open())
    assert load_state(cloud.open())["n"] == 1


def test_without_the_right_to_delete_saves_go_on_and_it_is_told(cloud, caplog):
    cloud.fail(403, method="DELETE", times=10**6)
    storage = cloud.open()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            save(storage, step, keep=1)
    assert "could not clear" in caplog.text
    assert load_state(cloud.open())["n"] == 2


def test_no_message_log_or_chain_shows_a_secret(cloud, caplog):
    save(cloud.open(), 1)
    secrets = [cloud.service.secret, "S1gn4tur3"]
    said = f"<Error><Code>Odd</Code><Message>{cloud.service.secret} http://x/?X-Amz-Signature=S1gn4tur3</Message></Error>"
    texts = [repr(cloud.open())]
    for status in (400, 403, 500):
        cloud.proxy.faults.clear()
        cloud.fail(status, times=10**6, body=said.encode())
        for call in (load_state, list_checkpoints, lambda s: save(s, 2), background_saver):
            with (
                caplog.at_level(logging.DEBUG, logger="efficio_ckpt"),
                pytest.raises(CheckpointError) as caught,
            ):
                call(cloud.open())
            texts.append(chain_of(caught.value))
    texts += [record.getMessage() for record in caplog.records if record.name.startswith("efficio")]
    assert not [secret for secret in secrets if secret in "".join(texts)]
    assert cloud.bucket in texts[-1]


# A fault at each request


def requests_of(cloud, work):
    cloud.proxy.log.clear()
    work()
    return len(cloud.proxy.log)


def said(work):
    """The text of the error, "" if there is none."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def is_sound(cloud, *, old, new, saved):
    """Old or new is loaded whole, and the new one if it was said to be saved; the storage goes on to work."""
    cloud.proxy.faults.clear()
    tree = load_state(cloud.open())
    assert tree["n"] in ({new} if saved else {old, new})
    assert same(tree, tree_of(tree["n"]))
    save(cloud.open(), new + 1, keep=1)
    assert same(load_state(cloud.open()), tree_of(new + 1))
    assert steps(cloud.open()) == [new + 1]


@each(503, "lost", long=(429, 500, "reset", "cut"))
def test_a_fault_that_passes_at_any_request_of_a_save_costs_nothing_old(cloud, kind):
    save(cloud.open(), 0, keep=1)
    count = requests_of(cloud, lambda: save(cloud.open(), 1, keep=1))
    assert count > 12
    failed = []
    for index in range(count):
        save(cloud.open(), 2, keep=1)
        cloud.fail(kind, skip=index)
        if said(lambda: save(cloud.open(), 3, keep=1)):
            failed.append(index)
        assert cloud.proxy.suffered == index + 1
        is_sound(cloud, old=2, new=3, saved=index not in failed)
    # What has no answer in time is asked again, and all that is asked may be asked twice.
    assert failed == []


@each(403, 404, "page", long=(401, 429, 500, 503, "reset", "cut", "lost"))
def test_a_fault_that_lasts_from_any_request_of_a_save_on_costs_nothing_old(cloud, kind):
    save(cloud.open(), 0, keep=1)
    count = requests_of(cloud, lambda: save(cloud.open(), 1, keep=1))
    failures = 0
    for index in range(count):
        save(cloud.open(), 2, keep=1)
        cloud.fail(kind, skip=index, times=10**6)
        text = said(lambda: save(cloud.open(), 3, keep=1))
        assert cloud.bucket in text or not text
        failures += bool(text)
        is_sound(cloud, old=2, new=3, saved=not text)
    assert failures >= 6


@each(429, 404, "lost", "truncated", long=(500, 503, "reset", "cut", "late"))
def test_a_fault_that_passes_at_any_request_of_a_load_gives_the_newest_or_an_error(cloud, kind):
    for step in (1, 2):
        save(cloud.open(), step, keep=2)
    count = requests_of(cloud, lambda: load_state(cloud.open()))
    assert count >= 7
    for index in range(count):
        cloud.proxy.faults.clear()
        cloud.fail(kind, skip=index, seconds=0.01)
        loaded = []
        text = said(lambda loaded=loaded: loaded.append(load_state(cloud.open())))
        assert kind == 404 if text else same(loaded[0], tree_of(2))
        assert cloud.proxy.suffered == index + 1


@each(403, 404, "page", "truncated", long=(401, 429, 500, 503, "reset", "cut", "lost"))
def test_a_fault_that_lasts_from_any_request_of_a_load_on_is_no_fresh_start(cloud, kind):
    for step in (1, 2):
        save(cloud.open(), step, keep=2)
    before = cloud.look()
    count = requests_of(cloud, lambda: load_state(cloud.open()))
    for index in range(count):
        cloud.proxy.faults.clear()
        cloud.fail(kind, skip=index, times=10**6)
        # In place of a file, a page of HTML is damage as any other; but with all of them replaced there is none that is good.
        with pytest.raises(CheckpointError):
            load_state(cloud.open())
        assert cloud.proxy.suffered > index
    assert cloud.look() == before


def test_a_bit_that_changes_on_the_way_is_read_again(cloud):
    for step in (1, 2):
        save(cloud.open(), step, keep=2)
    for name in ("MANIFEST", "state", "tensors"):
        cloud.fail("flipped", method="GET", path=rf"step-000000000002[^?]*{name}|{name}[^?]*\?.*alt=media")
        assert load_state(cloud.open())["n"] == 2
    assert cloud.proxy.suffered == 3
    assert not [name for name in cloud.look() if "DAMAGE" in name]


def test_what_is_damaged_in_the_bucket_is_told_and_the_one_before_is_taken(cloud, caplog):
    storage = cloud.open()
    for step in (1, 2, 3):
        save(storage, step, keep=3)
    (path,) = [name for name in cloud.look() if re.search("step-000000000003.*tensors", name)]
    whole = storage.system.cat_file(f"{cloud.bucket}/{path}")
    storage.system.pipe_file(f"{cloud.bucket}/{path}", whole[:-1] + b"x")
    (gone,) = [name for name in cloud.look() if re.search("step-000000000002.*tensors", name)]
    storage.system.rm_file(f"{cloud.bucket}/{gone}")
    with caplog.at_level(logging.WARNING):
        assert load_state(cloud.open())["n"] == 1
    assert "step-000000000003" in caplog.text
    assert "it is missing" in caplog.text


# The manifest


def is_manifest(cloud):
    """Matches the request that writes a manifest: for GCS the name is in the body, and it is the only one that is conditional."""
    return {"method": "PUT", "path": "MANIFEST"} if cloud.scheme == "s3" else {"path": "ifGenerationMatch=0"}


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "each-time"])
def test_a_lost_answer_after_the_manifest_was_written_is_a_save(cloud, times):
    save(cloud.open(), 1, keep=1)
    cloud.fail("lost", times=times, **is_manifest(cloud))
    save(cloud.open(), 2, keep=1)
    assert cloud.proxy.suffered >= 1
    cloud.proxy.faults.clear()
    assert steps(cloud.open()) == [2]


def test_an_answer_that_stays_away_is_an_error_and_the_older_one_is_there(cloud):
    save(cloud.open(), 1, keep=1)
    cloud.fail("lost", then=[Fault("reset", times=10**6)], **is_manifest(cloud))
    with pytest.raises(CheckpointError, match="could not save step 2"):
        save(cloud.open(), 2, keep=1)
    cloud.proxy.faults.clear()
    assert set(steps(cloud.open())) >= {1}
    # The manifest was written, though, and so was everything else: it counts.
    assert same(load_state(cloud.open()), tree_of(2))


def test_a_service_without_conditions_is_written_to_without(cloud):
    if cloud.scheme == "gs":
        return  # it has them
    body = b"<Error><Code>NotImplemented</Code><Message>A header implies functionality</Message></Error>"
    cloud.fail(501, body=body, headers={"Content-Type": "application/xml"}, **is_manifest(cloud))
    save(cloud.open(), 1)
    assert load_state(cloud.open())["n"] == 1


# Uploads


def test_what_fails_while_it_is_uploaded_leaves_no_object(cloud):
    storage = cloud.open()

    def pieces():
        yield memoryview(bytes(40 * 2**20))
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        storage.write("step-000000000001-00000000", "tensors-00001.safetensors", pieces())
    gc.collect()
    assert cloud.look() == {}


@pytest.mark.parametrize("kind", ["cut", "lost", 503])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_fault_at_a_part_of_a_large_file_costs_no_older_checkpoint(cloud, kind, part):
    save(cloud.open(), 1)
    path = "partNumber" if cloud.scheme == "s3" else "upload_id|upload/resumable"
    cloud.fail(kind, path=path, skip=part)
    tree = {"w": torch.zeros(18_000_000), "n": 2}
    text = said(lambda: save_state(cloud.open(), tree, step=2))
    if text:
        # The client for GCS sends a part again whose answer was lost; the emulator takes it twice, which is noticed.
        assert (cloud.scheme, kind) == ("gs", "lost")
        assert "older checkpoints are as they were" in text
        assert load_state(cloud.open())["n"] == 1
    else:
        assert same(load_state(cloud.open()), tree)
    assert cloud.proxy.suffered == 1


def test_a_network_that_is_away_for_a_while_delays_an_upload_and_loses_nothing(cloud):
    with background_saver(cloud.open()) as saver:
        saver.save(tree_of(1), step=1, wait=True)
        cloud.fail("reset", times=12)
        saver.save(tree_of(2), step=2)
    assert cloud.proxy.suffered == 12
    assert same(load_state(cloud.open()), tree_of(2))


def in_another_process(cloud, code, **environ):
    """Run code that is given a storage, as a process that has nothing from this one; its last line of output is returned."""
    options = {name: value for name, value in cloud.service.options.items() if name != "token"}
    # By name, so that each connection has to look it up.
    options["endpoint_url"] = options["endpoint_url"].replace("127.0.0.1", "localhost")
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import emulators
import torch
from efficio_ckpt import background_saver, load_state, open_storage
options = {options!r}
if {cloud.scheme!r} == "gs":
    from google.oauth2.credentials import Credentials
    options["token"] = Credentials({TOKEN!r})
storage = open_storage("{cloud.scheme}://{cloud.bucket}/run", **options)
{textwrap.dedent(code)}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout.split() or [""])[-1]


def test_the_interpreter_exits_only_when_the_upload_is_done(cloud):
    # The first request of GCS that writes is made in the call, which asks whether it can.
    skip = 1 if cloud.scheme == "gs" else 0
    cloud.fail("late", path="WRITER|uploadType", skip=skip, seconds=1.5, then=[Fault("reset")])
    in_another_process(
        cloud,
        """
        saver = background_saver(storage)
        saver.save({"w": torch.ones(9)}, step=5)
        # The script ends here: nobody waits for the upload.
        """,
    )
    assert cloud.proxy.suffered == 2
    assert steps(cloud.open()) == [5]


def test_another_process_goes_on_from_an_empty_machine(cloud, tmp_path):
    code = """
        try:
            w = load_state(storage)["w"]
        except FileNotFoundError:
            w = torch.zeros(4)
        with background_saver(storage, run_id="r") as saver:
            saver.save({"w": w + 1}, step=int(w[0]) + 1, wait=True)
        print(int(w[0]))
    """
    machines = [tmp_path / f"machine-{number}" for number in range(3)]
    assert [in_another_process(cloud, code, EFFICIO_SPOOL=str(machine)) for machine in machines] == [
        "0",
        "1",
        "2",
    ]
