"""Out-of-memory in the middle of a run: the group comes again in parts, and the step is that of the whole."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

import efficio
from efficio._live import Live
from efficio._recovery import Recovery

OOM = "CUDA out of memory (simulated)"
PLACES = ("start", "forward", "loss", "backward", "clip", "step", "end of forward")


def oom():
    raise torch.cuda.OutOfMemoryError(OOM)


class Net(nn.Module):
    def __init__(self, *, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.fails = None

    def forward(self, x):
        self.seen += len(x)  # a buffer that would count a failed batch twice
        hidden = self.body[0](x)
        if self.fails == "forward":
            oom()
        out = self.body[2](self.body[1](hidden))
        if self.fails == "end of forward":
            oom()
        return out


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        oom()


def data(sizes=(12, 12, 12, 12, 12, 7)):
    torch.manual_seed(1)
    return [(torch.randn(size, 4), torch.randint(3, (size,))) for size in sizes]


def train(
    folder,
    *,
    most=10**9,
    place="forward",
    at=range(10**9),
    group=1,
    weighted=False,
    batches=None,
    epochs=2,
    make=lambda p: torch.optim.AdamW(p, 0.05),
    transform=None,
    norm=False,
    clip=True,
    floor=1,
    save_every=10**6,
):
    """Train; memory runs out at a place of the body when it has more samples than there is room for."""
    model = Net(norm=norm)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run = efficio.Run(storage=folder, progress=False, grad_accum_steps=group, seed=5, save_every=save_every)
    run.prepare(model, optimizer, scheduler)
    bodies, taken = [], []
    for x, y in run.loop(batches or data(), epochs, gpu_transform=transform):
        fails = len(x) > most and run.step_count in at
        bodies.append((run.step_count, len(x)))
        with run.recover_oom(floor=floor):
            model.fails = place if fails else None
            if fails and place == "start":
                oom()
            loss = nn.functional.cross_entropy(model(x), y)
            if fails and place == "loss":
                oom()
            if fails and place == "backward":
                loss = FailsInBackward.apply(loss)
            run.backward(loss, weight=len(x) if weighted else None)
            if fails and place == "clip":
                oom()
            if clip:
                run.clip_grad_norm(1.0)
            if fails and place == "step":
                oom()
            run.step()
            taken.append(x)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, run, bodies, taken, model


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("most", [11, 2])
@pytest.mark.parametrize("place", PLACES)
def test_the_steps_are_those_of_whole_batches(place, most, weighted, group, tmp_path):
    options = {"weighted": weighted, "group": group}
    whole, run, _, _, model = train(tmp_path / "whole", **options)
    parts, other, bodies, taken, same = train(tmp_path / "parts", most=most, place=place, **options)
    assert (whole - parts).abs().max() < 1e-5  # AdamW divides by roots of gradients, so rounding grows
    assert (run.step_count, run.epoch) == (other.step_count, other.epoch)
    assert other.report().skipped_steps == 0
    assert same.seen == model.seen  # buffers were put back
    assert sum(len(x) for x in taken) >= 2 * 67  # none lost
    assert max(size for _, size in bodies[-6:]) <= most


@pytest.mark.parametrize("place", PLACES)
def test_sgd_within_rounding(place, tmp_path):
    def make(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    whole, *_ = train(tmp_path / "whole", make=make)
    parts, *_ = train(tmp_path / "parts", make=make, most=5, place=place)
    assert (whole - parts).abs().max() < 1e-6


def test_a_split_is_remembered_and_told_and_steps_before_it_are_not_repeated(tmp_path, capsys):
    _, run, bodies, _, _ = train(tmp_path, most=5, at=range(4, 100))
    assert [size for step, size in bodies if step < 4] == [12] * 4
    sizes = [size for step, size in bodies if step >= 4]
    assert sizes[:3] == [12, 6, 3]  # whole, halves, quarters
    assert all(size <= 3 for size in sizes[2:])
    told = capsys.readouterr().out
    assert told.count("out of memory with 12 samples at once after step 4") == 1
    assert told.count("out of memory with 6 samples at once after step 4") == 1
    assert run.step_count == 12


def test_a_resumed_run_goes_on_in_parts_without_running_out_again(tmp_path):
    train(tmp_path, most=5, epochs=1)
    _, run, bodies, _, _ = train(tmp_path, most=5, epochs=2)
    assert run.step_count == 12
    assert bodies[0] == (6, 3)
    assert all(size <= 3 for _, size in bodies)


def test_a_resume_in_the_middle_is_the_same_run(tmp_path):
    def make(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    whole, *_ = train(tmp_path / "one", most=5, make=make)
    train(tmp_path / "two", most=5, make=make, epochs=1)
    again, *_ = train(tmp_path / "two", most=5, make=make, epochs=2)
    assert torch.equal(whole, again)


def test_augmentation_is_that_of_the_whole_batch(tmp_path):
    seen = {}

    def transform(batch):
        x, y = batch
        x = x + torch.randn(len(x), 1)
        seen.setdefault(len(seen), x)
        return x, y

    whole, *_ = train(tmp_path / "whole", transform=transform)
    expected = list(seen.values())
    seen.clear()
    parts, _, _, taken, _ = train(tmp_path / "parts", most=5, transform=transform)
    assert (whole - parts).abs().max() < 1e-5
    assert torch.equal(torch.cat(expected), torch.cat(taken))


def test_a_model_in_channels_last_is_tried_when_a_resume_begins_in_parts(tmp_path, monkeypatch, capsys):
    from efficio_precision import Device, Policy

    class Flattens(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)

        def forward(self, x):
            return self.conv(x).view(len(x), -1)

    def session(epochs):
        run = efficio.Run(storage=tmp_path, progress=False, seed=0)
        policy = Policy(Device("cpu", "a CPU", None), torch.float32, channels_last=True)
        monkeypatch.setattr(run, "policy", policy)
        model = Flattens()
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for x in run.loop([torch.ones(4, 3, 8, 8)], epochs):
            with run.recover_oom():
                if len(x) > 2:
                    oom()
                run.backward(model(x).mean())
                run.step()
        return run

    session(1)
    capsys.readouterr()
    assert session(2).step_count == 2
    assert "Flattens does not run in channels_last" in capsys.readouterr().out


def test_batch_norm_is_told(tmp_path, capsys):
    train(tmp_path, most=5, norm=True)
    assert capsys.readouterr().out.count("BatchNorm takes its statistics from each part") == 1


@pytest.mark.parametrize(("floor", "smallest"), [(1, 1), (2, 3), (3, 3), (4, 6), (8, 12)])
def test_the_floor_is_an_error_that_names_the_sizes(floor, smallest, tmp_path):
    text = f"out of memory with {smallest} samples at once, and no fewer"
    with pytest.raises(RuntimeError, match=text) as raised:
        train(tmp_path, most=0, floor=floor)
    assert f"floor={floor}" in str(raised.value)
    assert OOM in str(raised.value)


def test_the_text_of_runtime_errors_counts_and_other_errors_do_not(tmp_path):
    run = efficio.Run(storage=tmp_path, progress=False)
    model = Net()
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    sizes = []
    for x, y in run.loop(data((8,)), 1):
        sizes.append(len(x))
        with run.recover_oom():
            if len(x) == 8:
                raise RuntimeError("MPS backend out of memory")
            run.backward(nn.functional.cross_entropy(model(x), y))
            run.step()
    assert sizes == [8, 4, 4]

    def broken():
        for _ in run.loop(data((8,)), 2, name="other"):
            with run.recover_oom():
                raise RuntimeError("mat1 and mat2")

    with pytest.raises(RuntimeError, match="mat1"):
        broken()


def test_outside_a_body_it_says_where_it_belongs(tmp_path):
    run = efficio.Run(storage=tmp_path, progress=False)
    with pytest.raises(RuntimeError, match=r"around the body of run\.loop"), run.recover_oom():
        pass


def test_not_around_each_body_of_a_group_is_told(tmp_path):
    model = Net()
    run = efficio.Run(storage=tmp_path, progress=False, grad_accum_steps=2)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def go():
        for number, (x, y) in enumerate(run.loop(data((8, 8, 8, 8)), 1)):
            if number < 3:
                run.backward(nn.functional.cross_entropy(model(x), y))
                run.step()
            else:
                with run.recover_oom():
                    oom()

    with pytest.raises(RuntimeError, match="use it for each"):
        go()


@pytest.mark.parametrize("batch", ["text", {"x": torch.tensor(1.0)}], ids=["text", "scalar"])
def test_a_batch_that_cannot_be_cut_is_told(batch, tmp_path):
    model = Net()
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def go():
        for _ in run.loop([batch], 1):
            with run.recover_oom():
                oom()

    with pytest.raises(TypeError, match="cannot be cut into parts"):
        go()


# Memory


class Saved:
    """Stands for what a graph keeps for its backward."""


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, saved):
        ctx.saved = saved
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Watched(nn.Module):
    """Keeps weak references to what its graphs keep."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = []

    def forward(self, x):
        saved = Saved()
        self.held.append(weakref.ref(saved))
        return Saves.apply(self.layer(x), saved).exp()


