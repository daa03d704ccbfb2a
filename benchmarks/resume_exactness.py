"""Whether a training that is killed in the middle of an epoch and resumed is the one that was not: efficio and its peers.

500 samples in batches of 16, 3 epochs, a small network, AdamW and OneCycleLR. Each library trains once without a stop. Then it trains
up to step 45, in the second epoch, saves in the way that its documentation describes, and its process ends; another process
resumes in the documented way. The samples of every step and the final weights are compared with that library's own training that was
not stopped. A: shuffled. B: with Dropout in the model. C: with Dropout, and noise that the data set adds with `torch.randn`.

    python benchmarks/resume_exactness.py            the result goes to benchmarks/results/resume_exactness/
    python benchmarks/resume_exactness.py --help
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from _results import ROOT, newest_result, peer_versions, versions, write_result

NAME = "resume_exactness"
SAMPLES, BATCH, EPOCHS, FEATURES, CLASSES = 500, 16, 3, 8, 4
PER_EPOCH = -(-SAMPLES // BATCH)
STEPS, KILL_AT = EPOCHS * PER_EPOCH, 45
COLUMNS = (("A", 0), ("B", 0), ("B", 2), ("C", 0), ("C", 2))
PEERS = (
    "lightning",
    "accelerate",
    "transformers",
    "pytorch-ignite",
    "torchdata",
    "keras",
    "grain",
    "efficio",
)


class Samples(Dataset):
    """A sample is its values, its label and its index."""

    def __init__(self, noisy: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return x + 0.3 * torch.randn(FEATURES) if self.noisy else x, self.y[index], index


class Session:
    """What a way to train is given: what to build, where to save, and what to call at each step."""

    def __init__(self, case: str, workers: int, folder: Path, role: str) -> None:
        self.case, self.workers, self.folder = case, workers, folder
        self.resumes, self._dies = role == "second", role == "first"
        self._log = (folder / "steps.jsonl").open("a", encoding="utf-8")
        self.step = 0

    def new(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Model, optimizer and scheduler, the same each time."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, 32),
            nn.ReLU(),
            nn.Dropout(0.0 if self.case == "A" else 0.3),
            nn.Linear(32, CLASSES),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS + 40)

    def data(self) -> Samples:
        """The data set of the case."""
        return Samples(self.case == "C")

    def loader(self, kind: Any = DataLoader) -> Any:
        """A loader of it, shuffled."""
        return kind(self.data(), BATCH, shuffle=True, num_workers=self.workers)

    def seen(self, ids: Any) -> None:
        """A step takes these samples."""
        self._log.write(json.dumps([int(i) for i in ids]) + "\n")
        self._log.flush()

    def done(self, save: Callable[[], object] | None = None) -> None:
        """A step is done; the first session saves and ends at the one where it is to be killed."""
        self.step += 1
        if self._dies and self.step == KILL_AT:
            if save is not None:
                save()
            os._exit(0)


def train_step(
    session: Session, model: Any, optimizer: Any, scheduler: Any, batch: Any, backward: Any = None
) -> None:
    x, y, ids = batch
    session.seen(ids)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward() if backward is None else backward(loss)
    optimizer.step()
    scheduler.step()


def generators() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


# The ways


def plain(session: Session) -> nn.Module:
    """Epoch, model, optimizer and scheduler in one file; the epoch begins anew."""
    model, optimizer, scheduler = session.new()
    loader, path, first = session.loader(), session.folder / "state.pt", 0
    if session.resumes:
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"]
    for epoch in range(first, EPOCHS):
        for batch in loader:
            train_step(session, model, optimizer, scheduler, batch)
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            session.done(
                lambda parts=parts, epoch=epoch: torch.save(
                    {name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, path
                )
            )
    return model


def stateful_by_hand(session: Session) -> nn.Module:
    """Torchdata's StatefulDataLoader, with the states of the three global generators stored by hand."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model, optimizer, scheduler = session.new()
    loader, path, first = session.loader(StatefulDataLoader), session.folder / "state.pt", 0
    rng = None
    if session.resumes:
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        loader.load_state_dict(state["loader"])
        first, rng = state["epoch"], state["rng"]
    for epoch in range(first, EPOCHS):
        batches = iter(loader)
        if rng is not None:  # what the iterator drew when it was made is undone, too
            torch.set_rng_state(rng["torch"])
            random.setstate(rng["python"])
            np.random.set_state(rng["numpy"])
            rng = None
        for batch in batches:
            train_step(session, model, optimizer, scheduler, batch)
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
            session.done(
                lambda parts=parts, epoch=epoch: torch.save(
                    {name: part.state_dict() for name, part in parts.items()}
                    | {"epoch": epoch, "rng": generators()},
                    path,
                )
            )
    return model


