"""Gradients of a sharded model: torch sends each rank its shard while backward runs.

What is left for the exchange is one small message: the control words, and which parameters some
rank has used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from hpctrain.engines import Op
from hpctrain.errors import CollectiveError, ConfigError
from hpctrain.fusion import CONTROL_WORDS, Arrived, Usage
from hpctrain.log import format_bytes
from hpctrain.optim import members_of
from hpctrain.pieces import local_tensor
from hpctrain.precision import multiply, sum_of_squares
from hpctrain.replica.control_words import GATHERED_DIFFERENTLY, ControlWords
from hpctrain.replica.modes.base import TorchGradientsMode
from hpctrain.replica.modes.gather_order import GatherOrder
from hpctrain.replica.modes.refusing import refuse_together

if TYPE_CHECKING:
    from hpctrain.engines import Engine
    from hpctrain.sharding import Sharding

__all__ = ["ShardedMode"]


class ShardedMode(TorchGradientsMode):
    """How a replica treats gradients that arrive in shards.

    Args:
        engine: Over the ranks of the data dimension.
        names: Of the parameters; the same on every rank.
        parameters: Shards, which the optimizer updates.
        sharding: What torch does.
        optimizer: Before its steps gathered weights are freed.
        order: Compares what the ranks gather, where control words are read late.
    """

    needs_every_pass = True
    holds_shards = True
    plain_refusal = (
        "loss.backward() with a sharded model: its gradients leave while backward runs, before "
        "anybody could weigh them by samples; call replica.backward(loss, num_samples=...) or "
        "replica.learn(loss_fn, x, y)"
    )

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        sharding: Sharding,
        optimizer: torch.optim.Optimizer,
        order: GatherOrder | None = None,
    ) -> None:
        super().__init__(names, parameters)
        self.engine = engine
        self.sharding = sharding
        self._order = order
        self._watch(Usage(self.names, self.parameters))
        self._num_messages = sharding.num_messages
        self._is_interrupted = False
        self._hooks = [
            member.register_step_pre_hook(lambda *_: sharding.reshard())
            for member in members_of(optimizer)
        ]
        self._stop_comparing: Callable[[], None] = lambda: None
        if engine.size > 1 and not sharding.in_stages:  # stages gather all units, whatever they run
            self._stop_comparing = sharding.after_evaluating(self._compare_evaluation)

    def _compare_evaluation(self) -> None:
        """Collective: refuse a pass without gradients in which ranks took different branches.

        Raises:
            CollectiveError: on all ranks; on GPUs after the next pass.
        """
        digest = self.sharding.digest
        if self._order is not None:
            self._order.check(digest, "evaluation")
            return
        words = torch.tensor([digest, -digest])
        self.engine.allreduce_(words, Op.MAX, what="comparing what an evaluation gathered")
        if words[0] != -words[1]:
            self.sharding.end_window()
            raise CollectiveError(f"in this evaluation {GATHERED_DIFFERENTLY}")

    def admit_model(self) -> None:
        """Collective on CPUs: refuse parameters that are no shards, before anything is gathered.

        On GPUs this rank alone refuses, and ends the job: agreeing would wait for the device.

        Raises:
            ConfigError: on all ranks; the model has other parameters than `split` has seen.
        """
        engine = self.engine if self.partners is None else self.partners.everyone
        refuse_together(engine, self.sharding.find_change())

    # Around a backward pass

    def begin(self, *, fresh: bool) -> None:
        """Before a backward pass: where a new window begins, there are no gradients."""
        super().begin(fresh=fresh)
        if fresh:
            self.sharding.forget()

    @contextmanager
    def around_pass(self, weight: float) -> Iterator[None]:
        """A backward pass; a rank without samples sends zeros in it."""
        self._is_interrupted = True
        around: AbstractContextManager[None] = nullcontext()
        if self.stages is not None:  # which may have several micro-batches, or none
            around = self.sharding.staged_pass()
        elif weight <= 0:
            around = self.sharding.silence()
        with around:
            yield
        self._is_interrupted = False

    def zero(self) -> bool:
        """Forget all gradients; units that an exception has left half-way begin anew."""
        if self._is_interrupted or self.sharding.is_half_way:
            self.sharding.recover()
            self._is_interrupted = False
        self.sharding.forget()
        return super().zero()

    def gather_digest(self) -> int:
        """What was gathered and reduced since the last exchange."""
        return self.sharding.digest

    # Exchange

    def exchange(self, control: ControlWords) -> Arrived:
        """Collective: sum the control words, and find what some rank has used."""
        self.watch.forget()
        sharding = self.sharding
        if sharding.whole_gradients:
            sharding.reduce_whole()
            self.watch.forget()
        if self._order is not None:
            self._order.check(sharding.digest)
        sharding.end_window()
        if self.stages is not None:
            self.stages.sum_tied()
        used = sharding.used()
        marks = [float(id(p) in used) for p in self.parameters]
        totals = torch.tensor([*control, *marks], dtype=torch.float64, device=self.engine.device)
        if self.engine.size > 1:
            self.engine.allreduce_(totals, Op.SUM, what="weights and use of gradients")
        flags = (tuple(range(len(self.parameters))), totals[CONTROL_WORDS:])
        return Arrived(
            control=totals[:CONTROL_WORDS],
            flags=(flags,),
            all_used_here=len(used) == len(self.parameters),
        )

    def each_alone(self) -> NoReturn:
        """Refused: a rank that has left would not gather with the others.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "replica.join() with a sharded model: all ranks must gather its parameters together; "
            "give every rank the same number of batches (a Loader does), with num_samples=0 for "
            "an empty one"
        )

    # Gradients: every rank treats its shards

    def _split_shards(self, excluded: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
        kept, left = self._split(excluded)
        return [local_tensor(g) for g in kept], [local_tensor(g) for g in left]

    def rest_of(self, divisor: float | Tensor) -> float | Tensor:
        """What is left of a divisor: torch has averaged over the ranks."""
        return divisor / self.engine.size

    def average(self, divisor: float | Tensor) -> None:
        """Turn what came into averages."""
        rest = self.rest_of(divisor)
        gradients, _ = self._split_shards(frozenset())
        if gradients and (isinstance(rest, Tensor) or rest != 1.0):
            torch._foreach_div_(gradients, rest)

    def norm_squared(self, excluded: frozenset[int]) -> tuple[Tensor, Tensor]:
        """Collective: sums of squares over all shards, without the excluded, and of these."""
        device = self.engine.device

        def squares(without: frozenset[int], of: frozenset[int]) -> Tensor:
            kept, left = self._split_shards(without)[0], self._split_shards(of)[1]
            sums = torch.stack([sum_of_squares(kept, device), sum_of_squares(left, device)])
            if self.engine.size > 1:
                self.engine.allreduce_(sums, Op.SUM, what="the norm of sharded gradients")
            return sums

        return self._sum_norms(squares, excluded)

    def scale(self, factor: Tensor, excluded: frozenset[int], excluded_factor: Tensor) -> None:
        """Multiply, the excluded parameters by a factor of their own."""
        kept, left = self._split_shards(excluded)
        multiply(kept, factor)
        multiply(left, excluded_factor)

    def clamp(self, limit: float, excluded: frozenset[int]) -> None:
        """Limit each element's size, but for the excluded parameters."""
        for gradient in self._split_shards(excluded)[0]:
            gradient.clamp_(-limit, limit)

    # Reports

    def describe(self) -> list[tuple[str, str]]:
        """Rows that say what was chosen."""
        sharding = self.sharding
        shards, largest, everything = sharding.num_bytes()
        if sharding.in_stages:
            gathered = f"and {format_bytes(everything)} gathered, once for all micro-batches"
        elif sharding.kind == "parameters":
            gathered = f"and at most {format_bytes(largest)} of a unit at a time, gathered"
        else:
            gathered = f"and {format_bytes(everything)} gathered from forward to backward"
        kept = "whole between backward passes" if sharding.whole_gradients else "in shards"
        held = everything if sharding.whole_gradients else shards
        if sharding.in_stages and not sharding.whole_gradients:
            kept = f"whole while micro-batches run ({format_bytes(everything)}), then in shards"
        return [
            ("sharded", f"{sharding.kind}, over {self.engine.size} ranks, by torch's fully_shard"),
            ("units", f"{len(sharding.names)} and the root"),
            ("weights", f"{format_bytes(shards)} of {format_bytes(everything)} a rank, {gathered}"),
            ("gradients", f"{kept}: {format_bytes(held)} a rank"),
            ("gathered", sharding.way),
        ]

    def counts(self) -> dict[str, int]:
        """Gathers and reductions so far, and the bytes of one gather and one reduction of all."""
        return {
            "messages": self.sharding.num_messages - self._num_messages,
            "hooks": 0,
            "bytes": 2 * self.sharding.num_bytes()[2],
        }

    def close(self) -> None:
        """Take the hooks away; the model stays sharded.

        Collective on GPUs, and over the stages where weights are tied.

        Raises:
            CollectiveError: on all ranks; on GPUs, where they took different branches in the last
                pass.
        """
        self._stop_comparing()
        self.usage.close()
        for hook in self._hooks:
            hook.remove()
        if self.stages is not None:
            self.stages.close()
        order, self._order = self._order, None
        if order is not None:
            order.close()
