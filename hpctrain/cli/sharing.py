"""More ranks than GPUs: said before the ranks are started, with the commands that work."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from hpctrain import log

__all__ = ["tell_of_sharing"]


def tell_of_sharing(
    num_ranks: int, environ: Mapping[str, str], before: Sequence[str], after: Sequence[str]
) -> None:
    """Say so where this machine has fewer GPUs than ranks.

    A notice and no refusal: whether the script computes on GPUs, and lets ranks share them, only it
    knows.

    Args:
        num_ranks: How many are to be started here.
        environ: The environment that they get.
        before: The words of the command before `-n N`.
        after: The words after it.
    """
    from hpctrain.launch import count_gpus, explain_sharing

    if num_ranks == 1:
        return
    num_gpus = count_gpus(num_ranks, environ)

    def write(*words: str) -> str:
        return shlex.join([*before, *words, *after])

    text = explain_sharing(
        num_ranks,
        num_gpus,
        alone=write("-n", str(num_gpus)),
        on_cpu=write("-n", str(num_ranks), "-x", "CUDA_VISIBLE_DEVICES="),
    )
    if text is not None:
        log.warn(text)