def fabric(session: Session, *, skip: bool = False, stateful: bool = False) -> nn.Module:
    """`fabric.save` and `fabric.load`; with `skip`, as many batches as were taken are read and dropped."""
    from lightning.fabric import Fabric, seed_everything

    seed_everything(0, workers=True, verbose=False)
    engine = Fabric(accelerator="cpu", devices=1)
    model, optimizer, scheduler = session.new()
    model, optimizer = engine.setup(model, optimizer)
    kind: Any = DataLoader
    if stateful:
        import torchdata.stateful_dataloader

        kind = torchdata.stateful_dataloader.StatefulDataLoader
    raw = session.loader(kind)
    loader = raw if stateful else engine.setup_dataloaders(raw)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "batch": 0}
    if stateful:
        state["loader"] = loader
    path = session.folder / "state.ckpt"
    if session.resumes:
        state.update(engine.load(path, state))
    dropped = state["batch"] if session.resumes and skip else 0
    for epoch in range(state["epoch"], EPOCHS):
        for number, batch in enumerate(loader):
            if number < dropped:
                continue
            train_step(session, model, optimizer, scheduler, batch, engine.backward)
            state.update(epoch=epoch, batch=number + 1)
            session.done(lambda: engine.save(path, state))
        dropped = 0
    return model


def lightning(session: Session, *, stateful: bool = False) -> nn.Module:
    """`Trainer.save_checkpoint` and `fit(ckpt_path=...)`."""
    import lightning.pytorch as pl

    pl.seed_everything(0, workers=True, verbose=False)
    model, optimizer, scheduler = session.new()
    path = session.folder / "state.ckpt"

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y, ids = batch
            session.seen(ids)
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            session.done(lambda: trainer.save_checkpoint(path))

    kind: Any = DataLoader
    if stateful:
        import torchdata.stateful_dataloader

        kind = torchdata.stateful_dataloader.StatefulDataLoader
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Module(), session.loader(kind), ckpt_path=path if session.resumes else None, weights_only=False
    )
    return model


