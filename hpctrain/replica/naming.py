"""Which parameters an optimizer has, in its order, and their names in the model. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hpctrain.errors import ConfigError
from hpctrain.sharding import load_shards, sharding_of
from hpctrain.tensor_names import fit_keys, plain_name
from hpctrain.tensor_parallel import division_of

__all__ = ["holds_parts", "load_model", "named_parameters"]


def holds_parts(model: torch.nn.Module) -> bool:
    """Whether no rank holds all weights: `split` has cut them into shards, or divided layers."""
    return sharding_of(model) is not None or division_of(model) is not None


def load_model(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], *, but: Collection[str] = ()
) -> None:
    """Load a model's state under the model's own names, compiled or not, then and now.

    Args:
        model: The model.
        state: All of its tensors, by name.
        but: Plain names of those that are left as they are: they have come from their masters.

    Raises:
        RuntimeError: torch's own, when it is the state of another model.
        ConfigError: the same, where ranks hold parts of the model.
    """
    if holds_parts(model):
        load_shards(model, state)
        return
    fitted = fit_keys(state, model.state_dict())
    kept = {name for name in fitted if plain_name(name) in but}
    complete = fitted.keys() == model.state_dict().keys()
    if not kept or not complete:
        model.load_state_dict(fitted)
        return
    rest = {name: value for name, value in fitted.items() if name not in kept}
    model.load_state_dict(rest, strict=False)


def named_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[str], list[torch.nn.Parameter]]:
    """List the optimizer's parameters in the order of its groups, each once.

    Parameters that are not the model's own are named by their place in the optimizer.

    Raises:
        ConfigError: there is none, or one is not a leaf that torch could give a gradient.
    """
    known = {id(p): plain_name(n) for n, p in model.named_parameters(remove_duplicate=True)}
    names: list[str] = []
    parameters: list[torch.nn.Parameter] = []
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = known.get(id(parameter), f"group{number}.{place}")
            if id(parameter) in seen:
                raise ConfigError(f"parameter {name} is in the optimizer twice; remove one of them")
            if not parameter.is_leaf:
                raise ConfigError(f"parameter {name} is not a leaf tensor; optimize its source")
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise ConfigError(
                    f"parameter {name} has dtype {parameter.dtype}, which has no gradient; leave "
                    "it out of the optimizer"
                )
            seen.add(id(parameter))
            names.append(name)
            parameters.append(parameter)
    if not parameters:
        raise ConfigError("the optimizer has no parameters; give it model.parameters()")
    return names, parameters
