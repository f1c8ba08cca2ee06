"""Handwritten digits on all ranks: `hpctrain run -n 2 examples/digits.py`.

Every rank trains on its share of each global batch; the test accuracy is exact: every test image is
counted once. Horovod exchanges the gradients where it is built; elsewhere MPI does, and says so.
It runs on any machine: with fewer GPUs than ranks the ranks share them, without any it takes CPUs.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.log import notice, table


def load(test_every: int = 5) -> tuple[torch.Tensor, ...]:
    """The 1,797 digits that ship with scikit-learn; every fifth is kept for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels)
    test = torch.arange(len(x)) % test_every == 0
    return x[~test], y[~test], x[test], y[test]


def distribute(world: hpc.World, model: nn.Module, engine: str) -> hpc.Replica:
    """The model on all ranks, by the engine asked for, or by `auto` where that is not built."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    try:
        return hpc.distribute(world, model, optimizer, engine=engine)
    except hpc.errors.ConfigError as error:
        if world.is_main:
            notice(f"{error}\nhpctrain: going on with engine='auto'")
        return hpc.distribute(world, model, optimizer)


def evaluate(world: hpc.World, model: nn.Module, test: hpc.Loader) -> float:
    """Test accuracy over all ranks, every image exactly once."""
    right = seen = 0
    model.eval()
    with torch.no_grad():
        for x, y in test:
            right, seen = right + int((model(x).argmax(1) == y).sum()), seen + len(y)
    model.train()
    return world.mean(right / max(1, seen), weight=seen)


def progress_of(world: hpc.World) -> Progress:
    """A bar on rank 0's terminal; nothing in a batch log."""
    columns = world.launch.terminal_columns
    live = world.is_main and (columns is not None or sys.stdout.isatty())
    console = Console(force_terminal=live, width=columns - 8 if columns else None)
    words = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    return Progress(*words, console=console, disable=not live)


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--engine", default="horovod", help="horovod, mpi, torch or auto")
    args = parser.parse_args()

    with hpc.init(seed=7, config=vars(args), allow_shared_device=True) as world:
        train_x, train_y, test_x, test_y = load()
        train = hpc.Loader(world, (train_x, train_y), global_batch=args.global_batch)
        test = hpc.Loader(world, (test_x, test_y), global_batch=256, shuffle=False)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
        replica = distribute(world, model.to(world.device), args.engine)
        rows = []
        with progress_of(world) as progress:
            task = progress.add_task("training", total=args.epochs * len(train))
            for epoch in range(args.epochs):
                started, summed, seen = time.perf_counter(), 0.0, 0
                for x, y in train:
                    loss = cross_entropy(replica(x), y)
                    replica.backward(loss, num_samples=len(y))
                    replica.step()
                    if len(y):
                        summed, seen = summed + loss.item() * len(y), seen + len(y)
                    progress.update(task, advance=1, description=f"epoch {epoch + 1}")
                rate = len(train_x) / (time.perf_counter() - started)
                accuracy = evaluate(world, model, test)
                mean = world.mean(summed / max(1, seen), weight=seen)
                rows.append((epoch + 1, f"{mean:.4f}", f"{100 * accuracy:.2f}%", f"{rate:.0f}"))
        world.print(world.describe(), replica.describe(), sep="\n\n", end="\n\n")
        world.print(table(("epoch", "loss", "test accuracy", "samples/s"), rows))


if __name__ == "__main__":
    main()
