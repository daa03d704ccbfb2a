"""What people do in a notebook: run a cell again after whatever ended it, and draw, plot and evaluate in between.

All of it happens in one process, and always ends with the run that was never stopped.
"""

import os
import random
import signal
import threading
from itertools import chain, count

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from training import (
    AUGMENT,
    BATCH,
    SAMPLES,
    Case,
    Clock,
    PlannedError,
    digest,
    images,
    loss_of,
    make_loader,
    make_model,
    make_objects,
    make_run,
    state,
)

import efficio
from efficio_ckpt import list_checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

BATCHES = -(-SAMPLES // BATCH)
CASE = Case(ema=True, interval="epoch", epochs=2)
AT = BATCHES + 7  # a body in mid-epoch

ENDS = [
    "finished",
    "sigint",
    "second-sigint",
    "before-forward",
    "before-step",
    "after-step",
    "after-average",
    "break",
    "loader",
]


@pytest.fixture(autouse=True)
def own_generators():
    """What these tests draw is no other test's business."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the uninterrupted run of a case ends with."""
    known = {}

    def of(case):
        if case not in known:
            notebook = Notebook(case, tmp_path_factory.mktemp("whole") / "run")
            notebook.cell()
            known[case] = notebook.state(), notebook.seen
        return known[case]

    return of


class Notebook:
    """Three cells: the objects, the run with `prepare`, and the loop."""

    def __init__(self, case, storage, **options):
        self.case, self.storage, self.options = case, storage, {"save_every": 1000, **options}
        self.bodies, self.seen = count(), []
        self.make()

    def make(self):
        self.objects = make_objects(self.case)
        self.loader = make_loader(self.case)

    def open(self):
        self.run = make_run(self.case, self.storage, **self.options)
        self.run.prepare(**self.objects)

    def loop(self, end=None, at=AT, epochs=None, **options):
        model, run = self.objects["model"], self.run
        loader = Faulty(self.loader, at) if end == "loader" else self.loader
        batches = run.loop(loader, epochs or self.case.epochs, gpu_transform=AUGMENT, **options)
        for number, (x, ids) in enumerate(batches):
            here = end if number == at else None
            if here == "before-forward":
                raise PlannedError
            if here in ("sigint", "second-sigint"):
                os.kill(os.getpid(), signal.SIGINT)
            loss = loss_of(model, x, ids)
            if here == "second-sigint":
                os.kill(os.getpid(), signal.SIGINT)
            run.backward(loss)
            if here == "before-step":
                raise PlannedError
            stepped = run.step()
            if here == "after-step":
                raise PlannedError
            if stepped and "ema" in self.objects:
                self.objects["ema"].update_parameters(model)
            if here == "after-average":
                raise PlannedError
            self.seen.append(ids.tolist())
            if here == "break":
                break

    def cell(self, end=None, **options):
        self.open()
        self.loop(end, **options)

    def state(self):
        return state(self.run, self.objects)


class Faulty:
    """A loader whose dataset fails at one batch, once."""

    def __init__(self, loader, at):
        self._loader, self._at = loader, at

    def with_seed(self, seed):
        return Faulty(self._loader.with_seed(seed), self._at)

    notes = ()

    def __len__(self):
        return len(self._loader)

    def iter_from(self, position):
        for batch, after in self._loader.iter_from(position):
            if after.epoch * SAMPLES + after.samples > self._at * BATCH:
                raise PlannedError
            yield batch, after


def ends(notebook, end, act):
    if end in ("sigint", "second-sigint"):
        with pytest.raises(KeyboardInterrupt):
            act(end)
    elif end in ("finished", "break"):
        act(end)
    else:
        with pytest.raises(PlannedError):
            act(end)


@pytest.mark.parametrize("anew", [True, False], ids=["objects-anew", "same-objects"])
@pytest.mark.parametrize("end", ENDS)
def test_running_the_whole_cell_again_goes_on_as_if_it_had_not_ended(end, anew, quick_path, whole):
    notebook = Notebook(CASE, quick_path / "run")
    ends(notebook, end, notebook.cell)
    if anew:
        notebook.make()

    notebook.cell()

    assert notebook.state() == whole(CASE)[0]
    assert notebook.run.finished


@pytest.mark.parametrize("save_every", [4, 1000], ids=["saved-often", "saved-never"])
@pytest.mark.parametrize("end", [end for end in ENDS if end != "finished"])
def test_running_the_cell_of_the_loop_again_goes_on_as_if_it_had_not_ended(
    end, save_every, quick_path, whole
):
    notebook = Notebook(CASE, quick_path / "run", save_every=save_every)
    notebook.open()
    ends(notebook, end, notebook.loop)

    notebook.loop()

    assert notebook.state() == whole(CASE)[0]
    assert notebook.run.finished


@pytest.mark.parametrize("whole_cell", [True, False], ids=["cell", "loop"])
@pytest.mark.parametrize("case", [Case(epochs=2), Case(epochs=2, accumulated=3)], ids=["step", "accumulated"])
def test_ending_again_and_again_in_one_process_is_the_run_that_was_never_stopped(
    case, whole_cell, quick_path, whole
):
    notebook = Notebook(case, quick_path / "run")
    notebook.open()
    for number, end in enumerate(end for end in ENDS if end != "finished" and "average" not in end):
        if whole_cell:
            notebook.make()
            notebook.open()
        at = 4 + number % 3
        if end != "loader":
            ends(notebook, end, lambda end, at=at: notebook.loop(end, at))

    notebook.loop()

    assert notebook.state() == whole(case)[0]


@pytest.mark.parametrize("anew", [True, False], ids=["objects-anew", "same-objects"])
def test_a_finished_run_gives_no_batch_and_leaves_the_checkpoint_as_it_is(anew, quick_path, capsys):
    notebook = Notebook(CASE, quick_path / "run")
    notebook.cell()
    ended, stored = notebook.state(), files(quick_path)
    seen = len(notebook.seen)
    if anew:
        notebook.make()

    notebook.cell()

    assert len(notebook.seen) == seen
    assert notebook.state() == ended
    assert files(quick_path) == stored
    assert "complete: 2 of 2 epochs are trained" in capsys.readouterr().out


def test_more_epochs_for_a_finished_run_train_exactly_those(quick_path, whole):
    case = Case(interval="epoch", epochs=3)
    notebook = Notebook(case, quick_path / "run")
    notebook.cell(epochs=2)
    assert len(notebook.seen) == 2 * BATCHES
    notebook.make()

    notebook.cell(epochs=3)

    assert (notebook.state(), notebook.seen) == whole(case)


def test_a_named_loop_that_is_finished_gives_nothing_when_only_its_cell_runs_again(quick_path):
    notebook = Notebook(CASE, quick_path / "run")
    notebook.cell(name="train")
    ended = notebook.state()

    notebook.loop(name="train")

    assert notebook.state() == ended


def test_the_epoch_after_a_resumed_one_has_an_order_of_its_own(quick_path, whole):
    case = Case(epochs=3)
    notebook = Notebook(case, quick_path / "run")
    ends(notebook, "sigint", lambda end: notebook.cell(end, at=5))
    notebook.make()

    notebook.cell()

    epochs = [notebook.seen[e * BATCHES : (e + 1) * BATCHES] for e in range(3)]
    assert notebook.seen == whole(case)[1]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_stop_by_sigterm_ends_the_cells_below_it_too_and_a_new_run_goes_on(quick_path, whole):
    notebook = Notebook(CASE, quick_path / "run")
    notebook.open()
    for number, (x, ids) in enumerate(notebook.run.loop(notebook.loader, 2, gpu_transform=AUGMENT)):
        train_step(notebook, x, ids)
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    assert notebook.run.stopped
    assert list(notebook.run.loop(notebook.loader, 2)) == []
    assert notebook.run.step_count == 4

    notebook.cell()

    assert notebook.state() == whole(CASE)[0]


def train_step(notebook, x, ids):
    notebook.run.backward(loss_of(notebook.objects["model"], x, ids))
    if notebook.run.step() and "ema" in notebook.objects:
        notebook.objects["ema"].update_parameters(notebook.objects["model"])


def pictures(model):
    """All images, where the model is."""
    return images().float().to(next(model.parameters()).device)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_thread(act):
    errors = []

    def guarded():
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_run_in_a_thread_is_the_same_run_and_says_that_signals_do_not_save(quick_path, whole, caplog):
    notebook = Notebook(CASE, quick_path / "run")
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    in_thread(notebook.cell)

    assert notebook.state() | {"generators": ""} == whole(CASE)[0] | {"generators": ""}
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    notes = [record for record in caplog.records if "not in the main thread" in record.message]
    assert len(notes) == 1


def test_the_budget_stops_a_run_in_a_thread(quick_path, whole):
    clock = Clock()
    notebook = Notebook(CASE, quick_path / "run", budget=100, margin=10, clock=clock)

    def first():
        notebook.open()
        for number, (x, ids) in enumerate(notebook.run.loop(notebook.loader, 2, gpu_transform=AUGMENT)):
            train_step(notebook, x, ids)
            clock.now += 100 if number == 5 else 1

    in_thread(first)
    assert notebook.run.stopped
    assert notebook.run.step_count == 6
    notebook.options.clear()
    notebook.cell()

    assert notebook.state() == whole(CASE)[0]


@pytest.fixture
def own_handler():
    """The user's handler of SIGTERM: what was in storage whenever it was called."""
    calls = []

    def handler(number, frame):
        calls.append([at.step for at in list_checkpoints(handler.storage)])

    before = signal.signal(signal.SIGTERM, handler)
    handler.calls = calls
    yield handler
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "at", [2, BATCHES - 1, 2 * BATCHES - 1], ids=["mid-epoch", "last-of-epoch", "last-of-all"]
)
def test_the_users_own_handler_is_called_once_after_the_save(at, own_handler, quick_path):
    own_handler.storage = quick_path / "run"
    notebook = Notebook(CASE, quick_path / "run")
    notebook.open()
    for number, (x, ids) in enumerate(notebook.run.loop(notebook.loader, 2)):
        if number == at:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(notebook, x, ids)

    assert len(own_handler.calls) == 1
    assert own_handler.calls[0][0] == at + 1
    assert signal.getsignal(signal.SIGTERM) is own_handler


