"""Session: what a run holds in memory and in storage, and how the one follows from the other."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from efficio._live import Live
from efficio._session import Session
from efficio_ckpt import CheckpointError, list_checkpoints, load_state
from efficio_data import Position


def session_in(folder, *, seed=0, keep=2, tell=lambda text: None, clock=lambda: 0.0):
    return Session(
        folder, mode="exact", keep=keep, seed=seed, environment={"device": "cpu"}, clock=clock, tell=tell
    )


def opened(folder, model, **options):
    session = session_in(folder, **options)
    session.add({"model": model})
    session.begin("0", length=8, size=None)
    return session


def layer(value):
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return model


def test_a_new_session_takes_the_seed_that_it_is_given_or_that_of_torch(tmp_path):
    torch.manual_seed(77)
    for folder, seed, expected in (("a", 5, 5), ("b", None, 77)):
        assert opened(tmp_path / folder, layer(1), seed=seed).progress.seed == expected


def test_a_resumed_session_keeps_the_seed_it_began_with(tmp_path):
    opened(tmp_path, layer(1), seed=5).close()
    session = session_in(tmp_path, seed=6)
    session.add({"model": layer(2)})
    assert session.progress.seed == 5
    assert session.resumed_from == 0


def test_there_is_a_checkpoint_before_anything_is_trained(tmp_path):
    session = session_in(tmp_path / "run")
    session.add({"model": layer(1)})
    assert not (tmp_path / "run").exists()
    session.begin("0", length=None, size=None)
    assert [at.step for at in list_checkpoints(tmp_path / "run")] == [0]


def test_storage_that_takes_nothing_is_found_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("in the way")
    session = session_in(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="run"):
        session.add({"model": layer(1)})


def test_what_was_saved_is_what_the_next_session_holds(tmp_path):
    model = layer(1)
    session = opened(tmp_path, model)
    nn.init.constant_(model.weight, 3)
    session.commit("0", Position(1, 32), Live(step=12, skipped=1), batches=4)
    assert session.save(wait=True)
    session.close()

    model = layer(2)
    session = session_in(tmp_path)
    session.add({"model": model})

    assert model.weight.item() == 3
    assert session.resumed_from == 12
    progress = session.progress
    assert (progress.step, progress.skipped, progress.batches["0"]) == (12, 1, 4)
    assert session.begin("0", length=8, size=None) == (Position(1, 32), ())


def test_one_point_is_saved_once_unless_it_is_asked_for(tmp_path):
    session = opened(tmp_path, layer(1), keep=9)
    session.commit("0", Position(0, 8), Live(step=1, skipped=0), batches=1)
    assert session.save(wait=True)
    assert not session.save(wait=True)
    assert not session.save(wait=False)
    assert session.save(wait=True, always=True)
    assert [at.step for at in list_checkpoints(tmp_path)] == [1, 1, 0]


def test_rewinding_gives_back_objects_and_progress_of_the_last_checkpoint(tmp_path):
    model = layer(1)
    session = opened(tmp_path, model)
    nn.init.constant_(model.weight, 2)
    session.commit("0", Position(0, 8), Live(step=1, skipped=0), batches=1)
    session.save(wait=True)
    nn.init.constant_(model.weight, 9)
    session.commit("0", Position(0, 16), Live(step=2, skipped=0), batches=2)
    session.is_half_way = True

    session.rewind()

    assert model.weight.item() == 2
    assert session.progress.step == 1
    assert session.progress.loops == {"0": Position(0, 8)}
    assert not session.is_half_way


def test_what_was_not_prepared_is_carried_on_from_checkpoint_to_checkpoint(tmp_path):
    session = session_in(tmp_path)
    session.add({"model": layer(1), "average": layer(4)})
    session.begin("0", length=None, size=None)
    session.close()
    for step in range(1, 4):
        session = session_in(tmp_path)
        session.add({"model": layer(2)})
        assert session.begin("0", length=None, size=None)[1] == ("average",)
        session.commit("0", Position(0, step), Live(step=step, skipped=0), batches=step)
        session.save(wait=True)
        session.close()

    average = layer(0)
    session = session_in(tmp_path)
    session.add({"model": layer(2), "average": average})
    assert average.weight.item() == 4


def test_an_object_that_comes_later_is_restored_then(tmp_path):
    session = session_in(tmp_path)
    session.add({"model": layer(1), "head": layer(5)})
    session.begin("0", length=None, size=None)
    session.close()

    model, head = layer(2), layer(3)
    session = session_in(tmp_path)
    assert session.add({"model": model}) == ()
    assert session.add({"head": head}) == ()

    assert (model.weight.item(), head.weight.item()) == (1, 5)
    assert session.add({"other": layer(6)}) == ("other",)


def test_a_misfit_changes_nothing(tmp_path):
    opened(tmp_path, layer(1)).close()
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match="does not fit"):
        session_in(tmp_path).add({"model": other})
    assert torch.equal(other.weight, before)


def test_the_generators_of_the_checkpoint_come_back_once(tmp_path):
    def draws():
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    opened(tmp_path, layer(1)).close()
    expected = draws()
    torch.rand(5), random.random(), np.random.rand(5)
    session = session_in(tmp_path)
    session.add({"model": layer(2)})
    assert draws() == expected
    session.add({"later": layer(2)})
    assert draws() != expected


def test_a_later_session_takes_the_storage_over(tmp_path):
    former = opened(tmp_path, layer(1))
    later = opened(tmp_path, layer(2))
    with pytest.raises(RuntimeError, match="a later Run took over"):
        former.save(wait=True, always=True)
    later.commit("0", Position(0, 8), Live(step=1, skipped=0), batches=1)
    assert later.save(wait=True)


def test_closing_waits_for_the_save_in_flight(tmp_path):
    model = nn.Linear(1000, 1000)
    session = opened(tmp_path, model)
    session.commit("0", Position(0, 8), Live(step=1, skipped=0), batches=1)
    session.save(wait=False)
    session.close()
    assert [at.step for at in list_checkpoints(tmp_path)] == [1, 0]


def test_seconds_add_up_over_sessions_and_never_go_back(tmp_path):
    now = 100.0

    def clock():
        return now

    for seconds in (30.0, 12.0, -50.0):
        now = 100.0
        model = layer(1)
        session = session_in(tmp_path, clock=clock)
        session.add({"model": model})
        session.begin("0", length=None, size=None)
        now += seconds
        session.commit("0", Position(0, 1), Live(step=session.progress.step + 1, skipped=0), batches=1)
        session.save(wait=True)
        session.close()
    assert load_state(tmp_path)["progress"]["seconds"] == 42.0


def test_a_saver_is_there_once_something_was_prepared(tmp_path):
    session = session_in(tmp_path)
    with pytest.raises(RuntimeError, match="nothing was prepared"):
        _ = session.saver
    session.add({"model": layer(1)})
    assert session.saver.status.committed == 0


def test_a_model_that_does_not_fit_is_told_with_the_names_and_how_to_take_its_weights_alone(tmp_path):
    old = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    nn.init.constant_(old[0].weight, 7.0)
    session = session_in(tmp_path)
    session.add({"model": old})
    session.begin("0", length=8, size=None)
    session.close()
    new = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4), nn.Linear(4, 4))  # the second is of another shape
    session = session_in(tmp_path)
    with pytest.raises(CheckpointError, match="nothing was changed") as raised:
        session.add({"model": new})
    text = str(raised.value)
    assert "not in the checkpoint: 2.bias, 2.weight" in text
    assert "1.weight is (4, 2) here and (3, 2) in the checkpoint" in text
    code = text[text.index("stored = efficio_ckpt") :]
    import efficio_ckpt

    exec(code, {"model": new, "efficio_ckpt": efficio_ckpt})
    assert (new[0].weight == 7).all()
