"""Train a small ResNet on real images twice, once with everything going wrong, and compare the weights.

The first run is never stopped. The second one is stopped by its budget in the middle of an epoch, goes on in a new process, is
killed with SIGKILL in the middle of another epoch, and goes on again. Both end with the same weights, bit for bit.

    python examples/quickstart.py [--storage FOLDER] [--epochs N] [--keep]
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import efficio
import fashion_mnist
from efficio import gpu_augment
from small_resnet import SmallResNet

BATCH = 125
PLAIN = gpu_augment.Normalize(0.286, 0.353)
AUGMENT = gpu_augment.Compose(
    [gpu_augment.RandomCrop(28, padding=2), gpu_augment.RandomHorizontalFlip(), PLAIN]
)


def train(storage: str, *, epochs: int, budget: str | None, kill: bool) -> efficio.Run:
    """Train, or go on training: the same lines whether the run is new, was stopped or was killed."""
    torch.manual_seed(0)
    torch.set_num_threads(
        1
    )  # small images: a second thread waits more than it helps; and equal bits need equal threads
    train_loader = efficio.GPULoader.from_tensors(*fashion_mnist.load("train"), BATCH, shuffle=True)
    model = SmallResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(train_loader))

    run = efficio.Run(budget=budget, storage=storage, save_every="2s")
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    # Halfway between here and the end; odd, and so inside an epoch of 80 steps.
    kill_at = (run.step_count + epochs * len(train_loader)) // 2 | 1 if kill else None
    for x, y in run.loop(train_loader, epochs=epochs, gpu_transform=efficio.on_inputs(AUGMENT)):
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        run.step()
        if run.step_count == kill_at:
            os.kill(
                os.getpid(), signal.SIGKILL
            )  # what a power cut or a reclaimed machine looks like from here

    if run.finished:
        print(f"digest {digest(model)}")
        print(f"accuracy {accuracy(run, model):.4f}")
    print(f"seconds {run.report().seconds('train'):.2f}")
    print(run.report())
    return run


def accuracy(run: efficio.Run, model: torch.nn.Module) -> float:
    """The fraction of the test images that are told right."""
    test_loader = efficio.GPULoader.from_tensors(*fashion_mnist.load("test"), 500)
    right = 0
    with run.evaluate_mode():
        for x, y in run.batches(test_loader):
            right += int((model(PLAIN(x)).argmax(1) == y).sum())
    return right / len(test_loader.y)


def digest(model: torch.nn.Module) -> str:
    """A fingerprint of every bit of the weights."""
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        sha.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def part(title: str, *arguments: str, expected: int = 0) -> dict[str, str]:
    """Run one part of the story in a process of its own, and return what it printed by its first word."""
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    command = [sys.executable, __file__, "--part", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        print(f"   {line}", end="", flush=True)
        lines.append(line)
    if process.wait() != expected:
        sys.exit(f"this part ended with status {process.returncode}, expected {expected}")
    print(f"   ({time.monotonic() - started:.0f} s)")
    return dict(
        line.split(maxsplit=1) for line in lines if line.startswith(("digest", "accuracy", "seconds"))
    )


def story(folder: Path, epochs: int) -> None:
    """The whole demonstration."""
    common = ["--epochs", str(epochs)]
    whole = part("One run that is never stopped", "--storage", f"{folder}/whole", *common)
    broken = ["--storage", f"{folder}/broken", *common]
    # A third of what the whole run takes, whatever machine this is.
    budget = f"{max(1.0, float(whole['seconds']) / 3):.1f}s"
    part("Another one, with a budget that is up in the middle of an epoch", *broken, "--budget", budget)
    part("It goes on in a new process, and is killed (SIGKILL)", *broken, "--kill", expected=-signal.SIGKILL)
    resumed = part("It goes on again, to the end", *broken)

    same = whole["digest"] == resumed["digest"]
    print(f"\nweights of the run that was never stopped   {whole['digest']}", end="")
    print(f"weights of the run that was stopped, killed {resumed['digest']}", end="")
    print(f"{'the same, bit for bit' if same else 'DIFFERENT'}")
    print(f"accuracy on 2,000 test images: {float(resumed['accuracy']):.1%}")
    if not same:
        sys.exit(1)


def main() -> None:
    """Parse the arguments and run the story, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", help="folder for the checkpoints; a temporary one by default")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        train(options.storage, epochs=options.epochs, budget=options.budget, kill=options.kill)
        return
    folder = Path(options.storage or tempfile.mkdtemp(prefix="efficio-demo-"))
    try:
        story(folder, options.epochs)
    finally:
        if options.storage is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
