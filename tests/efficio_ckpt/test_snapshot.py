"""States of live objects: by name, checked before anything is touched, never aliased."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from efficio_ckpt import CheckpointError, load_state, put_snapshot, save_state, snapshot_tree, take_snapshot


def train(model, optimizer, steps, *, seed=0, scheduler=None):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 3, 6, 6, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def conv_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adam-capturable-lr-tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_goes_on_bit_for_bit_from_a_stored_snapshot(make, tmp_path):
    model = conv_net()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    save_state(tmp_path, take_snapshot({"model": model, "optimizer": optimizer}), step=3)
    train(model, optimizer, 3, seed=1)

    fresh = conv_net(seed=9)
    fresh_optimizer = make(fresh.parameters())
    put_snapshot(load_state(tmp_path), {"model": fresh, "optimizer": fresh_optimizer})
    train(fresh, fresh_optimizer, 3, seed=1)

    for (name, a), b in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_lbfgs_goes_on_bit_for_bit(tmp_path):
    def go(weight, optimizer, steps):
        for _ in range(steps):

            def closure():
                optimizer.zero_grad()
                loss = (weight**4).sum() + weight[0] * weight[1]
                loss.backward()
                return loss

            optimizer.step(closure)

    flat = nn.ParameterList([nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))])
    optimizer = torch.optim.LBFGS(flat.parameters(), max_iter=2)
    go(flat[0], optimizer, 3)
    save_state(tmp_path, take_snapshot({"m": flat, "o": optimizer}), step=1)
    go(flat[0], optimizer, 2)
    other = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    again = torch.optim.LBFGS(other.parameters(), max_iter=2)
    put_snapshot(load_state(tmp_path), {"m": other, "o": again})
    go(other[0], again, 2)
    assert torch.equal(flat[0], other[0])


def test_a_snapshot_does_not_change_with_training_nor_training_with_it():
    model = conv_net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    snapshot = take_snapshot({"model": model, "optimizer": optimizer})
    kept = copy.deepcopy(snapshot)
    put_snapshot(snapshot, {"model": model, "optimizer": optimizer})
    train(model, optimizer, 2)
    assert torch.equal(snapshot["model"]["0.weight"], kept["model"]["0.weight"])
    for name, state in kept["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(snapshot["optimizer"]["state"][name][key], value), (name, key)


def test_optimizer_state_follows_the_name_of_its_parameter_not_its_place():
    def build(order):
        module = nn.Module()
        module.a, module.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        return module, torch.optim.Adam([getattr(module, name) for name in order])

    module, optimizer = build("ab")
    module.a.grad, module.b.grad = torch.full((3,), 1.0), torch.full((3,), 5.0)
    optimizer.step()
    snapshot = take_snapshot({"m": module, "o": optimizer})
    other, swapped = build("ba")
    placed = put_snapshot(snapshot, {"m": other, "o": swapped})
    assert swapped.state[other.a]["exp_avg"][0] == torch.tensor(0.1)
    assert swapped.state[other.b]["exp_avg"][0] == torch.tensor(0.5)
    assert placed.by_place == ()


def test_an_optimizer_can_be_restored_after_its_model():
    model = conv_net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    snapshot = take_snapshot({"model": model, "optimizer": optimizer})
    fresh = torch.optim.Adam(list(model.parameters())[::-1])
    weight = model[0].weight.clone()
    with pytest.raises(CheckpointError, match="does not fit"):
        put_snapshot(snapshot, {"optimizer": fresh})
    with torch.no_grad():
        model[0].weight.add_(1)
    placed = put_snapshot(snapshot, {"optimizer": fresh}, beside={"model": model})
    assert (placed.restored, placed.unused) == (("optimizer",), ("model",))
    assert torch.equal(fresh.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert torch.equal(model[0].weight, weight + 1)


def test_names_given_to_an_optimizer_are_used_for_parameters_outside_modules():
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    try:
        optimizer = torch.optim.Adam([("a", a), ("b", b)])
    except TypeError:
        pytest.skip(f"torch {torch.__version__} takes no named parameters")
    a.grad, b.grad = torch.full((3,), 1.0), torch.full((3,), 5.0)
    optimizer.step()
    snapshot = take_snapshot({"o": optimizer})
    swapped = torch.optim.Adam([("b", b), ("a", a)])
    put_snapshot(snapshot, {"o": swapped})
    assert swapped.state[a]["exp_avg"][0] == torch.tensor(0.1)


def test_parameters_outside_all_modules_come_back_with_their_values_and_are_told():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    snapshot = take_snapshot({"optimizer": optimizer})
    other = nn.Parameter(torch.zeros(2))
    placed = put_snapshot(snapshot, {"optimizer": torch.optim.SGD([other], lr=0.5)})
    assert torch.equal(other, weight)
    assert placed.by_place == ("optimizer: @0.0",)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_training_after_a_load_does_not_count_the_steps_of_the_snapshot(device):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    snapshot = take_snapshot({"o": optimizer})
    elsewhere = nn.Linear(
        2, 2, device=device
    )  # torch keeps the counters on the CPU, wherever the parameters are
    fresh = torch.optim.AdamW(elsewhere.parameters())
    put_snapshot(snapshot, {"o": fresh})
    for state in fresh.state.values():
        state["step"] += 1
    assert [float(state["step"]) for state in snapshot["o"]["state"].values()] == [3.0, 3.0]


@pytest.mark.parametrize("step", [7, torch.tensor(7.0)], ids=["int", "tensor"])
def test_step_counters_become_what_adam_expects(step):
    layer = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    snapshot = take_snapshot({"m": layer, "o": optimizer})
    for state in snapshot["o"]["state"].values():
        state["step"] = step
    fresh = torch.optim.Adam(layer.parameters())
    put_snapshot(snapshot, {"m": layer, "o": fresh})
    for state in fresh.state.values():
        assert state["step"].device.type == "cpu"
        assert state["step"].dtype == torch.float32
        assert float(state["step"]) == 7.0
        assert state["exp_avg"].dtype == torch.bfloat16


def test_state_in_another_dtype_than_its_parameter_keeps_its_bits():
    class Wide(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"] = torch.full(parameter.shape, 1 / 3, dtype=torch.float32)

    layer = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = Wide(layer.parameters())
    optimizer.step()
    fresh = Wide(layer.parameters())
    put_snapshot(take_snapshot({"m": layer, "o": optimizer}), {"m": layer, "o": fresh})
    assert torch.equal(fresh.state[layer.weight]["sum"], torch.full((2, 2), 1 / 3))


def test_learning_rate_is_the_stored_one_although_a_new_scheduler_wrote_into_the_optimizer():
    def build():
        layer = nn.Linear(1, 1)
        return layer, torch.optim.SGD(layer.parameters(), lr=1.0)

    layer, optimizer = build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1**epoch)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    snapshot = take_snapshot({"m": layer, "o": optimizer, "s": scheduler})
    other, again = build()
    put_snapshot(snapshot, {"m": other, "o": again})
    late = torch.optim.lr_scheduler.LambdaLR(again, lambda epoch: 0.1**epoch)
    put_snapshot(snapshot, {"m": other, "o": again, "s": late})
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == late.get_last_lr()[0]
    assert again.param_groups[0]["lr"] == 0.1**2


def test_optimizers_come_last_whatever_other_objects_write_into_them():
    class Meddler:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            optimizer.param_groups[0]["lr"] = 9.0

    class Eager(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.optimizer.param_groups[0]["lr"] = 9.0

    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.25)
    objects = {"o": optimizer, "s": Eager(optimizer, 5), "x": Meddler(), "l": layer}
    placed = put_snapshot(take_snapshot(objects), objects)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert placed.restored == ("l", "x", "s", "o")


def test_one_cycle_keeps_learning_rate_and_momentum():
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    for _ in range(4):
        optimizer.step()
        cycle.step()
    snapshot = take_snapshot({"o": optimizer, "s": cycle})
    again = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    late = torch.optim.lr_scheduler.OneCycleLR(again, max_lr=1.0, total_steps=10)
    put_snapshot(snapshot, {"o": again, "s": late})
    assert again.param_groups[0]["lr"] == 0.8117456539497631
    assert again.param_groups[0]["momentum"] == 0.8688255099070633


@pytest.mark.parametrize("target", ["plain", "compiled", "parallel", "both"])
@pytest.mark.parametrize("source", ["plain", "compiled", "parallel", "both"])
def test_wrapped_and_plain_modules_share_their_names(source, target):
    wrap = {
        "plain": lambda m: m,
        "compiled": lambda m: torch.compile(m, backend="eager"),
        "parallel": nn.DataParallel,
        "both": lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
    }
    saved, other = nn.Linear(2, 2), nn.Linear(2, 2)
    snapshot = take_snapshot({"model": wrap[source](saved)})
    assert set(snapshot["model"]) == {"weight", "bias"}
    put_snapshot(snapshot, {"model": wrap[target](other)})
    assert torch.equal(saved.weight, other.weight)


def test_a_child_that_is_really_named_module_keeps_its_name():
    holder = nn.Module()
    holder.module = nn.Linear(2, 2)
    assert set(take_snapshot({"m": holder})["m"]) == {"module.weight", "module.bias"}


def test_a_wrapped_part_of_a_model_has_clean_names():
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = take_snapshot({"m": model, "o": optimizer})
    assert set(snapshot["m"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert snapshot["o"]["param_groups"][0]["params"] == ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"]


def test_tied_weights_stay_tied_and_are_stored_once():
    def build():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = build()
    F.cross_entropy(model(torch.tensor([1])), torch.tensor([2])).backward()
    optimizer.step()
    snapshot = take_snapshot({"m": model, "o": optimizer})
    assert snapshot["m"]["0.weight"].data_ptr() == snapshot["m"]["1.weight"].data_ptr()
    other, again = build()
    put_snapshot(snapshot, {"m": other, "o": again})
    assert other[0].weight is other[1].weight
    assert torch.equal(other[0].weight, model[0].weight)


def test_channels_last_is_kept_in_the_live_module_and_loads_into_a_plain_one(tmp_path):
    fast = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    save_state(tmp_path, take_snapshot({"m": fast}), step=0)
    plain, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    for module in (plain, other):
        put_snapshot(load_state(tmp_path), {"m": module})
        assert torch.equal(module.weight, fast.weight)
    assert plain.weight.is_contiguous()
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def test_batch_norm_averages_go_on():
    def build():
        return nn.BatchNorm1d(2, momentum=None)

    norm = build()
    for value in range(4):
        norm(torch.full((2, 2), float(value)))
    other = build()
    put_snapshot(take_snapshot({"n": norm}), {"n": other})
    for module in (norm, other):
        module(torch.full((2, 2), 9.0))
    assert torch.equal(norm.running_mean, other.running_mean)
    assert int(other.num_batches_tracked) == 5


@pytest.mark.skipif(
    not hasattr(torch.amp, "GradScaler"), reason="torch scales losses on a CPU from version 2.3 on"
)
def test_grad_scaler_goes_on_and_an_empty_state_leaves_it_alone():
    def scaler(**options):
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, **options)

    first = scaler()
    first.scale(torch.zeros(1))
    first.load_state_dict({**first.state_dict(), "scale": 1024.0, "_growth_tracker": 1})
    other = scaler()
    put_snapshot(take_snapshot({"s": first}), {"s": other})
    assert other.get_scale() == 1024.0
    fresh = scaler()
    put_snapshot(take_snapshot({"s": scaler(enabled=False)}), {"s": fresh})
    assert fresh.get_scale() == 256.0


MISFITS = {
    "missing key": lambda s: s["model"].pop("0.weight"),
    "unexpected key": lambda s: s["model"].update(extra=torch.zeros(1)),
    "shape": lambda s: s["model"].update({"0.weight": torch.zeros(1)}),
    "optimizer type": lambda s: s["optimizer"].update(optimizer="SGD"),
    "number of groups": lambda s: s["optimizer"]["param_groups"].append({"params": []}),
    "parameter name": lambda s: s["optimizer"]["param_groups"][0]["params"].__setitem__(0, "model.gone"),
    "missing parameter": lambda s: s["optimizer"]["param_groups"][0]["params"].pop(),
    "scheduler type": lambda s: s["scheduler"].update(scheduler="CosineAnnealingLR"),
    "no optimizer state": lambda s: s.update(optimizer=3),
    "no module state": lambda s: s.update(model=[1]),
    "no scheduler state": lambda s: s.update(scheduler=None),
}


@pytest.mark.parametrize("spoil", MISFITS.values(), ids=MISFITS.keys())
def test_what_does_not_fit_is_told_before_anything_is_touched(spoil):
    model = conv_net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    snapshot = take_snapshot(objects)
    for value in snapshot["model"].values():
        value.zero_()
    spoil(snapshot)
    before = take_snapshot(objects)
    with pytest.raises(CheckpointError, match="does not fit, and nothing was changed"):
        put_snapshot(snapshot, objects)
    after = take_snapshot(objects)
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])


def test_all_misfits_come_in_one_message():
    model, optimizer = nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = take_snapshot({"model": model, "optimizer": optimizer})
    wide = nn.Linear(3, 2)
    with pytest.raises(
        CheckpointError, match=r"model: weight is \(2, 3\) here and \(2, 2\).*optimizer: it is AdamW"
    ):
        put_snapshot(snapshot, {"model": wide, "optimizer": torch.optim.AdamW(wide.parameters())})


def test_names_on_one_side_only_are_left_alone_and_told():
    model, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    placed = put_snapshot(take_snapshot({"model": model, "old": ema}), {"model": model, "new": ema})
    assert (placed.restored, placed.left_alone, placed.unused) == (("model",), ("new",), ("old",))


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "callable object": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Decay()),
    "multiplicative": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=30),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, 3),
    "cyclic with a function": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 0.1, 1.0, 3, scale_fn=lambda n: 0.5**n
    ),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Decay:
    def __init__(self):
        self.calls = 0

    def __call__(self, n):
        self.calls += 1
        return 0.5**n


# SequentialLR of torch 2.0 warns of its own call
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedules_go_on_exactly(make, tmp_path):
    def build():
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9)
        return {"layer": layer, "optimizer": optimizer, "scheduler": make(optimizer)}

    def rates(objects, steps):
        seen = []
        for _ in range(steps):
            objects["optimizer"].step()
            objects["scheduler"].step()
            seen.append(
                (objects["optimizer"].param_groups[0]["lr"], objects["optimizer"].param_groups[0]["momentum"])
            )
        return seen

    straight, stopped = build(), build()
    expected = rates(straight, 10)
    assert rates(stopped, 4) == expected[:4]
    save_state(tmp_path, take_snapshot(stopped), step=4)
    again = build()
    put_snapshot(load_state(tmp_path), again)
    assert rates(again, 6) == expected[4:]


def test_a_plateau_scheduler_goes_on_exactly():
    def build():
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        return {
            "l": layer,
            "o": optimizer,
            "s": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        }

    first, again = build(), build()
    for loss in (1.0, 2.0):
        first["s"].step(loss)
    put_snapshot(take_snapshot(first), again)
    for objects in (first, again):
        objects["s"].step(3.0)
    assert first["o"].param_groups[0]["lr"] == again["o"].param_groups[0]["lr"] == 0.05


class Refusing:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise KeyError("b")


def test_an_object_that_refuses_its_state_is_named():
    model = nn.Linear(2, 2)
    snapshot = take_snapshot({"mine": Refusing(), "model": model})
    with pytest.raises(
        CheckpointError, match=r"mine \(Refusing\) refused its state.*loaded before it: model"
    ):
        put_snapshot(snapshot, {"mine": Refusing(), "model": model})


def test_what_cannot_be_stored_is_named_by_its_path():
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "hook": print}], lr=0.1)
    with pytest.raises(
        TypeError, match=r"optimizer\.param_groups\[0\]\.hook is a builtins\.builtin_function"
    ):
        take_snapshot({"layer": layer, "optimizer": optimizer})
    with pytest.raises(TypeError, match="thing is a int without state_dict"):
        snapshot_tree({"thing": 3})


def test_hyperparameters_that_only_the_newer_torch_has_keep_their_value():
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
    snapshot = take_snapshot({"layer": layer, "o": optimizer})
    del snapshot["o"]["param_groups"][0]["momentum"]
    other = torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.25)
    put_snapshot(snapshot, {"layer": layer, "o": other})
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.1, 0.25)


def test_a_module_of_another_dtype_is_a_misfit_and_not_rounded():
    tree = take_snapshot({"model": nn.Linear(2, 2)})
    halved = nn.Linear(2, 2).half()
    before = halved.weight.detach().clone()
    with pytest.raises(CheckpointError, match="weight is float16 here and float32 in the checkpoint"):
        put_snapshot(tree, {"model": halved})
    assert torch.equal(halved.weight, before)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4), reason="no fused optimizers on a CPU before"
)
def test_an_optimizer_keeps_computing_as_it_was_made_to():
    def step_of(fused):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    stored = take_snapshot(step_of(fused=None))
    objects = step_of(fused=True)
    put_snapshot(stored, objects)
    assert objects["optimizer"].param_groups[0]["fused"] is True
    objects["model"](torch.ones(1, 2)).sum().backward()
    objects["optimizer"].step()
    assert objects["optimizer"].state[objects["model"].weight]["step"] == 2
