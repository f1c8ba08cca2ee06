"""Which wires there are. Free of torch.

A wire of this package is one line of `BUILT_IN`. Another package adds its own by an entry point of
the group `hpctrain.wires`, whose value is a subclass of `Wire`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError
from hpctrain.plugins import find_plugins, load_plugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.wire.wire import Wire

__all__ = ["BITS", "BUILT_IN", "GROUP", "NONE", "make_wire", "wire_names"]

GROUP = "hpctrain.wires"
"""The entry point group of wires from other packages."""
NONE = "none"
"""Gradients are sent as they are."""
BUILT_IN = {
    "bf16": "hpctrain.wire.casting:Bf16Wire",
    "fp16": "hpctrain.wire.casting:Fp16Wire",
}
"""One line per wire of this package."""
BITS = {NONE: 32, "bf16": 16, "fp16": 16}
"""What an element of float32 takes on the way."""


def wire_names() -> tuple[str, ...]:
    """The names of all wires, those of other packages last; none is imported."""
    return (NONE, *BUILT_IN, *find_plugins(GROUP, own={NONE, *BUILT_IN}))


def make_wire(name: str) -> Wire | None:
    """A wire by its name; None for `none`.

    Raises:
        ConfigError: there is no such wire, or it cannot be imported.
    """
    if name == NONE:
        return None
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].partition(":")
        own: Callable[[], Wire] = getattr(import_module(module), kind)
        return own()
    found = find_plugins(GROUP)
    if name not in found:
        raise ConfigError(f"wire={name!r} is unknown; choose {', '.join(wire_names())}")
    loaded = load_plugin(found[name], f"the wire {name}")
    kind_of_wire = import_module("hpctrain.wire.wire").Wire
    if not (isinstance(loaded, type) and issubclass(loaded, kind_of_wire)):
        raise ConfigError(
            f"the wire {name} ({found[name].value}) is not a subclass of hpctrain.wire.Wire"
        )
    made: Wire = loaded()
    return made
