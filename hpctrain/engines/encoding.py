"""How values are combined, and how a tensor is encoded for sending. Pure.

Refusals, the dtypes on the wire, and how large tensors are cut.

Nothing here communicates, and what is refused depends on what must match across ranks anyway
(dtype, layout, kind of device, op), so that all ranks refuse together before any of them has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from numbers import Integral

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

__all__ = [
    "DTYPES",
    "Op",
    "as_op",
    "check_buffer",
    "check_op",
    "check_tensor",
    "clip",
    "decode",
    "describe",
    "encode",
    "flatten",
    "pieces",
    "rounds",
    "segments",
    "shares",
    "store",
    "to_bytes",
]


class Op(StrEnum):
    """How an allreduce or a reduce-scatter combines the ranks' values."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    ADASUM = "adasum"


def as_op(op: Op | str) -> Op:
    """The op of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Op(op)
    except ValueError:
        names = ", ".join(known.value for known in Op)
        raise ConfigError(f"op={op!r} is unknown; choose one of {names}") from None


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DTYPES: tuple[torch.dtype, ...] = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)

# What carries a dtype that an engine cannot combine itself; casting back is exact or rounds once.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
}
_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}

Sends = Callable[[torch.dtype, Op], bool]


def check_buffer(num_elements: object, dtype: object) -> None:
    """Refuse what no buffer can be made of, before ranks wait for each other.

    Raises:
        ConfigError: the same on all ranks with the same arguments.
    """
    whole = isinstance(num_elements, Integral) and not isinstance(num_elements, bool)
    if not whole or int(num_elements) < 0:  # type: ignore[call-overload]
        raise ConfigError(
            f"allocate: num_elements={num_elements!r} must be a whole number, at least 0"
        )
    if dtype not in DTYPES:
        names = ", ".join(_short(known) for known in DTYPES)
        raise ConfigError(f"allocate: dtype={dtype!r} cannot be sent; use one of {names}")


def check_tensor(tensor: Tensor, *, call: str, device: torch.device, written: bool = False) -> None:
    """Refuse a tensor that cannot be sent.

    Args:
        tensor: What was given.
        call: The collective, for the message.
        device: The engine's; CPU tensors work on every engine.
        written: Whether the collective writes into it.

    Raises:
        ConfigError: the same on all ranks.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ConfigError(
            f"{call}: the tensor is {kind}; a dense (strided) tensor is required: send its values "
            "and indices apart, or call to_dense() first"
        )
    if tensor.is_quantized:
        raise ConfigError(f"{call}: the tensor is quantized; call dequantize() first")
    if tensor.dtype not in DTYPES:
        names = ", ".join(_short(dtype) for dtype in DTYPES)
        raise ConfigError(
            f"{call}: dtype {_short(tensor.dtype)} cannot be sent; use one of {names}"
        )
    here = tensor.device
    index_fits = device.index is None or here.index == device.index
    if here.type != "cpu" and (here.type != device.type or not index_fits):
        allowed = "cpu" if device.type == "cpu" else f"cpu or {device}"
        raise ConfigError(
            f"{call}: the tensor is on {here}, this engine sends from {allowed}; move it there"
        )
    if written and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ConfigError(
            f"{call}: several elements of the tensor share one memory location (it was expanded), "
            "so it cannot be written in place; call clone() first"
        )


def check_op(tensor: Tensor, op: Op, *, call: str, ops: Collection[Op], engine: str) -> None:
    """Refuse an op that the engine does not have or that means nothing for the dtype.

    Raises:
        ConfigError: the same on all ranks.
    """
    dtype = tensor.dtype
    if op not in ops:
        names = ", ".join(known for known in Op if known in ops)
        raise ConfigError(f"{call}: the {engine} engine has no op {op.value!r} here; use {names}")
    if op in (Op.AVERAGE, Op.ADASUM) and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(
            f"{call}: {op.value} of {_short(dtype)} would round to whole numbers; convert it to a "
            "floating dtype first, or use sum"
        )
    if op in (Op.MIN, Op.MAX, Op.ADASUM) and dtype.is_complex:
        raise ConfigError(f"{call}: {op.value} is undefined for {_short(dtype)}; use sum, average")


