"""Which layers make which stage, and the part of a model that one rank keeps of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import ConfigError
from hpctrain.pipeline.chain import Layer
from hpctrain.pipeline.shapes import follow, skeleton_of

__all__ = ["Cut", "StageModel", "Tie", "cut_at", "find_ties", "trouble_with_stages"]

Stages = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Tie:
    """One tensor that several stages hold, under the names that it has there."""

    names: dict[int, str]
    """By stage."""

    @property
    def owner(self) -> int:
        """The stage that counts it where it must be counted once."""
        return min(self.names)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a chain of layers is divided into stages. The same on every rank."""

    layers: tuple[str, ...]
    """Names, in their order."""
    stages: tuple[range, ...]
    """By stage: its layers."""
    ties: tuple[Tie, ...]
    """Parameters that more than one stage has."""
    why: str
    """How the division was chosen, in words."""
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """Name, shape and dtype of all that a checkpoint of the whole model has."""
    parameters: tuple[str, ...] = ()
    """Of the whole model, in its order; a tied one once, under the first of its names."""
    first_names: Mapping[str, str] = field(default_factory=dict)
    """Of parameters, by any of their names."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    def names_of(self, stage: int) -> tuple[str, ...]:
        """The layers of a stage."""
        own = self.stages[stage]
        return self.layers[own.start : own.stop]

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say which layers each stage has."""
        rows = [(f"stage {n}", _span(self.names_of(n))) for n in range(self.num_stages)]
        return [("stages", f"{self.num_stages}: {self.why}"), *rows]


def trouble_with_stages(stages: object) -> str | None:
    """Why this does not say where to cut, whatever the model, in words; None: it may. Pure."""
    wanted = (
        "give 'auto', a list of the names at which the stages but the first begin, or a list of "
        "names for each stage; how many stages there are is the grid's pipeline="
    )
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        kind = type(stages).__name__
        return f"stages={stages!r} is {'an' if kind[0] in 'aeio' else 'a'} {kind}; {wanted}"
    if all(isinstance(one, str) for one in stages):
        return None
    for one in stages:
        if isinstance(one, str) or not isinstance(one, Sequence):
            return f"stages={stages!r} has {one!r} in it, among other kinds; {wanted}"
        odd = next((name for name in one if not isinstance(name, str)), None)
        if odd is not None:
            return f"stages={stages!r} has {odd!r} in it, which is no name; {wanted}"
    return None


def cut_at(names: Sequence[str], stages: Stages, num_stages: int) -> tuple[range, ...]:
    """Turn the user's list of stages into ranges of layers. Pure.

    Args:
        names: Of the layers, in their order.
        stages: The name at which each stage but the first begins, or for each stage the list of its
            names. A name is a layer's, or that of a module with several layers in it.
        num_stages: How many there must be.

    Raises:
        ConfigError: a name is no layer's, or the lists are not all layers in their order.
    """
    if all(isinstance(one, str) for one in stages):
        starts = [_first(names, str(one)) for one in stages]
        if len(starts) != num_stages - 1:
            raise ConfigError(
                f"stages={list(stages)!r} begins {len(starts) + 1} stages, and the grid has "
                f"pipeline={num_stages}; name the layer at which each stage but the first begins, "
                f"{num_stages - 1} in all"
            )
        ends = [0, *starts, len(names)]
        if any(a >= b for a, b in itertools.pairwise(ends)):
            raise ConfigError(
                f"stages={list(stages)!r} is not in the order of the layers, or leaves a stage "
                f"without any; the layers are {_span(names)}"
            )
        return tuple(range(a, b) for a, b in itertools.pairwise(ends))
    return _cut_by_lists(names, stages, num_stages)


def _cut_by_lists(names: Sequence[str], stages: Stages, num_stages: int) -> tuple[range, ...]:
    if len(stages) != num_stages or any(isinstance(one, str) or not one for one in stages):
        raise ConfigError(
            f"stages={list(stages)!r}: {len(stages)} lists for pipeline={num_stages}; give one "
            "list of names for each stage, none of them empty"
        )
    found: list[range] = []
    start = 0
    for stage, wanted in enumerate(stages):
        at = start
        for one in wanted:
            matching = _matching(names, one)
            if matching.start != at:
                missing = names[at] if at < len(names) else "the end"
                raise ConfigError(
                    f"stages: stage {stage} names {one!r} where {missing!r} comes next; list all "
                    f"layers in their order, which is {_span(names)}"
                )
            at = matching.stop
        found.append(range(start, at))
        start = at
    if start != len(names):
        raise ConfigError(f"stages: no stage has {_span(names[start:])}; list all layers")
    return tuple(found)


