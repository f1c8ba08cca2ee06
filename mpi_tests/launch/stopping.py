"""A job whose rank 1 stops itself (SIGSTOP) right before one collective after the other.

Run by `test_stopped_ranks.py`, under `hpctrain run` and under mpirun:

    stopping.py ENGINE FOLDER [CASE ...]

One launch has many cases: where the watchdog would end the job, its report is kept, rank 1 is
resumed (SIGCONT), the collective ends, and the next case begins. Rank 0 prints one line of JSON for
each case. With `--end CASE` the watchdog ends the job as it does in earnest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import hpctrain as hpc
from hpctrain import faults
from hpctrain.data.storage.writing import write_shards
from hpctrain.faults import monitor

TIMEOUT_S = 2.0
LONG_S = 120.0
"""Where another timeout must not be the one that counts."""
GIVE_UP_S = 20.0

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One collective of the public interface."""

    prepare: Callable[[Kit], Call]
    says: str
    own: bool
    may_not_wait: bool


CASES: dict[str, Case] = {}


def case(
    says: str | None = None, *, own: bool = False, may_not_wait: bool = False
) -> Callable[[Callable[[Kit], Call]], object]:
    """A case.

    Args:
        says: A part of the call's name in the report, or several with `|` between, where engines
            differ; None: the case's own name.
        own: Whether the call has a timeout of its own, and not the world's.
        may_not_wait: Whether it may also end without waiting for anybody, as on some engines.
    """

    def add(prepare: Callable[[Kit], Call]) -> object:
        name = prepare.__name__.replace("__", ".").rstrip("_")
        CASES[name] = Case(prepare, name if says is None else says, own, may_not_wait)
        return prepare

    return add


class Kit:
    """What cases are made of."""

    def __init__(self, world: hpc.World, engine: str, folder: Path) -> None:
        self.world, self.engine, self.folder = world, engine, folder
        self.x = torch.arange(32.0).view(16, 2)
        self._number = 0

    def fresh(self) -> Path:
        """A path that no case has used, the same on all ranks."""
        self._number += 1
        return self.folder / f"case-{self._number}"

    def file(self) -> Path:
        """A file that is there."""
        path = self.fresh().with_suffix(".npy")
        if self.world.rank == 0:
            np.save(path, self.x.numpy())
        self.world.comm.Barrier()
        return path

    def loader(self) -> hpc.Loader:
        return hpc.Loader(self.world, (self.x, self.x.sum(1, keepdim=True)), global_batch=4)

    def replica(self, timeout_s: float = TIMEOUT_S, **options) -> hpc.Replica:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return hpc.distribute(
            self.world, model, optimizer, engine=self.engine, timeout_s=timeout_s, **options
        )

    def loss(self, replica: hpc.Replica) -> torch.Tensor:
        return replica(self.x[:4]).square().mean()

    def link(self):
        return hpc.connect(self.world, self.engine, timeout_s=TIMEOUT_S)

    def saver(self, **options) -> hpc.Saver:
        """Everything but the saver itself is patient."""
        return hpc.Saver(
            self.world,
            self.fresh(),
            self.replica(LONG_S),
            self.loader(),
            timeout_s=TIMEOUT_S,
            **options,
        )

    def store(self) -> hpc.Store:
        return hpc.Store(self.world, self.fresh(), timeout_s=TIMEOUT_S)


@case("agree")
def agree(kit):
    return lambda: hpc.agree(kit.world.comm, None)


@case("Barrier")
def world__comm(kit):
    return kit.world.comm.Barrier


@case("World.barrier: world.barrier", own=True)
def world__barrier(kit):
    return lambda: kit.world.barrier(timeout_s=TIMEOUT_S)


@case("World.mean: world.mean")
def world__mean(kit):
    return lambda: kit.world.mean(1.0)


@case("allgather")
def world__node(kit):
    return lambda: kit.world.node.allgather(1)


@case("Dup")
def world__comm__Dup(kit):
    return lambda: kit.world.comm.Dup().Free()


@case(own=True)
def scatter(kit):
    data = kit.x.numpy() if kit.world.rank == 0 else None
    return lambda: hpc.scatter(kit.world, data, timeout_s=TIMEOUT_S)


