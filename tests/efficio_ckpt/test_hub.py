"""Checkpoints in a repository of the Hub, through the real client, against a server in this process."""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from hub_server import Fault, hub_server, regular
from stored import chain_of, save, steps, tree_of
from trees import same

from efficio_ckpt import (
    CheckpointError,
    background_saver,
    list_checkpoints,
    load_checkpoint,
    load_state,
    open_storage,
    prune,
    verify,
)

pytest.importorskip("huggingface_hub")
# The client, not efficio, calls its HTTP library in a way that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

API = "/api/models/me/run"


class Waits(list):
    """A clock for the client and for efficio: it notes the waits, and none takes time."""

    def sleep(self, seconds):
        self.append(seconds)


@pytest.fixture
def waits():
    return Waits()


@pytest.fixture
def server(monkeypatch, tmp_path, waits):
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.25)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    # The client waits between its own tries, too.
    monkeypatch.setattr(_http, "time", waits)
    monkeypatch.setattr(file_download, "time", waits)
    with hub_server() as running:
        yield running


@pytest.fixture
def place(server, waits):
    """Opens a repository as a process of its own would."""

    def opened(url="hf://me/run", *, token="hf_write", **options):
        return open_storage(url, token=token, endpoint=server.url, sleep=waits.sleep, **options)

    return opened


def folders(repo):
    return sorted({path.split("/")[-2] for path in repo.tree if "/" in path})


# What it does when all is well


@pytest.mark.parametrize("prefix", ["", "/runs/first"], ids=["whole", "folder"])
def test_what_is_saved_is_loaded_from_another_place_bit_for_bit(server, place, prefix):
    url = f"hf://me/run{prefix}"
    storage = place(url)
    for step in range(4):
        save(storage, step, keep=2)
    checkpoint, tree = load_checkpoint(place(url))
    assert checkpoint.step == 3
    assert same(tree, tree_of(3))
    assert steps(place(url)) == [3, 2]
    assert [checkpoint.step for checkpoint in verify(place(url))] == [3, 2]
    assert [checkpoint.step for checkpoint in prune(place(url), keep=1)] == [2]
    assert steps(storage) == [3]
    assert storage.place == url


def test_the_repository_is_private_and_made_by_the_first_save_only(server, place):
    storage = place()
    with pytest.raises(FileNotFoundError):
        load_state(storage)
    assert list_checkpoints(storage) == []
    assert not server.repos
    save(storage, 1)
    assert server.repos["me/run"].private


def test_a_repository_is_public_only_on_request(server, place):
    save(place(private=False), 1)
    assert not server.repos["me/run"].private


def test_a_repository_that_holds_nothing_is_a_fresh_start(server, place):
    server.make("me/run")
    for url in ("hf://me/run", "hf://me/run/sub"):
        with pytest.raises(FileNotFoundError):
            load_state(place(url))


def test_a_save_is_one_commit_with_its_files_and_the_removals(server, place):
    storage = place()
    for step in range(3):
        save(storage, step, keep=1)
    repo = server.repos["me/run"]
    trees = [repo.commits[oid][1] for oid in repo.history()][::-1]
    assert [len(tree) - 1 for tree in trees] == [0, 3, 3, 3]
    assert sum("/commit/" in line for line in server.log) == 3


def test_an_unfinished_save_is_visible_to_nobody(server, place):
    storage = place()
    save(storage, 1)
    storage.begin("step-000000000002-00000000", b"")
    storage.write("step-000000000002-00000000", "tensors-00001.safetensors", [memoryview(b"x" * 999)])
    assert steps(place()) == [1]
    assert len(folders(server.repos["me/run"])) == 1
    storage.remove("step-000000000002-00000000")
    assert steps(place()) == [1]


def test_files_of_others_stay(server, place):
    storage = place()
    save(storage, 1, keep=1)
    repo = server.repos["me/run"]
    (folder,) = folders(repo)
    repo.commit(
        {**repo.tree, "README.md": regular(b"hi"), f"{folder}/notes.txt": regular(b"mine")}, "by hand"
    )
    save(storage, 2, keep=1)
    assert {"README.md", f"{folder}/notes.txt"} < repo.tree.keys()
    assert steps(place()) == [2]