def _first(names: Sequence[str], wanted: str) -> int:
    return _matching(names, wanted).start


def _matching(names: Sequence[str], wanted: str) -> range:
    """The layers that a name stands for: itself, or those within it."""
    found = [n for n, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}.")]
    if not found:
        raise ConfigError(f"stages: {wanted!r} is no layer; the layers are {_span(names)}")
    return range(found[0], found[-1] + 1)


def _span(names: Sequence[str], limit: int = 12) -> str:
    shown = list(names) if len(names) <= limit else [*names[: limit - 2], "...", names[-1]]
    return ", ".join(shown)


def find_ties(layers: Sequence[Layer], stages: Sequence[range]) -> tuple[Tie, ...]:
    """The parameters that more than one stage holds.

    Raises:
        ConfigError: a buffer is; two stages would write to it.
    """
    held: dict[int, dict[int, str]] = {}
    is_buffer: set[int] = set()
    for stage, own in enumerate(stages):
        for layer in layers[own.start : own.stop]:
            for name, tensor in layer.module.named_buffers():
                is_buffer.add(id(tensor))
                held.setdefault(id(tensor), {}).setdefault(stage, f"{layer.name}.{name}")
            for name, parameter in layer.module.named_parameters():
                held.setdefault(id(parameter), {}).setdefault(stage, f"{layer.name}.{name}")
    ties = []
    for key, names in held.items():
        if len(names) > 1:
            if key in is_buffer:
                raise ConfigError(
                    f"the buffer {' = '.join(names.values())} is in stages "
                    f"{', '.join(map(str, names))}; only parameters can be shared between stages: "
                    "cut elsewhere, or give each layer its own"
                )
            ties.append(Tie(names))
    return tuple(ties)


class StageModel(nn.Module):
    """One stage of a model: its layers, under the names that they have in the whole model.

    `parameters()` and `state_dict()` are those of this stage alone.

    Args:
        layers: Of the whole model.
        cut: How they are divided.
        stage: Which part this is.
    """

    def __init__(self, layers: Sequence[Layer], cut: Cut, stage: int) -> None:
        super().__init__()
        self.hpctrain_cut = cut
        self.hpctrain_stage = stage
        self._skeleton: list[nn.Module] = []
        own = cut.stages[stage]
        self._names = cut.names_of(stage)
        for layer in layers[own.start : own.stop]:
            _attach(self, layer)

    def forward(self, *inputs: Any) -> Any:
        """Run the layers one after the other."""
        value: Any = inputs
        for position, name in enumerate(self._names):
            layer = self.get_submodule(name)
            if position == 0 and self.hpctrain_stage == 0:
                value = layer(*inputs)
            elif position == 0:
                value = layer(inputs[0] if len(inputs) == 1 else inputs)
            else:
                value = layer(value)
        is_last = self.hpctrain_stage == self.hpctrain_cut.num_stages - 1
        return value if is_last else _dense(value)

    def keep_skeleton(self) -> None:
        """Keep a copy without data, before torch divides the tensors of this stage; once."""
        if not self._skeleton:
            self._skeleton = [skeleton_of(self)]

    @property
    def skeleton(self) -> nn.Module:
        """What shapes are found on: that copy as this stage is now, or the stage itself."""
        if not self._skeleton:
            return self
        follow(self._skeleton[0], self)
        return self._skeleton[0]

    @property
    def tied_names(self) -> dict[str, Tie]:
        """This stage's parameters that other stages have too, by their name here."""
        stage = self.hpctrain_stage
        return {t.names[stage]: t for t in self.hpctrain_cut.ties if stage in t.names}


def _attach(root: nn.Module, layer: Layer) -> None:
    """Register a module under its name in the whole model; the containers on the way are empty."""
    *path, last = layer.name.split(".")
    parent = root
    for part in path:
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    if hasattr(parent, last) and parent._modules.get(last) is not layer.module:
        raise ConfigError(f"a layer cannot be called {layer.name!r}; rename it")
    parent.add_module(last, layer.module)


def _dense(value: Any) -> Any:
    """What is sent to the next stage lies in memory as it is counted."""
    if isinstance(value, Tensor):
        return value.contiguous()
    if isinstance(value, tuple | list):
        return tuple(one.contiguous() if isinstance(one, Tensor) else one for one in value)
    return value
