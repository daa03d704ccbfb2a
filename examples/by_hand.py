"""The five packages in a hand-written loop: what `efficio.Run` does, with nothing hidden.

Each package is used through its public functions only, and any of them can be left out or replaced.

    python examples/by_hand.py [--storage FOLDER] [--epochs N] [--stop-after STEPS]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import fashion_mnist
from efficio_budget import Budget, stop_on_signals
from efficio_ckpt import background_saver, load_state, put_snapshot, rng_state, set_rng_state, snapshot_tree
from efficio_data import GPULoader, Position, derive_seed, gpu_augment, prefetch, resumable, seed_generators
from efficio_precision import (
    autocast,
    backward,
    clip_grad_norm,
    evaluating,
    make_scaler,
    precision_policy,
    step_optimizer,
    to_channels_last,
    tuned_backends,
)
from efficio_report import Totals, collect_report, sample_gpu, span
from small_resnet import SmallResNet

SEED = 7
AUGMENT = gpu_augment.Compose([gpu_augment.RandomHorizontalFlip(), gpu_augment.Normalize(0.286, 0.353)])


def train(
    storage: str, *, epochs: int, budget: str | None = None, stop_after: int | None = None
) -> nn.Module:
    """Train from where the storage says, until the epochs, the budget or `stop_after` steps are done."""
    totals, samples = Totals(phase="setup"), []
    time_left = Budget(budget)
    policy = precision_policy()
    device = torch.device(policy.device.type)
    scaler = make_scaler(policy)

    torch.manual_seed(SEED)
    images, labels = fashion_mnist.load("test")  # the smaller file: this example is about the loop
    loader = resumable(GPULoader.from_tensors(images, labels, 100, shuffle=True, device=device), seed=SEED)
    model = to_channels_last(SmallResNet(widths=(8, 16)).to(device), policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    step, position = 0, Position()
    try:
        tree = load_state(storage)  # every byte is checked before anything is returned
    except FileNotFoundError:
        pass  # a new run
    else:
        put_snapshot(tree["objects"], objects)  # all or nothing
        set_rng_state(tree["rng"])
        step, position = tree["step"], Position(*tree["position"])
    begun_at = step

    def state() -> dict[str, object]:
        place = (position.epoch, position.samples)
        return {"objects": snapshot_tree(objects), "rng": rng_state(), "step": step, "position": place}

    with (
        stop_on_signals() as stop,
        background_saver(storage, keep=2) as saver,
        tuned_backends(policy),
        sample_gpu(samples),
    ):
        while position.epoch < epochs and not stop:
            totals.switch("data")
            for (x, y), after in prefetch(loader.iter_from(position), device):
                totals.switch("train")
                # What the body draws follows from the place in the data, not from what was drawn before.
                seed_generators(derive_seed(SEED, "body", position.epoch, position.samples), device=device)
                with autocast(policy):
                    loss = F.cross_entropy(model(AUGMENT(x)), y)
                backward(loss, scaler)
                clip_grad_norm(model.parameters(), 1.0, optimizer=optimizer, scaler=scaler)
                stepped = step_optimizer(optimizer, scaler)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                if stepped:
                    step += 1
                    scheduler.step()

                # From here on the batch counts: only here may the state be stored.
                position = after
                if time_left.expired() or step == stop_after:
                    stop.request("budget")
                if stop:
                    break
                if step % 20 == 0:
                    with span(totals, "save"):
                        saver.save(state(), step=step)
                totals.switch("data")
            else:
                position = Position(position.epoch + 1)
        with span(totals, "save"):
            saver.save(state(), step=step, wait=True)

    with span(totals, "evaluate"), evaluating(model, policy=policy):
        right = int((model(AUGMENT.transforms[-1](images.to(device))).argmax(1) == labels.to(device)).sum())
    totals.settle()
    report = collect_report(
        totals,
        samples,
        steps=step - begun_at,
        device=device.type,
        precision=policy.reason,
        stopped=stop.reason,
    )
    print(f"step {step}, position {position}, {right / len(labels):.1%} of the images it has seen are right")
    print(report)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", default="demo-run-by-hand")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--budget")
    parser.add_argument("--stop-after", type=int)
    options = parser.parse_args()
    train(options.storage, epochs=options.epochs, budget=options.budget, stop_after=options.stop_after)