def test_rules_for_git_leave_no_file_out(server, place):
    repo = server.make("me/run")
    repo.commit({**repo.tree, ".gitignore": regular(b"*\n")}, "ignore all")
    save(place(), 1)
    assert same(load_state(place()), tree_of(1))


def test_long_listings_and_large_files_go_in_parts(server, place):
    server.page, server.part_bytes = 3, 1000
    storage = place()
    for step in range(5):
        save(storage, step, keep=5)
    assert any("/part/" in line for line in server.log)
    assert steps(place()) == [4, 3, 2, 1, 0]
    assert same(load_state(place(), step=2), tree_of(2))


def test_no_local_file_is_left(server, place, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = place()
    save(storage, 1)
    load_state(storage)
    server.fail(403, method="POST", path="/commit/")
    with pytest.raises(CheckpointError):
        save(storage, 2)
    server.fail(403, method="GET", path="/storage/")
    with pytest.raises(CheckpointError):
        load_state(storage)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_for_temporary_files_is_told(server, place, monkeypatch):
    storage = place()
    save(storage, 1)
    real = open

    def full(path, mode="r", *arguments, **options):
        if "x" in mode:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr("builtins.open", full)
    with pytest.raises(CheckpointError, match=r"temporary files .* TMPDIR"):
        save(storage, 2)
    monkeypatch.undo()


def test_runs_that_share_a_repository_keep_their_own(server, place):
    for step in range(2):
        save(place(), step, keep=1, run_id="a")
        save(place(), step + 10, keep=1, run_id="b")
    assert sorted(steps(place())) == [1, 11]
    assert load_state(place(), run_id="a")["n"] == 1


def test_the_background_saver_saves_to_the_hub(server, place):
    with background_saver(place(), keep=1) as saver:
        saver.save(tree_of(1), step=1)
        saver.save(tree_of(2), step=2, wait=True)
    assert same(load_state(place()), tree_of(2))


def test_a_run_is_continued_by_another_process_from_an_empty_folder(server, tmp_path):
    script = textwrap.dedent(
        """
        import sys, torch
        from efficio_ckpt import load_state, open_storage, put_snapshot, rng_state
        from efficio_ckpt import save_state, set_rng_state, take_snapshot

        def make():
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Dropout(0.3), torch.nn.Linear(5, 1))
            return model, torch.optim.AdamW(model.parameters(), lr=0.05)

        def train(model, optimizer, count):
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
            return [value.tolist() for value in model.state_dict().values()]

        storage = open_storage("hf://me/run")
        assert "huggingface_hub" not in sys.modules
        model, optimizer = make()
        objects = {"model": model, "optimizer": optimizer}
        if sys.argv[1] == "first":
            train(model, optimizer, 4)
            save_state(storage, {"objects": take_snapshot(objects), "rng": rng_state()}, step=4)
        else:
            tree = load_state(storage)
            put_snapshot(tree["objects"], objects)
            set_rng_state(tree["rng"])
        print(train(model, optimizer, 6))
        """
    )
    environ = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_write",
        "OMP_NUM_THREADS": "1",
    }

    def run(part):
        folder = tmp_path / part
        folder.mkdir()
        return subprocess.run(
            [sys.executable, "-c", script, part],
            cwd=folder,
            env={**environ, "HF_HOME": str(folder)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    unbroken = run("first")
    server.log.clear()
    assert run("second") == unbroken
    assert any("/storage/" in line for line in server.log)


# Who may do what


@pytest.mark.parametrize(
    ("token", "hidden"),
    [("hf_other", True), ("hf_other", False), (False, True), (False, False), ("hf_fine", False)],
    ids=str,
)
def test_a_repository_that_is_not_shown_is_no_fresh_start(server, place, hidden, token):
    # What a token may not see looks like what is not there.
    name = "me/secret"
    if hidden:
        server.make(name)
    with pytest.raises(CheckpointError, match="me/secret") as caught:
        load_state(place(f"hf://{name}", token=token))
    message = str(caught.value)
    assert ("there is no token" in message) if token is False else ("has no access to it" in message)
    if not token:
        assert "HF_TOKEN" in message


def test_no_token_is_told_before_the_first_step(server, place):
    with pytest.raises(CheckpointError, match=r"there is no token.*HF_TOKEN") as caught:
        background_saver(place(token=None))
    assert "Kaggle" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"there is no token.*HF_TOKEN"):
        save(place(token=None), 1)
    assert not server.repos


def test_the_token_of_the_environment_is_found(server, place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    save(place(token=None), 1)
    assert steps(place()) == [1]


def test_a_wrong_token_is_told(server, place):
    server.make("me/run")
    for call in (load_state, background_saver, lambda storage: save(storage, 1)):
        with pytest.raises(CheckpointError, match="does not accept the token \\(401\\)"):
            call(place(token="hf_revoked"))


def test_a_read_only_token_is_told_before_the_first_step(server, place):
    save(place(), 1)
    with pytest.raises(CheckpointError, match="token is read-only"):
        background_saver(place(token="hf_read"))
    with pytest.raises(CheckpointError, match="token is read-only"):
        save(place(token="hf_read"), 2)
    assert load_state(place(token="hf_read"))["n"] == 1
    assert verify(place(token="hf_read"))


@pytest.mark.parametrize("token", ["hf_vague", "hf_fine"])
def test_a_small_commit_decides_when_the_hub_does_not_say(server, place, token):
    server.make("me/run")
    with background_saver(place(token=token)) as saver:
        assert sum("/commit/" in line for line in server.log) == (token == "hf_vague")
        saver.save(tree_of(1), step=1, wait=True)
    assert steps(place()) == [1]
    server.fail(403, path="preupload", body=b'{"error": "no write access"}')
    with pytest.raises(CheckpointError, match="no write access"):
        background_saver(place(token="hf_vague"))


def test_a_repository_of_somebody_else_is_told(server, place):
    server.make("other/run", private=False, token="hf_other")
    with pytest.raises(CheckpointError, match="no write access to 'other/run'"):
        background_saver(place("hf://other/run"))


def test_a_full_account_is_told_and_older_checkpoints_stay(server, place):
    save(place(), 1, keep=1)
    server.quota = 5000
    with pytest.raises(CheckpointError, match=r"is full.*squash_every") as caught:
        save(place(), 2, keep=1)
    assert "make room" in str(caught.value)
    assert same(load_state(place()), tree_of(1))


@pytest.mark.parametrize("status", [400, 401, 404, 503], ids=str)
@pytest.mark.parametrize(
    "path",
    [
        "whoami",
        "/revision/",
        "/tree/",
        "preupload",
        "batch",
        "/storage/",
        "/verify/",
        "/commit/",
        "/resolve/",
    ],
)
def test_a_token_is_in_no_message_chain_log_or_repr(server, place, caplog, status, path):
    token = "s3cretS3cret"
    import hub_server as module

    module.USERS[token] = module.USERS["hf_write"]
    module.WRITERS.add(token)
    try:
        storage = place(token=token)
        save(storage, 1)
        body = f'{{"error": "{token} is bad at https://host/x?X-Signature=s1gned"}}'.encode()
        server.fail(status, path=path, times=99, body=body)
        problems = []
        with caplog.at_level(logging.DEBUG, logger="efficio_ckpt"):
            for call in (load_state, lambda storage: save(storage, 2), background_saver):
                try:
                    call(place(token=token))
                except CheckpointError as error:
                    problems.append(error)
    finally:
        del module.USERS[token]
        module.WRITERS.discard(token)
    assert problems or path in {"whoami", "/verify/"}
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("efficio"))
    shown = "".join(map(chain_of, problems)) + ours + repr(storage) + repr(storage._repository)
    assert "s3cret" not in shown
    assert "s1gned" not in shown


# What the network does

DOWNLOAD_FAULTS = [
    Fault("reset", times=2),
    Fault(503, times=2),
    Fault(429, headers={"Retry-After": "3"}),
    Fault("truncate", "GET"),
    Fault("truncate", "GET", times=3),
    Fault("short", "GET"),
    Fault("flip", "GET"),
    Fault("flip", "GET", times=2),
    Fault("html", "GET"),
    Fault("slow", "GET", seconds=0.05),
]


@pytest.mark.parametrize(
    "path",
    ["whoami", "/revision/", "/tree/", "create", "preupload", "batch", "/storage/", "/verify/", "/commit/"],
)
def test_a_stated_wait_is_kept_before_a_save_goes_on(server, place, waits, path):
    fault = server.fail(429, path=path, times=2, headers={"Retry-After": "2"})
    save(place(), 1)
    # An older client does not ask a second time whether an upload was complete.
    assert sum(wait >= 2 for wait in waits) == 2 - fault.times > 0
    assert steps(place()) == [1]
    assert len(list(server.repos["me/run"].history())) == 2


def test_the_rate_limit_header_is_kept_and_a_wait_that_is_too_long_is_told(server, place, waits):
    server.make("me/run")
    server.fail(429, path="/commit/", headers={"RateLimit": '"api";r=0;t=120'})
    save(place(), 1)
    assert waits == [121.0]
    server.fail(429, path="/commit/", headers={"Retry-After": "4000"})
    with pytest.raises(CheckpointError, match=r"limits the number of requests.*4000 s"):
        save(place(), 2)
    assert waits == [121.0]
    assert steps(place()) == [1]


def test_a_hub_that_stays_away_is_told_after_a_bounded_wait(server, place, waits):
    save(place(), 1)
    server.fail(503, times=10**6)
    for call in (load_state, list_checkpoints, lambda storage: save(storage, 2)):
        waits.clear()
        with pytest.raises(CheckpointError, match="503"):
            call(place())
        assert 10 < sum(waits) < 400


@pytest.mark.parametrize("answer", [0, 500, 502, 504, 200], ids=["silence", "500", "502", "504", "html"])
def test_a_commit_whose_answer_is_lost_is_not_made_twice(server, place, answer):
    storage = place()
    save(storage, 1, keep=1)
    server.fail("lost", path="/commit/", answer=answer)
    save(storage, 2, keep=1)
    assert sum("/commit/" in line for line in server.log) == 2
    assert same(load_state(place()), tree_of(2))


def test_a_commit_that_cannot_be_checked_costs_no_checkpoint(server, place):
    # It was carried out, with the removal of the older one; then the network is gone, and later it is back.
    storage = place()
    save(storage, 1, keep=1)
    server.fail("lost", path="/commit/", then=[Fault(503, path="/revision/", times=6)])
    with pytest.raises(CheckpointError):
        save(storage, 2, keep=1)
    assert same(load_state(place()), tree_of(2))
    save(storage, 3, keep=1)
    assert steps(place()) == [3]


def test_a_commit_that_was_not_carried_out_is_made_again(server, place):
    storage = place()
    save(storage, 1, keep=1)
    for kind in ("reset", 500, "html"):
        server.fail(kind, path="/commit/")
    save(storage, 2, keep=1)
    assert same(load_state(place()), tree_of(2))
    assert len(list(server.repos["me/run"].history())) == 3


def test_a_commit_of_somebody_else_in_between_is_kept(server, place, caplog):
    storage = place()
    save(storage, 1, keep=1)
    server.before_commit.append(lambda repo: repo.commit({**repo.tree, "x": regular(b"1")}, "theirs"))
    save(storage, 2, keep=1)
    assert "x" in server.repos["me/run"].tree
    assert steps(place()) == [2]
    assert "somebody else has just committed" in caplog.text


def test_two_writers_at_once_lose_nothing(server, place):
    save(place(), 0, run_id="a")
    problems = []

    def write(run_id):
        storage = place()
        for step in range(1, 5):
            try:
                save(storage, step, keep=2, run_id=run_id)
            except CheckpointError as error:
                problems.append(error)

    writers = [threading.Thread(target=write, args=(run_id,)) for run_id in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert problems == []
    assert [checkpoint.step for checkpoint in verify(place())].count(4) == 2
    assert sorted(steps(place())) == [3, 3, 4, 4]
    for run_id in "ab":
        assert same(load_state(place(), run_id=run_id), tree_of(4))


def test_a_writer_that_is_always_late_is_told(server, place):
    save(place(), 1)
    server.before_commit += [
        lambda repo, n=n: repo.commit({**repo.tree, "x": regular(b"%d" % n)}, "theirs") for n in range(20)
    ]
    with pytest.raises(CheckpointError, match="somebody else committed"):
        save(place(), 2)
    assert steps(place()) == [1]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop", "PUT"),
        Fault("reset", "PUT"),
        Fault("drop", "PUT", times=3),
        Fault(500, "PUT", times=7),
        Fault("lost", "PUT"),
        Fault("lost", path="/verify/"),
        Fault("lost", path="batch"),
    ],
    ids=["dropped", "reset", "dropped thrice", "500 seven times", "answer lost", "verify lost", "batch lost"],
)
@pytest.mark.parametrize("part_bytes", [None, 900], ids=["one piece", "parts"])
def test_an_upload_that_is_cut_off_goes_on(server, place, fault, part_bytes):
    server.part_bytes = part_bytes
    save(place(), 1, keep=1)
    server.faults.append(fault)
    save(place(), 2, keep=1)
    assert not fault.times
    assert same(load_state(place()), tree_of(2))


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *(("/storage/", fault) for fault in DOWNLOAD_FAULTS),
        ("state.json", Fault("flip", "GET", times=2)),
        ("state.json", Fault("reset", times=2)),
        ("MANIFEST.json", Fault("html", "GET")),
        ("MANIFEST.json", Fault("slow", "GET", seconds=0.5)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.kind} x{value.times} {value.seconds}",
)
def test_a_download_that_goes_wrong_for_a_while_costs_nothing(server, place, fault, path):
    save(place(), 1)
    save(place(), 2)
    fault = Fault(**{**vars(fault), "path": path})
    server.faults.append(fault)
    assert same(load_state(place()), tree_of(2))
    assert fault.times == 0


