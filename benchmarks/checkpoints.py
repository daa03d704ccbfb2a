"""What a checkpoint costs: time that the training loop is blocked, steps while it is written, time until it is durable, loading, memory.

A ResNet-18 with SGD and momentum, and a transformer with AdamW, train in earnest; now and then the whole state is saved with
efficio and with its peers, each in a process of its own, in turn. "Blocked" is the time of the call, and of the wait before the
next optimizer step where a method needs one. Whatever is stored is loaded again and compared bit by bit with what was saved.

    python benchmarks/checkpoints.py            the result goes to benchmarks/results/checkpoints/
    python benchmarks/checkpoints.py --help
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _results import ROOT, peer_versions, versions, write_result

NAME = "checkpoints"
PEERS = ("accelerate", "lightning", "torchsnapshot", "safetensors", "efficio-ckpt")


# What is trained


class Transformer(nn.Module):
    """An encoder over tokens, in the sizes of a small language model."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to logits."""
        return self.head(self.layers(self.words(x)))


@dataclass(frozen=True)
class Training:
    """A model and its optimizer, and a function that computes one batch's gradients."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[], None]

    def state(self) -> dict[str, Any]:
        """As torch gives it; the tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def put(self, state: dict[str, Any]) -> None:
        """As torch takes it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def resnet() -> Training:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Training(model, optimizer, lambda: F.cross_entropy(model(x), y).backward())


def transformer() -> Training:
    torch.manual_seed(0)
    model = Transformer(16_000, 512, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randint(16_000, (4, 64))
    return Training(model, optimizer, lambda: F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward())


MODELS: dict[str, Callable[[], Training]] = {"resnet18": resnet, "transformer": transformer}


# How it is saved


@dataclass(frozen=True)
class Method:
    """One way to save and load.

    Args:
        save: Saves to a folder that does not exist yet; returns what gives the time at which it was done, once it is.
        load: Puts what is stored into another training.
        fence: Called before each optimizer step.
        close: Called at the end.
    """

    save: Callable[[Path], Callable[[], float]]
    load: Callable[[Path, Training], None]
    fence: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


def at_once(write: Callable[[Path], None]) -> Callable[[Path], Callable[[], float]]:
    def save(folder: Path) -> Callable[[], float]:
        write(folder)
        now = time.perf_counter()
        return lambda: now

    return save


def when_done(future: Future[Any]) -> Callable[[], float]:
    stamp: list[float] = []
    future.add_done_callback(lambda _: stamp.append(time.perf_counter()))

    def done() -> float:
        future.result()
        while not stamp:
            time.sleep(0.001)
        return stamp[0]

    return done


def flushed(folder: Path) -> None:
    """Flush the files of a folder and the folder itself."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def raw(training: Training) -> Method:
    """The state's bytes written to one file and flushed: nothing that is durable can be faster."""
    from efficio_ckpt._tree import flatten

    def write(folder: Path) -> None:
        folder.mkdir()
        with (folder / "bytes").open("wb", buffering=0) as file:
            for source in flatten(training.state()).sources:
                file.write(source.reshape(-1).view(torch.uint8).numpy())
        flushed(folder)

    def read(folder: Path, _: Training) -> None:
        (folder / "bytes").read_bytes()

    return Method(at_once(write), read)


def torch_save(training: Training) -> Method:
    def write(folder: Path) -> None:
        folder.mkdir()
        torch.save(training.state(), folder / "state.pt")

    return Method(
        at_once(write), lambda folder, fresh: fresh.put(torch.load(folder / "state.pt", weights_only=True))
    )


def safetensors_save(training: Training) -> Method:
    """The tensors alone, in one file, neither flushed nor checked."""
    from safetensors.torch import load_file, save_file

    def write(folder: Path) -> None:
        folder.mkdir()
        state = training.state()
        tensors = {f"model.{name}": value for name, value in state["model"].items()}
        for number, entry in state["optimizer"]["state"].items():
            tensors |= {
                f"optimizer.{number}.{name}": value
                for name, value in entry.items()
                if isinstance(value, Tensor)
            }
        save_file(tensors, folder / "state.safetensors")

    def load(folder: Path, fresh: Training) -> None:
        tensors = load_file(folder / "state.safetensors")
        state = fresh.state()
        for name in state["model"]:
            state["model"][name] = tensors[f"model.{name}"]
        for number, entry in state["optimizer"]["state"].items():
            entry.update({name: tensors.get(f"optimizer.{number}.{name}", entry[name]) for name in entry})
        fresh.put(state)

    return Method(at_once(write), load)


def accelerate_save(training: Training) -> Method:
    from accelerate import Accelerator

    engine = Accelerator(cpu=True)
    engine.prepare(training.model, training.optimizer)

    def load(folder: Path, fresh: Training) -> None:
        other = Accelerator(cpu=True)
        other.prepare(fresh.model, fresh.optimizer)
        other.load_state(str(folder))

    return Method(at_once(lambda folder: engine.save_state(str(folder))), load)


