"""The training that a soak kills: small, without chance, and honest about every sample it used.

    hpctrain run -n N -m hpctrain.chaos.soak_subject DIRECTORY ATTEMPT STEPS PAUSE_S

Every rank writes the samples of each step to a file of its own, before the step can be saved.
"""

from __future__ import annotations

import json
import os
import sys
import time
from hashlib import sha256
from pathlib import Path

import torch

from hpctrain.checkpoint import Keep
from hpctrain.connection import init
from hpctrain.data import Loader
from hpctrain.replica import Replica, distribute
from hpctrain.saver import Saver
from hpctrain.world import World

__all__ = ["BATCH", "NUM_SAMPLES", "log_name"]

NUM_SAMPLES = 400
BATCH = 40
_EVERY_STEPS = 5
_CLASSES, _FEATURES, _HIDDEN = 10, 20, 512


def log_name(attempt: int, rank: int) -> str:
    """Of the file with the samples of one rank in one attempt."""
    return f"attempt-{attempt:04d}-rank-{rank}.jsonl"


def _make_data(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points around as many centres as there are classes, some of them nearer to another."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(_CLASSES, _FEATURES, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(_CLASSES, (num,), generator=random)
    return centres[labels] + 1.5 * torch.randn(num, _FEATURES, generator=random), labels


def _digest(replica: Replica) -> str:
    state = replica.model.state_dict()
    return sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def _accuracy(replica: Replica) -> float:
    points, labels = _make_data(1000, seed=3)
    with torch.no_grad():
        return float((replica.model(points).argmax(1) == labels).double().mean())


def _train(world: World, directory: Path, attempt: int, num_steps: int, pause_s: float) -> None:
    points, labels = _make_data(NUM_SAMPLES, seed=2)
    data = (points, labels, torch.arange(NUM_SAMPLES))
    loader = Loader(world, data, global_batch=BATCH, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(_FEATURES, _HIDDEN), torch.nn.ReLU(), torch.nn.Linear(_HIDDEN, _CLASSES)
    )
    replica = distribute(world, model, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9))
    saver = Saver(
        world, directory / "checkpoints", replica, loader,
        keep=Keep(last=3), every_s=None, every_steps=_EVERY_STEPS,
    )  # fmt: skip
    restored = saver.restore()
    log = os.open(directory / log_name(attempt, world.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(facts: dict[str, object]) -> None:
        os.write(log, json.dumps(facts).encode() + b"\n")

    write(
        {
            "pid": os.getpid(),
            "ranks": world.size,
            "from_step": 0 if restored is None else restored.step,
            "path": None if restored is None else restored.path,
        }
    )
    for inputs, target, samples in saver.resume(num_epochs=num_steps * BATCH // NUM_SAMPLES):
        loss = torch.nn.functional.cross_entropy(replica(inputs), target)
        replica.backward(loss, num_samples=len(target))
        replica.step()
        write({"step": saver.step + 1, "epoch": loader.epoch, "samples": samples.tolist()})
        time.sleep(pause_s)
    if world.rank == 0:
        result = {"steps": saver.step, "accuracy": _accuracy(replica), "digest": _digest(replica)}
        (directory / "result.json").write_text(json.dumps(result))


def main(words: list[str]) -> None:
    """Collective: train; the words must match."""
    directory, attempt, num_steps, pause_s = words
    with init(seed=7, device="cpu", num_threads=1) as world:
        _train(world, Path(directory), int(attempt), int(num_steps), float(pause_s))


if __name__ == "__main__":
    main(sys.argv[1:])