@pytest.mark.parametrize("how", ["name", "view", "dict", "list", "tuple", "module frame"])
def test_nothing_of_the_failed_body_is_held_when_it_comes_again(how, tmp_path):
    """G01, in a loop and without the garbage collector's own rounds."""
    source = """
def go(run, model, wrap, alive, info):
    for x in run.loop([torch.ones(8, 4)], 1):
        alive.append([reference() is not None for reference in model.held])
        info.append(sys.exc_info())
        with run.recover_oom():
            out = wrap(model(x))
            kept = [out, 3]
            if len(x) == 8:
                oom()
            run.backward(out.mean() if isinstance(out, torch.Tensor) else model(x).mean())
            run.step()
"""
    if how == "module frame":  # as a cell of a notebook
        source = source.replace("def go(run, model, wrap, alive, info):", "if True:")
    model = Watched()
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    wrap = {
        "view": lambda out: out.view(-1)[:3],
        "dict": lambda out: {"logits": out, "n": 1},
        "list": lambda out: [out.view(-1)],
        "tuple": lambda out: (out.view(-1), 1),
    }.get(how, lambda out: out)
    alive, info = [], []
    names = {
        "torch": torch,
        "sys": sys,
        "oom": oom,
        "run": run,
        "model": model,
        "wrap": wrap,
        "alive": alive,
        "info": info,
    }
    gc.disable()
    try:
        exec(compile(source, "cell", "exec"), names)
        if how != "module frame":
            names["go"](run, model, wrap, alive, info)
    finally:
        gc.enable()
    assert alive[0] == []
    assert alive[1] == [False]  # when the first half comes, nothing of the whole batch is left
    assert info == [(None, None, None)] * 3