def lightning_async(training: Training) -> Method:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.plugins import AsyncCheckpointIO

    plugin = AsyncCheckpointIO(TorchCheckpointIO())

    def save(folder: Path) -> Callable[[], float]:
        plugin.save_checkpoint(training.state(), folder / "state.ckpt")
        assert plugin._executor is not None
        return when_done(
            plugin._executor.submit(lambda: None)
        )  # it has one worker, and the save is before this

    return Method(
        save,
        lambda folder, fresh: fresh.put(torch.load(folder / "state.ckpt", weights_only=True)),
        close=plugin.teardown,
    )


def torchsnapshot_async(training: Training) -> Method:
    from torchsnapshot import Snapshot

    def app(part: Training) -> dict[str, Any]:
        return {"model": part.model, "optimizer": part.optimizer}

    def save(folder: Path) -> Callable[[], float]:
        pending = Snapshot.async_take(str(folder), app(training))
        future: Future[None] = Future()

        def wait() -> None:
            pending.wait()
            future.set_result(None)

        threading.Thread(target=wait).start()
        return when_done(future)

    return Method(save, lambda folder, fresh: Snapshot(str(folder)).restore(app(fresh)))


def dcp_load(folder: Path, fresh: Training) -> None:
    import torch.distributed.checkpoint as dcp

    state = fresh.state()
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    fresh.put(state)


def dcp_save(training: Training) -> Method:
    import torch.distributed.checkpoint as dcp

    return Method(
        at_once(lambda folder: dcp.save(training.state(), checkpoint_id=str(folder), no_dist=True)),
        dcp_load,
    )


def dcp_async(training: Training, *, aside: bool = False) -> Method:
    """The stager keeps its buffers from save to save, which is faster than the default.

    With `aside` it copies in a thread of its own, and the loop waits for it before the optimizer steps. That stores BatchNorm
    statistics of one step with weights of another, so it serves for comparison only.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=aside,
            use_non_blocking_copy=False,
        )
    )
    staging: list[Future[Any]] = []

    def save(folder: Path) -> Callable[[], float]:
        response = dcp.async_save(
            training.state(), checkpoint_id=str(folder), async_stager=stager, no_dist=True
        )
        if not aside:
            return when_done(response)
        staging[:] = [response.staging_completion]
        return when_done(response.upload_completion)

    def fence() -> None:
        for future in staging:
            future.result()
        staging.clear()

    return Method(save, dcp_load, fence, stager.close)


def efficio_load(folder: Path, fresh: Training) -> None:
    from efficio_ckpt import load_state, put_snapshot

    put_snapshot(load_state(folder), {"model": fresh.model, "optimizer": fresh.optimizer})


def efficio_background(training: Training) -> Method:
    from efficio_ckpt import background_saver, snapshot_tree

    objects = {"model": training.model, "optimizer": training.optimizer}
    savers: list[Any] = []

    def save(folder: Path) -> Callable[[], float]:
        begun = time.perf_counter()
        if not savers:  # one for all saves, as in a training; the others get a new folder each time
            savers.append(background_saver(folder, keep=1))
        (saver,) = savers
        if not saver.save(snapshot_tree(objects), step=0, optimizers=[training.optimizer]):
            raise SystemExit("a save was still in flight")

        def done() -> float:
            saver.wait()
            return begun + float(saver.status.seconds)

        return done

    return Method(
        save,
        efficio_load,
        fence=lambda: savers[0].fence() if savers else None,
        close=lambda: savers[0].close() if savers else None,
    )


def efficio_at_once(training: Training) -> Method:
    from efficio_ckpt import save_state, snapshot_tree

    objects = {"model": training.model, "optimizer": training.optimizer}
    return Method(
        at_once(lambda folder: save_state(folder, snapshot_tree(objects), step=0) and None),
        efficio_load,
    )


def nothing(_: Training) -> Method:
    """No save at all: what the others are compared with."""
    return Method(at_once(lambda _: None), lambda *_: None)


METHODS: dict[str, Callable[[Training], Method]] = {
    "none": nothing,
    "raw": raw,
    "safetensors": safetensors_save,
    "torch_save": torch_save,
    "accelerate": accelerate_save,
    "dcp_save": dcp_save,
    "efficio_save": efficio_at_once,
    "lightning": lightning_async,
    "torchsnapshot": torchsnapshot_async,
    "dcp_async": dcp_async,
    "dcp_async_aside": lambda training: dcp_async(training, aside=True),
    "efficio": efficio_background,
}
NOT_COMPARED = ("none", "raw")


# The measurement


def warm_up(training: Training, *, steps: int) -> None:
    for _ in range(steps):
        training.optimizer.zero_grad()
        training.backward()
        training.optimizer.step()


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in nested containers, in an order that does not depend on the names."""
    if isinstance(tree, Tensor):
        return [tree]
    values = (
        list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    )
    return [tensor for value in values for tensor in tensors_of(value)]