@pytest.mark.parametrize("when", ["end-of-epoch", "end-of-all", "last-save"])
def test_a_signal_between_the_last_body_and_the_end_is_neither_lost_nor_costs_a_step(
    when, own_handler, quick_path
):
    """Workers that end, a scheduler and a save take their time after the last body; a signal in them counts."""
    own_handler.storage = quick_path / "run"
    case = Case(interval="epoch", epochs=2)
    notebook = Notebook(case, quick_path / "run")

    class Signalling(torch.optim.lr_scheduler.StepLR):
        def step(self, *given):
            super().step(*given)
            if self.last_epoch == {"end-of-epoch": 1, "end-of-all": 2}.get(when):
                os.kill(os.getpid(), signal.SIGTERM)

        def state_dict(self):
            if when == "last-save" and self.last_epoch == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().state_dict()

    notebook.objects["scheduler"] = Signalling(notebook.objects["optimizer"], 1, gamma=0.5)
    notebook.cell()

    assert own_handler.calls
    assert notebook.run.stopped
    steps = BATCHES if when == "end-of-epoch" else 2 * BATCHES
    assert notebook.run.step_count == steps
    assert next(at.step for at in list_checkpoints(quick_path / "run")) == steps
    if when != "last-save":  # where state_dict, and so the signal, may come twice
        assert own_handler.calls == [[steps, *own_handler.calls[0][1:]]]