def accelerate(session: Session, *, seedable: bool = False) -> nn.Module:
    """`save_state`, `load_state` and `skip_first_batches`; with `seedable`, `use_seedable_sampler=True`."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    set_seed(0)
    engine = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    model, optimizer, loader, scheduler = engine.prepare(
        *session.new()[:2], session.loader(), session.new()[2]
    )
    model, optimizer, scheduler = _rebuilt(session, engine)
    path, step = session.folder / "state", 0
    if session.resumes:
        engine.load_state(str(path))
        step = KILL_AT
    for epoch in range(step // PER_EPOCH, EPOCHS):
        if seedable and hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        rest = loader
        if session.resumes and epoch == step // PER_EPOCH:
            rest = engine.skip_first_batches(loader, step % PER_EPOCH)
        for batch in rest:
            with engine.accumulate(model):
                train_step(session, model, optimizer, scheduler, batch, engine.backward)
            session.done(lambda: engine.save_state(str(path)))
    return model


def _rebuilt(session: Session, engine: Any) -> Any:
    """Model, optimizer and scheduler that belong together, and to the engine alone."""
    engine._models.clear()
    engine._optimizers.clear()
    engine._schedulers.clear()
    model, optimizer, scheduler = session.new()
    return engine.prepare(model, optimizer, scheduler)


def transformers(session: Session) -> nn.Module:
    """`Trainer` with `save_steps`, and `train(resume_from_checkpoint=True)`."""
    import transformers as hf

    model, optimizer, scheduler = session.new()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            session.seen(ids)
            return {"loss": F.cross_entropy(self.model(x), y)}

    class Dies(hf.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            session.step += 1

        def on_save(self, *_: Any, **__: Any) -> None:
            session.step -= 1
            session.done()

    def collate(items: list[Any]) -> dict[str, torch.Tensor]:
        x, y, ids = torch.utils.data.default_collate(items)
        return {"x": x, "y": y, "ids": ids}

    settings = hf.TrainingArguments(
        str(session.folder / "trainer"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=session.workers,
        save_steps=KILL_AT,
        seed=0,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        remove_unused_columns=False,
    )
    trainer = hf.Trainer(
        Wrapped(),
        settings,
        train_dataset=session.data(),
        data_collator=collate,
        optimizers=(optimizer, scheduler),
        callbacks=[Dies()],
    )
    trainer.train(resume_from_checkpoint=True if session.resumes else None)
    return model


def ignite(session: Session, *, deterministic: bool = False) -> nn.Module:
    """`Engine` (or `DeterministicEngine`) with `Checkpoint`, loaded with `Checkpoint.load_objects`."""
    from ignite.engine import DeterministicEngine, Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.utils import manual_seed

    manual_seed(0)
    model, optimizer, scheduler = session.new()
    engine = (DeterministicEngine if deterministic else Engine)(
        lambda _, batch: train_step(session, model, optimizer, scheduler, batch)
    )
    parts = {"engine": engine, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    saver = Checkpoint(
        parts, DiskSaver(str(session.folder / "ignite"), require_empty=False), filename_prefix="x"
    )
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: session.done(lambda: saver(engine)))
    if session.resumes:
        (path,) = (session.folder / "ignite").glob("*.pt")
        Checkpoint.load_objects(parts, torch.load(path, weights_only=False))
    engine.run(session.loader(), max_epochs=EPOCHS)
    return model


def keras(session: Session) -> Any:
    """`BackupAndRestore(save_freq=45)` and `fit`, on torch; the model is the same one in Keras's layers."""
    import keras as k

    k.utils.set_random_seed(0)
    model = k.Sequential(
        [
            k.layers.Input((FEATURES + 1,)),  # the last one is the sample's index
            k.layers.Lambda(lambda x: x[:, :FEATURES]),
            k.layers.Dense(32, activation="relu"),
            k.layers.Dropout(0.0 if session.case == "A" else 0.3),
            k.layers.Dense(CLASSES),
        ]
    )

    class Noted(k.Sequential):
        def train_step(self, data: Any) -> Any:
            session.seen(data[0][:, -1])
            return super().train_step(data)

    model = Noted(model.layers)
    model.build((None, FEATURES + 1))
    model.compile(
        optimizer=k.optimizers.AdamW(k.optimizers.schedules.CosineDecay(0.01, STEPS)),
        loss=k.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    class Dies(k.callbacks.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            session.done()

    def collate(items: list[Any]) -> Any:
        x, y, ids = torch.utils.data.default_collate(items)
        return torch.cat([x, ids[:, None].float()], 1), y

    loader = DataLoader(session.data(), BATCH, shuffle=True, num_workers=session.workers, collate_fn=collate)
    backup = k.callbacks.BackupAndRestore(str(session.folder / "backup"), save_freq=KILL_AT)
    model.fit(loader, epochs=EPOCHS, callbacks=[backup, Dies()], verbose=0)
    return model


def grain(session: Session) -> nn.Module:
    """Grain's `DataLoader`, its state taken and set by its API; noise from NumPy's global generator, as code that people have."""
    import grain.python as pygrain

    model, optimizer, scheduler = session.new()
    data = session.data()
    noisy, data.noisy = data.noisy, False

    class Source:
        def __len__(self) -> int:
            return SAMPLES

        def __repr__(self) -> str:  # Grain compares it when a state is set
            return "Source()"

        def __getitem__(self, index: Any) -> Any:
            x, y, number = data[int(index)]
            return x.numpy(), int(y), number

    class Noise(pygrain.MapTransform):
        def map(self, sample: Any) -> Any:
            x, y, number = sample
            return x + 0.3 * np.random.randn(FEATURES).astype(np.float32), y, number

    sampler = pygrain.IndexSampler(
        SAMPLES, shuffle=True, seed=0, num_epochs=EPOCHS, shard_options=pygrain.NoSharding()
    )
    operations = [*([Noise()] if noisy else []), pygrain.Batch(BATCH)]
    np.random.seed(0)
    loader = pygrain.DataLoader(
        data_source=Source(), sampler=sampler, operations=operations, worker_count=session.workers
    )
    batches, path = iter(loader), session.folder / "state.pt"
    if session.resumes:
        state = torch.load(path, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        batches.set_state(state["batches"])
        torch.set_rng_state(state["rng"])
    for x, y, ids in batches:
        batch = torch.from_numpy(np.asarray(x)), torch.from_numpy(np.asarray(y)), ids
        train_step(session, model, optimizer, scheduler, batch)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        session.done(
            lambda parts=parts: torch.save(
                {name: part.state_dict() for name, part in parts.items()}
                | {"batches": batches.get_state(), "rng": torch.get_rng_state()},
                path,
            )
        )
    return model


def efficio(session: Session) -> nn.Module:
    """`Run`, made and prepared by the same lines; the process dies after a save."""
    from efficio import Run

    model, optimizer, scheduler = session.new()
    run = Run(storage=session.folder / "run", save_every=10, progress=False, seed=0)
    run.prepare(model, optimizer, scheduler)
    kept = run.step_count
    if session.resumes:  # what came after the last checkpoint is trained again
        steps = (session.folder / "steps.jsonl").read_text().splitlines()[:kept]
        (session.folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in steps))
    for x, y, ids in run.loop(session.loader(), EPOCHS):
        session.seen(ids)
        run.backward(F.cross_entropy(model(x), y))
        run.step()
        session.done()
    return model


WAYS: dict[str, Callable[[Session], Any]] = {
    "plain": plain,
    "fabric": fabric,
    "fabric_skip": lambda session: fabric(session, skip=True),
    "fabric_stateful": lambda session: fabric(session, stateful=True),
    "lightning": lightning,
    "lightning_stateful": lambda session: lightning(session, stateful=True),
    "accelerate": accelerate,
    "accelerate_seedable": lambda session: accelerate(session, seedable=True),
    "transformers": transformers,
    "ignite": ignite,
    "ignite_deterministic": lambda session: ignite(session, deterministic=True),
    "keras": keras,
    "stateful_by_hand": stateful_by_hand,
    "grain": grain,
    "efficio": efficio,
}


# The comparison


def child(way: str, case: str, workers: int, folder: Path, role: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    session = Session(case, workers, folder, role)
    model = WAYS[way](session)
    weights = (
        model.state_dict().values() if isinstance(model, nn.Module) and way != "keras" else model.weights
    )
    sha = hashlib.sha256()
    for weight in weights:
        array = weight.numpy() if way == "keras" else weight.detach().numpy()
        sha.update(np.ascontiguousarray(array).tobytes())
    (folder / "weights.txt").write_text(sha.hexdigest()[:16])


def run_child(way: str, case: str, workers: int, folder: Path, role: str) -> None:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--child", way, case, str(workers), str(folder), role]
    with (folder / f"{role}.err").open("w") as errors:
        # A process group of its own: workers outlive a parent that is killed.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            code = process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            raise RuntimeError("it did not end within two minutes") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        text = (folder / f"{role}.err").read_text().strip()
        raise RuntimeError(text.splitlines()[-1][:200] if text else f"it ended with {code}")


def outcome(folder: Path) -> tuple[list[list[int]], str]:
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return steps, (folder / "weights.txt").read_text()


def compare(way: str, case: str, workers: int, base: Path) -> dict[str, Any]:
    """What a resumed training is beside the one that was not stopped."""
    whole, parts = base / "whole", base / "parts"
    try:
        run_child(way, case, workers, whole, "whole")
        run_child(way, case, workers, parts, "first")
        run_child(way, case, workers, parts, "second")
    except RuntimeError as error:
        return {"verdict": "error", "error": str(error)}
    expected, weights = outcome(whole)
    found, found_weights = outcome(parts)
    # Of the epoch that was cut, by the epochs of the whole training.
    before, after = found[PER_EPOCH:KILL_AT], found[KILL_AT:]
    rest = after[: max(0, len(after) - (EPOCHS - 2) * PER_EPOCH)]
    ids = [i for step in before + rest for i in step]
    same_order = found == expected
    return {
        "verdict": "exact" if same_order and weights == found_weights else "order" if same_order else "no",
        "steps": len(found),
        "whole_steps": len(expected),
        "twice": len(ids) - len(set(ids)),
        "never": SAMPLES - len(set(ids)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--dry-run", action="store_true", help="write no result")
    parser.add_argument("--add", action="store_true", help="keep the other ways of today's result")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.child:
        way, case, workers, folder, role = arguments.child
        child(way, case, int(workers), Path(folder), role)
        return
    found = peer_versions(*PEERS)
    from tqdm import tqdm

    rows: dict[str, Any] = {}
    with tqdm(total=len(arguments.ways) * len(COLUMNS), desc=NAME) as bar:
        for way in arguments.ways:
            rows[way] = {}
            for case, workers in COLUMNS:
                with tempfile.TemporaryDirectory() as folder:
                    rows[way][f"{case}{workers}"] = compare(way, case, workers, Path(folder))
                bar.update()
    if arguments.add:
        (before,) = newest_result(NAME)["repeats"]
        rows = {way: rows.get(way) or before[way] for way in WAYS if way in rows or way in before}
    settings = {
        "samples": SAMPLES,
        "batch": BATCH,
        "epochs": EPOCHS,
        "killed_after_step": KILL_AT,
        "columns": [f"{case}{workers}" for case, workers in COLUMNS],
        "ways": {way: (WAYS[way].__doc__ or "").strip() for way in rows},
        "threads": 1,
        "repeats": 1,
    }
    if not arguments.dry_run:
        path = write_result(
            NAME, settings=settings, versions=versions("torch", "numpy") | found, repeats=[rows]
        )
        print(f"wrote {path.relative_to(ROOT)}")
    from table import resume_exactness_table

    print(resume_exactness_table({"repeats": [rows], "settings": settings, "versions": found}))


if __name__ == "__main__":
    main()