def fingerprint(tensors: list[Tensor]) -> list[str]:
    """Digests of the tensors that hold more than a few numbers, sorted; aliases count once."""
    return sorted(
        {hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors if t.numel() > 8}
    )


def memory_bytes(name: str) -> int:
    """A figure of this process from the kernel, such as `VmRSS` or its peak, `VmHWM`."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return int(line.split()[1]) * 1024


def measure(model: str, method: str, *, saves: int, gap: int, folder: Path) -> dict[str, Any]:
    """Train and save in this process, then load what was saved last; seconds and bytes."""
    training = MODELS[model]()
    warm_up(training, steps=3)
    way = METHODS[method](training)
    figures: dict[str, Any] = {key: [] for key in ("blocked", "total", "plain", "during", "memory", "load")}
    figures["state_bytes"] = sum(t.numel() * t.element_size() for t in tensors_of(training.state()))
    expected: list[str] = []
    stored = folder
    for number in range(saves):
        stored = folder / ("save" if method == "efficio" else f"save-{number}")
        for _ in range(gap):
            figures["plain"].append(timed_step(training, way)[0])
        if number == saves - 1:
            expected = fingerprint(tensors_of(training.state()))
        gc.collect()
        before = memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        begun = time.perf_counter()
        done = way.save(stored)
        blocked = time.perf_counter() - begun
        during, fenced = timed_step(training, way)
        for _ in range(gap - 1):
            timed_step(training, way)
        figures["during"].append(during)
        figures["blocked"].append(blocked + fenced)
        figures["total"].append(done() - begun)
        figures["memory"].append(memory_bytes("VmHWM") - before)
        if number < saves - 1 and method != "efficio":
            shutil.rmtree(stored, ignore_errors=True)
    way.close()
    fresh = MODELS[model]()
    warm_up(fresh, steps=1)  # some load in place, and need the optimizer's state to be there
    for _ in range(3):
        begun = time.perf_counter()
        way.load(stored, fresh)
        figures["load"].append(time.perf_counter() - begun)
    if method not in NOT_COMPARED:
        found = fingerprint(tensors_of(fresh.state()))
        if not set(expected) <= set(found):
            raise SystemExit(f"{method} did not load what was in memory when {model} was saved")
    return figures


def timed_step(training: Training, way: Method) -> tuple[float, float]:
    """Seconds of one step without the wait at the fence, and of that wait."""
    start = time.perf_counter()
    training.optimizer.zero_grad()
    training.backward()
    fence = time.perf_counter()
    way.fence()
    fenced = time.perf_counter() - fence
    training.optimizer.step()
    return time.perf_counter() - start - fenced, fenced


def child(model: str, method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        command = [sys.executable, __file__, "--child", model, method, "--folder", folder]
        command += ["--saves", str(arguments.saves), "--gap", str(arguments.gap)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{method} on {model} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--saves", type=int, default=5, help="in each repeat; the first one makes buffers")
    parser.add_argument("--gap", type=int, default=3, help="steps before each save, and after it")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--folder", help="where to save; a temporary folder by default")
    parser.add_argument("--dry-run", action="store_true", help="write no result")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' hints
    if arguments.child:
        model, method = arguments.child
        figures = measure(
            model, method, saves=arguments.saves, gap=arguments.gap, folder=Path(arguments.folder)
        )
        print(json.dumps(figures))
        return
    found = peer_versions(*PEERS)
    from tqdm import tqdm

    repeats = []
    names = arguments.methods
    with tqdm(total=arguments.repeats * len(arguments.models) * len(names), desc=NAME) as bar:
        for repeat in range(arguments.repeats):
            row: dict[str, Any] = {}
            for model in arguments.models:
                row[model] = {}
                for place in range(len(names)):
                    method = names[(repeat + place) % len(names)]
                    row[model][method] = child(model, method, arguments)
                    bar.update()
            repeats.append(row)
    settings = {
        "models": arguments.models,
        "methods": names,
        "threads": torch.get_num_threads(),
        "repeats": arguments.repeats,
        "saves": arguments.saves,
        "gap": arguments.gap,
        "file_system": file_system(arguments.folder or tempfile.gettempdir()),
    }
    if not arguments.dry_run:
        path = write_result(
            NAME, settings=settings, versions=versions("torch", "numpy") | found, repeats=repeats
        )
        print(f"wrote {path.relative_to(ROOT)}")
    from table import checkpoints_table

    print(checkpoints_table({"repeats": repeats, "settings": settings}))


def file_system(folder: str) -> str:
    """The kind of file system that a folder is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        if os.path.realpath(folder).startswith(point) and len(point) > len(best):
            best, kind = point, found
    return kind


if __name__ == "__main__":
    main()
