"""Which modules of a model are gathered and freed together: its units. Pure.

A unit's parameters travel in one message, just before the unit runs, so the largest unit is what a
rank holds beside its shards. Repeated blocks make good units: the layers of a transformer, the
stages of a network. Everything outside of them belongs to the root, which is gathered for the whole
pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import ConfigError
from hpctrain.name_patterns import is_inside, match_names

__all__ = ["ModuleFacts", "choose_units", "match_units"]

_SMALLEST_SHARE = 0.01
"""Of all elements: a single layer that is smaller stays with its parent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts:
    """A module as the choice sees it."""

    name: str
    """From the root, such as `layers.0`; the root itself is the empty text."""
    kind: str
    """Its class."""
    is_container: bool = False
    """Whether it only holds others: Sequential, ModuleList, ModuleDict."""
    is_callable: bool = True
    """Whether it has a forward of its own; lists and dictionaries of modules have none."""
    parameters: frozenset[int] = frozenset()
    """Its own parameters, without those of modules inside it, by number."""


def choose_units(modules: Sequence[ModuleFacts], sizes: Mapping[int, int]) -> tuple[str, ...]:
    """The repeated blocks of a model, outermost first.

    Args:
        modules: In the order of the tree, the root first.
        sizes: Elements of each parameter, by number.

    Returns:
        Names of modules, none inside another. Blocks that share a parameter with the rest of the
        model are left out: they stay with the root.
    """
    tree = _Tree(modules)
    total = sum(sizes.values())
    found: list[str] = []

    def visit(module: ModuleFacts) -> None:
        children = [child for child in tree.children(module.name) if tree.all_of(child.name)]
        kinds = Counter(child.kind for child in children)
        for child in children:
            num_elements = sum(sizes[p] for p in tree.all_of(child.name))
            is_large = num_elements >= _SMALLEST_SHARE * total
            repeats = module.is_container and kinds[child.kind] > 1 and not child.is_container
            if repeats and child.is_callable and (tree.children(child.name) or is_large):
                if tree.owners_outside(child.name) is None:
                    found.append(child.name)
            else:
                visit(child)

    visit(modules[0])
    return tuple(found)


def match_units(modules: Sequence[ModuleFacts], patterns: Sequence[str]) -> tuple[str, ...]:
    """The modules that a user's patterns mean, such as `layers.*`; of nested ones the outer.

    Without a pattern there are none: everything is the root's.

    Raises:
        ConfigError: a pattern that means nothing, or a module that cannot be a unit.
    """
    tree = _Tree(modules)
    names = [module.name for module in modules if module.name]
    if not patterns:
        return ()
    matched = match_names(patterns, names, argument="units:", outermost=True)
    found = {name for each in matched.values() for name in each}
    for name in (name for name in names if name in found):
        trouble = _trouble_with_unit(tree, name)
        if trouble is not None:
            raise ConfigError(f"units: {trouble}")
    return tuple(name for name in names if name in found)


def _trouble_with_unit(tree: _Tree, name: str) -> str | None:
    """Why a module cannot be a unit, in words; None: it can."""
    module = tree.by_name[name]
    if not module.is_callable:
        return (
            f"{name} is a {module.kind}, which has no forward and so cannot be gathered when it "
            f"runs; give '{name}.*' for the modules in it"
        )
    if not tree.all_of(name):
        return f"{name} ({module.kind}) has no parameters; leave it out"
    outside = tree.owners_outside(name)
    if outside is not None:
        return (
            f"{name} shares a parameter with {outside or 'the model itself'}, which is outside of "
            "it; tied weights must be in one unit: name a module that has both, or leave it to "
            "the root"
        )
    return None


class _Tree:
    """The modules by name, and which parameters are whose."""

    def __init__(self, modules: Sequence[ModuleFacts]) -> None:
        self.by_name = {module.name: module for module in modules}
        self._children: dict[str, list[ModuleFacts]] = {name: [] for name in self.by_name}
        self._owners: dict[int, list[str]] = {}
        for module in modules:
            if module.name:
                self._children[module.name.rpartition(".")[0]].append(module)
            for parameter in module.parameters:
                self._owners.setdefault(parameter, []).append(module.name)
        self._all: dict[str, frozenset[int]] = {}
        for module in reversed(modules):  # children first
            inner = (self._all[child.name] for child in self._children[module.name])
            self._all[module.name] = module.parameters.union(*inner)

    def children(self, name: str) -> list[ModuleFacts]:
        """What is directly inside a module."""
        return self._children[name]

    def all_of(self, name: str) -> frozenset[int]:
        """All parameters of a module."""
        return self._all[name]

    def owners_outside(self, name: str) -> str | None:
        """A module outside of this one that has one of its parameters; None: there is none."""
        owners = (owner for p in sorted(self._all[name]) for owner in self._owners[p])
        return next((o for o in owners if o != name and not is_inside(o, name)), None)