@case(own=True)
def share(kit):
    data = kit.x.numpy() if kit.world.rank == 0 else None
    return lambda: hpc.share(kit.world, data, timeout_s=TIMEOUT_S)


@case("share", own=True)
def share_of_a_file(kit):
    path = kit.file()
    return lambda: hpc.share(kit.world, path, timeout_s=TIMEOUT_S)


@case(own=True)
def files(kit):
    path = kit.file()
    return lambda: hpc.files(kit.world, path, timeout_s=TIMEOUT_S)


@case(own=True)
def stage(kit):
    path, to = kit.file(), kit.fresh()
    return lambda: hpc.stage(kit.world, path, to=to, timeout_s=TIMEOUT_S)


@case(own=True)
def gather(kit):
    own = np.array([kit.world.rank])
    return lambda: hpc.gather(kit.world, own * 2, own, timeout_s=TIMEOUT_S)


@case("write_shards", own=True)
def data__write_shards(kit):
    source, folder = hpc.files(kit.world, kit.file()), kit.fresh()
    return lambda: write_shards(kit.world, source, folder, samples_per_shard=4, timeout_s=TIMEOUT_S)


@case()
def reshuffle(kit):
    shard = hpc.scatter(kit.world, kit.x.numpy() if kit.world.rank == 0 else None)
    return lambda: hpc.reshuffle(kit.world, shard, epoch=1)


@case()
def Loader(kit):
    return kit.loader


@case("Loader.__iter__")
def Loader__next(kit):
    shard = hpc.scatter(kit.world, kit.x.numpy() if kit.world.rank == 0 else None)
    loader = hpc.Loader(kit.world, shard, global_batch=4)
    for _ in loader:
        pass
    return lambda: next(iter(loader))


@case("Loader.load_state_dict")
def Loader__load_state_dict(kit):
    loader = kit.loader()
    return lambda: loader.load_state_dict(loader.state_dict())


@case("total")
def metrics__total(kit):
    return lambda: hpc.metrics.total(kit.world, 1.0)


@case("Mean.value")
def metrics__Mean__value(kit):
    mean = hpc.metrics.Mean()
    mean.update(torch.ones(1))
    return lambda: mean.value(kit.world)


@case()
def average_batchnorm(kit):
    model = torch.nn.BatchNorm1d(2)
    return lambda: hpc.optim.average_batchnorm(kit.world, model)


@case(own=True)
def connect(kit):
    return kit.link


@case("allreduce", own=True)
def engine__allreduce_(kit):
    engine = kit.link().engine
    return lambda: engine.allreduce_(torch.ones(3))


@case("allreduce", own=True)
def engine__allreduce_async(kit):
    engine = kit.link().engine
    return lambda: engine.allreduce_async_(torch.ones(3)).wait()


@case("reduce_scatter", own=True)
def engine__reduce_scatter(kit):
    engine = kit.link().engine
    return lambda: engine.reduce_scatter(torch.ones(4))


@case("broadcast", own=True)
def engine__broadcast_(kit):
    engine = kit.link().engine
    return lambda: engine.broadcast_(torch.ones(3), root=1)


@case("allgather", own=True)
def engine__allgather(kit):
    engine = kit.link().engine
    return lambda: engine.allgather(torch.ones(3))


@case("allgather", own=True)
def engine__allgather_into(kit):
    engine = kit.link().engine
    return lambda: engine.allgather_into(torch.ones(6), torch.ones(3))


@case("alltoall", own=True)
def engine__alltoall(kit):
    engine = kit.link().engine
    return lambda: engine.alltoall(torch.ones(4))


@case("barrier", own=True)
def engine__barrier(kit):
    return kit.link().engine.barrier


@case("split", own=True)
def engine__split(kit):
    engine = kit.link().engine
    return lambda: engine.split(0)


@case("close", own=True, may_not_wait=True)
def Connection__close(kit):
    return kit.link().close


@case("meeting of nodes", own=True)
def engine__allocate(kit):
    engine = hpc.connect(kit.world, "mpi", timeout_s=TIMEOUT_S).engine
    return lambda: engine.allocate(1000)