@pytest.mark.parametrize("kind", ["short", "flip", "html"])
@pytest.mark.parametrize("part", ["tensors", "state.json", "MANIFEST.json"])
def test_a_download_that_stays_bad_gives_the_next_older_checkpoint(server, place, caplog, kind, part):
    save(place(), 1)
    save(place(), 2)
    repo = server.repos["me/run"]
    (path,) = [path for path in repo.tree if "000002-" in path and part in path]
    where = repo.tree[path].get("sha256", path)
    server.fail(kind, method="GET", path=where, times=99)
    assert same(load_state(place()), tree_of(1))
    assert "trying the next older checkpoint" in caplog.text
    server.faults.clear()
    assert same(load_state(place()), tree_of(2))
    assert steps(place()) == [2, 1]


def test_when_all_downloads_stay_bad_it_is_an_error(server, place):
    save(place(), 1)
    for kind in ("flip", "short", "html"):
        server.fail(kind, method="GET", path="/storage/|resolve", times=10**6)
        with pytest.raises(CheckpointError, match="no checkpoint in 'hf://me/run' is good"):
            load_state(place())
        server.faults.clear()


# History


def versions(repo):
    return len(list(repo.history()))


def test_history_grows_and_is_squashed_at_the_stated_number_of_versions(server, place):
    storage = place(squash_every=5)
    counts = []
    for step in range(1, 13):
        save(storage, step, keep=1)
        repo = server.repos["me/run"]
        counts.append((versions(repo), len(repo.objects)))
        assert same(load_state(place()), tree_of(step))
    assert max(counts) < (6, 6)
    assert (1, 1) in counts
    plain = place("hf://me/plain")
    for step in range(5):
        save(plain, step, keep=1)
    assert len(server.repos["me/plain"].objects) == 5


