"""What a user logs: remembered, resumed, stored with the weights that it is of, and used to keep the best."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn

import efficio
from efficio_ckpt import Retention, list_checkpoints, load_checkpoint


def prepared(folder, **options):
    model = nn.Linear(2, 1)
    run = efficio.Run(storage=folder, progress=False, seed=0, **options)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


def test_the_last_the_lowest_and_the_highest_with_their_steps(tmp_path):
    run, model = prepared(tmp_path)
    values = [3.0, float("nan"), 1.0, 2.0]
    for number, x in enumerate(run.loop([torch.ones(1, 2)] * 4, 1)):
        run.backward(model(x).mean())
        run.step()
        run.log(loss=torch.tensor(values[number]), more=np.float32(number))
    metric = run.metrics["loss"]
    assert (metric.last, metric.step) == (2.0, 4)
    assert (metric.lowest, metric.lowest_step, metric.highest, metric.highest_step) == (1.0, 3, 3.0, 1)
    assert run.metrics["more"].last == 3


def test_a_number_that_is_none_yet():
    from efficio._metrics import logged

    metric = logged({}, {"loss": math.nan}, step=1)["loss"]
    assert (metric.lowest, metric.highest) == (None, None)
    assert math.isnan(metric.last)


def test_they_go_on_after_a_resume_and_are_those_of_the_checkpoint(tmp_path):
    run, model = prepared(tmp_path)
    for x in run.loop([torch.ones(1, 2)] * 3, 1):
        run.backward(model(x).mean())
        run.step()
        run.log(loss=10 - run.step_count)
    run, model = prepared(tmp_path)
    assert run.metrics["loss"].lowest == 7
    for number, x in enumerate(run.loop([torch.ones(1, 2)] * 3, 2)):
        run.backward(model(x).mean())
        run.step()
        run.log(loss=-100)
        if number:
            break  # half-way: the next loop goes back
    next(run.loop([torch.ones(1, 2)] * 3, 2))
    assert run.metrics["loss"].lowest == 7


def test_a_checkpoint_says_what_was_logged_of_its_very_weights(tmp_path):
    run, model = prepared(tmp_path, save_every=1, keep=9)
    for number, x in enumerate(run.loop([torch.ones(1, 2)] * 4, 1)):
        run.backward(model(x).mean())
        if number == 1:
            run.log(early=1.0)  # before the step: of other weights
        run.step()
        if number == 2:
            run.log(late=2.0)
        run._session.saver.wait()  # or the next save is skipped
    run._session.saver.wait()
    found = {
        c.step: {key: c.metadata.get(key) for key in ("early", "late")} for c in list_checkpoints(tmp_path)
    }
    assert found[3] == {"early": None, "late": 2.0}
    assert all(values == {"early": None, "late": None} for step, values in found.items() if step != 3)


def evaluated(run, model, scores, folder):
    for epoch, score in enumerate(scores):
        for x in run.loop([torch.ones(1, 2)] * 2, epoch + 1, name="train"):
            run.backward(model(x).mean())
            run.step()
        with run.evaluate_mode():
            pass
        run.log(score=score)


@pytest.mark.parametrize(("end", "best"), [("max", 0.9), ("min", 0.1)])
def test_the_best_is_saved_when_it_is_logged_and_stays(end, best, tmp_path):
    scores = [0.5, 0.9, 0.1, 0.2, 0.3]
    run, model = prepared(tmp_path, keep=Retention(newest=1, best=("score", end)))
    evaluated(run, model, scores, tmp_path)
    kept = {c.step: c.metadata.get("score") for c in list_checkpoints(tmp_path)}
    step = 2 * (scores.index(best) + 1)
    assert kept[step] == best
    assert max(kept) == 10
    assert len(kept) == 2
    _, tree = load_checkpoint(tmp_path, step=step)
    assert tree["progress"]["step"] == step


def test_the_best_inside_a_body_is_saved_when_the_body_has_finished(tmp_path):
    run, model = prepared(tmp_path, keep=Retention(newest=1, best=("score", "max")))
    for number, x in enumerate(run.loop([torch.ones(1, 2)] * 6, 1)):
        run.backward(model(x).mean())
        run.step()
        run.log(score=[1, 2, 3, 0, 0, 0][number])
        run._session.saver.wait()
    assert {c.step: c.metadata.get("score") for c in list_checkpoints(tmp_path)} == {3: 3.0, 6: 0.0}


def test_the_best_is_kept_while_other_saves_are_in_flight(tmp_path, monkeypatch):
    from efficio_ckpt import Saver

    write = Saver._write

    def slow(*arguments, **options):
        time.sleep(0.05)
        return write(*arguments, **options)

    monkeypatch.setattr(Saver, "_write", slow)
    run, model = prepared(tmp_path, save_every=1, keep=Retention(newest=1, best=("score", "max")))
    for number, x in enumerate(run.loop([torch.ones(1, 2)] * 8, 1)):
        run.backward(model(x).mean())
        run.step()
        run.log(score=[1, 2, 3, 4, 9, 0, 0, 0][number])
    assert {c.step: c.metadata.get("score") for c in list_checkpoints(tmp_path)} == {5: 9.0, 8: 0.0}


def test_a_failed_save_of_the_best_is_told_and_training_goes_on(tmp_path, monkeypatch, capsys):
    from efficio_ckpt import CheckpointError

    run, model = prepared(tmp_path, keep=Retention(best=("score", "max")))
    evaluated(run, model, [0.5], tmp_path)

    def full(live):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(run._session, "save_now", full)
    run.log(score=0.6)
    assert "the best checkpoint so far was not saved: the disk is full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "low"}, "loss='low' is no number"),
        ({"loss": torch.ones(2)}, "is no number"),
        ({"loss": None}, "loss=None is no number"),
        ({"device": 3}, "'device' is what checkpoints say of the machine"),
    ],
    ids=str,
)
def test_what_is_no_number_is_told_and_nothing_is_logged(values, message, tmp_path):
    run, _ = prepared(tmp_path)
    with pytest.raises(TypeError, match=message):
        run.log(fine=1.0, **values)
    assert not run.metrics


def test_metrics_are_read_only(tmp_path):
    run, _ = prepared(tmp_path)
    with pytest.raises(TypeError):
        run.metrics["loss"] = 1
