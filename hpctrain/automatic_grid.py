"""`hpc.auto_grid`: the grid that `hpctrain plan --memory` would propose, chosen by the job itself.

A grid comes before the loader and before `split`, so it is chosen first, from the function that
builds the model: rank 0 runs one micro-batch on torch's fake device, where nothing has memory, and
tells the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hpctrain import log
from hpctrain.errors import ConfigError
from hpctrain.grid import Grid
from hpctrain.predict import (
    Compute,
    Footprint,
    GridChoice,
    GridPlan,
    Subject,
    find_machine,
    measure_footprint,
    plan_grids,
)
from hpctrain.splitting import split
from hpctrain.tables import bytes_in, count_of, positive
from hpctrain.train import memory_limit
from hpctrain.world import agree

if TYPE_CHECKING:
    from hpctrain.world import World

__all__ = ["AutoGrid", "auto_grid"]

Build = Callable[[], nn.Module]
_MOST_REASONS = 3


@dataclass(frozen=True, kw_only=True)
class AutoGrid:
    """A grid, and how to use it. The same on every rank."""

    grid: Grid
    choice: GridChoice
    """What is divided, and the bytes and seconds that were predicted."""
    why: str
    """In one line."""
    global_batch: int
    tensor: Mapping[str, str] | None = None

    @property
    def split_options(self) -> dict[str, Any]:
        """What `hpctrain.split` is given beside the grid and the model."""
        found: dict[str, Any] = {}
        if self.choice.shard != "none":
            found["shard"] = self.choice.shard
        if self.choice.cuts:
            found["stages"] = list(self.choice.cuts)
        if self.choice.shape.tensor > 1:
            found["tensor"] = self.tensor
        return found

    @property
    def loader_options(self) -> dict[str, Any]:
        """What `hpctrain.Loader` is given beside the data: its batch is that of one `learn`."""
        return {"global_batch": self.global_batch // self._accumulate, "grid": self.grid}

    @property
    def distribute_options(self) -> dict[str, Any]:
        """What `hpctrain.distribute` is given for the grid."""
        found: dict[str, Any] = {"grid": self.grid}
        if self.choice.shape.pipeline > 1:
            found["micro_batches"] = self.choice.micro_batches
        elif self._accumulate > 1:
            found["accumulate"] = self._accumulate
        return found

    @property
    def _accumulate(self) -> int:
        return 1 if self.choice.shape.pipeline > 1 else self.choice.micro_batches

    def split(self, build: Build) -> nn.Module:
        """Collective: build the model and divide it as chosen.

        Where parameters or gradients are sharded and nothing else is divided, no rank ever holds
        the whole of it.

        Args:
            build: What `auto_grid` was given.
        """
        options = self.split_options
        if options.get("shard") in ("gradients", "parameters") and len(options) == 1:
            return split(self.grid, build, **options)
        return split(self.grid, build().to(self.grid.world.device), **options)


def auto_grid(
    world: World,
    build: Build,
    loss_fn: Callable[..., Tensor],
    /,
    *batch: Tensor,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    global_batch: int | None = None,
    precision: str = "fp32",
    tensor: Mapping[str, str] | None = None,
    memory_per_rank: int | str | None = None,
    machine: str | None = None,
    tflops: float | None = None,
) -> AutoGrid:
    """Collective: the best grid for a model, with what to divide; every rank passes the same.

    Rank 0 decides, and prints what was chosen, what it will need, and what the next best would.

    Args:
        world: The ranks.
        build: Builds the model, such as `lambda: GPT(config)`. It is called where tensors have no
            data, and must not look at values.
        loss_fn: As in `replica.learn`.
        batch: One batch as in `replica.learn`: the model's inputs, and the target as the last.
            Memory and operations grow in proportion to its samples.
        optimizer: Makes the optimizer from parameters, such as `lambda p: AdamW(p, 1e-3)`.
        global_batch: Samples of a step, over all ranks; None: `batch` on every rank.
        precision: As `hpctrain.distribute` takes it.
        tensor: Layers that may be divided over a tensor dimension, as `hpctrain.split` takes them.
        memory_per_rank: Bytes, or a text such as `80GB`; None: those of the GPU, or of the node,
            shared by the ranks on it.
        machine: A machine file or name, for step times: see `hpctrain plan`.
        tflops: What a rank reaches in training, for step times.

    Raises:
        ConfigError: on all ranks; an argument is wrong, the model cannot be run without data, or
            no grid fits (with what is missing).
    """
    given = {
        "global_batch": global_batch,
        "precision": precision,
        "tensor": tensor,
        "memory_per_rank": memory_per_rank,
        "machine": machine,
        "tflops": tflops,
    }
    trouble = _find_mistake(build, loss_fn, batch, optimizer, given)
    agree(world.comm, trouble, error=ConfigError)
    here = bytes_in(memory_per_rank or memory_of(world), "memory_per_rank")
    told = world.comm.allgather((given, here))
    trouble = find_difference([one for one, _ in told])
    if trouble is not None:
        raise ConfigError(trouble)
    memory = min(bytes_ for _, bytes_ in told)
    plan: GridPlan | None = None
    if world.is_main:
        try:
            footprint = _measure(build, loss_fn, batch, optimizer, precision, tensor)
            plan = _plan(world, footprint, memory, global_batch, machine, tflops)
            if plan.best is None:
                trouble = f"auto_grid: {'; '.join(plan.why)}"
        except ConfigError as error:
            trouble = f"auto_grid: {error}"
    agree(world.comm, trouble, error=ConfigError)
    plan = cast("GridPlan", world.comm.bcast(plan, root=0))
    choice = cast("GridChoice", plan.best)
    why = describe(plan)
    if world.is_main:
        log.notice(why)
    return AutoGrid(
        grid=Grid(world, **choice.shape._asdict()),
        choice=choice,
        why=why,
        global_batch=plan.global_batch,
        tensor=tensor,
    )


def find_difference(given: Sequence[Mapping[str, Any]]) -> str | None:
    """The first argument that differs from rank 0's, in words; None: none. Pure."""
    for rank, other in enumerate(given):
        for name, first in given[0].items():
            if other[name] != first:
                return (
                    f"auto_grid: {name} is {first!r} on rank 0 and {other[name]!r} on rank {rank}; "
                    "give the same on every rank"
                )
    return None


