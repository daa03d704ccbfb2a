"""CPU time that a training loop adds to a step, over the loop written by hand: those of its peers, and efficio.Run.

Every loop trains the same small model on the same ready-made batches, and must end with the same weights. Each library runs in a
process of its own, since what one leaves behind in a process slows the others; the loop by hand runs beside each, in turn, in
an order that rotates, and differences are taken within such a repeat. Keyed randomness is measured on its own: how
often efficio starts the random generators in a step is counted in an untimed run, and the loop by hand is timed with as many
such calls, too; called in a row they cost a third of what they cost between the steps of a training.

    python benchmarks/loop_overhead.py            the result goes to benchmarks/results/loop_overhead/
    python benchmarks/loop_overhead.py --help
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from _results import ROOT, versions, write_result

NAME = "loop_overhead"
BATCH_SIZE, FEATURES, HIDDEN, CLASSES = 16, 32, 64, 10
LEARNING_RATE = 0.01
PEERS = {
    "fabric": "lightning",
    "accelerate": "accelerate",
    "ignite": "ignite",
    "lightning": "lightning",
    "transformers": "transformers",
    "efficio": "efficio",
}

Timed = Callable[[], None]
"""Called at the end of each body; notes the process's CPU time."""
Loop = Callable[[DataLoader[Any], Timed], torch.nn.Module]
"""Trains on a loader and returns the model."""


def ready_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that are there already, in a list: the loader has nothing to build, and no sample draws anything."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH_SIZE, FEATURES, generator=generator),
            torch.randint(CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(count)
    ]