def test_entering_keeps_nothing_of_the_body_before(tmp_path):
    """Where a frame keeps copies of its variables, they would live on until the next body."""
    model = nn.Linear(4, 4)
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    old = lambda: None  # noqa: E731
    for x in run.loop([torch.ones(8, 4)] * 3, 1):
        with run.recover_oom():
            out = model(x)
            assert old() is None
            old = weakref.ref(out)


def test_the_variables_of_a_class_body_and_of_exec_stay():
    from efficio._recovery import variables_of

    class Body:
        x = 1
        seen = variables_of(sys._getframe())

    names = {"variables_of": variables_of, "sys": sys}
    own = {"x": 2}
    exec("y = variables_of(sys._getframe())", names, own)
    assert Body.x == Body.seen["x"] == 1
    assert own["x"] == own["y"]["x"] == 2


def test_tensors_that_were_there_before_the_body_keep_their_graph(tmp_path):
    model, head = nn.Linear(4, 4), nn.Linear(4, 1)
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, head, torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1))
    shared = model(torch.ones(8, 4))
    failed = False
    for rows in run.loop([torch.arange(8)], 1):
        with run.recover_oom():
            out = head(shared[rows])
            if not failed:
                failed = True
                oom()
            loss = out.mean() / 2
            loss.backward(retain_graph=True)
    assert shared.grad_fn is not None
    assert model.weight.grad is not None


def test_an_error_after_the_step_is_not_swallowed(tmp_path, capsys):
    model = Net()
    run = efficio.Run(storage=tmp_path, progress=False)
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def go():
        for x, y in run.loop(data((8, 8)), 1):
            with run.recover_oom():
                run.backward(nn.functional.cross_entropy(model(x), y))
                run.step()
                oom()

    with pytest.raises(torch.cuda.OutOfMemoryError):
        go()
    assert "cannot be taken back" in capsys.readouterr().out


class FailsInStep(torch.optim.AdamW):
    """Runs out of memory at one of the places of a step at which memory is taken."""

    fails = None

    def _init_group(self, group, *arguments):
        if self.fails == "state":
            first = group["params"][0]
            self.state[first] = {"step": torch.tensor(0.0)}  # made in part
            oom()
        result = super()._init_group(group, *arguments)
        if self.fails == "states":
            oom()
        return result


@pytest.mark.parametrize("fails", ["state", "states"])
def test_a_step_that_fails_before_it_changes_anything_is_taken_back(fails, tmp_path):
    def run_with(folder, place):
        model = Net()
        optimizer = FailsInStep(model.parameters(), 0.05)
        run = efficio.Run(storage=folder, progress=False)
        run.prepare(model, optimizer)
        sizes = []
        for x, y in run.loop(data((8, 8)), 1):
            sizes.append(len(x))
            optimizer.fails = place if len(x) > 4 else None
            with run.recover_oom():
                run.backward(nn.functional.cross_entropy(model(x), y))
                run.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), sizes

    whole, _ = run_with(tmp_path / "whole", None)
    parts, sizes = run_with(tmp_path / "parts", fails)
    assert sizes == [8, 4, 4, 4, 4]
    assert (whole - parts).abs().max() < 1e-5


def test_entering_costs_little_where_nothing_fails(tmp_path):
    """The copy of the buffers is taken once a group, not once a body."""
    model = Net(norm=True)
    live = Live(in_body=True)
    kept = []

    class Counted(Recovery):
        def _keep(self):
            kept.append(live.group)

    recovery = Counted(live, None, models=lambda: [model], tell=print)
    for group in (1, 1, 1, 2):
        live.group = group
        with recovery:
            pass
    assert kept == [1, 2]
