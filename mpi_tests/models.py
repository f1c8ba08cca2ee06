"""Small float64 models with every habit that gradient exchange has to survive."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.optim import LAMB, LARS

FEATURES, CLASSES = 12, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.layers(x)


class ConvBatchNorm(nn.Module):
    """Statistics are each chunk's own, as they are on ranks."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a normalisation has no gradient but rounding, which Adam magnifies by 1/eps
        # (test_models.py proves it): two orders of summation would end further apart than 1e-9.
        self.conv = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.out(self.block(self.embed(x.view(len(x), 4, 3))).mean(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.out(self.lstm(x.view(len(x), 4, 3))[0][:, -1])


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branches(nn.Module):
    """Which branch is used depends on the chunk; one is used by none, and one by chunk 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)
        self.never = nn.Linear(FEATURES, 8)
        self.zero_only = nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        hidden = self.odd(x) if chunk % 2 else self.even(x)
        if chunk == 0:
            hidden = hidden * self.zero_only
        return self.out(torch.tanh(hidden))


class Complex(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 8, dtype=torch.complex128) * 0.3)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.out((x.to(self.weight.dtype) @ self.weight).abs())


class SparseEmbedding(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, chunk: int) -> Tensor:
        return self.out(self.table(x.abs().mul(3).long().clamp(max=9)[:, :4]).mean(1))


MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "conv-batchnorm": ConvBatchNorm,
    "transformer": Transformer,
    "lstm": Lstm,
    "tied": Tied,
    "branches": Branches,
    "complex": Complex,
}


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Two groups with their own learning rate and decay: matrices, and the rest."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    return [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.05},
        {"params": rest, "lr": 0.05, "weight_decay": 0.0},
    ]


def _by_trust(model: nn.Module) -> list[dict[str, object]]:
    matrices, rest = groups(model)
    return [matrices, {**rest, "trust_ratio": False}]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(groups(m), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "adamw-fused": lambda m: torch.optim.AdamW(groups(m), lr=0.01, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(groups(m), lr=0.01),
    "lars": lambda m: LARS(_by_trust(m), lr=0.1, trust_coefficient=0.02),
    "lamb": lambda m: LAMB(_by_trust(m), lr=0.01, norm_bounds=(0.1, 10.0)),
    "adagrad": lambda m: torch.optim.Adagrad(groups(m), lr=0.05),
}


def batch(step: int, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The same global batch for everyone, in one chunk per rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(sum(sizes), FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
