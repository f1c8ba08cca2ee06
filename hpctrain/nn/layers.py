"""Linear and embedding layers whose weight is a tensor train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hpctrain.errors import ConfigError
from hpctrain.nn.contracting import look_up, multiply_batch
from hpctrain.nn.cores import Decomposition, decompose, draw, multiply_out
from hpctrain.nn.factors import TrainShape, choose_shape
from hpctrain.nn.orders import (
    MERGE_LIMIT,
    LookupOrder,
    ProductOrder,
    lookup_orders,
    product_orders,
    up_to,
)
from hpctrain.nn.report import TrainReport
from hpctrain.tables import count_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.nn.dividing import CoreDivision

__all__ = ["TTEmbedding", "TTLinear"]


class TensorTrain(nn.Module):
    """A matrix of rows x columns as cores: what both layers have in common."""

    def __init__(self, shape: TrainShape, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype={dtype} must be a floating-point one")
        self.shape = shape
        self.division: CoreDivision | None = None
        """How the largest core is divided over ranks; None: it is not."""
        self.factorisation_error: float | None = None
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(each, device=device, dtype=dtype))
            for each in shape.core_shapes
        )

    @property
    def weight(self) -> Tensor:
        """The dense weight, computed anew; gradients flow to the cores."""
        return self.to_dense()

    def to_dense(self) -> Tensor:
        """The weight as the dense layer has it; gradients flow to the cores."""
        cores: list[Any] = list(self.cores)
        if self.division is not None:
            cores = [core.full_tensor() for core in cores]
        return multiply_out(cores, self.shape)

    @property
    def largest_core(self) -> int:
        """The number of the core with the most elements; the first of several."""
        sizes = [math.prod(each) for each in self.shape.core_shapes]
        return sizes.index(max(sizes))

    @property
    def divided_rows(self) -> int:
        """What the number of ranks must divide: the row factor of the largest core."""
        return self.shape.row_factors[self.largest_core]

    def divide_cores(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the largest core; `split(tensor={...: "cores"})` calls it.

        Args:
            mesh: Over the ranks, whose number divides `divided_rows`; all have the same cores.
        """
        from hpctrain.nn.dividing import divide_core  # DTensor takes seconds to load

        self.division = divide_core(self.cores, self.shape, self.largest_core, mesh)

    def report(self) -> TrainReport:
        """Parameters against the dense layer's, and the error when it was made from one."""
        others = sum(parameter.numel() for parameter in self.parameters(recurse=False))  # the bias
        return TrainReport(
            kind=type(self).__name__,
            shape=self.shape,
            num_parameters=self.shape.num_parameters + others,
            dense_parameters=self.shape.rows * self.shape.columns + others,
            error=self.factorisation_error,
        )

    def _take(self, made: Decomposition, like: nn.Linear | nn.Embedding) -> None:
        """Take the cores of a dense layer's weight, and how that layer is trained."""
        self.factorisation_error = made.error
        with torch.no_grad():
            for core, value in zip(self.cores, made.cores, strict=True):
                core.copy_(value)
        for core in self.cores:
            core.requires_grad_(like.weight.requires_grad)
        self.train(like.training)

    def _repr(self, sizes: str) -> str:
        report = self.report()
        ranks = ", ".join(map(str, self.shape.ranks))
        told = f"{sizes}, factors={report.describe_factors()}, ranks=({ranks})"
        error = "" if report.error is None else f", error={report.error:.3g}"
        return f"{told}, {report.describe_compression()} parameters{error}"


