"""Replace layers of a model by tensor-train layers, chosen by the patterns of their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.name_patterns import match_names
from hpctrain.nn.factors import choose_shape
from hpctrain.nn.layers import TTEmbedding, TTLinear
from hpctrain.nn.report import Factorised, TrainReport
from hpctrain.tables import count_of

__all__ = ["factorise"]


def factorise(
    model: nn.Module,
    patterns: str | Sequence[str],
    *,
    ranks: int | None = None,
    error: float | None = None,
    num_cores: int = 3,
    say: Callable[[str], None] | None = print,
) -> Factorised:
    """Replace linear and embedding layers whose names match, in place, and print a table.

    Make the optimizer afterwards: the parameters are others. A layer that would not get smaller
    stays dense, and the table says so.

    Args:
        model: Changed in place.
        patterns: Of names as in `model.named_modules()`; `*` stands for any text, dots too, and
            `*.up` is also an `up` at the top.
        ranks: One number for all bonds.
        error: Relative error of each layer's weight.
        num_cores: Of each layer.
        say: What is done with the table; give None on ranks other than 0.

    Raises:
        ConfigError: a pattern matches no linear or embedding layer, or a weight is shared.
    """
    if (ranks is None) == (error is None):
        raise ConfigError("give either ranks= or error=, and not both")
    if ranks is not None:
        count_of(ranks, "ranks")
    choose_shape(1, 1, ranks=ranks, num_cores=num_cores)  # refuses what is wrong before any work
    layers = {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, nn.Linear | nn.Embedding)
    }
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    found = match_names(given, layers, what="linear or embedding layer")
    names = sorted({name for each in found.values() for name in each}, key=list(layers).index)
    _refuse_shared(model, names)
    before = _count(model)
    replaced: dict[str, TrainReport] = {}
    made: dict[str, TTLinear | TTEmbedding] = {}
    kept: dict[str, str] = {}
    for name in names:
        layer = layers[name]
        if type(layer) not in (nn.Linear, nn.Embedding):
            kept[name] = f"it is a {type(layer).__name__}, whose owner uses its weight itself"
            continue
        new = _factorise(layer, ranks, error, num_cores, name)
        if new.report().compression <= 1:
            kept[name] = (
                f"as a tensor train it would have {new.report().num_parameters:,} parameters"
            )
            continue
        made[name], replaced[name] = new, new.report()
    for name, new in made.items():  # only now: a refusal leaves the model as it was
        model.set_submodule(name, new)
    done = Factorised(
        replaced=replaced, kept=kept, parameters_before=before, parameters_after=_count(model)
    )
    if say is not None:
        say(str(done))
    return done


def _factorise(
    layer: nn.Module, ranks: int | None, error: float | None, num_cores: int, name: str
) -> TTLinear | TTEmbedding:
    try:
        if isinstance(layer, nn.Linear):
            return TTLinear.from_dense(layer, ranks=ranks, error=error, num_cores=num_cores)
        if isinstance(layer, nn.Embedding):
            return TTEmbedding.from_dense(layer, ranks=ranks, error=error, num_cores=num_cores)
    except ConfigError as trouble:
        raise ConfigError(f"{name}: {trouble}") from trouble
    raise ConfigError(
        f"{name} is a {type(layer).__name__}, and must be a linear or embedding layer"
    )


def _refuse_shared(model: nn.Module, names: Sequence[str]) -> None:
    """A weight that two modules hold would be factorised in one of them only."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name in names:
        sharing = next((o for o in owners.values() if f"{name}.weight" in o), [])
        if len(sharing) > 1:
            others = ", ".join(other for other in sharing if other != f"{name}.weight")
            raise ConfigError(
                f"{name}.weight is shared with {others}; a tensor train cannot be: give each its "
                "own weight, or leave them out of the patterns"
            )


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
