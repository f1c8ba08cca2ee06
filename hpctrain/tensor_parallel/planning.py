"""Which layers of a model are divided, and how: decided from names and sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.name_patterns import match_names
from hpctrain.tensor_parallel.running import ModuleOrder

__all__ = [
    "KINDS",
    "DividesItself",
    "Division",
    "divided_sizes",
    "division_of",
    "plan_layers",
    "trouble_with_dtensors",
]

KINDS = ("column", "row", "vocabulary", "cores")
_ATTRIBUTE = "_hpctrain_division"
_OLDEST = "2.12"
"""2.6 and 2.9 get gradients before a divided last layer wrong; 2.9 and 2.11 divide no attention."""
_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads")


@runtime_checkable
class DividesItself(Protocol):
    """A layer that knows how to be divided, as tensor trains do: kind `cores`."""

    @property
    def divided_rows(self) -> int:
        """What the number of ranks must divide."""
        ...

    def divide_cores(self, mesh: Any) -> None:
        """Keep this rank's part."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Division:
    """How the layers of a model are divided over the tensor dimension."""

    plan: Mapping[str, str]
    """The kind of each divided layer, by its name."""
    mesh: Any
    """Over the ranks that share them."""
    order: ModuleOrder
    """Which modules have run."""

    @property
    def num_ranks(self) -> int:
        """How many ranks share a layer."""
        return int(self.mesh.size())

    def mark(self, model: nn.Module) -> None:
        """Note on a model that it was divided so."""
        model.__dict__[_ATTRIBUTE] = self


def division_of(model: nn.Module) -> Division | None:
    """How the layers of a model were divided; None: they were not."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Division) else None


def trouble_with_dtensors() -> str | None:
    """Why this torch cannot divide layers, in words; None: it can. Pure."""
    if torch.__version__ >= _OLDEST:
        return None
    return (
        f"tensor= needs torch >= {_OLDEST}, whose DTensor gives the gradients of one process, and "
        f"this is torch {torch.__version__}; use a newer one, or leave tensor= out"
    )


def plan_layers(model: nn.Module, patterns: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """The kind of each layer that is divided, by its name.

    Args:
        model: Whole.
        patterns: Of names, each with its kind. `column`: a linear layer's outputs are divided.
            `row`: its inputs are. `vocabulary`: an embedding's rows, or the outputs of the last
            layer, whose scores stay divided for `vocabulary_cross_entropy`. `cores`: the largest
            core of a tensor train.
        num_ranks: Of the tensor dimension.

    Raises:
        ConfigError: an unknown kind, a pattern without a layer, a layer with two kinds, sizes that
            do not divide (the message has those that would), or what cannot be divided exactly.
    """
    for pattern, kind in patterns.items():
        if kind not in KINDS:
            raise ConfigError(
                f"tensor: {pattern!r} is {kind!r}; choose {', '.join(map(repr, KINDS))}"
            )
    layers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if name and _may_be_divided(module)
    }
    plan: dict[str, str] = {}
    for pattern, names in match_names(patterns, layers, what="linear or embedding layer").items():
        for name in names:
            if plan.setdefault(name, patterns[pattern]) != patterns[pattern]:
                raise ConfigError(
                    f"tensor: {name} is both {plan[name]!r} and {patterns[pattern]!r}; keep one"
                )
    for name, kind in plan.items():
        _check_layer(name, layers[name], kind, num_ranks)
        _check_heads(model, name, num_ranks)
    _check_model(model, plan)
    return plan


def divided_sizes(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """What the ranks of a tensor group must divide: each planned layer's size, and its heads."""
    for name, kind in plan.items():
        layer = model.get_submodule(name)
        if isinstance(layer, DividesItself):
            yield name, layer.divided_rows
            continue
        weight = layer.get_parameter("weight")
        yield name, weight.shape[1 if kind == "row" else 0]
        owner = model.get_submodule(name.rpartition(".")[0])
        for attribute in _HEADS:
            heads = getattr(owner, attribute, None)
            if isinstance(heads, int):
                yield f"{name} ({attribute})", heads


def _may_be_divided(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding | DividesItself)


def _check_layer(name: str, layer: nn.Module, kind: str, num_ranks: int) -> None:
    if isinstance(layer, DividesItself) or kind == "cores":
        if not isinstance(layer, DividesItself) or kind != "cores":
            raise ConfigError(
                f"tensor: {name} is a {type(layer).__name__} and cannot be {kind!r}; 'cores' is "
                "for tensor trains, and the others for linear and embedding layers"
            )
        size, what = layer.divided_rows, "rows in its largest core"
    elif isinstance(layer, nn.Embedding):
        if kind != "vocabulary":
            raise ConfigError(
                f"tensor: {name} is an embedding and can be 'vocabulary', not {kind!r}"
            )
        odd = [n for n in ("padding_idx", "max_norm") if getattr(layer, n) is not None]
        odd += [n for n in ("scale_grad_by_freq", "sparse") if getattr(layer, n)]
        if odd:
            raise ConfigError(f"tensor: {name} has {', '.join(odd)} and cannot be divided exactly")
        size, what = layer.num_embeddings, "rows"
    elif isinstance(layer, nn.Linear):
        if type(layer) is not nn.Linear:
            raise ConfigError(
                f"tensor: {name} is a {type(layer).__name__}, whose owner uses its weight itself; "
                "leave it out"
            )
        size, what = (
            (layer.in_features, "inputs") if kind == "row" else (layer.out_features, "outputs")
        )
    if size % num_ranks:
        raise ConfigError(
            f"tensor: {name} has {size} {what}, which tensor={num_ranks} does not divide; "
            f"{size // num_ranks * num_ranks or num_ranks} or {-(-size // num_ranks) * num_ranks} "
            f"would, or tensor={_divisors(size)}"
        )


def _check_heads(model: nn.Module, name: str, num_ranks: int) -> None:
    """Attention that lies across ranks would need parts of a head from a peer."""
    owner = model.get_submodule(name.rpartition(".")[0])
    for attribute in _HEADS:
        heads = getattr(owner, attribute, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise ConfigError(
                f"tensor: {name} belongs to attention with {attribute}={heads}, which "
                f"tensor={num_ranks} does not divide; tensor={_divisors(heads)} would"
            )


def _check_model(model: nn.Module, plan: Mapping[str, str]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    trains = tuple(f"{layer}." for layer, kind in plan.items() if kind == "cores")
    for names in owners.values():
        if len(names) > 1 and any(name.startswith(trains) for name in names):
            raise ConfigError(f"tensor: {' and '.join(names)} are one tensor; untie them")
        layers = [name.rpartition(".")[0] for name in names]
        if len({_cut(plan.get(layer)) for layer in layers}) > 1:
            raise ConfigError(
                f"tensor: {' and '.join(names)} are one tensor and are not divided alike; give "
                "both a kind that divides its rows ('vocabulary' or 'column'), or untie them"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(f"tensor: {name} is a batch normalisation; use LayerNorm")


def _cut(kind: str | None) -> str | None:
    """Along which dimension a layer's weight is divided."""
    return "rows" if kind in ("column", "vocabulary") else kind


def _divisors(size: int) -> str:
    found = [str(number) for number in range(1, min(size, 64) + 1) if size % number == 0]
    return " or ".join(found[:6])