def test_what_other_sessions_saved_counts_towards_the_squash(server, place):
    for step in range(6):
        save(place(squash_every=4), step, keep=1)
    assert versions(server.repos["me/run"]) <= 4
    assert len(server.repos["me/run"].objects) <= 4


def test_squash_on_request_frees_what_only_old_versions_held(server, place):
    storage = place()
    for step in range(4):
        save(storage, step, keep=2)
    storage.squash()
    repo = server.repos["me/run"]
    assert versions(repo) == 1
    assert len(repo.objects) == 2
    assert [checkpoint.step for checkpoint in verify(place())] == [3, 2]


def test_a_squash_leaves_tags_other_folders_and_shared_content_whole(server, place):
    save(place("hf://me/run/a"), 1, keep=1)
    repo = server.repos["me/run"]
    repo.tags["best"] = repo.head
    save(place("hf://me/run/a"), 2, keep=1)
    save(place("hf://me/run/b"), 5, keep=1)
    save(place("hf://me/run/a"), 5, keep=1)
    save(place("hf://me/run/b"), 6, keep=1)
    repo.objects["0" * 64], repo.names["0" * 64] = b"by hand", "a/weights.bin"
    place("hf://me/run/a").squash()
    assert "0" * 64 in repo.objects
    kept = {file["sha256"] for _, tree in repo.commits.values() for file in tree.values() if "sha256" in file}
    assert kept <= repo.objects.keys()
    assert "best" in repo.tags
    assert verify(place("hf://me/run/a"))
    assert verify(place("hf://me/run/b"))