@case("statistics", own=True)
def sync_batchnorm(kit):
    engine = kit.link().engine
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    hpc.optim.sync_batchnorm(engine, model)
    return lambda: model(kit.x)


@case(own=True)
def distribute(kit):
    kit.replica().close()  # what torch and hpctrain import at first use takes seconds
    return kit.replica


@case("", own=True)
def replica__backward(kit):
    replica = kit.replica()
    return lambda: replica.backward(kit.loss(replica))


@case("gradients|allreduce bucket", own=True)
def replica__synchronize(kit):
    replica = kit.replica(accumulate=2)
    replica.backward(kit.loss(replica))
    return replica.synchronize


@case("", own=True)
def replica__step(kit):
    replica = kit.replica()
    for _ in range(2):
        replica.backward(kit.loss(replica))
        replica.step()

    def call() -> None:
        replica.backward(kit.loss(replica))
        replica.step()

    return call


@case("", own=True)
def replica__join(kit):
    replica = kit.replica()

    def call() -> None:
        with replica.join():
            pass

    return call


@case("close", own=True, may_not_wait=True)
def replica__close(kit):
    return kit.replica().close


@case("", own=True, may_not_wait=True)
def EMA__once_a_node(kit):
    replica = kit.replica()
    return lambda: hpc.optim.EMA.once_a_node(replica.engine, replica.model)


@case(own=True)
def Store(kit):
    return kit.store


@case("Store.save", own=True)
def store__save(kit):
    store = kit.store()
    return lambda: store.save({"a": kit.x}, step=1)


@case("Store.save", own=True)
def store__save_again(kit):
    store = kit.store()
    store.save({"a": kit.x}, step=1, wait=True)
    return lambda: store.save({"a": kit.x}, step=2, own={"rank": kit.world.rank}, wait=True)


@case("Store.wait", own=True)
def store__wait(kit):
    store = kit.store()
    store.save({"a": kit.x}, step=1)
    return store.wait


@case("Store.load", own=True)
def store__load(kit):
    store = kit.store()
    store.save({"a": kit.x}, step=1, wait=True)
    return store.load


@case("Store.claim", own=True)
def store__claim(kit):
    return kit.store().claim


@case("Store.close", own=True)
def store__close(kit):
    store = kit.store()
    store.save({"a": kit.x}, step=1)
    return store.close


@case(own=True)
def Saver(kit):
    replica, loader, folder = kit.replica(LONG_S), kit.loader(), kit.fresh()
    return lambda: hpc.Saver(kit.world, folder, replica, loader, timeout_s=TIMEOUT_S)


@case("Saver.restore", own=True)
def saver__restore(kit):
    saver = kit.saver()
    saver.save(wait=True)
    return saver.restore


@case("Saver.save", own=True)
def saver__save(kit):
    return kit.saver().save


@case("Saver.save", own=True)
def saver__save_and_wait(kit):
    saver = kit.saver()
    return lambda: saver.save(wait=True)


@case("Saver.boundary", own=True)
def saver__first_boundary(kit):
    return kit.saver().boundary


@case("the step boundary", own=True)
def saver__boundary(kit):
    saver = kit.saver()
    saver.restore()
    saver.boundary()

    def call() -> None:
        saver.boundary()  # completes the exchange of the last one, and posts another
        saver.boundary()

    return call


@case("Saver.epochs", own=True)
def saver__epochs(kit):
    saver = kit.saver()
    return lambda: next(iter(saver.epochs(2)))


@case("Saver.resume", own=True)
def saver__resume(kit):
    saver = kit.saver()
    return lambda: next(iter(saver.resume(2)))


@case("", own=True)
def saver__close(kit):
    saver = kit.saver()
    saver.save()
    return saver.close


@case("", own=True)
def saver__synchronize_then_close(kit):
    saver = kit.saver()
    replica = kit.replica(accumulate=2)
    replica.backward(kit.loss(replica))

    def call() -> None:
        replica.synchronize()
        saver.close()

    return call


