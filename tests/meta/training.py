"""A small training with everything random in it, which can be ended in any way, for the proofs of exact resume.

`train` is what a user writes. It notes in a file what it has seen, since a process that is killed cannot tell; `surviving`
reads from these notes which batches have had an effect that was not lost.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

import efficio
from efficio import gpu_augment
from efficio_ckpt import Saver

SAMPLES, BATCH, EPOCHS = 500, 16, 3  # the last batch of an epoch has 4 samples
SIDE, CLASSES = 6, 10
PHASES = ("setup", "loader", "forward", "backward", "step", "evaluation", "end")


@dataclass(frozen=True)
class Case:
    """What is trained, and by which loader."""

    data: str = (
        "gpu"  # gpu, loader, batches (a batch sampler of uneven sizes), stream (an iterable with a state)
    )
    shuffle: bool = True
    workers: int = 0
    weighted: bool = False
    augment: bool = False
    accumulated: int = 1
    ema: bool = False
    interval: str = "step"
    epochs: int = EPOCHS
    batch: int = BATCH
    evaluate: bool = False
    optimizer: str = "adamw"  # sgd, adamw, adafactor, lbfgs
    scheduler: str = ""  # onecycle, step, sequential; by the interval if it is not given
    precision: str = "auto"  # fp16 scales the loss; the forward pass stays in float32


@dataclass(frozen=True)
class End:
    """How a session ends: what happens, and in which body of the session."""

    kind: str = "finish"
    body: int = 0
    nth: int = 0  # operation inside the optimizer's step, or file operation of the session


class PlannedError(Exception):
    """Raised by a body because the test says so."""


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Images(Dataset):
    """Random images whose label is their index, augmented by all three global generators."""

    def __init__(self, augment):
        self.x = images()
        self.augment = augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index].float() / 255
        if self.augment:
            x = torch.roll(x, random.randint(-1, 1), -1) * float(np.random.uniform(0.8, 1.2))
            x = x + 0.1 * torch.randn(x.shape)
        return x, index


class Uneven(Sampler):
    """Batches of 12, 16 and 20 in turn, shuffled by whatever torch's global generator says."""

    def __len__(self):
        return -(-SAMPLES // BATCH)

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        at = 0
        for size in itertools.cycle((12, 16, 20)):
            if at >= SAMPLES:
                return
            yield order[at : at + size]
            at += size


class Stream(IterableDataset):
    """The same images one after the other, from where the state says; each epoch begins at another one."""

    def __init__(self, augment):
        self._images = Images(augment)
        self._at = self._epoch = 0

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        while self._at < SAMPLES:
            index = (self._at + 100 * self._epoch) % SAMPLES
            self._at += 1
            yield self._images[index]
        self._at = 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._at = state["at"]


def images():
    return torch.randint(0, 256, (SAMPLES, 1, SIDE, SIDE), dtype=torch.uint8, generator=generator(1))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def noise(x):
    return x.float() / 255 + 0.1 * torch.randn(x.shape, device=x.device)


AUGMENT = efficio.on_inputs(
    gpu_augment.Compose([gpu_augment.RandomCrop(SIDE, padding=1), gpu_augment.RandomHorizontalFlip()])
)


def make_loader(case):
    if case.data == "gpu":
        return efficio.GPULoader.from_tensors(
            images(), torch.arange(SAMPLES), case.batch, shuffle=case.shuffle, transform=noise
        )
    if case.data == "stream":
        return DataLoader(Stream(case.augment), case.batch)
    if case.data == "batches":
        return DataLoader(Images(case.augment), batch_sampler=Uneven(), num_workers=case.workers)
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], SAMPLES) if case.weighted else None
    return DataLoader(
        Images(case.augment),
        case.batch,
        shuffle=case.shuffle and sampler is None,
        sampler=sampler,
        num_workers=case.workers,
    )


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(32, CLASSES),
    )