@pytest.mark.parametrize("path", ["/commits/", "super-squash", "/refs", "lfs-files$", "lfs-files/batch"])
def test_a_squash_that_fails_is_no_failure_of_the_save(server, place, caplog, path):
    server.fail(403, path=path, times=99)
    storage = place(squash_every=2)
    for step in range(4):
        save(storage, step, keep=1)
        assert same(load_state(place()), tree_of(step))
    assert "could not squash" in caplog.text


def test_history_is_not_squashed_before_the_new_commit_is_seen(server, place, caplog):
    storage = place(squash_every=1)
    save(storage, 1, keep=1)
    repo = server.repos["me/run"]
    server.log.clear()
    save(storage, 2, keep=1)
    squash = [i for i, line in enumerate(server.log) if "super-squash" in line]
    (commit,) = [i for i, line in enumerate(server.log) if "/commit/" in line]
    looks = [i for i, line in enumerate(server.log) if "/tree/" in line]
    assert any(commit < look < squash[0] for look in looks)
    server.log.clear()
    server.fail(403, path="/commit/")
    with pytest.raises(CheckpointError):
        save(storage, 3, keep=1)
    assert not any("super-squash" in line for line in server.log)
    assert versions(repo) == 1


def test_a_reader_goes_on_when_the_history_is_squashed_under_it(server, place):
    for step in range(3):
        save(place(), step, keep=2)
    reader = place()
    names = reader.folders()
    place().squash()
    with reader.open(names[-1], "MANIFEST.json") as file:
        assert b'"step":2' in file.read()
    assert same(load_state(reader), tree_of(2))


