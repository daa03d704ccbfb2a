"""What needs a card: real out-of-memory, synchronisations of a whole step, the memory format's gain."""

import warnings

import pytest
import torch
from torch import nn

import efficio
from efficio_precision import autocast, precision_policy, to_channels_last

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def synchronisations(work):
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(each.message) for each in caught if "synchroniz" in str(each.message)]


@pytest.mark.parametrize(
    ("precision", "fused", "expected"), [("fp32", False, 0), ("fp16", False, 1), ("fp16", True, 1)]
)
def test_a_step_of_run_waits_for_the_device_no_more_than_gradscaler_does(
    precision, fused, expected, tmp_path
):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 4))
    run = efficio.Run(storage=tmp_path, progress=False, precision=precision, save_every="10h")
    optimizer = torch.optim.AdamW(model.cuda().parameters(), fused=fused, foreach=not fused)
    run.prepare(model, optimizer)
    x = torch.randn(300, 8, 64, device="cuda")
    counts = []
    batches = run.loop(list(x), 1)

    def body():
        batch = next(batches)
        with run.autocast():
            loss = model(batch).float().square().mean()
        run.backward(loss, weight=torch.tensor(8.0, device="cuda"))
        run.clip_grad_norm(1.0)
        run.step()

    for _ in range(20):
        body()
    for _ in range(200):  # some of which look at 64 losses
        counts.append(len(synchronisations(body)))
    batches.close()
    assert max(counts) == expected


def test_real_out_of_memory_is_recovered_from_and_every_step_is_taken(tmp_path):
    """The model's hidden layer is so wide that a quarter of the batch fits into what is left free, and the whole does not."""
    free, _ = torch.cuda.mem_get_info()
    width = 4096
    rows = int(free * 0.7 / width / 4)  # one activation takes 70 % of what is free, and there are several

    def train(folder, batch_rows):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 1))
        run = efficio.Run(storage=folder, progress=False, precision="fp32", seed=0)
        optimizer = torch.optim.SGD(model.cuda().parameters(), lr=0.1)
        run.prepare(model, optimizer)
        sizes = []
        data = torch.randn(batch_rows, 4)
        for x in run.loop([data, data], 1):
            sizes.append(len(x))
            with run.recover_oom():
                run.backward(model(x).square().mean())
                run.step()
        return [p.detach().cpu() for p in model.parameters()], sizes, run

    weights, sizes, run = train(tmp_path / "large", rows)
    assert sizes[0] == rows
    assert sizes[-1] < rows
    assert run.step_count == 2
    assert all(torch.isfinite(p).all() for p in weights)


def test_memory_of_the_failed_body_is_free_when_it_comes_again(tmp_path):
    model = nn.Linear(1024, 1024).cuda()
    run = efficio.Run(storage=tmp_path, progress=False, precision="fp32")
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = []
    failed = False
    for x in run.loop([torch.randn(4096, 1024)], 1):
        held.append(torch.cuda.memory_allocated())
        with run.recover_oom():
            out = model(x).exp().sin()
            if not failed:
                failed = True
                torch.empty(2**50, dtype=torch.uint8, device="cuda")
            run.backward(out.mean())
            run.step()
    assert held[1] - held[0] <= 4096 * 1024 * 4 + 2**20  # the name `out` itself, and none of its graph


def test_channels_last_is_faster_for_a_convolutional_model_in_16_bit():
    policy = precision_policy("cuda")
    if not policy.channels_last:
        pytest.skip(f"not for this card: {policy.reason}")

    def seconds(last):
        torch.manual_seed(0)
        layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(12)]
        model = nn.Sequential(
            *[part for layer in layers for part in (layer, nn.BatchNorm2d(64), nn.ReLU())]
        ).cuda()
        if last:
            to_channels_last(model, policy)
        x = torch.randn(64, 64, 56, 56, device="cuda")
        times = []
        for _ in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            with autocast(policy):
                model(x).float().mean().backward()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    assert seconds(last=True) < seconds(last=False)
