"""A rank's side of `precision`: the same step by raw torch.amp and by hpctrain, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain as hpc
from hpctrain.bench import Measurable
from hpctrain.replica import Replica
from hpctrain.world import World

__all__ = ["WORKLOADS", "make_maker"]

_FIRST_STEPS = (20, 3)
"""On a GPU, until the loss scale has settled and the kernels have been chosen; on a CPU."""
_SEED = 11
_CLASSES = 100
_RATE = 1e-5
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TransformerBlock(nn.Module):
    """One encoder layer over sequences, and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The class of each sequence."""
        answer: Tensor = self.out(self.block(x).mean(1))
        return answer


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        return torch.relu(self.inner(x) + self.around(x))


def resnet_like(channels: int) -> nn.Module:
    """Four stages of two blocks each, as in ResNet-18."""
    parts: list[nn.Module] = []
    before = 3
    for stage in range(4):
        now = channels << stage
        parts += [Residual(before, now, 1 if stage == 0 else 2), Residual(now, now, 1)]
        before = now
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, _CLASSES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and the shape of a batch, on a GPU and (smaller) on a CPU."""

    model: Callable[[int], nn.Module]
    width: tuple[int, int]
    shape: tuple[tuple[int, ...], tuple[int, ...]]


WORKLOADS = {
    "transformer": Workload(
        model=TransformerBlock, width=(1024, 64), shape=((32, 512, 1024), (2, 16, 64))
    ),
    "resnet": Workload(model=resnet_like, width=(64, 4), shape=((128, 3, 64, 64), (4, 3, 16, 16))),
}
"""By name: on a GPU 12.7 and 11.3 million parameters."""


class Raw:
    """As a user of torch.amp writes it for one device."""

    def __init__(self, world: World, precision: str) -> None:
        self.world = world
        self.device = world.device
        self.precision = precision

    def prepare(self, case: str) -> dict[str, object]:
        """Build model, optimizer and batch, and take the first steps."""
        workload = WORKLOADS[case]
        place = 0 if self.device.type == "cuda" else 1
        torch.manual_seed(_SEED)
        self.model = workload.model(workload.width[place]).to(self.device)
        self.x = torch.randn(workload.shape[place], device=self.device)
        self.y = torch.arange(len(self.x), device=self.device) % _CLASSES
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_RATE, fused=True)
        self.begin()
        self.run(_FIRST_STEPS[place])
        return {}

    def begin(self) -> None:
        """What precedes the first step."""
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")

    def run(self, repeats: int) -> None:
        """Take steps, and wait for the last."""
        for _ in range(repeats):
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        dtype = _DTYPES.get(self.precision)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            loss = cross_entropy(self.model(self.x), self.y)
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loss = loss.detach()

    def counts(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def finish(self) -> dict[str, object]:
        """The last loss, which all variants of a precision must share but for rounding."""
        outcome: dict[str, object] = {"loss": self.loss.item()}
        self.release()
        return outcome

    def release(self) -> None:
        """Let the case's memory go."""
        del self.model, self.optimizer, self.x, self.y, self.loss


class Distributed(Raw):
    """The same with `hpctrain.distribute(precision=...)`."""

    replica: Replica

    def begin(self) -> None:
        """Make the replica."""
        self.replica = hpc.distribute(
            self.world, self.model, self.optimizer, precision=self.precision
        )

    def step(self) -> None:
        """One step."""
        loss = cross_entropy(self.replica(self.x), self.y)
        self.replica.backward(loss)
        self.replica.step()
        self.loss = loss.detach()

    def release(self) -> None:
        """Let the model go."""
        self.replica.close()
        del self.replica
        super().release()


def make_maker() -> Callable[[World, str], Measurable]:
    """What makes the subject of a variant, such as `amp-fp16` or `hpctrain-bf16`."""

    def make(world: World, variant: str) -> Measurable:
        way, precision = variant.removesuffix("-again").split("-")
        return Raw(world, precision) if way == "amp" else Distributed(world, precision)

    return make
