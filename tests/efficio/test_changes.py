import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

from efficio._changes import Changes


def watching(*things):
    changes = Changes()
    changes.watch({str(number): thing for number, thing in enumerate(things)})
    changes.settle()
    return changes


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_of_an_optimizer_is_seen_until_it_is_settled(kind, fused):
    try:
        optimizer = kind(nn.Linear(2, 2).parameters(), 0.1, **({"fused": True} if fused else {}))
    except (RuntimeError, TypeError):  # TypeError: torch 2.0 has no fused SGD at all
        pytest.skip(f"torch {torch.__version__} has no fused {kind.__name__} on the CPU")
    changes = watching(optimizer)
    assert not changes.seen
    stepped(optimizer)
    assert changes.seen
    changes.settle()
    assert not changes.seen


def test_a_step_that_raises_half_way_is_seen():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].data.zero_()
            raise ZeroDivisionError

    optimizer = Broken(nn.Linear(2, 2).parameters(), 0.1)
    changes = watching(optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert changes.seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(3),
        lambda: nn.BatchNorm1d(3, momentum=None),
        lambda: nn.SyncBatchNorm(3) if torch.cuda.is_available() else nn.BatchNorm1d(3),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))),
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    ],
    ids=["BatchNorm", "cumulative", "SyncBatchNorm", "nested", "spectral norm"],
)
def test_statistics_are_seen_to_move_in_training_and_to_rest_in_evaluation(make):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make().to(device)
    changes = watching(model)
    model.eval()
    model(torch.randn(4, 3, device=device))
    assert not changes.seen
    model.train()
    model(torch.randn(4, 3, device=device))
    assert changes.seen


def test_a_part_that_is_called_by_itself_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    changes = watching(model)
    model[1](torch.randn(4, 3))
    assert changes.seen


@pytest.mark.filterwarnings("ignore:input's size at dim")
def test_statistics_of_an_instance_norm_are_seen_to_move():
    model = nn.InstanceNorm1d(3, track_running_stats=True)
    changes = watching(model)
    before = model.running_mean.clone()
    model(torch.randn(4, 3, 5))
    assert not torch.equal(model.running_mean, before)
    assert changes.seen


def test_a_model_without_buffers_moves_with_its_optimizer_only():
    model = nn.Linear(2, 2)
    changes = watching(model)
    model(torch.ones(1, 2)).sum().backward()
    assert not changes.seen


class Codebook(nn.Module):
    """Keeps its statistics as VQ-VAEs do, where no version counter moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.zeros(3))

    def forward(self, x):
        self.sizes.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x


def test_statistics_that_are_written_past_the_counters_are_seen():
    model = nn.Sequential(nn.Linear(3, 3), Codebook())
    changes = watching(model)
    model(torch.randn(4, 3))
    assert changes.seen


class Average(nn.Module):
    """An average of weights, without a buffer that counts."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)


def test_an_average_of_weights_without_buffers_is_seen_to_move():
    model = nn.Linear(3, 3)
    average = Average(model)
    changes = watching(model, average, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.randn(4, 3)).sum().backward()
    assert not changes.seen
    average.update(model)
    assert changes.seen


def test_a_buffer_that_is_loaded_or_written_is_seen():
    model = nn.BatchNorm1d(3)
    changes = watching(model)
    model.load_state_dict(model.state_dict())
    assert changes.seen


@pytest.mark.parametrize(
    "make",
    [lambda o: schedules.StepLR(o, 1), schedules.ReduceLROnPlateau],
    ids=["StepLR", "ReduceLROnPlateau"],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_step_of_a_scheduler_is_seen(make):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    scheduler = make(optimizer)
    changes = watching(optimizer, scheduler)
    assert not changes.seen
    scheduler.step(1.0) if isinstance(scheduler, schedules.ReduceLROnPlateau) else scheduler.step()
    assert changes.seen


def test_averaged_weights_are_seen_to_move():
    model = nn.Linear(2, 2)
    averaged = AveragedModel(model)
    changes = watching(model, averaged)
    assert not changes.seen
    averaged.update_parameters(model)
    assert changes.seen


def test_an_object_that_gives_no_sign_may_always_have_moved():
    class Opaque:
        pass

    model, opaque = nn.Linear(1, 1), Opaque()
    changes = watching(model)
    assert changes.is_certain
    assert not changes.possible
    changes.watch({"model": model, "thing": opaque})
    changes.settle()
    assert not changes.is_certain
    assert changes.possible
    assert not changes.seen


def test_a_buffer_that_no_checkpoint_holds_is_not_watched():
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.ones(3), persistent=False)
    changes = watching(model)
    model(torch.randn(4, 3))
    assert not changes.seen


def test_the_runs_own_objects_need_no_sign():
    changes = Changes()
    changes.watch({"@scaler": object()})
    assert changes.is_certain


def test_what_is_watched_again_is_watched_once():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    changes = watching(optimizer)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    changes.watch({"other name": optimizer})
    assert len(optimizer._optimizer_step_pre_hooks) == hooks


def test_after_unwatch_nothing_is_seen_and_the_hooks_are_gone():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    changes = watching(model, optimizer)
    changes.unwatch()
    changes.settle()
    model(torch.randn(4, 3))
    stepped(optimizer)
    assert not changes.seen


def test_neither_a_model_nor_an_optimizer_keeps_the_watcher_alive():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    changes = watching(model, optimizer)
    changes.unwatch()
    kept = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert kept() is None