def make_scheduler(case, optimizer):
    kind = case.scheduler or ("step" if case.interval == "epoch" else "onecycle")
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 1 if case.interval == "epoch" else 9, gamma=0.5)
    if kind == "sequential":
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        ]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [5])
    batches = -(-SAMPLES // case.batch)
    steps = case.epochs * -(-batches // case.accumulated)
    has_momentum = case.optimizer in ("adamw", "sgd")
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.01, total_steps=steps, cycle_momentum=has_momentum
    )


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.01, max_iter=2, history_size=3),
}


def make_objects(case):
    """Model, optimizer and scheduler, by the name under which `Run` stores them; with the average of the model if asked for."""
    model = make_model()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    objects = {"model": model, "optimizer": optimizer, "scheduler": make_scheduler(case, optimizer)}
    if case.ema:
        objects["ema"] = AveragedModel(model, avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new)
    return objects


def make_run(case, storage, **options):
    given = {"save_every": 5, "progress": False, "deterministic": torch.cuda.is_available()}
    given |= {"grad_accum_steps": case.accumulated, "scheduler_interval": case.interval}
    given |= {"precision": case.precision}
    return efficio.Run(storage=storage, **(given | options))


def loss_of(model, x, y):
    """Cross entropy of inputs that are moved by draws from all three global generators."""
    x = x + 0.05 * random.random() * float(np.random.rand()) * torch.randn(x.shape, device=x.device)
    return nn.functional.cross_entropy(model(x), y % CLASSES)


class Notes:
    """A file that outlives the process: sessions with the step at which they began, bodies with theirs and the samples seen."""

    def __init__(self, path):
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def begin(self, step):
        os.write(self._file, (json.dumps({"begin": step}) + "\n").encode())

    def body(self, step, ids):
        os.write(self._file, (json.dumps({"step": step, "ids": ids}) + "\n").encode())


