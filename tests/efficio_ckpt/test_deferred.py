"""Copies that are made after the call: what is stored is the state at the call, or the save fails and says why."""

import logging
import threading

import pytest
import torch
from torch import nn

from efficio_ckpt import CheckpointError, background_saver, load_state, snapshot_tree, take_snapshot
from efficio_ckpt._deferred import DeferredCopies, is_deferrable, spans_of
from efficio_ckpt._tree import flatten

WIDE = 64  # 64 x 64 float32 are 16 KiB: large enough to be copied later


class Model(nn.Module):
    """Large parameters in several layouts, one tied; BatchNorm; a large buffer that moves in forward."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDE, 7).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(WIDE)
        self.first = nn.Linear(WIDE, WIDE)
        self.last = nn.Linear(WIDE, WIDE)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(4096))

    def forward(self, x):
        self.seen += 1
        x = self.norm(self.conv(x)).mean(dim=(2, 3))
        return self.last(self.first(x).relu())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
}


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):  # which has no fused ones on a CPU
    OPTIMIZERS = {name: make for name, make in OPTIMIZERS.items() if not name.endswith("fused")}


class Training:
    def __init__(self, optimizer):
        torch.manual_seed(0)
        self.model = Model()
        if optimizer == "lbfgs":  # it takes gradients of plain strides only
            self.model.to(memory_format=torch.contiguous_format)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.objects = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
        }

    def step(self):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 3, 9, 9)).square().mean()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)


def same(tree, other):
    if isinstance(tree, torch.Tensor):
        return torch.equal(tree, other) and tree.dtype == other.dtype and tree.stride() == other.stride()
    if isinstance(tree, dict):
        return tree.keys() == other.keys() and all(same(tree[key], other[key]) for key in tree)
    if isinstance(tree, (list, tuple)):
        return len(tree) == len(other) and all(map(same, tree, other))
    return tree == other


class Late:
    """A lock that a thread in the background gets only when it may: until then the other one is alone."""

    def __init__(self):
        self.go = threading.Event()
        self.lock = threading.RLock()
        self.main = threading.current_thread()

    def __enter__(self):
        if threading.current_thread() is not self.main:
            assert self.go.wait(60)
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


@pytest.fixture
def late(monkeypatch):
    """The thread that saves copies nothing before `late.go` is set."""
    late = Late()
    make = DeferredCopies.__init__

    def patched(self, *arguments):
        make(self, *arguments)
        self._lock = late

    monkeypatch.setattr(DeferredCopies, "__init__", patched)
    yield late
    late.go.set()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("who", ["the optimizer copies", "the thread copies"])
def test_what_is_stored_is_the_state_at_the_call_whatever_is_trained_next(tmp_path, late, kind, who):
    training = Training(kind)
    if who == "the thread copies":
        late.go.set()
    training.step()
    with background_saver(tmp_path, keep=1) as saver:
        for number in range(4):
            expected = take_snapshot(training.objects)
            assert saver.save(snapshot_tree(training.objects), step=number, optimizers=[training.optimizer])
            training.step()  # the forward moves buffers, the step everything else
            training.step()
            late.go.set()
            saver.wait()
            if who == "the optimizer copies":
                late.go.clear()
            assert same(load_state(tmp_path), expected)


def test_large_tensors_of_an_optimizer_are_copied_after_the_call_and_all_else_in_it(tmp_path, late):
    training = Training("adamw")
    training.step()
    flat = flatten(snapshot_tree(training.objects))
    spans = spans_of([training.optimizer])
    later = {
        name for name, source in zip(flat.names, flat.sources, strict=True) if is_deferrable(source, spans)
    }
    states = {
        f"optimizer.state.model.{p}.{m}"
        for p in ("conv.weight", "first.weight")
        for m in ("exp_avg", "exp_avg_sq")
    }
    assert later == {"model.conv.weight", "model.first.weight", *states}


def test_a_step_waits_for_the_copies_and_not_for_the_file(tmp_path, late):
    training = Training("adamw")
    training.step()
    with background_saver(tmp_path) as saver:
        saver.save(snapshot_tree(training.objects), step=1, optimizers=[training.optimizer])
        assert saver.status.in_flight_step == 1
        training.step()
        assert saver.status.in_flight_step == 1  # its thread still waits to be let go
        late.go.set()
    assert saver.status.last_step == 1


CHANGES = {
    "in place": lambda weight: weight.add_(1.0),
    "behind torch's back": lambda weight: weight.data.mul_(2.0),
    "through numpy": lambda weight: weight.detach().numpy().__imul__(2.0),
    "in one element": lambda weight: weight[3, 5].fill_(7.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_by_hand_before_the_copy_fails_the_save_and_the_next_one_copies_at_once(
    tmp_path, late, change, caplog
):
    training = Training("sgd")
    training.step()
    tree = snapshot_tree(training.objects)
    with background_saver(tmp_path) as saver:
        saver.save(tree, step=1, wait=True)
        saver.save(tree, step=2, optimizers=[training.optimizer])
        with torch.no_grad():
            change(training.model.first.weight)
        late.go.set()
        with pytest.raises(CheckpointError, match=r"step 2 .*model\.first\.weight was changed by other code"):
            saver.wait()
        assert saver.status.last_step == 1
        expected = take_snapshot(training.objects)
        saver.save(snapshot_tree(training.objects), step=3, optimizers=[training.optimizer])
        with torch.no_grad():
            change(training.model.first.weight)
    assert same(load_state(tmp_path), expected)


def test_a_change_after_the_fence_changes_nothing_that_is_stored(tmp_path, late):
    training = Training("adamw")
    training.step()
    expected = take_snapshot(training.objects)
    with background_saver(tmp_path) as saver:
        saver.save(snapshot_tree(training.objects), step=1, optimizers=[training.optimizer])
        saver.fence()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.zero_()
        late.go.set()
    assert same(load_state(tmp_path), expected)


def test_weights_that_move_in_forward_are_noticed(tmp_path, late):
    torch.manual_seed(0)
    model = nn.Embedding(100, 64, max_norm=1.0)  # forward scales rows of the weight down
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with background_saver(tmp_path) as saver:
        saver.save(snapshot_tree({"model": model}), step=1, optimizers=[optimizer])
        model(torch.arange(50))
        late.go.set()
        with pytest.raises(CheckpointError, match=r"model\.weight was changed"):
            saver.wait()


def test_new_memory_for_a_parameter_leaves_the_copied_one_alone(tmp_path, late):
    training = Training("sgd")
    training.step()
    expected = take_snapshot(training.objects)
    with background_saver(tmp_path) as saver:
        saver.save(snapshot_tree(training.objects), step=1, optimizers=[training.optimizer])
        for parameter in training.model.parameters():
            parameter.data = torch.zeros_like(parameter)
        training.optimizer.load_state_dict(Training("sgd").optimizer.state_dict())
        late.go.set()
    assert same(load_state(tmp_path), expected)


def test_two_optimizers_fence_each_for_both(tmp_path, late):
    first, second = Training("sgd"), Training("adamw")
    objects = {"first": first.model, "second": second.model}
    for training in (first, second):
        training.step()
    expected = take_snapshot(objects)
    with background_saver(tmp_path) as saver:
        saver.save(snapshot_tree(objects), step=1, optimizers=[first.optimizer, second.optimizer])
        second.optimizer.step()
        first.optimizer.step()
        late.go.set()
    assert same(load_state(tmp_path), expected)


def test_an_optimizer_is_hooked_once_and_let_go_of(tmp_path):
    training = Training("sgd")
    training.step()
    with background_saver(tmp_path) as saver:
        for number in range(5):
            saver.save(snapshot_tree(training.objects), step=number, optimizers=[training.optimizer])
            saver.wait()
        assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    assert not training.optimizer._optimizer_step_pre_hooks
    training.step()


def test_a_waiting_save_needs_no_fence(tmp_path, late):
    training = Training("sgd")
    training.step()
    with background_saver(tmp_path) as saver:
        assert saver.save(snapshot_tree(training.objects), step=1, optimizers=[training.optimizer], wait=True)
    assert same(load_state(tmp_path), take_snapshot(training.objects))


def test_an_interrupt_in_the_middle_of_a_copy_loses_nothing():
    source, copy = torch.arange(3_000_000.0), torch.empty(3_000_000)
    other, another = torch.ones(2000), torch.empty(2000)
    copies = DeferredCopies(["a", "b"], [(source, copy), (other, another)])

    class Interrupted(Exception):
        pass

    piece, calls = copies._copy_piece, []

    def interrupted(*pair):
        piece(*pair)
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted

    copies._copy_piece = interrupted
    with pytest.raises(Interrupted):
        copies.finish()
    assert not copies.done
    assert copies.finish() == ()
    assert torch.equal(copy, source)
    assert torch.equal(another, other)


def test_nan_is_no_change():
    source = torch.full((5000,), float("nan"))
    copies = DeferredCopies(["a"], [(source, torch.empty(5000))])
    assert copies.finish() == ()


def test_two_threads_share_the_work_and_both_return_when_it_is_done():
    sources = [torch.randn(1_500_000) for _ in range(8)]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    copies = DeferredCopies([str(number) for number in range(8)], pairs)
    seen = []

    def finish():
        copies.finish()
        seen.append(all(torch.equal(source, copy) for source, copy in pairs))

    threads = [threading.Thread(target=finish) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3


def test_memory_of_another_kind_is_never_deferred():
    weight = nn.Parameter(torch.zeros(100, 100))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    spans = spans_of([optimizer])
    assert is_deferrable(weight.detach(), spans)
    assert is_deferrable(weight.detach().t(), spans)
    assert not is_deferrable(weight.detach()[1:], spans)  # a part is not what the optimizer owns
    assert not is_deferrable(weight.detach()[:, ::2], spans)
    assert not is_deferrable(torch.zeros(100, 100), spans)
    assert not is_deferrable(torch.zeros(4, 4), frozenset())


def test_a_training_loop_that_saves_at_every_step_stores_each_of_them_exactly(tmp_path):
    training = Training("adamw-fused" if "adamw-fused" in OPTIMIZERS else "adamw")
    training.step()
    with background_saver(tmp_path, keep=1) as saver:
        for number in range(30):
            expected = take_snapshot(training.objects)
            assert saver.save(snapshot_tree(training.objects), step=number, optimizers=[training.optimizer])
            training.step()
            saver.wait()
            assert same(load_state(tmp_path), expected)


def test_the_failed_save_is_told_by_a_saver_that_is_closed(tmp_path, late, caplog):
    training = Training("sgd")
    training.step()
    saver = background_saver(tmp_path)
    saver.save(snapshot_tree(training.objects), step=1, optimizers=[training.optimizer])
    with torch.no_grad():
        training.model.conv.weight.zero_()
    late.go.set()
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match=r"conv\.weight was changed"):
        saver.close()
