"""The interface of exchange modes to a replica, and what the modes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.fusion import Arrived, Bucket, Usage
from hpctrain.pieces import local_tensor
from hpctrain.precision import Gradients
from hpctrain.replica.control_words import ControlWords
from hpctrain.replica.modes.partners import Partners
from hpctrain.replica.modes.refusing import refuse_together
from hpctrain.replica.wire_state import WireUse
from hpctrain.wire import ENCODABLE

if TYPE_CHECKING:
    from hpctrain.replica.modes.stages import Stages

__all__ = ["BackwardWatch", "Hooks", "Mode", "TorchGradientsMode", "look_at", "unfrozen"]


class Hooks(Protocol):
    """Hooks on gradients that tell which parameters a backward pass has used."""

    def hook(self) -> None:
        """Before a pass of ours: hook what can have a gradient now."""

    def uncollected(self) -> list[str]:
        """Parameters that a pass has used since the last `collect`, by name, each once."""

    def collect(self) -> None:
        """After a pass of ours, or when all is forgotten."""


class BackwardWatch:
    """Distinguishes a replica's own backward passes from others, and untouched gradients.

    Args:
        hooks: What a pass has used.
        fingerprint: Changes when a gradient is written to or replaced.
        is_intact: Checked besides the fingerprint, which may miss replaced gradients.
        depart: Lets gradients leave during the pass that follows; None: they leave after it.
    """

    def __init__(
        self,
        hooks: Hooks,
        fingerprint: Callable[[], object],
        *,
        is_intact: Callable[[], bool] = lambda: True,
        depart: Callable[[ControlWords], None] | None = None,
    ) -> None:
        self.hooks = hooks
        self._fingerprint = fingerprint
        self._is_intact = is_intact
        self._depart = depart
        self._seen: object = None  # after a pass that gradients wait in the middle of a window
        self._closing = False

    def arm(self, control: ControlWords) -> None:
        """Before the last backward pass of a window: gradients may leave while it runs."""
        self._closing = True
        if self._depart is not None:
            self._depart(control)

    def end(self) -> None:
        """After a backward pass of ours."""
        self.hooks.collect()
        self._seen = None if self._closing else self._fingerprint()
        self._closing = False

    def forget(self) -> None:
        """Gradients were dropped, or taken as they are."""
        self.hooks.collect()
        self._seen = None
        self._closing = False

    def foreign(self) -> list[str]:
        """Parameters that another backward pass has written to, by name."""
        return self.hooks.uncollected()

    def edited(self) -> bool:
        """Whether gradients were written to since the previous pass."""
        if self._seen is None:
            return False
        return self._seen != self._fingerprint() or not self._is_intact()


@dataclass(frozen=True, slots=True)
class _Look:
    marks: list[tuple[int, int]]
    gradients: list[Tensor | None] = field(compare=False)  # kept, so that no other gets their id


def look_at(parameters: Sequence[Tensor]) -> object:
    """A fingerprint of gradients where torch puts them."""
    gradients = [p.grad for p in parameters]
    return _Look([(id(g), -1 if g is None else g._version) for g in gradients], gradients)


class Mode(Gradients, ABC):
    """How gradients are exchanged, between the calls of a replica.

    Args:
        names: Of the parameters; the same on every rank.
        parameters: What the user's optimizer updates.
    """

    watch: BackwardWatch
    weighs_samples = True
    """Whether ranks are weighted by their samples; Adasum has no weights."""
    needs_every_pass = False
    """Whether a rank without samples must run backward as well: its passes communicate."""
    holds_shards = False
    """Whether ranks hold different parts of the weights, which cannot be compared."""
    plain_refusal = ""
    """Why `loss.backward()` cannot be used, and what to call instead; empty: it can."""
    stages: Stages | None = None
    """The stages that the model is one of; None: it is whole."""
    chosen = ""
    """What the policy chose, and why."""
    partners: Partners | None = None
    """Ranks that hold other parts of the model; None: this one holds all that is not in shards."""
    wire: WireUse | None = None
    """How gradients are sent between nodes; None: as they are."""
    wire_chosen = ""
    """The same in words; empty if not requested."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._kinds = [(p.dtype, p.device, p.shape) for p in self.parameters]

    def carry(self, stages: Stages) -> None:
        """The model is one of these stages: forward and backward are one pass through all."""
        self.stages = stages
        self.needs_every_pass = True
        self.plain_refusal = stages.plain_refusal

    def share(self, partners: Partners) -> None:
        """The layers of the model are divided over these ranks."""
        self.partners = partners
        self.holds_shards = True
        self.plain_refusal = self.plain_refusal or partners.plain_refusal

    def fits(self) -> bool:
        """Whether the parameters are still what they were laid out as."""
        return self._kinds == [(p.dtype, p.device, p.shape) for p in self.parameters]

    def admit_model(self) -> None:
        """Before a forward pass that trains: refuse a model that is not what it was.

        Collective in modes whose forward pass communicates, on CPUs: then all ranks refuse. On
        GPUs a rank refuses alone, and ends the job.

        Raises:
            ConfigError: the model has other parameters than `distribute` has seen.
        """
        if self.partners is not None:
            refuse_together(self.partners.everyone, self.partners.find_change())

    # Around a backward pass; `watch` has the rest

    @abstractmethod
    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass; `fresh` begins from zero."""

    def around_pass(self, weight: float) -> AbstractContextManager[None]:
        """A backward pass of ours runs inside.

        Args:
            weight: Of this rank's samples in it.
        """
        return nullcontext()

    def gather_digest(self) -> int:
        """What was gathered since the last exchange, as a number that all ranks must share."""
        return 0

    @abstractmethod
    def take_all(self) -> None:
        """After an unannounced pass: take gradients from the parameters."""

    @abstractmethod
    def zero(self) -> bool:
        """Forget all gradients. Collective after an interrupted pass that sent some of them.

        Returns:
            Whether that was an exchange.
        """

    # Exchange

    @abstractmethod
    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: sum all gradients over all ranks."""

    def rest_of(self, divisor: float | Tensor) -> float | Tensor:
        """All of it, where nothing is divided on the way."""
        return divisor

    def each_alone(self) -> AbstractContextManager[None]:
        """A block in which every rank that steps updates everything by itself.

        Raises:
            ConfigError: the model is in stages, or its layers are divided; a rank that has left
                would not run its own.
        """
        for others in (self.stages, self.partners):
            if others is not None:
                raise ConfigError(others.join_refusal)
        return nullcontext()

    # Gradients as they lie on the parameters

    def hide_unused(self, used: frozenset[int] | None) -> None:
        """Give parameters that no rank used no gradient at all: None is not zero.

        Collective over the stages with tied weights.

        Args:
            used: By index; None: all of them.
        """
        if self.stages is not None:
            used = self.stages.used_anywhere(used)
        if used is not None:
            for index, parameter in enumerate(self.parameters):
                if index not in used:
                    parameter.grad = None

    def has_none(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(p.grad is None for p in self.parameters)

    def local_gradients(self) -> list[Tensor | None]:
        """What of the gradients is on this rank."""
        return [None if p.grad is None else local_tensor(p.grad) for p in self.parameters]

    def gradients(self) -> list[Tensor | None]:
        """Copies of the gradients as they are now."""
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients that were set aside."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)

    def _split(self, excluded: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that there are: without the excluded parameters, and of these."""
        kept: list[Tensor] = []
        left: list[Tensor] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                (left if index in excluded else kept).append(parameter.grad)
        return kept, left

    def _sum_norms(
        self, squares: Callable[[frozenset[int], frozenset[int]], Tensor], excluded: frozenset[int]
    ) -> tuple[Tensor, Tensor]:
        """Collective over the stages and partners: sums of squares of the whole model.

        What several of them hold, such as tied weights, is counted once.

        Args:
            squares: Those that are here: without these parameters, and of those.
            excluded: What is counted apart.
        """
        others = [one for one in (self.partners, self.stages) if one is not None]
        elsewhere = frozenset[int]().union(*(one.elsewhere for one in others))
        sums = squares(excluded | elsewhere, excluded - elsewhere)
        for one in others:
            sums = one.sum_over(sums)
        kept, left = sums.unbind()
        return kept, left

    # Reports

    def _bytes_of(self, bucket: Bucket) -> int:
        """What a message takes on the way: encoded, where gradients are."""
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        size, num_gradients = bucket.stop - bucket.start, bucket.flags - bucket.start
        if self.wire is None or dtype not in ENCODABLE:
            return size * dtype.itemsize
        encoded = self.wire.wire.num_bytes(num_gradients)
        return encoded + (size - num_gradients) * dtype.itemsize

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Messages sent and Python hooks called so far, and bytes in one exchange."""

    @abstractmethod
    def close(self) -> None:
        """Take the hooks away."""


class TorchGradientsMode(Mode):
    """Backward begins without gradients and leaves them where torch puts them."""

    usage: Usage

    def _watch(self, usage: Usage) -> None:
        self.usage = usage
        self.watch = BackwardWatch(usage, partial(look_at, self.parameters))

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: at the start of a window there are no gradients."""
        if fresh:
            self.watch.forget()
            for parameter in self.parameters:
                parameter.grad = None
        self.usage.hook()

    def take_all(self) -> None:
        """Gradients are where torch has put them: an exchange takes them from there."""
        self.watch.forget()

    def zero(self) -> bool:
        """Forget all gradients; none has left before its window was full."""
        self.watch.forget()
        return False


@contextmanager
def unfrozen(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let parameters be hooked that are frozen now, so that they may be unfrozen later."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
