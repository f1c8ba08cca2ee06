"""`-n auto`: the layout that `hpctrain bench layout` has found best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain import log
from hpctrain.errors import ConfigError

__all__ = ["AUTO", "choose_layout", "ranks_or_auto"]

AUTO = "auto"


def ranks_or_auto(word: str) -> int | str:
    """What `-n` is given: a whole number, or `auto`."""
    return AUTO if word == AUTO else int(word)


def choose_layout(
    key: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    """How many ranks to start, and an environment that has their threads; says what and why.

    Args:
        key: The whole path of a script or configuration, or a module's name.
        arguments: The user's own.
        environ: The environment.

    Raises:
        ConfigError: nothing was measured here, or the number of threads is fixed.
    """
    from hpctrain.bench import LayoutBook, digest_script, find_layout, this_machine
    from hpctrain.submit import state_home

    if environ.get("OMP_NUM_THREADS"):
        raise ConfigError(
            f"-n auto chooses threads as well as ranks, and OMP_NUM_THREADS is set to "
            f"{environ['OMP_NUM_THREADS']}; unset it, or give -n a number"
        )
    layout, differences = find_layout(
        LayoutBook(state_home(environ)).read(),
        target=key,
        arguments=arguments,
        machine=this_machine(),
        digest=digest_script(key),
    )
    log.notice(
        f"-n auto: {layout.num_ranks} x {layout.num_threads} (ranks x threads), {layout.why}; "
        f"measured on {layout.date}"
    )
    for difference in differences:
        log.warn(f"-n auto: {difference}; `hpctrain bench layout` measures it anew")
    return layout.num_ranks, {**environ, "OMP_NUM_THREADS": str(layout.num_threads)}