@case(own=True)
def Sentinel(kit):
    model = torch.nn.Linear(2, 1)
    return lambda: hpc.Sentinel(kit.world, model, timeout_s=TIMEOUT_S)


@case("comparison of weights", own=True)
def sentinel__step(kit):
    replica = kit.replica(LONG_S)
    sentinel = hpc.Sentinel(kit.world, replica.model, every=1, timeout_s=TIMEOUT_S)
    return sentinel.step


@case("the step boundary", own=True)
def Boundary__meet(kit):
    boundary = faults.Boundary(kit.world, timeout_s=TIMEOUT_S)
    return lambda: boundary.meet(now=True)


@case("start")
def faults__start(kit):
    return lambda: faults.start(kit.world, timeout_s=LONG_S).stop()


@case("Trainer.fit")
def Trainer__fit(kit):
    trainer = hpc.Trainer(
        kit.world,
        kit.replica(),
        kit.loader(),
        loss=torch.nn.functional.mse_loss,
        evaluation=kit.loader(),
        directory=kit.fresh(),
    )
    return trainer.fit


END = "end"
"""The end of the world's block: the last case of a launch."""


class Judge:
    """Keeps what the watchdog of rank 0 says, and resumes rank 1."""

    def __init__(self, world: hpc.World) -> None:
        self.world = world
        self.pids = world.comm.allgather(os.getpid())
        self.heard: list[str] | None = None
        self._looking = world.watching.watchdog.monitor

    def end_all_ranks(self, _launch, text: str, _cause: str, **_options) -> None:
        """In place of the end of the job."""
        if self.heard is not None:
            self.heard.append(text)
            os.kill(self.pids[1], signal.SIGCONT)
        self._looking._surveying = False

    def begin(self, own: bool) -> threading.Timer:
        self.world.watching.timeout_s = LONG_S if own else TIMEOUT_S
        self._looking._not_before = 0.0
        self.heard = []
        timer = threading.Timer(GIVE_UP_S, os.kill, (self.pids[1], signal.SIGCONT))
        if self.world.rank == 0:
            timer.start()
        return timer

    def tell(self, name: str, began: float, timer: threading.Timer) -> None:
        timer.cancel()
        seconds, heard, self.heard = time.monotonic() - began, self.heard, None
        if self.world.rank == 0:
            report = (heard or [""])[0]
            print(json.dumps({"case": name, "seconds": seconds, "report": report}), flush=True)
            if not heard:
                self._resume()

    def _resume(self) -> None:
        """Resume rank 1, which nobody waited for: it may not even have stopped yet."""
        path = Path(f"/proc/{self.pids[1]}/stat")
        while path.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.05)
        os.kill(self.pids[1], signal.SIGCONT)


def main() -> None:
    """Run the cases that were asked for, or all."""
    words = sys.argv[1:]
    in_earnest = "--end" in words
    words = [word for word in words if word != "--end"]
    engine, folder, *names = words
    with hpc.init(seed=3, device="cpu", num_threads=1, timeout_s=LONG_S) as world:
        kit = Kit(world, engine, Path(folder))
        judge = Judge(world)
        if not in_earnest:
            monitor.end_job = judge.end_all_ranks
        for name in names or [*CASES, END]:
            if name == END:
                continue
            own = CASES[name].own
            call = CASES[name].prepare(kit)
            world.comm.Barrier()
            timer = judge.begin(own) if not in_earnest else threading.Timer(0, print)
            world.watching.timeout_s = LONG_S if own else TIMEOUT_S
            began = time.monotonic()
            if in_earnest and world.rank == 0:
                print("ready", time.time(), flush=True)
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            call()
            judge.tell(name, began, timer)
            world.watching.timeout_s = LONG_S
            world.comm.Barrier()
        if names and END not in names:
            return
        world.comm.Barrier()
        timer = judge.begin(False) if not in_earnest else threading.Timer(0, print)
        for calls in judge._looking._logs.values():
            calls.timeout_s = TIMEOUT_S  # the end has the world's timeout
        began = time.monotonic()
        if in_earnest and world.rank == 0:
            print("ready", time.time(), flush=True)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    judge.tell(END, began, timer)


if __name__ == "__main__":
    main()
