import itertools
import warnings

import pytest
import torch
from torch import nn

from efficio_precision import autocast, backward, clip_grad_norm, make_scaler, step_optimizer

SGD = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
ADAMW = lambda p: torch.optim.AdamW(p, lr=0.1)  # noqa: E731


def fused(parameters):
    try:
        return torch.optim.AdamW(parameters, lr=0.1, fused=True)
    except RuntimeError:  # no fused optimizers on a CPU before torch 2.4
        pytest.skip("torch has fused optimizers for a CPU from version 2.4 on")


OPTIMIZERS = [pytest.param(SGD, id="sgd"), pytest.param(ADAMW, id="adamw"), pytest.param(fused, id="fused")]


def parameter(*values):
    return nn.Parameter(torch.tensor(values))


def test_clipping_acts_on_the_unscaled_gradient(scaler):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    backward((3 * p).sum(), scaler)
    norm = clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=scaler)
    assert step_optimizer(optimizer, scaler)
    assert norm.item() == 3.0
    assert abs(p.item() - -0.99999964) <= 1e-6


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_overflow_skips_the_step_and_halves_the_scale(fp16, make):
    p = parameter(1.0, 2.0)
    optimizer = make([p])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = make_scaler(fp16, init_scale=8.0)
    skipped = 0
    for factor in (float("inf"), 1.0):
        before = p.detach().clone()
        optimizer.zero_grad()
        backward(p.sum() * factor, scaler)
        stepped = step_optimizer(optimizer, scaler)
        scaler.update()
        if stepped:
            scheduler.step()
        skipped += not stepped
        assert stepped is (factor == 1.0)
        assert torch.equal(p, before) is not stepped
        assert scaler.get_scale() == 4.0
        assert scheduler.last_epoch == int(stepped)
        assert scheduler.get_last_lr() == [0.05 if stepped else 0.1]
    assert skipped == 1


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_overflow_found_by_clipping_skips_the_step_too(scaler, make):
    p = parameter(1.0)
    optimizer = make([p])
    backward((p * float("nan")).sum(), scaler)
    assert not clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=scaler).isfinite()
    assert step_optimizer(optimizer, scaler) is False
    scaler.update()
    assert (p.item(), scaler.get_scale()) == (1.0, 512.0)


def groups(batches, size):
    """Cut batches into accumulation groups, the last one shorter."""
    batches = iter(batches)
    return iter(lambda: list(itertools.islice(batches, size)), [])


def run_accumulated(scaler, *, batches, accumulate, max_norm):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for _ in range(2):
        for group in groups(torch.randn(batches, 8, 4).unbind(), accumulate):
            optimizer.zero_grad()
            for x in group:
                backward(model(x).square().mean(), scaler, scale=1 / len(group))
            norms.append(clip_grad_norm(model.parameters(), max_norm, optimizer=optimizer, scaler=scaler))
            assert step_optimizer(optimizer, scaler)
            scaler.update()
    return model.weight.detach(), torch.stack(norms)


@pytest.mark.parametrize(("batches", "accumulate"), [(6, 4), (2, 4), (4, 1)])
def test_clipping_once_a_group_gives_the_weights_of_the_run_without_scaler(
    scaler, no_scaler, batches, accumulate
):
    weight, norms = run_accumulated(scaler, batches=batches, accumulate=accumulate, max_norm=0.5)
    expected, expected_norms = run_accumulated(
        no_scaler, batches=batches, accumulate=accumulate, max_norm=0.5
    )
    assert (weight - expected).abs().max() <= 1e-6
    assert (norms - expected_norms).abs().max() <= 1e-6
    assert len(norms) == 2 * -(-batches // accumulate)


def test_clipping_after_each_backward_of_a_group_is_what_it_is_without_scaler(scaler, no_scaler):
    def run(scaler):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                backward(model(torch.randn(8, 4)).square().mean(), scaler)
                clip_grad_norm(model.parameters(), 0.5, optimizer=optimizer, scaler=scaler)
            assert step_optimizer(optimizer, scaler)
            scaler.update()
        return model.weight.detach()

    assert (run(scaler) - run(no_scaler)).abs().max() <= 1e-6


def test_a_second_clip_in_a_step_returns_the_norm_that_is_left(scaler):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    backward((3 * p).sum(), scaler)
    clip_grad_norm(p, 1.0, optimizer=optimizer, scaler=scaler)
    assert abs(clip_grad_norm(p, 1.0, optimizer=optimizer, scaler=scaler).item() - 1.0) < 1e-6
    assert step_optimizer(optimizer, scaler)


def test_sparse_gradients_survive_a_backward_after_a_clip(scaler, no_scaler):
    def run(scaler):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        for index in (1, 3):
            backward(table(torch.tensor([index])).sum(), scaler)
            if scaler.is_enabled():
                scaler.unscale_(optimizer)
        assert step_optimizer(optimizer, scaler)
        return table.weight.detach()

    assert torch.equal(run(scaler), run(no_scaler))


def test_clipping_before_any_backward_says_to_call_backward(scaler, fp16, no_scaler):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    resumed = make_scaler(fp16)
    resumed.load_state_dict(scaler.state_dict())
    with pytest.raises(RuntimeError, match=r"call backward\(loss, scaler\) first"):
        clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=resumed)
    assert clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=no_scaler).item() == 0.0


