"""Handwritten digits on all ranks: `hpctrain run -n 2 examples/digits.py`.

Horovod averages the gradients where it is built; elsewhere MPI does. Every rank trains on its share
of each global batch, and the test accuracy is exact: every test image is counted once.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from mpi4py import MPI
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import nn

import hpctrain as hpc
from hpctrain.log import notice, table


def load(test_every: int = 5) -> tuple[torch.Tensor, ...]:
    """The 1,797 digits that ship with scikit-learn; every fifth is kept for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16.0
    y = torch.tensor(labels)
    test = torch.arange(len(x)) % test_every == 0
    return x[~test], y[~test], x[test], y[test]


def horovod_or_none(world: hpc.World):
    """Horovod's torch module, started on this world's ranks, or None where it is not built."""
    try:
        import horovod.torch as hvd

        hvd.init(comm=world.comm)
    except (ImportError, ValueError) as error:
        if world.rank == 0:
            notice(
                f"Horovod is not built here ({error}); MPI averages the gradients instead "
                "(`hpctrain horovod build` builds it)"
            )
        return None
    return hvd


class MpiAverage:
    """Averages gradients over MPI before each step; stands in where Horovod is not built."""

    def __init__(self, world: hpc.World, optimizer: torch.optim.Optimizer) -> None:
        self.world, self.optimizer = world, optimizer

    def step(self) -> None:
        """Average, then update."""
        gradients = [p.grad for g in self.optimizer.param_groups for p in g["params"]]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.world.comm.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat /= self.world.size
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the last gradients."""
        self.optimizer.zero_grad()


def evaluate(world: hpc.World, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Test accuracy over all ranks, every image exactly once."""
    mine = slice(world.rank, None, world.size)
    with torch.no_grad():
        right = (model(x[mine].to(world.device)).argmax(1).cpu() == y[mine]).sum().item()
    return world.comm.allreduce(right) / len(y)


def progress_of(world: hpc.World) -> Progress:
    """A bar on rank 0's terminal; nothing in a batch log."""
    columns = world.launch.terminal_columns
    live = world.rank == 0 and (columns is not None or sys.stdout.isatty())
    console = Console(force_terminal=live, width=columns - 8 if columns else None)
    words = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    return Progress(*words, console=console, disable=not live)


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64)
    args = parser.parse_args()

    with hpc.init(seed=7, config=vars(args)) as world:
        hvd = horovod_or_none(world)
        train_x, train_y, test_x, test_y = load()
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
        model.to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if hvd is not None:
            trainer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        else:
            trainer = MpiAverage(world, optimizer)
        world.streams.bind_own()

        steps = len(train_x) // args.global_batch
        rows = []
        with progress_of(world) as progress:
            task = progress.add_task("training", total=args.epochs * steps)
            for epoch in range(args.epochs):
                order = world.streams.numpy("shuffle", epoch, per_rank=False)
                order = torch.from_numpy(order.permutation(len(train_x)))
                started, summed = time.perf_counter(), 0.0
                model.train()
                for step in range(steps):
                    batch = order[step * args.global_batch : (step + 1) * args.global_batch]
                    mine = batch[world.rank :: world.size]
                    loss = nn.functional.cross_entropy(
                        model(train_x[mine].to(world.device)), train_y[mine].to(world.device)
                    )
                    trainer.zero_grad()
                    loss.backward()
                    trainer.step()
                    summed += loss.item()
                    progress.update(task, advance=1, description=f"epoch {epoch + 1}")
                elapsed = time.perf_counter() - started
                model.eval()
                accuracy = evaluate(world, model, test_x, test_y)
                mean = world.comm.allreduce(summed) / world.size / steps
                rate = steps * args.global_batch / elapsed
                rows.append((epoch + 1, f"{mean:.4f}", f"{100 * accuracy:.2f}%", f"{rate:.0f}"))
        if world.rank == 0:
            print(world.describe())
            engine = f"Horovod {sys.modules['horovod'].__version__}" if hvd else "MPI"
            title = f"\n{world.mpi}, gradients averaged by {engine}"
            print(table(("epoch", "loss", "test accuracy", "samples/s"), rows, title=title))


if __name__ == "__main__":
    main()
