"""torch.compile: where it pays, and what it has built goes on to the next session."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import efficio
from efficio._compiling import Compiling

needs_compile = pytest.mark.skipif(not hasattr(nn.Module, "compile"), reason="from torch 2.2 on")


@pytest.fixture
def compiled(monkeypatch):
    """Names of the models that were compiled; nothing is."""
    names = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: names.append(type(model).__name__), raising=False)
    return names


def test_it_is_off_unless_it_is_wanted(compiled):
    off = Compiling(False, device="a CPU")
    assert off.compile([nn.Linear(1, 1)], seconds_left=1e9) == []
    assert not off.is_on
    assert compiled == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(899, "not compiled: about 90 s"), (901, "compiled by torch.compile")]
)
def test_it_must_pay_within_the_budget(seconds, words, compiled):
    compiling = Compiling(True, device="a CPU")
    (note,) = compiling.compile([nn.Linear(1, 1)], seconds_left=seconds)
    assert note.startswith(words)
    assert compiling.is_on == (compiled == ["Linear"]) == (seconds > 900)


def stored(**changes):
    return {
        **Compiling(False, device="a CPU")._made_for,
        "artifacts": torch.zeros(3, dtype=torch.uint8),
        **changes,
    }


@pytest.mark.skipif(
    not hasattr(getattr(torch, "compiler", None), "load_cache_artifacts"), reason="from torch 2.7 on"
)
@pytest.mark.parametrize(
    ("state", "warm"),
    [(stored(), True), (stored(torch="1.0"), False), (stored(device="a T4"), False), ({}, False)],
)
def test_what_was_built_is_used_where_it_was_built_for(state, warm, compiled, monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    compiling = Compiling(True, device="a CPU")
    compiling.load_state_dict(state)
    (note,) = compiling.compile([nn.Linear(1, 1)], seconds_left=300)
    assert (loaded == [bytes(3)]) is warm
    assert note.startswith("compiled" if warm else "not compiled")


def test_what_was_built_is_carried_through_a_session_that_does_not_compile():
    compiling = Compiling(False, device="a CPU")
    compiling.load_state_dict(stored())
    assert compiling.state_dict()["artifacts"].tolist() == [0, 0, 0]
    assert compiling.state_dict().keys() == stored().keys()


def test_an_old_torch_is_told(monkeypatch):
    monkeypatch.delattr(nn.Module, "compile", raising=False)
    with pytest.raises(ValueError, match=r"needs torch 2\.2 or newer"):
        Compiling(True, device="a CPU")


def test_a_checkpoint_from_before_is_taken_and_nothing_is_told_of_the_compiler(tmp_path, compiled, capsys):
    from efficio._session import Session

    model = nn.Linear(1, 1)
    session = Session(
        tmp_path, mode="exact", keep=2, seed=0, environment={}, clock=lambda: 0.0, tell=lambda text: None
    )
    session.add({"model": model})
    session.begin("0", length=1, size=None)
    session.close()
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model)
    assert "@" not in capsys.readouterr().out


SCRIPT = textwrap.dedent(
    """
    import sys

    import torch
    from torch import nn

    import efficio

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = efficio.Run(storage=sys.argv[1], progress=False, seed=1, compile_models=True)
    run.prepare(model, optimizer)
    for x in run.loop(list(torch.randn(8, 16, 8, generator=torch.Generator().manual_seed(2))), 1):
        run.backward(model(x).square().mean())
        run.step()
        if run.step_count == int(sys.argv[2]):
            run.stop()
    from torch._dynamo.utils import counters

    print("hits", counters["inductor"]["fxgraph_cache_hit"], "misses", counters["inductor"]["fxgraph_cache_miss"])
    print("graphs", counters["stats"]["unique_graphs"] > 0)
    print("weights", [p.tolist() for p in model.parameters()], list(model.state_dict()))
    """
)


@needs_compile
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(
    not hasattr(getattr(torch, "compiler", None), "load_cache_artifacts"), reason="from torch 2.7 on"
)
def test_a_compiled_run_is_resumed_exactly_and_finds_what_was_built(tmp_path):
    def process(storage, stop_at, cache):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / storage), str(stop_at)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return dict(
            line.split(" ", 1)
            for line in done.stdout.splitlines()
            if line.split(" ")[0] in ("hits", "graphs", "weights")
        )

    whole = process("whole", 0, "one")
    first = process("parts", 3, "one")
    second = process("parts", 0, "two")
    assert whole["graphs"] == first["graphs"] == second["graphs"] == "True"
    hits, _, misses = second["hits"].split()
    assert int(hits) > 0
    assert int(misses) == 0
    assert second["weights"] == whole["weights"]
    assert "'0.weight'" in second["weights"]
