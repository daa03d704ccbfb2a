"""The command: what it shows, what it refuses, and its exit status."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import efficio
from efficio._command import main
from efficio_ckpt import list_checkpoints, load_state, open_storage, save_state

DATA = "tensors-00001.safetensors"


def save(root, step, **options):
    return save_state(root, {"w": torch.full((5, 4), float(step))}, step=step, **{"keep": 9, **options})


def damage(root, checkpoint):
    path = root / checkpoint.name / DATA
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_two_runs_and_what_is_damaged(tmp_path, capsys):
    first, second, torn = save(tmp_path, 1, run_id="a"), save(tmp_path, 2, run_id="b"), save(tmp_path, 3)
    (tmp_path / torn.name / DATA).write_bytes(b"")
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "name", "run", "size", "age", "where"]
    assert [row.split()[:3] for row in rows[:2]] == [["2", second.name, "b"], ["1", first.name, "a"]]
    assert rows[2].startswith(f"damaged: {torn.name}/{DATA}")


def test_an_empty_storage_is_empty_and_a_missing_one_an_error(tmp_path, capsys):
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert "no checkpoint" in capsys.readouterr().out
    for action in ("ls", "show", "verify"):
        assert main(["ckpt", action, str(tmp_path / "missing")]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "does not exist" in err
        assert err.count("\n") == 1


def test_verify_names_the_damaged_one(tmp_path, capsys):
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    damage(tmp_path, bad)
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert bad.name in capsys.readouterr().err


def test_rm_asks_and_keeps_the_last_of_a_run_and_an_attempt(tmp_path, capsys, monkeypatch):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    attempt = "step-000000000003-abcdef01"
    open_storage(tmp_path).begin(attempt, b"{}")
    here = ["ckpt", "rm", str(tmp_path)]
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main([*here, first.name]) == 1
    assert main([*here, "--yes", "--all", first.name, attempt]) == 2
    assert "unfinished" in capsys.readouterr().err
    assert main([*here, "--yes", first.name, second.name]) == 2
    assert list_checkpoints(tmp_path) == [second, first]
    assert main([*here, "--yes", first.name]) == 0
    assert main([*here, "--yes", "--all", second.name]) == 0
    assert list_checkpoints(tmp_path) == []
    assert (tmp_path / attempt).exists()


def train(folder, *, stop_after=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = [(torch.full((4, 3), float(n)), torch.ones(4, 1)) for n in range(6)]
    run = efficio.Run(storage=str(folder), progress=False)
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for x, y in run.loop(data, epochs=2):
        run.backward(F.mse_loss(model(x), y))
        run.step()
        if run.step_count == stop_after:
            run.stop()
    return model.weight.detach().clone()


def test_a_pulled_run_goes_on_exactly(tmp_path, capsys):
    whole = train(tmp_path / "whole")
    train(tmp_path / "a", stop_after=5)
    pull = ["ckpt", "pull", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(pull) == 0
    assert main(pull) == 0
    assert "already" in capsys.readouterr().out
    assert main(["ckpt", "show", str(tmp_path / "b"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["parameters"], shown["progress"]["step"]) == (5, 4, 5)
    assert main(["ckpt", "show", str(tmp_path / "b")]) == 0
    assert "weight (1, 3)" in capsys.readouterr().out
    assert torch.equal(train(tmp_path / "b"), whole)
    assert load_state(tmp_path / "b")["progress"]["step"] == 12


def test_no_secret_is_shown(capsys):
    secret = "s4://key:hidden@bucket/run?token=hidden"
    assert main(["ckpt", "ls", secret]) == 2
    with pytest.raises(SystemExit) as ending:
        main(["ckpt", "ls", "x", secret])
    assert ending.value.code == 2
    assert "hidden" not in "".join(capsys.readouterr())


def test_it_runs_as_a_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "efficio", "ckpt", "ls", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
