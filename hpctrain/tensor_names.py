"""Names of a model's tensors as the model itself has them, compiled by torch or not. Pure.

`torch.compile(model)` puts `_orig_mod.` before the names of what it wraps. Checkpoints and exports
have the plain names, so that a compiled run resumes uncompiled, and vice versa.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["are_plain", "fit_keys", "plain_keys", "plain_name"]

T = TypeVar("T")

_WRAPPER = re.compile(r"(?:^|(?<=[./]))_orig_mod\.")


def plain_name(name: str) -> str:
    """A tensor's name without the wrappers of `torch.compile`, anywhere in it."""
    return _WRAPPER.sub("", name)


def are_plain(names: Iterable[object]) -> bool:
    """Whether no name has a wrapper in it."""
    return not any(isinstance(name, str) and _WRAPPER.search(name) for name in names)


def plain_keys(state: Mapping[str, T]) -> dict[str, T]:
    """The same under plain names; unchanged where two tensors would have one name."""
    plain = {plain_name(name): value for name, value in state.items()}
    return plain if len(plain) == len(state) else dict(state)


def fit_keys(state: Mapping[str, T], wanted: Iterable[str]) -> dict[str, T]:
    """A state under the names that a model uses, if the plain names are the same.

    Unneeded names stay as they are, to be refused later.
    """
    known = {plain_name(name): name for name in wanted}
    fitted = {known.get(plain_name(name), name): value for name, value in state.items()}
    return fitted if len(fitted) == len(state) else dict(state)
