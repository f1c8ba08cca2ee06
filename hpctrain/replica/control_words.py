"""The control words: what every rank sends with its gradients, and what the sums tell.

They are sent at the end of the gradients, so none of this costs a message. Every check gives the
same answer on all ranks that see the same sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.fusion import CONTROL_WORDS

__all__ = [
    "GATHERED_DIFFERENTLY",
    "ControlWords",
    "LateSums",
    "check_counted",
    "check_sums",
    "digest_options",
    "own_words",
]

_COMPARED = (bool, int, float, complex, str, tuple, type(None), np.generic)
"""Kinds of options that are compared; lists are not."""
_SEQUENCE_PERIOD = 16
"""Modulus of compared numbers: sums of squares stay exact in float32 for 70,000 ranks."""
GATHERED_DIFFERENTLY = (
    "the ranks have gathered different units of the sharded model, or in another order, so that "
    "they have computed with each other's parameters: a module was called, or its output used in "
    "the loss, on some ranks and not on others; run the same modules on every rank (multiply by "
    "zero what a rank does not need), or train without shard=. Or ranks that hold parts of one "
    "model did different things: their own message says what"
)
_GATHERS_PERIOD = 1 << 18
"""Of digests that travel in float64: sums of squares stay exact for 130,000 ranks."""


class ControlWords(NamedTuple):
    """One rank's control words, or their sums over all ranks."""

    weight: float
    """Samples, or 1 for each backward call without a count."""
    calls: float
    present: float
    """1 for a rank that takes part, 0 for one that ran out of data (`join`)."""
    counted: float
    """Backward calls that had sample counts."""
    plain: float
    """1 for a rank that called `loss.backward()`: its gradients are not weighted yet."""
    sequence: float
    """Exchanges and updates so far, and batches since the last one, modulo a small number."""
    sequence_squared: float
    """If both sums are equal, the numbers are equal on all ranks."""
    options: float
    """A digest of the optimizer's options, and of which parameters are frozen."""
    options_squared: float
    nonfinite: float
    """1 for a rank whose loss or gradient is inf or NaN."""
    nonfinite_rank: float
    """That rank's number, else 0."""
    loads: float = 0.0
    """Number of states loaded into the optimizer, modulo a small number."""
    loads_squared: float = 0.0
    new_weights: float = 0.0
    """1 for a rank whose model has loaded a state since its last exchange."""
    gathers: float = 0.0
    """A digest of what a sharded model has gathered and reduced, in its order; else 0."""
    gathers_squared: float = 0.0
    interrupted: float = 0.0
    """1 for a rank whose backward pass raised after some gradients were sent; the last word, which
    an abandoned arena sets itself."""


if len(ControlWords._fields) != CONTROL_WORDS:
    raise RuntimeError("ControlWords and CONTROL_WORDS differ")


def own_words(
    *,
    rank: int,
    weight: float,
    calls: float,
    present: bool,
    counted: float,
    plain: bool,
    sequence: int,
    options: int,
    finding: str | None,
    loads: int = 0,
    new_weights: bool = False,
    gathers: int = 0,
) -> ControlWords:
    """This rank's words."""
    loaded = float(loads % _SEQUENCE_PERIOD) if present else 0.0
    number = float(sequence % _SEQUENCE_PERIOD) if present else 0.0
    gathered = float(gathers % _GATHERS_PERIOD) if present else 0.0
    digest = float(options % _SEQUENCE_PERIOD) if present else 0.0
    return ControlWords(
        weight=weight,
        calls=calls,
        present=float(present),
        counted=counted,
        plain=float(plain),
        sequence=number,
        sequence_squared=number * number,
        options=digest,
        options_squared=digest * digest,
        nonfinite=float(finding is not None),
        nonfinite_rank=float(rank) if finding is not None else 0.0,
        loads=loaded,
        loads_squared=loaded * loaded,
        new_weights=float(new_weights),
        gathers=gathered,
        gathers_squared=gathered * gathered,
    )


