"""Cases of kind F: data loading and images."""

import os
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import efficio
from efficio_data import tune_loader


class Vectors(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, index):
        return torch.full((8,), float(index))


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_lambda_where_processes_are_spawned_means_no_workers_and_all_batches(system, tmp_path, monkeypatch):
    """F03: through the tuner and through a loop; with workers that the user set, an error names what cannot be pickled."""

    def loader(**options):
        return DataLoader(Vectors(), 100, collate_fn=lambda items: torch.stack(items), **options)

    model = nn.Linear(8, 1)
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", system)
        elsewhere.setattr("multiprocessing.get_start_method", lambda allow_none=False: "spawn")
        tuned = tune_loader(loader())
        batches = run.loop(loader(), 1)
        with pytest.raises(ValueError, match=r"collate_fn cannot be pickled .*lambda"):
            run.loop(loader(num_workers=2), 1)

    assert tuned.num_workers == 0
    assert any("no workers" in applied and "spawn" in applied for applied in run.report().applied)
    for given in (tuned, batches):
        assert torch.equal(torch.cat(list(given))[:, 0], torch.arange(500.0))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors of Linux")
@pytest.mark.parametrize("kept", [False, True], ids=["losses-only", "batches-kept"])
def test_a_loop_keeps_no_batch_and_who_keeps_them_is_told_what_to_do(kept, tmp_path):
    """F05: 256 descriptors, two workers and 500 batches; what was trained until the error is stored."""
    import resource

    model = nn.Linear(8, 1)
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    opened, things = [], []

    def train():
        for x in run.loop(DataLoader(Vectors(), 1, num_workers=2, multiprocessing_context="fork"), 1):
            loss = model(x).sum()
            run.backward(loss)
            run.step()
            opened.append(len(os.listdir("/proc/self/fd")))
            things.append(x if kept else loss.item())

    try:
        if kept:
            with pytest.raises(RuntimeError, match=r"Too many open files.*file_system"):
                train()
        else:
            train()
    finally:
        things.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if kept:
        again = nn.Linear(8, 1)
        resumed = efficio.Run(storage=tmp_path, progress=False)
        resumed.prepare(again, torch.optim.SGD(again.parameters(), lr=1e-6))
        assert resumed.step_count == run.step_count == len(opened) > 100
        assert torch.equal(again.weight, model.weight)
    else:
        assert run.step_count == 500
        assert (
            max(opened) <= max(opened[:50]) + 16
        )  # batches on their way hold some; each batch kept would hold one