def test_clipping_several_optimizers_unscales_each_and_takes_one_norm(scaler):
    one, two = parameter(0.0), parameter(0.0)
    optimizers = torch.optim.SGD([one], lr=1.0), torch.optim.AdamW([two], lr=1.0)
    backward((3 * one + 4 * two).sum(), scaler)
    assert clip_grad_norm([one, two], 1.0, optimizer=optimizers, scaler=scaler).item() == 5.0
    assert [step_optimizer(each, scaler) for each in optimizers] == [True, True]
    assert abs(one.item() - -0.6) < 1e-6


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_that_is_none_is_an_error(no_scaler, max_norm):
    p = parameter(0.0)
    with pytest.raises(ValueError, match=r"max_norm=.* is not a norm"):
        clip_grad_norm([p], max_norm, optimizer=torch.optim.SGD([p], lr=1.0), scaler=no_scaler)


def test_sparse_gradients_are_clipped_beside_dense_ones(no_scaler):
    table, p = nn.Embedding(4, 1, sparse=True), parameter(0.0)
    optimizer = torch.optim.SGD([table.weight, p], lr=1.0)
    (table(torch.tensor([2, 2, 2])).sum() + 4 * p.sum()).backward()
    norm = clip_grad_norm([table.weight, p], 1.0, optimizer=optimizer, scaler=no_scaler)
    assert norm.item() == 5.0
    assert (table.weight.grad.to_dense()[2].item(), p.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-5)


def test_clipping_an_empty_generator_does_not_warn(no_scaler):
    optimizer = torch.optim.SGD([parameter(0.0)], lr=1.0)
    assert clip_grad_norm((p for p in ()), 1.0, optimizer=optimizer, scaler=no_scaler).item() == 0.0


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("scaled", [True, False], ids=["scaler", "no-scaler"])
def test_a_step_without_any_gradient_is_true_and_changes_nothing(scaler, no_scaler, make, scaled):
    scaler = scaler if scaled else no_scaler
    used, unused = parameter(1.0), parameter(2.0)
    optimizer, other = make([used]), make([unused])
    for _ in range(2):
        optimizer.zero_grad()
        backward(used.sum(), scaler)
        clip_grad_norm([used, unused], 1.0, optimizer=[optimizer, other], scaler=scaler)
        assert step_optimizer(optimizer, scaler)
        assert step_optimizer(other, scaler)
        scaler.update()
    assert unused.item() == 2.0
    assert used.item() < 1.0


def test_no_gradient_anywhere_and_no_backward_is_no_error(scaler):
    optimizer = torch.optim.SGD([parameter(1.0)], lr=1.0)
    assert step_optimizer(optimizer, scaler)
    scaler.update()
    assert scaler.get_scale() == 1024.0