def surviving(path):
    """The samples of all bodies whose effect was not lost, in order: what a session begins at a step replaces what was seen there."""
    bodies = []
    with open(path, encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if "begin" in line:
                bodies = [body for body in bodies if body["step"] < line["begin"]]
            else:
                bodies.append(line)
    return [body["ids"] for body in bodies]


def digest(thing):
    """A fingerprint of nested states, every bit of every tensor."""
    sha = hashlib.sha256()
    _feed(sha, thing)
    return sha.hexdigest()[:16]


def _feed(sha, thing):
    if isinstance(thing, torch.Tensor):
        sha.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
        sha.update(thing.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            sha.update(f"{key!r}:".encode())
            _feed(sha, thing[key])
    elif isinstance(thing, (list, tuple)):
        sha.update(f"[{len(thing)}".encode())
        for part in thing:
            _feed(sha, part)
    elif isinstance(thing, np.ndarray):
        sha.update(thing.tobytes())
    elif not callable(thing):
        sha.update(repr(thing).encode())


def state(run, objects):
    """Fingerprints of all that a run is: its objects one by one, its steps, and the global generators."""
    digests = {name: digest(thing.state_dict()) for name, thing in objects.items()}
    return {
        **digests,
        "scaler": digest(run._stepping.scaler.state_dict()),
        "steps": run.step_count,
        "generators": digest([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
    }


class Places:
    """Where a process is, in two bytes of a file that another process reads: the phase, and whether a save is being written."""

    def __init__(self, path):
        import mmap

        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2)

    def enter(self, phase):
        self._memory[0] = PHASES.index(phase)

    def watch(self, optimizer):
        optimizer.register_step_pre_hook(lambda *_: self.enter("step"))
        optimizer.register_step_post_hook(lambda *_: self.enter("forward"))

    def watch_saves(self):
        write = Saver._write

        def noted(*arguments, **options):
            self._memory[1] = 1
            try:
                return write(*arguments, **options)
            finally:
                self._memory[1] = 0

        Saver._write = noted


class NoPlaces:
    def enter(self, phase):
        pass


def signal_group():
    """SIGTERM to this process and all others of its group, from a process outside, as a scheduler does it.

    Returns once workers that were hit are gone, for their end may take the training down, too.
    """
    group = os.getpgid(0)
    outside = os.fork()
    if outside == 0:
        os.setsid()
        os.killpg(group, signal.SIGTERM)
        os._exit(0)
    os.waitpid(outside, 0)
    for _ in range(20):
        if not multiprocessing.active_children():
            break
        time.sleep(0.01)


class KillAtOperation(TorchDispatchMode):
    """Ends the process by SIGKILL before one operation of many: half of the parameters have moved, say."""

    def __init__(self, nth):
        super().__init__()
        self._left = nth

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return function(*args, **(kwargs or {}))


def kill_in_step(optimizer, step, nth):
    """Arrange for SIGKILL before the nth operation inside the optimizer's step with this number in the session."""
    mode, steps = KillAtOperation(nth), iter(range(step + 1))

    def enter(*_):
        if next(steps, None) == step:
            mode.__enter__()

    optimizer.register_step_pre_hook(enter)


def kill_in_save(storage, nth):
    """Arrange for SIGKILL just before the nth time that this process creates, opens, renames or removes something in a storage."""
    left = nth

    def hook(event, arguments):
        nonlocal left
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"):
            return
        if not isinstance(arguments[0], (str, os.PathLike)) or not os.fspath(arguments[0]).startswith(
            storage
        ):
            return
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(hook)


def train(case, end, storage, notes, places_file=None, save_every=5):
    """One session in a process of its own, from where the run is to the end that is asked for; what it ended with."""
    notes, clock = Notes(notes), Clock()
    places = NoPlaces() if places_file is None else Places(places_file)
    options = {"budget": 1000, "margin": 1, "clock": clock} if end.kind == "budget" else {}
    loader, objects = make_loader(case), make_objects(case)
    model, optimizer = objects["model"], objects["optimizer"]
    if places_file is not None:
        places.watch(optimizer)
        places.watch_saves()
    if end.kind == "kill-in-step":
        kill_in_step(optimizer, end.body, end.nth)
    if end.kind == "kill-in-save":
        kill_in_save(str(storage), end.nth)
    run = make_run(case, storage, save_every=save_every, **options)
    run.prepare(**objects)
    first = run.step_count
    notes.begin(first)
    caught = None
    try:
        batches = run.loop(loader, case.epochs, gpu_transform=AUGMENT if case.data == "gpu" else None)
        for number, (x, ids) in enumerate(batches):
            here = end.kind if number == end.body else ""
            if here == "raise-early":
                raise PlannedError
            places.enter("forward")
            notes.body(run.step_count, ids.tolist())
            clock.now += 1
            if here == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            elif here == "group-sigterm":
                signal_group()
            elif here == "budget":
                clock.now += 1000
            if case.optimizer != "lbfgs":
                loss = loss_of(model, x, ids)
                places.enter("backward")
                run.backward(loss)
            if here == "sigint":
                os.kill(os.getpid(), signal.SIGINT)
            elif here == "second-sigint":
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            elif here == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif here == "raise":
                raise PlannedError
            if case.optimizer == "lbfgs":

                def closure(x=x, ids=ids):
                    optimizer.zero_grad()
                    loss = loss_of(model, x, ids)
                    run.backward(loss)
                    return loss

                stepped = run.step(closure=closure)
            else:
                stepped = run.step()
            if stepped and case.ema:
                objects["ema"].update_parameters(model)
            if here == "raise-late":
                raise PlannedError
            if here == "sigkill-late":
                os.kill(os.getpid(), signal.SIGKILL)
            if here == "break":
                break
            if case.evaluate and number % 20 == 7:
                places.enter("evaluation")
                with run.evaluate_mode():
                    torch.rand(3)
                    model(images().float().to(run.device))
            places.enter("loader")
    except (KeyboardInterrupt, PlannedError) as error:
        caught = type(error).__name__
    places.enter("end")
    return {
        "first": first,
        "caught": caught,
        "finished": run.finished,
        "stopped": run.stopped,
        "told": list(run.report().notes),
        "state": state(run, objects),
    }
