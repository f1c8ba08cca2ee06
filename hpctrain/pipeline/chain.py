"""A model as a chain of layers: each takes what the one before it gives, and nothing else.

`nn.Sequential` is one by its nature. Of any other model, the forward method is traced with its
modules as black boxes: where it does more than call one module after the other, it is refused with
the name of the place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from hpctrain.errors import ConfigError

__all__ = ["Layer", "chain_of"]

_CURE = "put it into a module of its own, or give split() an nn.Sequential or a list of stages"


class Layer(NamedTuple):
    """One link of a chain."""

    name: str
    """As in the whole model's `named_modules()`."""
    module: nn.Module


def chain_of(model: nn.Module) -> tuple[Layer, ...]:
    """The layers of a model in the order in which its forward calls them.

    An `nn.Sequential` within one is opened. The model is left as it is.

    Raises:
        ConfigError: the model is no chain, or has parameters outside it; the message names what.
    """
    layers: list[Layer] = []
    if _is_sequential(model):
        layers = _open("", model)
    else:
        modules = dict(model.named_modules())
        for name in _traced_names(model):
            layers.extend(_open(name, modules[name]))
    _check_hooks(model)
    _check_complete(model, layers)
    return tuple(layers)


def _is_sequential(module: nn.Module) -> bool:
    """Whether its forward is that of `nn.Sequential`: patched ones are called as they are."""
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def _open(name: str, module: nn.Module) -> list[Layer]:
    if not _is_sequential(module) or (name and _has_hooks(module)):
        return [Layer(name, module)]
    prefix = f"{name}." if name else ""
    found: list[Layer] = []
    for child_name, child in module._modules.items():  # a module may be there twice
        if child is not None:
            found.extend(_open(f"{prefix}{child_name}", child))
    return found


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, None) for kind in hooks)


def _check_hooks(model: nn.Module) -> None:
    if _has_hooks(model):
        raise ConfigError(
            f"{type(model).__name__} has hooks, which no stage would call; hook its layers instead"
        )


def _check_complete(model: nn.Module, layers: Sequence[Layer]) -> None:
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no layers; a pipeline needs some")
    held = {id(t) for layer in layers for t in _tensors_of(layer.module)}
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    outside = next((name for name, tensor in named if id(tensor) not in held), None)
    if outside is not None:
        raise ConfigError(
            f"{outside} belongs to no layer that the forward of {type(model).__name__} calls, so "
            "no stage would have it; put it into a layer, or remove it"
        )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class _Tracer(fx.Tracer):
    """Traces the forward of one module; whatever that calls is a black box."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """All of them are."""
        return True


def _traced_names(model: nn.Module) -> list[str]:
    """The modules that a forward calls one after the other, in training and in evaluation alike."""
    title = type(model).__name__
    seen: list[list[str]] = []
    for training in (True, False):
        # The tensors are the model's own; everything that the forward may write to is a copy.
        traced = copy.deepcopy(model, {id(tensor): tensor for tensor in _tensors_of(model)})
        traced.train(training)
        try:
            graph = _Tracer().trace(traced)
        except Exception as error:
            raise ConfigError(
                f"the forward of {title} cannot be followed ({type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}), "
                "so it is not known to be a chain of modules; give split() an nn.Sequential or a "
                "list of stages"
            ) from error
        seen.append(_chain_in(graph, title))
    if seen[0] != seen[1]:
        odd = next(
            name for name in [*seen[0], *seen[1]] if seen[0].count(name) != seen[1].count(name)
        )
        raise ConfigError(
            f"the forward of {title} calls {odd} in training only or in evaluation only; a stage "
            "has the same modules in both: let the module itself look at self.training"
        )
    return seen[0]


def _chain_in(graph: fx.Graph, title: str) -> list[str]:
    names: list[str] = []
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    value: Any = None
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            if not names or node.args[0] is not value:
                raise ConfigError(
                    f"the forward of {title} does not return what its last module gives; {_CURE}"
                )
            continue
        if node.op != "call_module":
            after = f"after {names[-1]}" if names else "before its first module"
            raise ConfigError(
                f"the forward of {title} is no chain of modules: {after} it uses "
                f"{_label(node)}; {_CURE}"
            )
        _check_arguments(node, value, inputs, title, names)
        names.append(str(node.target))
        value = node
    return names


def _check_arguments(
    node: fx.Node, value: Any, inputs: Sequence[fx.Node], title: str, names: Sequence[str]
) -> None:
    if not names:
        used = [one for one in inputs if one.users]
        good = list(node.args) == used and used == inputs[: len(used)] and not node.kwargs
        wanted = "the model's inputs in their order"
    else:
        good = list(node.args) == [value] and not node.kwargs
        wanted = f"what {names[-1]} gives, and nothing else"
    if not good:
        raise ConfigError(
            f"the forward of {title} is no chain of modules: {node.target} must be given {wanted}; "
            f"{_CURE}"
        )


def _label(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"the attribute {node.target}"
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