def new_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def bare(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    model, optimizer = new_training()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        timed()
    return model


def fabric(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    model, optimizer = engine.setup(*new_training())
    for x, y in engine.setup_dataloaders(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        optimizer.step()
        timed()
    return model


def accelerate(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    from accelerate import Accelerator

    engine = Accelerator(cpu=True)
    model, optimizer, prepared = engine.prepare(*new_training(), loader)
    for x, y in prepared:
        with engine.accumulate(model):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            engine.backward(loss)
            optimizer.step()
        timed()
    return model


def ignite(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    from ignite.engine import Engine, Events

    model, optimizer = new_training()

    def update(_: Engine, batch: Any) -> float:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return 0.0

    engine = Engine(update)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: timed())
    engine.run(loader, max_epochs=1)
    return model


def lightning(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = new_training()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            timed()

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module.model


def transformers(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    import transformers as hf

    model, optimizer = new_training()

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.model(x), y)}

    class Trainer(hf.Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(
                DataLoader([{"x": x, "y": y} for x, y in loader.dataset], batch_size=None)
            )

    class Timing(hf.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            timed()

    with tempfile.TemporaryDirectory() as folder:
        settings = hf.TrainingArguments(
            folder,
            max_steps=len(loader.dataset),  # type: ignore[arg-type]
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        )
        trainer = Trainer(
            Wrapped(),
            settings,
            train_dataset=loader.dataset,
            optimizers=(optimizer, None),
            callbacks=[Timing()],
        )
        trainer.train()
    return model


def efficio(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
    from efficio import Run

    with tempfile.TemporaryDirectory() as storage:
        run = Run(storage=storage, progress=False, save_every="10h")
        model, _ = run.prepare(*new_training())
        for x, y in run.loop(loader, epochs=1):
            with run.autocast():
                loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.step()
            timed()
    return model


def keyed_by_hand(calls: dict[str, int]) -> Loop:
    """The bare loop, with as many keys derived and generators started from them in a step as efficio's loop does."""
    from efficio_data import derive_seed, seed_generators

    def keyed(loader: DataLoader[Any], timed: Timed) -> torch.nn.Module:
        model, optimizer = new_training()
        root = derive_seed(0, "loop", "0", "body", 0)  # once an epoch, as in efficio's loop
        for step, (x, y) in enumerate(loader):
            for _ in range(calls["derive_seed"]):
                key = derive_seed(root, step)
            for _ in range(calls["seed_generators"]):
                seed_generators(key)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            timed()
        return model

    return keyed


LOOPS: dict[str, Loop] = {
    "bare": bare,
    "ignite": ignite,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
    "transformers": transformers,
    "efficio": efficio,
}


def run_loop(name: str, loop: Loop, data: list[Any], warmup: int) -> tuple[dict[str, float], torch.Tensor]:
    """Train once; the CPU time a step in microseconds, and the weights at the end."""
    marks: list[float] = []
    gc.collect()
    with contextlib.redirect_stdout(io.StringIO()):
        model = loop(DataLoader(data, batch_size=None), lambda: marks.append(time.process_time()))
    if len(marks) != len(data):
        raise SystemExit(f"{name} took {len(marks)} of {len(data)} steps: its figures would compare nothing")
    steps = np.diff(marks)[warmup:] * 1e6
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "p10": float(np.percentile(steps, 10)),
        "median": float(np.median(steps)),
        "mean": float(steps.mean()),
    }, weights


@contextlib.contextmanager
def counted_calls(*functions: Callable[..., Any]) -> Iterator[Counter[str]]:
    """Count how often functions are called in the body, in this thread."""
    names = {function.__code__: function.__name__ for function in functions}  # type: ignore[attr-defined]
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            counts[names[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def keyings_per_step() -> dict[str, int]:
    """How often a step of efficio's loop derives a key and starts the generators from one, counted in an untimed run."""
    from efficio_data import derive_seed, seed_generators

    def total(steps: int) -> Counter[str]:
        with counted_calls(derive_seed, seed_generators) as counts, contextlib.redirect_stdout(io.StringIO()):
            efficio(DataLoader(ready_batches(steps), batch_size=None), lambda: None)
        return counts

    few, many = total(20), total(120)  # the difference leaves out what happens once
    calls = {name: round((many[name] - few[name]) / 100) for name in ("derive_seed", "seed_generators")}
    if not all(calls.values()):
        raise SystemExit(
            f"efficio's loop was seen to make {calls} calls a step: its keyed randomness went another way"
        )
    return calls


def measure(loops: dict[str, Loop], *, repeats: int, steps: int, warmup: int) -> list[dict[str, Any]]:
    from tqdm import tqdm

    data, names = ready_batches(steps), list(loops)
    reference: torch.Tensor | None = None
    measured = []
    for repeat in tqdm(range(repeats), desc=NAME, unit="repeat"):
        order = [names[(repeat + place) % len(names)] for place in range(len(names))]
        row: dict[str, Any] = {"order": order}
        for name in order:
            row[name], weights = run_loop(name, loops[name], data, warmup)
            reference = weights if reference is None else reference
            if not torch.equal(weights, reference):
                raise SystemExit(
                    f"{name} ends with other weights than the loop that ran first: it did other work"
                )
        measured.append(row)
    return measured


def library(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one library beside the loop by hand, in this process."""
    try:
        peer = importlib.import_module(PEERS[name])
    except ImportError as error:
        raise SystemExit(
            f"{error}; install the peers first: pip install -r requirements-bench.txt"
        ) from error
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' hints about workers and accelerators
    loops = {"bare": bare, name: LOOPS[name]}
    calls = keyings_per_step() if name == "efficio" else None
    if calls is not None:
        loops["keyed"] = keyed_by_hand(calls)
    repeats = measure(loops, repeats=arguments.repeats, steps=arguments.steps, warmup=arguments.warmup)
    return {"repeats": repeats, "calls": calls, "version": str(peer.__version__)}


def in_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--child", name]
    for option in ("repeats", "steps", "warmup"):
        command += [f"--{option}", str(getattr(arguments, option))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def resnet_step(steps: int = 6) -> float:
    """CPU time, in microseconds, of one step by hand of a ResNet-18 on 64 images of CIFAR's shape: what the overhead is a part of."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    marks = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        marks.append(time.process_time())
    return float(np.median(np.diff(marks))) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400, help="steps a repeat, those left out included")
    parser.add_argument("--warmup", type=int, default=50, help="first steps of each repeat that are left out")
    parser.add_argument(
        "--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS), help="'bare' is always run"
    )
    parser.add_argument("--dry-run", action="store_true", help="write no result")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(library(arguments.child, arguments)))
        return
    names = [name for name in arguments.loops if name != "bare"]
    results = {name: in_child(name, arguments) for name in names}
    repeats: list[dict[str, Any]] = []
    for number in range(arguments.repeats):
        row: dict[str, Any] = {}
        for result in results.values():
            found = result["repeats"][number]
            for loop, figures in found.items():
                if loop not in ("bare", "order"):
                    row[loop] = {**figures, "bare": found["bare"]["p10"]}
            row["bare"] = found["bare"]  # of the last one, which is efficio's if it is measured
        repeats.append(row)
    calls = results.get("efficio", {}).get("calls")
    loops = ["bare", *names, *(["keyed"] if calls else [])]
    settings = {
        "model": f"MLP {FEATURES}-{HIDDEN}-{CLASSES}",
        "batch_size": BATCH_SIZE,
        "optimizer": f"SGD, lr {LEARNING_RATE}",
        "threads": torch.get_num_threads(),
        "clock": "time.process_time",
        "repeats": arguments.repeats,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "loops": loops,
        "keyings_per_step": calls,
        "resnet18_step_us": resnet_step(),
    }
    if not arguments.dry_run:
        found = versions("torch", "numpy") | {
            PEERS[name]: result["version"] for name, result in results.items()
        }
        path = write_result(NAME, settings=settings, versions=found, repeats=repeats)
        print(f"wrote {path.relative_to(ROOT)}")
    from table import loop_overhead_table

    print(loop_overhead_table({"repeats": repeats, "settings": settings}))


if __name__ == "__main__":
    main()