def describe(plan: GridPlan) -> str:
    """The choice in one line: what it needs, and what the runner-up would. Pure."""
    best, second = cast("GridChoice", plan.best), plan.runner_up
    there = log.format_bytes(plan.memory_per_rank or 0)
    text = f"grid chosen: {_costs(best)} (predicted; there are {there})"
    if second:
        return f"{text}; the runner-up: {_costs(second)}"
    if len(plan.choices) > 1:
        text += "; no other fits"
    reasons = dict.fromkeys(why for _, why in plan.refused)
    if not reasons:
        return text
    shown = "; ".join(list(reasons)[:_MOST_REASONS])
    others = "further grids are not" if len(plan.choices) > 1 else "no other grid is"
    return f"{text}; {others} possible: {shown}"


def _costs(choice: GridChoice) -> str:
    step = "step time not known without machine= and tflops="
    if choice.time is not None:
        step = f"{log.format_seconds(choice.time.step_s)} a step"
    return f"{choice}, {log.format_bytes(choice.need.total)} a rank, {step}"


def memory_of(world: World) -> int:
    """Bytes that a rank may use: its share of the GPU, or of the memory of its node."""
    if world.device.type != "cuda":
        return memory_limit() // world.local_size
    _, total = torch.cuda.mem_get_info(world.device)
    here = [info for info in world.ranks if info.node_rank == world.node_rank]
    mine = world.ranks[world.rank].device
    return total // sum(info.device == mine for info in here)


def _find_mistake(
    build: object,
    loss_fn: object,
    batch: tuple[object, ...],
    optimizer: object,
    given: Mapping[str, Any],
) -> str | None:
    """What is wrong with this rank's arguments, or None. Pure."""
    if isinstance(build, nn.Module) or not callable(build):
        return (
            f"auto_grid: the model is of type {type(build).__name__}, and must be the function "
            "that builds it, such as lambda: GPT(config): it is run without memory first"
        )
    for name, value in (("loss_fn", loss_fn), ("optimizer", optimizer)):
        if isinstance(value, torch.optim.Optimizer) or not callable(value):
            such = "lambda p: AdamW(p, 1e-3)" if name == "optimizer" else "cross_entropy"
            return (
                f"auto_grid: {name} is of type {type(value).__name__}, and must be a function, "
                f"such as {such}"
            )
    odd = next((one for one in batch if not isinstance(one, Tensor) or not one.ndim), None)
    if len(batch) < 2 or odd is not None:
        return (
            "auto_grid: give one batch of tensors, as replica.learn is given: the model's "
            "inputs, and the target as the last"
        )
    checks: dict[str, Callable[[object, str], float]]
    checks = {"global_batch": count_of, "memory_per_rank": bytes_in, "tflops": positive}
    try:
        for name, check in checks.items():
            if given[name] is not None:
                check(given[name], name)
    except ConfigError as error:
        return f"auto_grid: {error}"
    if (given["machine"] is None) != (given["tflops"] is None):
        return (
            "auto_grid: step times need both machine=, how ranks are connected, and tflops=, "
            "what a rank reaches in training; give both or none"
        )
    return None


def _measure(
    build: Build,
    loss_fn: Callable[..., Tensor],
    batch: tuple[Tensor, ...],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    precision: str,
    tensor: Mapping[str, str] | None,
) -> Footprint:
    """One micro-batch on the fake device; random numbers are as before afterwards."""
    *inputs, target = (one.cpu() for one in batch)

    def make() -> Subject:
        model = build()
        return Subject(
            model=model,
            optimizer=optimizer(model.parameters()),
            loss=lambda: loss_fn(model(*inputs), target),
            batch=len(target),
        )

    with torch.random.fork_rng(devices=[]):
        return measure_footprint(make, precision=precision, tensor=tensor)


def _plan(
    world: World,
    footprint: Footprint,
    memory: int,
    global_batch: int | None,
    machine: str | None,
    tflops: float | None,
) -> GridPlan:
    compute = None
    if machine is not None and tflops is not None:
        compute = Compute.at(tflops, footprint, find_machine(machine))
    counts = Counter(info.node_rank for info in world.ranks)
    return plan_grids(
        footprint,
        world.size,
        memory_per_rank=memory,
        global_batch=global_batch,
        compute=compute,
        ranks_per_node=max(counts.values()),
        shares_memory=world.device.type == "cpu",
    )
