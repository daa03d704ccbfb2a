"""A run on the Hub, through the real client, goes on in another process that begins with nothing."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "efficio_ckpt"))  # the server is shared with its tests

pytest.importorskip("huggingface_hub")

SCRIPT = textwrap.dedent(
    """
    import sys

    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import efficio


    class Noisy(Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            return torch.full((4,), index / 60) + 0.1 * torch.randn(4) * float(np.random.rand()), index


    storage, stop_at = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
    run = efficio.Run(storage=storage, seed=4, save_every=3, progress=False)
    run.prepare(model, optimizer, scheduler)
    seen = []
    for x, index in run.loop(DataLoader(Noisy(), 6, shuffle=True), 2):
        seen += index.tolist()
        run.backward(model(x).square().mean())
        run.step()
        run.log(loss=run.step_count)
        if run.step_count == stop_at:
            run.stop()
    print("seen", seen)
    print("resumed from", run.report().resumed_from)
    print("state", [value.tolist() for value in model.state_dict().values()], scheduler.get_last_lr(), run.metrics["loss"])
    """
)


def test_a_run_on_the_hub_is_continued_from_an_empty_folder_by_another_process(tmp_path):
    from hub_server import hub_server

    def process(name, storage, stop_at, url):
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, storage, str(stop_at)],
            cwd=folder,
            env={
                **os.environ,
                "HOME": str(folder),
                "HF_HOME": str(folder / "hub"),
                "EFFICIO_SPOOL": str(
                    folder / "spool"
                ),  # that of this machine, which the next one does not have
                "HF_ENDPOINT": url,
                "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": "hf_write",
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return dict(
            line.split(" ", 1)
            for line in done.stdout.splitlines()
            if line.split(" ")[0] in ("seen", "state", "resumed")
        )

    with hub_server() as server:
        whole = process("whole", "run", 0, server.url)
        first = process("first", "hf://me/run", 7, server.url)
        server.log.clear()
        second = process("second", "hf://me/run", 0, server.url)
        assert any("/storage/" in line for line in server.log)  # it was read from there
    assert second["resumed"] == "from 7"
    assert eval(first["seen"]) + eval(second["seen"]) == eval(whole["seen"])
    assert second["state"] == whole["state"]