def digest_options(
    groups: Sequence[Mapping[str, Any]], parameters: Sequence[Tensor], *, number: int
) -> int:
    """A number that differs where options of an optimizer or frozen parameters differ.

    Tensors on a GPU are left out: reading them would synchronize it.

    Args:
        groups: The optimizer's.
        parameters: Trained or frozen.
        number: Of the exchange. Only a few bits are compared, so a difference that is missed in
            one exchange is found in a later one.
    """
    options = [
        (name, value.item() if isinstance(value, Tensor) else value)
        for group in groups
        for name, value in group.items()
        if isinstance(value, _COMPARED) or _is_number(value)
    ]
    frozen = [index for index, p in enumerate(parameters) if not p.requires_grad]
    text = repr((number, options, frozen)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"


def check_sums(mine: ControlWords, sums: ControlWords, *, size: int, step: int) -> None:
    """Refuse what ranks did differently.

    Args:
        mine: This rank's words.
        sums: Over all ranks.
        size: The number of ranks.
        step: Names this exchange, for the message.

    Raises:
        ConfigError: sample counts on some ranks only, a state that was loaded on some ranks only,
            or different options.
        CollectiveError: the ranks are not in the same step, have gathered different units of a
            sharded model, or a rank has sent half a pass.
    """
    if sums.interrupted:
        raise CollectiveError(
            f"a backward pass was interrupted on {sums.interrupted:.0f} of {size} ranks while "
            "gradients were being sent; catch an exception on all ranks or on none, or use "
            "overlap=False"
        )
    check_counted(sums.calls, sums.counted, here=mine.counted > 0)
    ranks = sums.present
    if 0 < sums.plain < ranks:
        raise ConfigError(
            f"loss.backward() was called on {sums.plain:.0f} of {ranks:.0f} ranks and "
            "replica.backward(loss) on the others; call the same on every rank"
        )
    same = (
        sums.sequence == mine.sequence * ranks
        and sums.sequence_squared == mine.sequence_squared * ranks
    )
    if mine.present and not same:
        raise CollectiveError(
            f"the ranks are not in the same step (this one has made {step}): some rank took a "
            "batch, or called backward or step, and others did not, so their steps do not match; "
            "do each of these equally often on every rank (a `continue` or an `if` that only "
            "some ranks take is the usual cause)"
        )
    same = (
        sums.gathers == mine.gathers * ranks
        and sums.gathers_squared == mine.gathers_squared * ranks
    )
    if mine.present and not same:
        raise CollectiveError(GATHERED_DIFFERENTLY)
    same = sums.loads == mine.loads * ranks and sums.loads_squared == mine.loads_squared * ranks
    if mine.present and not same:
        raise ConfigError(
            "a state was loaded into the optimizer (load_state_dict) on some ranks and not on "
            "others since distribute(), so that their updates would differ; load the same state on "
            "every rank, or on rank 0 before distribute(), which copies it to all ranks"
        )
    same = (
        sums.options == mine.options * ranks
        and sums.options_squared == mine.options_squared * ranks
    )
    if mine.present and not same:
        raise ConfigError(
            "the learning rates or other options of the optimizer differ between ranks (weight "
            "decay, momentum, ...), or they have frozen different parameters; set them alike on "
            "every rank, and give schedules the same number, such as ReduceLROnPlateau the mean "
            "over all ranks, world.mean(loss)"
        )


def check_counted(calls: float, counted: float, *, here: bool) -> None:
    """Refuse sample counts on some ranks alone, from the totals over all ranks.

    Raises:
        ConfigError: on all ranks, since all have the same totals.
    """
    if 0 < counted < calls:
        raise ConfigError(
            "num_samples was given on some ranks and not on others (this rank "
            f"{'gave' if here else 'did not give'} it); give it on every rank or on none"
        )


class LateSums:
    """Sums on their way from a GPU.

    All ranks read them the same number of exchanges later, so that all raise together. By then they
    have arrived: nothing waits for them.
    """

    def __init__(self, sums: Tensor, mine: ControlWords, *, step: int, finding: str | None) -> None:
        self.mine = mine
        self.step = step
        self.finding = finding
        self._host = torch.empty(CONTROL_WORDS, dtype=sums.dtype, pin_memory=True)
        self._host.copy_(sums, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def read(self) -> ControlWords:
        """The sums; waits where they are still under way."""
        self._event.synchronize()
        return ControlWords(*self._host.tolist())