def test_a_squash_between_two_requests_of_a_listing_is_no_empty_repository(server, place):
    save(place(), 1)
    server.fail(
        404,
        path="/tree/",
        headers={"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"},
    )
    assert steps(place()) == [1]
    server.fail(
        404,
        path="/tree/",
        times=99,
        headers={"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"},
    )
    with pytest.raises(CheckpointError):
        load_state(place())


# Every request in turn


def requests_of(server, action):
    server.log.clear()
    action()
    return len(server.log)


def sweep_of_saves(server, place, kind, options, chosen):
    """One fault at each request of a save: the save succeeds, or the one before is whole."""
    survived = 0
    count = requests_of(server, lambda: (save(place("hf://me/dry"), 1), save(place("hf://me/dry"), 2)))
    for k in range(count):
        if k % chosen[1] != chosen[0]:
            continue
        name = f"hf://me/run{k}"
        server.faults.clear()
        server.fail(kind, skip=k, **options)
        done = []
        for step in (1, 2):
            try:
                save(place(name), step, keep=1)
            except CheckpointError:
                continue
            done.append(step)
        server.faults.clear()
        if done:
            tree = load_state(place(name))
            assert tree["n"] >= done[-1]
            assert same(tree, tree_of(tree["n"]))
        survived += done == [1, 2]
        save(place(name), 3, keep=1)
        assert same(load_state(place(name)), tree_of(3))
    return count, survived