def test_handlers_are_put_back_after_every_end(quick_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for end in ENDS:
        notebook = Notebook(Case(epochs=1), quick_path / end)
        notebook.open()
        ends(notebook, end, lambda end, notebook=notebook: notebook.loop(end, at=3))
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def disturb():
    """Draw from everything, as a plot or an own sampler does."""
    torch.rand(random.randrange(1, 50))
    np.random.rand(random.randrange(1, 50))
    random.random()


def test_draws_before_the_loop_move_nothing(quick_path, whole):
    notebook = Notebook(CASE, quick_path / "run")
    disturb()
    notebook.open()
    disturb()
    notebook.loop()

    assert (notebook.state(), notebook.seen) == whole(CASE)


@pytest.mark.parametrize("data", ["gpu", "loader"])
def test_evaluations_and_draws_between_bodies_move_nothing(data, quick_path, whole):
    case = Case(data=data, augment=True, epochs=2)
    notebook = Notebook(case, quick_path / "run")
    notebook.open()
    validation = DataLoader(TensorDataset(images().float()), 100, shuffle=True)
    for number, (x, ids) in enumerate(notebook.run.loop(notebook.loader, 2, gpu_transform=gpu(data))):
        train_step(notebook, x, ids)
        notebook.seen.append(ids.tolist())
        if number % 9 == 5:
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
            with notebook.run.evaluate_mode():
                disturb()
                for (batch,) in notebook.run.batches(validation):
                    notebook.objects["model"](batch)
            after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
            assert torch.equal(before[0], after[0])
            assert before[1:] == after[1:]
            if number < 2 * BATCHES - 9:  # the last draws would be left in the generators
                disturb()

    undisturbed = Notebook(case, quick_path / "other")
    undisturbed.open()
    for x, ids in undisturbed.run.loop(undisturbed.loader, 2, gpu_transform=gpu(data)):
        train_step(undisturbed, x, ids)
        undisturbed.seen.append(ids.tolist())
    assert (notebook.state(), notebook.seen) == (undisturbed.state(), undisturbed.seen)


def gpu(data):
    return AUGMENT if data == "gpu" else None


class Drawing(Dataset):
    """Twelve items that are nothing but a draw."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(1)


def test_values_that_a_dataset_draws_are_the_same_after_a_resume(quick_path):
    def values(storage, stop):
        model = nn.Linear(1, 1)
        run = efficio.Run(storage=storage, progress=False)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        for number, x in enumerate(run.loop(DataLoader(Drawing(), 2), 1)):
            run.backward(model(x).mean())
            run.step()
            seen.append(x.flatten().tolist())
            if number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
        return seen

    torch.manual_seed(0)
    uninterrupted = values(quick_path / "whole", None)
    torch.manual_seed(0)
    parts = values(quick_path / "parts", 2) + values(quick_path / "parts", None)
    assert parts == uninterrupted
    assert len({value for batch in uninterrupted for value in batch}) == 12


def two_loops(storage, stop=None, draw_between=False):
    """Train a body, then the same with a new head and another loader; stopped once by SIGTERM at a body, by number."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = make_run(Case(), storage, save_every=1000)
    run.prepare(model, optimizer)
    bodies, seen = count(), []
    objects = {"model": model, "optimizer": optimizer}

    def loop(loader, parts):
        for x, ids in run.loop(loader, 1, gpu_transform=AUGMENT):
            seen.append(ids.tolist())
            run.backward(loss_of(nn.Sequential(*parts), x, ids))
            run.step()
            if next(bodies) == stop:
                os.kill(os.getpid(), signal.SIGTERM)

    loop(make_loader(Case()), [model])
    head = nn.Sequential(
        nn.Linear(10, 16), nn.Dropout(0.2), nn.Linear(16, 10)
    )  # drawn from what the loop left
    second = torch.optim.SGD(head.parameters(), lr=0.1)
    run.prepare(head=head, head_optimizer=second)
    objects |= {"head": head, "head_optimizer": second}
    loop(make_loader(Case(batch=25)), [model, head])
    return state(run, objects), seen, run


@pytest.mark.parametrize("stop", [7, BATCHES - 1, BATCHES, BATCHES + 11], ids=lambda stop: f"body-{stop}")
def test_two_loops_in_turn_go_on_wherever_the_first_session_was_stopped(stop, quick_path):
    uninterrupted = two_loops(quick_path / "whole")
    first = two_loops(quick_path / "parts", stop)
    assert first[2].stopped

    second = two_loops(quick_path / "parts")

    assert second[2].finished
    assert second[0] == uninterrupted[0]
    assert first[1] + second[1] == uninterrupted[1]


def test_a_loop_for_each_epoch_goes_on_where_it_was(quick_path):
    def train(storage, stop=None):
        notebook = Notebook(Case(), storage)
        notebook.open()
        bodies = count()
        for _ in range(3):
            for x, ids in notebook.run.loop(notebook.loader, 1, gpu_transform=AUGMENT):
                notebook.seen.append(ids.tolist())
                train_step(notebook, x, ids)
                if next(bodies) == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
        return notebook

    uninterrupted = train(quick_path / "whole")
    first = train(quick_path / "parts", BATCHES + 4)
    second = train(quick_path / "parts")
    assert second.state() == uninterrupted.state()
    assert first.seen + second.seen == uninterrupted.seen
    epochs = [str(uninterrupted.seen[e * BATCHES : (e + 1) * BATCHES]) for e in range(3)]
    assert len(set(epochs)) == 3


def test_a_save_that_is_asked_for_in_a_body_is_taken_when_the_body_has_finished(quick_path, whole):
    notebook = Notebook(CASE, quick_path / "run", keep=9)
    notebook.open()
    for number, (x, ids) in enumerate(notebook.run.loop(notebook.loader, 2, gpu_transform=AUGMENT)):
        if number == 5:
            assert not notebook.run.save()
        if number == 8:
            raise_after = number
            break
        train_step(notebook, x, ids)
    assert raise_after == 8
    assert 6 in [at.step for at in list_checkpoints(quick_path / "run")]
    notebook.make()
    notebook.cell()
    assert notebook.state() == whole(CASE)[0]


def test_a_save_outside_the_loop_stores_what_was_changed_there(quick_path):
    notebook = Notebook(Case(epochs=1), quick_path / "run")
    notebook.cell()
    with torch.no_grad():
        notebook.objects["model"](
            pictures(notebook.objects["model"])
        )  # statistics taken anew, as update_bn does
    changed = digest(notebook.objects["model"].state_dict())

    assert notebook.run.save()

    notebook.make()
    notebook.open()
    assert digest(notebook.objects["model"].state_dict()) == changed


@pytest.mark.parametrize("end", ["break", "after-step", "before-step"])
def test_a_save_after_the_loop_was_left_half_way_never_stores_a_mixture(end, quick_path, whole):
    notebook = Notebook(CASE, quick_path / "run")
    ends(notebook, end, notebook.cell)
    notebook.run.save()
    notebook.make()

    notebook.cell()

    assert notebook.state() == whole(CASE)[0]


def test_an_exception_below_a_module_that_was_called_by_parts_is_noticed(quick_path):
    """BatchNorm moves its statistics in forward, also when the module around it is not called itself."""

    def train(storage, stop=None):
        notebook = Notebook(Case(epochs=1), storage)
        for end in (stop, None):
            notebook.make()
            notebook.open()
            model = notebook.objects["model"]
            try:
                for number, (x, ids) in enumerate(notebook.run.loop(notebook.loader, 1)):
                    features = model[:3](x)
                    if number == end:
                        raise PlannedError
                    notebook.run.backward(nn.functional.cross_entropy(model[3:](features), ids % 10))
                    notebook.run.step()
            except PlannedError:
                pass
        return notebook.state()

    assert train(quick_path / "parts", 7) == train(quick_path / "whole")


def look(model, optimizer):
    """See which shapes come out, and move the statistics of BatchNorm with it."""
    model(pictures(model))


def hand_step(model, optimizer):
    """A step of the user's own, outside of all loops."""
    images_there = pictures(model)
    labels = torch.arange(SAMPLES, device=images_there.device) % 10
    nn.functional.cross_entropy(model(images_there), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("work", [look, hand_step])
def test_what_is_done_by_hand_before_a_loop_is_part_of_the_run(work, quick_path):
    notebook = Notebook(Case(epochs=1), quick_path / "run")
    notebook.open()
    before = digest(notebook.objects["model"].state_dict())
    work(notebook.objects["model"], notebook.objects["optimizer"])
    after = digest(notebook.objects["model"].state_dict())

    next(notebook.run.loop(notebook.loader, 1))

    assert before != after == digest(notebook.objects["model"].state_dict())


@pytest.mark.parametrize("stop", [0, 7, BATCHES - 1, BATCHES, BATCHES + 9], ids=lambda stop: f"body-{stop}")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "lost"])
@pytest.mark.parametrize("work", [look, hand_step])
def test_what_is_done_by_hand_between_loops_is_done_once_however_often_the_script_runs(
    work, end, stop, quick_path
):
    def script(storage, stop=None):
        notebook = Notebook(Case(), storage, save_every=5)
        notebook.open()
        bodies = count()
        for _ in range(2):
            work(notebook.objects["model"], notebook.objects["optimizer"])
            for x, ids in notebook.run.loop(notebook.loader, 1, gpu_transform=AUGMENT):
                train_step(notebook, x, ids)
                if next(bodies) == stop:
                    if end == signal.SIGKILL:  # as far as the storage can tell
                        return None
                    os.kill(os.getpid(), end)
            if notebook.run.stopped:
                return None
        return notebook.state()

    script(quick_path / "parts", stop)
    assert script(quick_path / "parts") == script(quick_path / "whole")


