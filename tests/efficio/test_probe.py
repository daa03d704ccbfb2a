"""How large a batch fits, tried with the prepared objects."""

import pytest
import torch
from torch import nn

import efficio


def prepared(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = efficio.Run(storage=folder, progress=False, seed=0, **options)
    run.prepare(model, optimizer, scheduler)
    return run, model


def trainer(run, model, *, room):
    sizes = []

    def train(size):
        sizes.append(size)
        if size > room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        with run.autocast():
            loss = model(torch.randn(size, 4)).square().mean() * float("nan")
        run.backward(loss)
        run.clip_grad_norm(1.0)
        assert run.step()

    return train, sizes


def trained(run, model):
    for x in run.loop([torch.randn(8, 4, generator=torch.Generator().manual_seed(1))] * 3, 1):
        run.backward(model(x).square().mean())
        run.step()
    return (
        [p.tolist() for p in model.state_dict().values()],
        run.step_count,
        run._stepping.optimizers[0].param_groups[0]["lr"],
    )


@pytest.mark.parametrize("group", [1, 2])
def test_the_run_afterwards_is_the_run_without_it(group, tmp_path, capsys):
    expected = trained(*prepared(tmp_path / "a", grad_accum_steps=group))
    run, model = prepared(tmp_path / "b", grad_accum_steps=group)
    train, sizes = trainer(run, model, room=100)
    assert run.find_batch_size(train, limit=512) == 88
    told = capsys.readouterr().out
    assert "batches of 88 samples fit (with 10% to spare): " in told
    assert "times the samples a second of batches of 8" in told
    assert "NaN" not in told
    assert sizes[0] == 8
    assert run.step_count == 0
    assert trained(run, model) == expected
    assert not any("NaN" in note for note in run.report().notes)


def test_the_limit_is_said(tmp_path, capsys):
    run, model = prepared(tmp_path)
    assert run.find_batch_size(trainer(run, model, room=10**9)[0], limit=32) == 32
    assert "batches of 32 samples fit (the limit)" in capsys.readouterr().out


def test_an_error_in_the_training_comes_through_and_everything_is_put_back(tmp_path):
    run, model = prepared(tmp_path)
    before = [p.tolist() for p in model.state_dict().values()]

    def train(size):
        run.backward(model(torch.randn(size, 4)).mean())
        run.step()
        if size > 16:
            raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        run.find_batch_size(train)
    assert [p.tolist() for p in model.state_dict().values()] == before
    assert run.step_count == 0


def test_inside_a_loop_it_says_so(tmp_path):
    run, _ = prepared(tmp_path)
    batches = run.loop([torch.ones(2, 4)], 1)
    next(batches)
    with pytest.raises(RuntimeError, match="inside loop '0': call it before the loop"):
        run.find_batch_size(lambda size: None)
    batches.close()


def test_nothing_fits(tmp_path):
    run, model = prepared(tmp_path)
    with pytest.raises(RuntimeError, match="not even one sample fits"):
        run.find_batch_size(trainer(run, model, room=0)[0])


def test_losses_with_a_weight_may_follow_a_trial_without_one(tmp_path):
    run, model = prepared(tmp_path, grad_accum_steps=2)
    train, sizes = trainer(run, model, room=100)
    run.find_batch_size(train, limit=64)
    for x in run.loop([torch.ones(8, 4)] * 4 * len(sizes), 1):
        run.backward(model(x).square().mean(), weight=8)
        run.step()
    assert run.step_count == 2 * len(sizes)
