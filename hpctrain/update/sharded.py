"""The sharded update: each rank of a node updates its share of the weights, and all take the rest.

The user's optimizer stays the truth. Calling its `step` runs an optimizer of the same kind on this
rank's share; the new weights go through memory that the node shares into every rank's own
parameters. Groups' options are taken from the user's optimizer at each step, and its state is
there for all to see: on every rank, for all parameters, though a node holds it only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError
from hpctrain.fusion import is_dense
from hpctrain.log import format_bytes
from hpctrain.update.divided import DividedUpdate
from hpctrain.update.holding import SharedState
from hpctrain.update.pieces import (
    ParameterPiece,
    flat_memory,
    make_inner,
    make_pieces,
    take_options,
    without_global_hooks,
)
from hpctrain.update.shared_weights import SharedWeights
from hpctrain.update.sharing import (
    cut_elements,
    describe_shares,
    divide_parameters,
    refuse_fused_complex,
    some_names,
)

if TYPE_CHECKING:
    from hpctrain.engines import Engine, NodeGroup

__all__ = ["ShardedUpdate"]

_ALIGN_BYTES = 64


class ShardedUpdate(DividedUpdate):
    """Takes over `optimizer.step()` until it is closed.

    Args:
        engine: Announces waiting to the watchdog.
        group: The ranks of the node.
        optimizer: The user's.
        names: Of its parameters, in the order of its groups.
        parameters: Dense, on the CPU, in the same order.
        views: The gradients that the exchange returns, one permanent object per parameter.
        by: `element` or `parameter`.
        share_weights: Whether the node holds the weights themselves once.
    """

    def __init__(
        self,
        engine: Engine,
        group: NodeGroup,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        views: Sequence[Tensor],
        *,
        by: str,
        share_weights: bool = False,
    ) -> None:
        super().__init__(optimizer, names, parameters)
        self.by = by
        self._engine = engine
        self._group = group
        self._views = views
        self._has_complex = any(p.is_complex() for p in parameters)
        sizes = [p.numel() for p in parameters]
        if by == "element":
            shares = cut_elements(
                sizes,
                [p.element_size() for p in parameters],
                num_cells=max(group.local_sizes),
                num_ranks=group.local_size,
            )
        else:
            shares = divide_parameters(sizes, num_ranks=group.local_size)
        self.shares = shares
        self._weights: SharedWeights | None = None
        self._stage(share_weights)
        self._build()
        self._state = SharedState(group, optimizer, names, self._parameters)
        self.take_over()

    def _stage(self, share_weights: bool) -> None:
        """Collective: the memory through which new weights are passed, or in which they stay."""
        starts, end = [], 0
        for parameter in self._parameters:
            starts.append(end)
            num_bytes = parameter.numel() * parameter.element_size()
            end += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        what = "weights" if share_weights else "weights under way"
        size = end + self._group.local_size
        private = [(0, size)] if share_weights else []
        self.block = self._group.allocate(size, what, private=private)
        if share_weights:
            own = self.shares[self._group.local_rank]
            places = [*starts, end]
            self._weights = self._engine.meet(
                lambda: SharedWeights(self._group, self.block, places, self._parameters, own),
                "sharing of weights",
                "",
                None,
            )
        self._staged = [
            self.block.tensor(p.dtype, start=start, num_elements=p.numel())
            for p, start in zip(self._parameters, starts, strict=True)
        ]

    def _build(self) -> None:
        """Cut the parameters where they lie now."""
        self._places = [(p.data_ptr(), p.stride()) for p in self._parameters]
        whole = self.by == "parameter"
        own = self._group.local_rank
        targets: Sequence[Tensor] = self._parameters
        if self._weights is not None:
            targets = self._weights.like_parameters()
        self.pieces = make_pieces(self.shares[own], targets, whole=whole)
        self._gradients = [self._ready_gradient(piece) for piece in self.pieces]
        flats = [flat_memory(p) for p in self._parameters]
        self._sent = [
            (
                f.parameter,
                self._staged[f.parameter][f.start : f.stop],
                flats[f.parameter][f.start : f.stop],
            )
            for f in self.shares[own]
            if self._weights is None
        ]
        self._received = [
            (
                f.parameter,
                flats[f.parameter][f.start : f.stop],
                self._staged[f.parameter][f.start : f.stop],
            )
            for rank, share in enumerate(self.shares)
            if rank != own and self._weights is None
            for f in share
        ]
        self._routes: tuple[tuple[bool, ...], Any] | None = None
        self.inner = make_inner(self._optimizer, self.pieces)

    def _ready_gradient(self, piece: ParameterPiece) -> Tensor | None:
        """The piece's part of what the exchange returns; None if it would be a copy."""
        view = self._views[piece.fragment.parameter]
        parameter = self._parameters[piece.fragment.parameter]
        same = piece.whole or view.stride() == parameter.stride() or view.numel() <= 1
        return piece.part_of(view, parameter) if same else None

    def _forget_state(self) -> None:
        self._state.forget()

    @torch.no_grad()
    def _step(self) -> None:
        """Collective: one update of all parameters that have a gradient."""
        # Until all ranks are here, some may still read what is shared: state, perhaps weights,
        # or, in a second step without an exchange, the weights of the first under way.
        self._engine.meet(self._group.barrier.wait, "begin of an update", "", None)
        places = [(p.data_ptr(), p.stride()) for p in self._parameters]
        if self._weights is not None:
            self._weights.take_in()
        elif places != self._places:
            self._rebuild_pieces()
        take_options(self.inner, self._optimizer)
        used = tuple(p.grad is not None for p in self._parameters)
        if self._has_complex:
            refuse_fused_complex(self._optimizer, self._names)
        self._state.take_in(self.inner, self.pieces)
        for piece, ready in zip(self.pieces, self._gradients, strict=True):
            self._give_gradient(piece, ready)
        with without_global_hooks():
            self._group.compute_alike(self.inner.step)
        if getattr(self._optimizer, "grad_scale", None) is not None:
            # Fused kernels have unscaled the gradients in place, and do not count it as a write.
            torch.autograd.graph.increment_version([g for g in self._gradients if g is not None])
        self._share_state(self._state.bring_home(used))
        if self._routes is None or self._routes[0] != used:
            self._routes = (used, (_route(self._sent, used), _route(self._received, used)))
        out, back = self._routes[1]
        self._engine.meet(lambda: self._exchange(out, back), "update of the weights", "", None)
        if self._weights is not None:
            self._weights.show(used)
        self._state.refresh()

    def _share_state(self, new: frozenset[int]) -> None:
        """Collective for parameters that were updated for the first time."""
        if new:
            names = some_names([self._names[index] for index in sorted(new)])
            self._engine.meet(
                lambda: self._state.share(self.inner, self.pieces, new),
                f"sharing of optimizer state ({names})",
                "",
                None,
            )

    def _rebuild_pieces(self) -> None:
        """A parameter got other memory (`p.data = ...`): cut it again, keep the state."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not is_dense(parameter):
                raise ConfigError(
                    f"{name} was made non-contiguous between backward and step; make it "
                    'contiguous, or pass update="replicated" to distribute'
                )
        before, places = self.inner.state, self._places
        old = {p.fragment: before[p.tensor] for p in self.pieces if p.tensor in before}
        self._build()
        for piece in self.pieces:
            if piece.fragment in old:
                self.inner.state[piece.tensor] = old[piece.fragment]
        if [stride for _, stride in places] != [stride for _, stride in self._places]:
            self._state.forget()  # it lies in the order of the weights

    def _give_gradient(self, piece: ParameterPiece, ready: Tensor | None) -> None:
        index = piece.fragment.parameter
        gradient = self._parameters[index].grad
        if ready is not None and gradient is self._views[index]:
            piece.tensor.grad = ready
        elif gradient is None:
            piece.tensor.grad = None
        else:
            piece.tensor.grad = piece.part_of(gradient, self._parameters[index])

    def _exchange(
        self, out: tuple[list[Tensor], list[Tensor]], back: tuple[list[Tensor], list[Tensor]]
    ) -> None:
        if out[0]:
            torch._foreach_copy_(*out)
        self._group.barrier.wait()
        if back[0]:
            torch._foreach_copy_(*back)

    def describe(self) -> list[tuple[str, str]]:
        """What was chosen, in words."""
        counts = [sum(f.stop - f.start for f in share) for share in self.shares]
        return [
            (
                "update",
                f"sharded by {self.by}: {min(counts):,} to {max(counts):,} elements a rank, "
                f"in {sum(map(len, self.shares))} fragments",
            ),
            *describe_shares(self.shares, self._names, [p.numel() for p in self._parameters]),
            ("state", self._state.describe()),
            (
                "weights",
                f"{format_bytes(self.block.num_bytes)} a {self._group.share_name}, "
                + ("shared by its ranks" if self._weights else "each rank's own besides"),
            ),
        ]

    def close(self) -> None:
        """Give the optimizer its own step back; its state stays, complete on every rank."""
        super().close()
        if self._weights is not None:
            self._weights.release()
            self._weights = None
        self.block.close()
        self._state.close()


def _route(
    triples: Sequence[tuple[int, Tensor, Tensor]], used: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Targets and sources of the parameters that moved."""
    moved = [(target, source) for index, target, source in triples if used[index]]
    return [target for target, _ in moved], [source for _, source in moved]