@pytest.mark.parametrize("kind", ["lambda", "one-cycle"])
def test_a_scheduler_that_is_built_and_prepared_after_the_optimizer_was_restored_goes_on(kind, quick_path):
    def scheduler_of(optimizer):
        if kind == "lambda":
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=10)

    def session(stop):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        run = efficio.Run(storage=quick_path / "run", progress=False)
        run.prepare(model, optimizer)
        scheduler = run.prepare(scheduler_of(optimizer))
        at_start = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        for number, (x, y) in enumerate(run.loop([(torch.zeros(1, 1), torch.zeros(1, 1))] * 9, 1)):
            run.backward(nn.functional.mse_loss(model(x), y))
            run.step()
            if number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
        return at_start, scheduler

    session(1 if kind == "lambda" else 3)
    (rate, momentum), _ = session(0)
    if kind == "lambda":
        assert rate == pytest.approx(0.01)
        assert momentum == 0.9
    else:
        assert (rate, momentum) == (0.8117456539497631, 0.8688255099070633)


def test_another_batch_size_goes_on_at_the_same_sample(quick_path, capsys):
    case = Case(epochs=1, interval="epoch")
    order = Notebook(case, quick_path / "whole")
    order.cell()
    notebook = Notebook(case, quick_path / "run")
    ends(notebook, "sigint", lambda end: notebook.cell(end, at=9))
    notebook.case = Case(epochs=1, interval="epoch", batch=20)
    notebook.make()

    notebook.cell()

    assert [*chain(*notebook.seen)] == [*chain(*order.seen)]
    assert [len(ids) for ids in notebook.seen] == [16] * 10 + [20] * 17
    assert "32 batches an epoch and now has 25" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_opens_its_file_when_first_read_gives_the_right_samples(workers, quick_path):
    (quick_path / "numbers").write_bytes(np.repeat(np.arange(300), 512).tobytes())
    run = make_run(Case(), quick_path / "run")
    model = nn.Linear(1, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dataset = LazyFile(quick_path / "numbers")

    for read, index in run.loop(DataLoader(dataset, 4, shuffle=True, num_workers=workers), 2):
        assert torch.equal(read, index)

    # Workers that are forked from a process which has the file open would share its place in the file.
    assert (dataset.file is None) == (workers > 0)
    if dataset.file is not None:
        os.close(dataset.file)


class LazyFile(Dataset):
    """Numbers in a file that is opened by the process that reads it first, as is advised for workers."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return 300

    def __getitem__(self, index):
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
        os.lseek(self.file, index * 4096, 0)
        return int(np.frombuffer(os.read(self.file, 4096), dtype=np.int64)[0]), index


def test_two_optimizers_that_step_in_turn_are_restored_both(quick_path):
    """A GAN: two steps of one network for each step of the other."""

    def train(storage, rounds, stop=None):
        torch.manual_seed(0)
        networks = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
        optimizers = {
            f"{name}_optimizer": torch.optim.Adam(net.parameters()) for name, net in networks.items()
        }
        run = make_run(Case(), storage)
        run.prepare(**networks, **optimizers)
        for number, x in enumerate(run.loop([torch.ones(4, 2)] * rounds, 1)):
            for _ in range(2):
                run.backward(networks["d"](networks["g"](x + torch.randn_like(x)).detach()).square().mean())
                run.step(optimizers["d_optimizer"])
            run.backward(-networks["d"](networks["g"](torch.randn_like(x))).mean())
            run.step(optimizers["g_optimizer"])
            optimizers["d_optimizer"].zero_grad()
            if number == stop:
                os.kill(os.getpid(), signal.SIGTERM)
        return state(run, {**networks, **optimizers}), optimizers

    uninterrupted = train(quick_path / "whole", 5)
    train(quick_path / "parts", 5, stop=2)
    ended = train(quick_path / "parts", 5)
    assert ended[0] == uninterrupted[0]
    steps = [next(iter(o.state.values()))["step"].item() for o in ended[1].values()]
    assert steps == [5.0, 10.0]


def test_a_loop_that_was_begun_and_left_alone_does_not_disturb_a_new_run(quick_path, whole):
    notebook = Notebook(CASE, quick_path / "run")
    notebook.open()
    left = notebook.run.loop(notebook.loader, 2, gpu_transform=AUGMENT)
    next(left)
    notebook.make()
    notebook.open()
    del left

    notebook.loop()

    assert notebook.state() == whole(CASE)[0]