def flatten(tensor: Tensor) -> Tensor:
    """The values in logical order, contiguous, one-dimensional; a view where that is possible."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1)


def to_bytes(flat: Tensor) -> Tensor:
    """The bytes of a flat tensor: data that only moves needs no dtype of its own."""
    return flat.view(torch.uint8)


def store(flat: Tensor, tensor: Tensor) -> None:
    """Put flat values into the tensor they belong to, unless they are there already.

    The version counter moves either way, so that autograd notices what a collective overwrote.
    """
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    elif not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def encode(flat: Tensor, op: Op, sends: Sends, size: int, *, owned: bool) -> tuple[Tensor, Op]:
    """What to combine on the wire, and how, so that `decode` gives the op of the flat values.

    - complex: its real and imaginary parts, one after the other;
    - bool: bytes; sum and max are "any", min is "all";
    - min and max of floating values: integers in the same order, in which NaN wins as in torch
      (MPI and NCCL leave NaN open, and ranks may then differ);
    - what the engine cannot combine: a wider dtype.

    Args:
        flat: From `flatten`.
        op: Checked by `check_op`.
        sends: Whether the engine combines a dtype by an op itself.
        size: How many ranks combine.
        owned: Whether `flat` may be overwritten.
    """
    on_wire = Op.SUM if op is Op.AVERAGE else op
    if flat.dtype.is_complex:
        return torch.view_as_real(flat).view(-1), on_wire
    if flat.dtype is torch.bool:
        flat, on_wire = flat.view(torch.uint8), Op.MIN if op is Op.MIN else Op.MAX
    if flat.dtype.is_floating_point and op in (Op.MIN, Op.MAX):
        wide = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        return _order_keys(-wide if op is Op.MIN else wide), Op.MAX
    if not sends(flat.dtype, on_wire):
        return flat.to(_WIDER[flat.dtype]), on_wire
    if _divides_before(flat.dtype, op):
        return flat.div_(size) if owned else flat / size, on_wire
    return flat, on_wire


def decode(wire: Tensor, dtype: torch.dtype, op: Op, size: int) -> Tensor:
    """Turn the result (all of it or a part) into flat values of the dtype; may overwrite it."""
    if dtype.is_floating_point and op in (Op.MIN, Op.MAX):
        values = _from_order_keys(wire)
        return (-values if op is Op.MIN else values).to(dtype)
    if op is Op.AVERAGE and not _divides_before(wire.dtype, op):
        wire.div_(size)
    if dtype.is_complex:
        return torch.view_as_complex(wire.view(-1, 2))
    if dtype is torch.bool and wire.dtype is torch.uint8:
        return wire.view(dtype)
    return wire if wire.dtype is dtype else wire.to(dtype)


def _divides_before(wire_dtype: torch.dtype, op: Op) -> bool:
    """A sum in float16 overflows at 65504, so an average sent as float16 is divided first."""
    return op is Op.AVERAGE and wire_dtype is torch.float16


def _order_keys(values: Tensor) -> Tensor:
    """Integers that compare as the values do, -0.0 below 0.0 and NaN above everything."""
    keyed = _KEYS[values.dtype]
    bits = torch.where(values.isnan(), torch.nan, values).view(keyed)
    return bits ^ ((bits >> (torch.iinfo(keyed).bits - 1)) & torch.iinfo(keyed).max)


def _from_order_keys(keys: Tensor) -> Tensor:
    values = next(dtype for dtype, keyed in _KEYS.items() if keyed is keys.dtype)
    sign = keys >> (torch.iinfo(keys.dtype).bits - 1)
    return (keys ^ (sign & torch.iinfo(keys.dtype).max)).view(values)


def pieces(flat: Tensor, most: int) -> tuple[Tensor, ...]:
    """Cut a flat tensor into pieces of at most `most` elements."""
    return (flat,) if flat.numel() <= most else torch.split(flat, most)


def shares(rows: int, size: int) -> list[int]:
    """How `torch.tensor_split` divides rows: the first ranks get one more where it does not fit."""
    each, left = divmod(rows, size)
    return [each + (rank < left) for rank in range(size)]


def rounds(largest: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut the range up to `largest` into pieces of at most `most`: start and stop of each."""
    for start in range(0, largest, most):
        yield start, min(start + most, largest)


def clip(counts: Sequence[int], start: int, stop: int) -> list[int]:
    """How much of each count falls into a round."""
    return [max(0, min(count, stop) - start) for count in counts]


def segments(flat: Tensor, counts: Sequence[int], start: int, stop: int) -> list[Tensor]:
    """The part of a round in each of the segments that `counts` cuts a flat tensor into."""
    return [segment[start:stop] for segment in torch.split(flat, list(counts))]


def describe(call: str, what: str, tensor: Tensor, *, rows_vary: bool = False) -> str:
    """A description of a collective that is the same on all ranks."""
    sizes = [str(size) for size in tensor.shape]
    if rows_vary:
        sizes[:1] = ["*"]
    return " ".join(filter(None, (call, what, _short(tensor.dtype), f"({', '.join(sizes)})")))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