def sweep_of_loads(server, place, kind, options, chosen):
    save(place(), 1)
    save(place(), 2)
    count = requests_of(server, lambda: load_state(place()))
    for k in range(count):
        if k % chosen[1] != chosen[0]:
            continue
        server.faults.clear()
        server.fail(kind, skip=k, **options)
        assert same(load_state(place()), tree_of(2)), k
    server.faults.clear()
    return count


PASSING = {
    "500": (500, {}),
    "503": (503, {}),
    "429": (429, {"headers": {"Retry-After": "1"}}),
    "reset": ("reset", {}),
    "lost": ("lost", {}),
    "drop": ("drop", {}),
    "html": ("html", {}),
}


@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_at_a_request_of_a_save_is_survived(server, place, fault):
    kind, options = PASSING[fault]
    part = list(PASSING).index(fault)
    count, _ = sweep_of_saves(server, place, kind, options, (part, len(PASSING)))
    assert count > 20


@pytest.mark.torture
@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_at_every_request_of_a_save_is_survived(server, place, fault):
    kind, options = PASSING[fault]
    count, survived = sweep_of_saves(server, place, kind, options, (0, 1))
    # A page in the place of the storage's answer passes for success until the upload is verified; there is one a save.
    assert survived >= count - (2 if fault == "html" else 0)


@pytest.mark.torture
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 412, 416, 418])
def test_one_refusal_at_every_request_of_a_save_loses_nothing(server, place, status):
    sweep_of_saves(server, place, status, {}, (0, 1))


@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_at_a_request_of_a_load_is_survived(server, place, fault):
    kind, options = PASSING[fault]
    part = list(PASSING).index(fault)
    assert sweep_of_loads(server, place, kind, options, (part % 3, 3)) >= 8


@pytest.mark.torture
@pytest.mark.parametrize("fault", PASSING)
def test_one_fault_at_every_request_of_a_load_is_survived(server, place, fault):
    kind, options = PASSING[fault]
    sweep_of_loads(server, place, kind, options, (0, 1))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500, 503], ids=str)
def test_a_load_is_never_a_fresh_start_while_there_are_checkpoints(server, place, status):
    save(place(), 1)
    count = requests_of(server, lambda: load_state(place()))
    for k in range(count):
        server.faults.clear()
        server.fail(status, skip=k, times=10**6)
        with pytest.raises(CheckpointError):
            load_state(place())


# How it is named


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("hf://buckets/me/run", {"squash_every": 3}, "has no option squash_every; choose token"),
        ("hf://datasets/me/run", {}, "is no place for checkpoints"),
        ("hf://me", {}, "names no repository"),
        ("hf://me/run/../x", {}, "names no repository"),
        ("hf://me/run//x", {}, "names no repository"),
        ("hf://me:word@host/run", {}, "'hf://host/run' names no repository"),
        ("hf://me/run?token=word", {}, "'hf://me/run' names no repository"),
        ("hf://me/run", {"tokn": "word"}, "has no option tokn; choose token"),
        ("hf://me/run", {"squash_every": -1}, "squash_every=-1 is no count"),
    ],
    ids=str,
)
def test_what_names_no_repository_is_told_without_secrets(url, options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as caught:
        open_storage(url, **options)
    assert "word" not in chain_of(caught.value)


def test_opening_asks_nothing(server, place):
    storage = place("hf://me/run/sub/")
    assert storage.place == "hf://me/run/sub"
    assert not server.log


def test_a_missing_client_is_told_with_the_command(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "efficio-ckpt\[hub\]"'):
        open_storage("hf://me/run")