def reference_step(loss_terms, optimizers, parameters, scaler, max_norm):
    """The order that torch's documentation gives, written out."""
    for loss in loss_terms:
        scaler.scale(loss).backward()
    if max_norm is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, max_norm)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def our_step(loss_terms, optimizers, parameters, scaler, max_norm):
    for loss in loss_terms:
        backward(loss, scaler)
    if max_norm is not None:
        clip_grad_norm(parameters, max_norm, optimizer=optimizers, scaler=scaler)
    for optimizer in optimizers:
        step_optimizer(optimizer, scaler)
    scaler.update()


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("scaled", [True, False], ids=["scaler", "no-scaler"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("losses", [1, 3])
@pytest.mark.parametrize("split", [False, True], ids=["one-optimizer", "two-optimizers"])
def test_weights_are_bitwise_those_of_the_hand_written_step(
    fp16, no_scaler, make, scaled, max_norm, losses, split
):
    def run(step, scaler):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        parts = (
            [list(model[0].parameters()), list(model[2].parameters())]
            if split
            else [list(model.parameters())]
        )
        optimizers = [make(part) for part in parts]
        for turn in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            factor = float("inf") if turn == 2 and scaled else 1.0
            terms = [model(torch.randn(8, 4)).square().mean() * factor / losses for _ in range(losses)]
            step(terms, optimizers, list(model.parameters()), scaler, max_norm)
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale()

    ours = make_scaler(fp16, growth_interval=2) if scaled else no_scaler
    theirs = torch.amp.GradScaler("cpu", growth_interval=2, enabled=scaled)
    weights, scale = run(our_step, ours)
    expected, expected_scale = run(reference_step, theirs)
    assert all(torch.equal(one, two) for one, two in zip(weights, expected, strict=True))
    assert scale == expected_scale


def test_clipping_one_optimizer_before_the_other_ones_backward_is_exact(fp16):
    def run(scaler, late):
        torch.manual_seed(0)
        one, two = nn.Linear(4, 2), nn.Linear(4, 2)
        first, second = ADAMW(one.parameters()), ADAMW(two.parameters())
        for _ in range(4):
            first.zero_grad(), second.zero_grad()
            x = torch.randn(8, 4)
            backward(one(x).square().mean(), scaler)
            if not late:
                clip_grad_norm(one.parameters(), 0.1, optimizer=first, scaler=scaler)
            backward(two(x).square().mean(), scaler)
            if late:
                clip_grad_norm(one.parameters(), 0.1, optimizer=first, scaler=scaler)
            clip_grad_norm(two.parameters(), 0.1, optimizer=second, scaler=scaler)
            assert step_optimizer(first, scaler)
            assert step_optimizer(second, scaler)
            scaler.update()
        return one.weight.detach()

    assert torch.equal(run(make_scaler(fp16), late=False), run(make_scaler(fp16), late=True))


def test_an_overflow_of_one_optimizer_halves_the_scale_though_the_other_one_follows(scaler):
    one, two = parameter(1.0), parameter(1.0)
    first, second = SGD([one]), SGD([two])
    backward((one * float("inf")).sum(), scaler)
    clip_grad_norm([one], 1.0, optimizer=first, scaler=scaler)
    assert step_optimizer(first, scaler) is False
    backward(two.sum(), scaler)
    assert step_optimizer(second, scaler) is True
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_a_step_left_out_by_hand_after_a_clip_disturbs_nothing(scaler):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    for zero in (True, False):
        optimizer.zero_grad()
        backward((3 * p).sum(), scaler)
        clip_grad_norm([p], float("inf"), optimizer=optimizer, scaler=scaler)
        scaler.update()
        if zero:
            optimizer.zero_grad()
        backward((3 * p).sum(), scaler)
        norm = clip_grad_norm([p], float("inf"), optimizer=optimizer, scaler=scaler)
        assert norm.item() == (3.0 if zero else 6.0)
        assert step_optimizer(optimizer, scaler)
        scaler.update()


def test_scaling_the_loss_is_done_only_where_the_scale_is_not_one(no_scaler):
    p = parameter(2.0)
    backward((p * p).sum(), no_scaler, scale=0.25)
    assert p.grad.item() == 1.0
    loss = (p * p).sum()
    backward(loss, no_scaler)
    assert p.grad.item() == 5.0


def test_a_closure_works_without_scaler_and_is_refused_with_one(scaler, no_scaler):
    p = parameter(3.0)
    optimizer = torch.optim.LBFGS([p], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        backward(loss, no_scaler)
        return loss

    assert step_optimizer(optimizer, no_scaler, closure)
    assert abs(p.item()) < 0.1
    before = p.item()
    with pytest.raises(
        RuntimeError, match=r"closure cannot be used with loss scaling; train in 'fp32' or 'bf16'"
    ):
        step_optimizer(optimizer, scaler, closure)
    assert p.item() == before


class Wrapper:
    """An optimizer that is none of torch's and calls no hooks, as other libraries wrap them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= p.grad


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_an_optimizer_without_hooks_still_tells_whether_it_stepped(scaler, factor):
    p = parameter(1.0)
    optimizer = Wrapper(torch.optim.SGD([p], lr=1.0))
    backward((p * factor).sum(), scaler)
    assert step_optimizer(optimizer, scaler) is (factor == 1.0)
    assert p.item() == (0.0 if factor == 1.0 else 1.0)


def test_no_hook_stays_on_the_optimizer(scaler):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    backward(p.sum(), scaler)
    step_optimizer(optimizer, scaler)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert calls == [1]

    def broken(*_):
        raise ZeroDivisionError

    optimizer.register_step_pre_hook(broken)
    scaler.update()
    with pytest.raises(ZeroDivisionError):
        step_optimizer(optimizer, scaler)
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_a_group_dropped_after_a_failed_step_can_be_done_again(scaler):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    handle = optimizer.register_step_pre_hook(
        lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("simulated"))
    )
    backward((3 * p).sum(), scaler)
    clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=scaler)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        step_optimizer(optimizer, scaler)
    handle.remove()
    optimizer.zero_grad()
    backward((3 * p).sum(), scaler)
    assert clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=scaler).item() == 3.0
    assert step_optimizer(optimizer, scaler)
    assert abs(p.item() - -0.99999964) <= 1e-6


@pytest.mark.skipif(
    not hasattr(torch.amp, "GradScaler"), reason="torch scales losses on a CPU from version 2.3 on"
)
def test_torchs_own_scaler_can_be_given_too():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, stepped in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        backward((p * factor).sum(), scaler)
        clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=scaler)
        assert step_optimizer(optimizer, scaler) is stepped
        scaler.update()


def test_a_whole_loop_on_a_cpu_gives_no_warning(fp32):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = make_scaler(fp32)
        for _ in range(3):
            optimizer.zero_grad()
            with autocast(fp32):
                output = model(torch.randn(2, 4))
            assert output.dtype is torch.float32
            backward(output.square().mean(), scaler)
            clip_grad_norm(model.parameters(), 1.0, optimizer=optimizer, scaler=scaler)
            assert step_optimizer(optimizer, scaler)
            scaler.update()
            scheduler.step()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fused_optimizer", [False, True])
def test_a_real_fp16_step_has_the_synchronisations_of_gradscaler_and_one_read_if_fused(fused_optimizer):
    from efficio_precision import precision_policy

    policy = precision_policy("cuda", "fp16")
    scaler = make_scaler(policy)
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused_optimizer, foreach=not fused_optimizer)
    x = torch.randn(8, 64, device="cuda")

    def step():
        optimizer.zero_grad()
        with autocast(policy):
            loss = model(x).float().square().mean()
        backward(loss, scaler)
        clip_grad_norm(model.parameters(), 1.0, optimizer=optimizer, scaler=scaler)
        stepped = step_optimizer(optimizer, scaler)
        scaler.update()
        return stepped

    assert step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # One item() either way: GradScaler's own for ordinary optimizers, ours for fused ones.
    assert len([each for each in caught if "synchroniz" in str(each.message)]) == 1


@pytest.mark.gpu
@needs_gpu
def test_clipping_has_the_exact_value_on_a_gpu():
    from efficio_precision import precision_policy

    scaler = make_scaler(precision_policy("cuda", "fp16"), init_scale=1024.0)
    p = nn.Parameter(torch.zeros(1, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    backward((3 * p).sum(), scaler)
    assert clip_grad_norm([p], 1.0, optimizer=optimizer, scaler=scaler).item() == 3.0
    assert step_optimizer(optimizer, scaler)
    assert abs(p.item() - -0.99999964) <= 1e-6