class TTLinear(TensorTrain):
    """`nn.Linear` whose weight (out_features x in_features) is a tensor train.

    The initial weight has the variance that `nn.Linear` gives it.

    Args:
        in_features: As for `nn.Linear`.
        out_features: As for `nn.Linear`.
        bias: As for `nn.Linear`; it stays dense.
        ranks: Between neighbouring cores: one number for each, or one for all, which is cut to what
            is possible.
        in_factors: Whose product is at least `in_features`; None chooses.
        out_factors: Whose product is at least `out_features`; None chooses.
        num_cores: 3, unless factors are given.
        merge_limit: Elements that cores multiplied ahead of the batch may have.
        device: As for `nn.Linear`.
        dtype: As for `nn.Linear`.

    Raises:
        ConfigError: sizes, factors or ranks that do not fit together.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ranks: int | Sequence[int],
        in_factors: Sequence[int] | None = None,
        out_factors: Sequence[int] | None = None,
        num_cores: int | None = None,
        merge_limit: int = MERGE_LIMIT,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = _linear_shape(in_features, out_features, ranks, in_factors, out_factors, num_cores)
        super().__init__(shape, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.merge_limit = count_of(merge_limit, "merge_limit")
        self.orders = product_orders(shape, merge_limit=self.merge_limit)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight with the variance of `nn.Linear`'s, and the bias as it does."""
        draw(list(self.cores), self.shape, variance=1 / (3 * self.in_features))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        *,
        ranks: int | Sequence[int] | None = None,
        error: float | None = None,
        in_factors: Sequence[int] | None = None,
        out_factors: Sequence[int] | None = None,
        num_cores: int | None = None,
        merge_limit: int = MERGE_LIMIT,
    ) -> TTLinear:
        """Factorise a dense layer by TT-SVD, at given ranks or at a given relative error.

        Args:
            linear: Stays as it is; the bias is copied.
            ranks: As for the layer itself.
            error: In the Frobenius norm, between 0 and 1; the smallest ranks that stay within it.
            in_factors: As for the layer itself.
            out_factors: As for the layer itself.
            num_cores: As for the layer itself.
            merge_limit: As for the layer itself.

        Raises:
            ConfigError: what is given does not fit together, the error is out of reach in the
                weight's dtype, or the weight has no values yet.
        """
        weight = _weight_of(linear, nn.Linear, ranks, error)
        sizes = linear.in_features, linear.out_features
        shape = _linear_shape(*sizes, ranks, in_factors, out_factors, num_cores)
        made = decompose(weight, shape, error=error)
        layer = cls(
            *sizes,
            linear.bias is not None,
            ranks=made.shape.ranks,
            in_factors=shape.column_factors,
            out_factors=shape.row_factors,
            merge_limit=merge_limit,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer._take(made, linear)
        if layer.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(linear.bias)
            layer.bias.requires_grad_(linear.bias.requires_grad)
        return layer

    def order(self, batch: int) -> ProductOrder:
        """The order in which a batch of vectors is multiplied: the cheapest."""
        return up_to(self.orders, batch)

    def divide_cores(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the largest core: each rank computes some of the outputs."""
        super().divide_cores(mesh)
        if self.division is not None:
            self.orders = product_orders(self.division.shape, merge_limit=self.merge_limit)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the weight, add the bias."""
        if x.shape[-1] != self.in_features:
            raise ConfigError(
                f"the input's last dimension is {x.shape[-1]}, and must be {self.in_features}"
            )
        shape, lead = self.shape, x.shape[:-1]
        flat = x.reshape(-1, self.in_features)
        if shape.padded_columns > shape.columns:
            flat = pad(flat, (0, shape.padded_columns - shape.columns))
        cores, order = list(self.cores), self.order(flat.shape[0])
        if self.division is None:
            digits = multiply_batch(flat, cores, shape, order)
        else:
            mine, parts = self.division.local_input(flat), self.division.local_cores(cores)
            digits = multiply_batch(mine, parts, self.division.shape, order)
            digits = self.division.join_digits(digits)
        out = digits.reshape(-1, shape.padded_rows)
        out = out[:, : shape.rows].reshape(*lead, self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        """Sizes, factors, ranks, what it saves."""
        return self._repr(
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class TTEmbedding(TensorTrain):
    """`nn.Embedding` whose weight (num_embeddings x embedding_dim) is a tensor train.

    The initial weight has the variance that `nn.Embedding` gives it: 1. The row of `padding_idx` is
    zero and gets no gradient, as in `nn.Embedding`. Rows are computed in the weight's dtype, under
    autocast too, as `nn.Embedding` reads them.

    Args:
        num_embeddings: As for `nn.Embedding`.
        embedding_dim: As for `nn.Embedding`.
        padding_idx: As for `nn.Embedding`.
        ranks: Between neighbouring cores: one number for each, or one for all, which is cut to what
            is possible.
        row_factors: Whose product is at least `num_embeddings`; None chooses.
        column_factors: Whose product is at least `embedding_dim`; None chooses.
        num_cores: 3, unless factors are given.
        merge_limit: Elements that cores multiplied ahead of the batch may have.
        device: As for `nn.Embedding`.
        dtype: As for `nn.Embedding`.

    Raises:
        ConfigError: sizes, factors or ranks that do not fit together.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        ranks: int | Sequence[int],
        row_factors: Sequence[int] | None = None,
        column_factors: Sequence[int] | None = None,
        num_cores: int | None = None,
        merge_limit: int = MERGE_LIMIT,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = choose_shape(
            num_embeddings,
            embedding_dim,
            ranks=ranks,
            row_factors=row_factors,
            column_factors=column_factors,
            num_cores=num_cores,
        )
        super().__init__(shape, device, dtype)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = _check_padding(padding_idx, num_embeddings)
        self.merge_limit = count_of(merge_limit, "merge_limit")
        self.orders = lookup_orders(shape, merge_limit=self.merge_limit)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight with variance 1."""
        draw(list(self.cores), self.shape, variance=1.0)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Embedding,
        *,
        ranks: int | Sequence[int] | None = None,
        error: float | None = None,
        row_factors: Sequence[int] | None = None,
        column_factors: Sequence[int] | None = None,
        num_cores: int | None = None,
        merge_limit: int = MERGE_LIMIT,
    ) -> TTEmbedding:
        """Factorise a dense layer by TT-SVD, at given ranks or at a given relative error.

        Args:
            dense: Stays as it is.
            ranks: As for the layer itself.
            error: In the Frobenius norm, between 0 and 1; the smallest ranks that stay within it.
            row_factors: As for the layer itself.
            column_factors: As for the layer itself.
            num_cores: As for the layer itself.
            merge_limit: As for the layer itself.

        Raises:
            ConfigError: as for a linear layer; or the dense layer has `max_norm`,
                `scale_grad_by_freq`, `sparse`, or a padding row that is not zero.
        """
        weight = _weight_of(dense, nn.Embedding, ranks, error)
        _check_options(dense)
        sizes = dense.num_embeddings, dense.embedding_dim
        shape = choose_shape(
            *sizes,
            ranks=ranks,
            row_factors=row_factors,
            column_factors=column_factors,
            num_cores=num_cores,
        )
        made = decompose(weight, shape, error=error)
        layer = cls(
            *sizes,
            dense.padding_idx,
            ranks=made.shape.ranks,
            row_factors=shape.row_factors,
            column_factors=shape.column_factors,
            merge_limit=merge_limit,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer._take(made, dense)
        return layer

    def order(self, batch: int) -> LookupOrder:
        """The order in which a batch of rows is made: the cheapest."""
        return up_to(self.orders, batch)

    def divide_cores(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the largest core: each rank makes some of the rows."""
        super().divide_cores(mesh)
        if self.division is not None:
            self.orders = lookup_orders(self.division.shape, merge_limit=self.merge_limit)

    def to_dense(self) -> Tensor:
        """The weight as the dense layer has it; gradients flow to the cores."""
        weight = super().to_dense()
        if self.padding_idx is None:
            return weight
        rows = torch.arange(self.num_embeddings, device=weight.device)
        return weight.masked_fill((rows == self.padding_idx).unsqueeze(1), 0.0)

    def forward(self, ids: Tensor) -> Tensor:
        """Make the rows of these numbers."""
        flat = ids.reshape(-1).long()
        rows = self._rows(flat)[:, : self.embedding_dim]
        if self.padding_idx is not None:
            rows = rows.masked_fill((flat == self.padding_idx).unsqueeze(1), 0.0)
        return rows.reshape(*ids.shape, self.embedding_dim)

    def _rows(self, flat: Tensor) -> Tensor:
        division, cores, order = self.division, list(self.cores), self.order(flat.shape[0])
        if division is None:
            return look_up(flat, cores, self.shape, order)
        ids, is_mine = division.local_ids(division.local_input(flat), self.shape)
        rows = look_up(ids, division.local_cores(cores), division.shape, order)
        return division.join_rows(rows.masked_fill(~is_mine.unsqueeze(1), 0.0))

    def extra_repr(self) -> str:
        """Sizes, factors, ranks, what it saves."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return self._repr(f"{self.num_embeddings}, {self.embedding_dim}{padding}")


def _linear_shape(
    in_features: int,
    out_features: int,
    ranks: int | Sequence[int] | None,
    in_factors: Sequence[int] | None,
    out_factors: Sequence[int] | None,
    num_cores: int | None,
) -> TrainShape:
    return choose_shape(
        count_of(out_features, "out_features"),
        count_of(in_features, "in_features"),
        ranks=ranks,
        row_factors=out_factors,
        column_factors=in_factors,
        num_cores=num_cores,
        names=("out_factors", "in_factors"),
    )


def _weight_of(
    layer: nn.Module, kind: type[nn.Linear] | type[nn.Embedding], ranks: object, error: object
) -> Tensor:
    """The weight of a dense layer that can be factorised this way."""
    if not isinstance(layer, kind):
        raise ConfigError(f"from_dense takes an nn.{kind.__name__}, not a {type(layer).__name__}")
    if (ranks is None) == (error is None):
        raise ConfigError("give either ranks= or error=, and not both")
    if error is not None and not (isinstance(error, int | float) and 0 < error < 1):
        raise ConfigError(f"error={error!r} must be a relative error, above 0 and below 1")
    weight = layer.weight.detach()
    if not weight.dtype.is_floating_point:
        raise ConfigError(f"the weight is {weight.dtype}, and must be of a floating-point dtype")
    if weight.is_meta:
        raise ConfigError("the weight is on the meta device and has no values; load it first")
    return weight


def _check_padding(padding_idx: int | None, num_embeddings: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigError(f"padding_idx={padding_idx} must be within {num_embeddings} embeddings")
    return padding_idx % num_embeddings


def _check_options(dense: nn.Embedding) -> None:
    given = [
        name
        for name in ("max_norm", "scale_grad_by_freq", "sparse")
        if getattr(dense, name) not in (None, False)
    ]
    if given:
        raise ConfigError(
            f"an embedding with {', '.join(given)} cannot be factorised; leave it off"
        )
    row = dense.padding_idx
    if row is not None and bool(dense.weight.detach()[row].any()):
        raise ConfigError(
            f"the row of padding_idx={row} is not zero, and a TTEmbedding has zeros there; zero it"
        )
