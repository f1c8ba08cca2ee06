"""How a replica works: where gradients are summed, when they are sent, who updates what. Pure.

From facts (ranks, nodes, device, what the engine can do, the optimizers, sizes) and options (what
the caller requested) to one `Choice`. `hpctrain.distribute`, the dry run of a configuration and the
predictor call the same function. Free of torch and MPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.engines import Capabilities
from hpctrain.errors import ConfigError

__all__ = [
    "UPDATES",
    "Choice",
    "ChosenUpdate",
    "ModeName",
    "OptimizerFacts",
    "Options",
    "ReplicaFacts",
    "bucket_size",
    "choose",
    "choose_update",
    "may_share_memory",
]

UPDATES = ("auto", "sharded", "replicated")
ModeName = Literal["alone", "arena", "node", "slices", "horovod"]

_SMALLEST_BYTES = 4 << 20
_LARGEST_BYTES = 25 << 20
_PIECES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What matters of an optimizer; the defaults are those of Adam over plain parameters."""

    shards_by: str | None = "element"
    """What may be updated independently: `element`, `parameter`, or None for nothing."""
    why: str = "every element is updated independently"
    keeps_state: bool = True
    """Whether it has state that a node could hold once; plain SGD has none."""
    scattered: str | None = None
    """The name of a parameter that is not contiguous in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFacts:
    """Where and what is trained; the same on every rank."""

    num_ranks: int
    num_nodes: int
    sharing_ranks: int
    """The most ranks that can share memory: those of the fullest node or, if nodes are divided, of
    the fullest NUMA domain."""
    device_type: str
    """What the ranks compute on, as torch names it."""
    engine: Capabilities
    gradient_bytes: int
    optimizers: tuple[OptimizerFacts, ...] = (OptimizerFacts(),)
    """One optimizer, or several that step together."""
    has_masters: bool = False
    """Whether weights have float32 masters, which every rank keeps."""
    has_spare_cores: bool = False
    """Whether the nodes have idle cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The requests of the caller of `distribute`."""

    overlap: bool | None = None
    bucket_bytes: int | None = None
    update: str = "auto"
    share_parameters: bool = False
    wire: str = "none"
    """How gradients are sent between nodes."""
    horovod_fusion: bool = False
    """Whether Horovod fuses the gradients itself."""
    shard_state: bool = False
    """Whether each rank is to hold 1/n of the optimizer's state: `split(shard="state")`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenUpdate:
    """How one optimizer's weights are updated, and why."""

    by: str | None
    """`element`, `parameter`, or None: every rank updates everything."""
    why: str

    def __str__(self) -> str:
        return "replicated" if self.by is None else f"sharded by {self.by}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a replica works."""

    mode: ModeName
    """`alone`: no exchange; `arena`: flat buffers through the engine; `node`: sums in memory
    that the ranks of a node share; `slices`: each rank gets and updates its slice of all
    parameters; `horovod`: Horovod's own fusion."""
    update: tuple[ChosenUpdate, ...]
    """One per optimizer."""
    overlap: bool
    """Whether gradients are sent while backward still runs."""
    bucket_bytes: int | None
    """When a bucket is closed; None: everything at once."""
    why: str
    """Why this mode."""
    wire: str = "none"
    """How gradients are sent between nodes; `none` if they do not leave a node."""

    @property
    def divides_update(self) -> bool:
        """Whether the ranks of a node divide any of the update among them."""
        return any(one.by is not None for one in self.update)


_NOTHING_ASKED = Options()


def choose(facts: ReplicaFacts, options: Options = _NOTHING_ASKED) -> Choice:
    """Choose how a replica works. Pure.

    Raises:
        ConfigError: the request is unknown, or not possible here.
    """
    if options.shard_state:
        _check_state(facts)
    mode, why = _choose_mode(facts, options)
    if mode == "slices":
        return _slice(facts, options, why)
    update = tuple(
        choose_update(
            one,
            update="sharded" if options.shard_state and mode == "node" else options.update,
            shared=mode == "node",
            has_masters=facts.has_masters,
            alone=facts.num_ranks == 1,
        )
        for one in facts.optimizers
    )
    whole = [one for one in update if one.by is None]
    if options.share_parameters and whole and facts.num_ranks > 1:
        raise ConfigError(
            f"share_parameters=True needs a sharded update, and it is replicated: {whole[0].why}"
        )
    wire = _choose_wire(facts, options)
    overlap = mode in ("arena", "horovod") and wire == "none" and _overlaps(facts, options)
    size = options.bucket_bytes if mode == "arena" else None
    if mode == "arena" and size is None and overlap:
        size = bucket_size(facts.gradient_bytes)
    return Choice(mode=mode, update=update, overlap=overlap, bucket_bytes=size, why=why, wire=wire)


def _check_state(facts: ReplicaFacts) -> None:
    """Refuse optimizers whose state cannot be divided anywhere.

    Raises:
        ConfigError: with what can be.
    """
    if len(facts.optimizers) > 1:
        raise ConfigError(
            f"shard='state' with {len(facts.optimizers)} optimizers; use one with several "
            "parameter groups, or split without shard="
        )
    for one in facts.optimizers:
        if one.shards_by != "element" or one.scattered is not None:
            trouble = one.why if one.scattered is None else f"{one.scattered} is not contiguous"
            raise ConfigError(
                f"shard='state' cuts parameters anywhere: {trouble}; use an optimizer that treats "
                "every element alone, such as AdamW, over contiguous parameters"
            )


def _slice(facts: ReplicaFacts, options: Options, why: str) -> Choice:
    """Each rank updates a slice of every bucket."""
    return Choice(
        mode="slices",
        update=tuple(ChosenUpdate(by="element", why=one.why) for one in facts.optimizers),
        overlap=False,
        bucket_bytes=options.bucket_bytes or bucket_size(facts.gradient_bytes),
        why=why,
    )


def _choose_wire(facts: ReplicaFacts, options: Options) -> str:
    if options.wire == "none":
        return "none"
    if options.horovod_fusion:
        raise ConfigError(
            f"wire={options.wire!r} with Horovod's own fusion; use its "
            'HorovodTraining(compression="fp16"), or fusion="arena"'
        )
    if options.overlap:
        raise ConfigError(
            f"wire={options.wire!r} encodes after backward; leave out overlap=True, or the wire"
        )
    return options.wire if facts.num_nodes > 1 else "none"


def _choose_mode(facts: ReplicaFacts, options: Options) -> tuple[ModeName, str]:
    if options.horovod_fusion:
        return "horovod", "Horovod is set to fuse the gradients"
    shares = may_share_memory(facts.engine, facts.device_type, facts.num_ranks, options)
    if options.shard_state and facts.num_ranks > 1:
        if shares and facts.sharing_ranks == facts.num_ranks:
            return "node", "shard='state', and all ranks share memory, which holds the state once"
        return "slices", "shard='state': reduce-scatter, update of a slice, allgather"
    if shares:
        if facts.sharing_ranks > 1:
            return "node", "several ranks of a node share memory"
        return "arena", "no node has several ranks that could share memory"
    asks_for_messages = options.overlap or options.bucket_bytes is not None
    if facts.num_ranks == 1 and not asks_for_messages:
        return "alone", "there is one rank"
    if asks_for_messages:
        return "arena", "overlap or buckets were requested"
    if facts.device_type != "cpu":
        return "arena", f"gradients are on {facts.device_type}"
    return "arena", "the engine shares no memory between ranks"


def may_share_memory(
    engine: Capabilities, device_type: str, num_ranks: int, options: Options
) -> bool:
    """Whether gradients are summed in shared memory if a node has several ranks. Pure.

    Requesting overlap or buckets means messages.
    """
    wants_messages = options.overlap or options.bucket_bytes is not None or options.horovod_fusion
    return engine.shares_memory and device_type == "cpu" and num_ranks > 1 and not wants_messages


def _overlaps(facts: ReplicaFacts, options: Options) -> bool:
    """Whether something other than this rank's computing threads can carry messages meanwhile.

    That is so on GPUs, between nodes, where the engine has threads of its own anyway (Horovod and
    Gloo), and where the node has cores that no rank computes on; and if there are gradients for at
    least two pieces. Horovod's own fusion sends while backward runs in any case.
    """
    if options.overlap is not None:
        return options.overlap
    if facts.num_ranks == 1:
        return False
    if options.horovod_fusion:
        return True
    if facts.gradient_bytes < 2 * _SMALLEST_BYTES:
        return False
    elsewhere = facts.device_type != "cpu" or facts.num_nodes > 1
    return elsewhere or facts.engine.own_threads or facts.has_spare_cores


def bucket_size(total_bytes: int) -> int:
    """Cut gradients into some eight pieces: enough to begin early, few enough to be worth sending.

    The last piece is what backward cannot hide; small pieces cost more in latency than they bring.
    """
    return min(max(total_bytes // _PIECES, _SMALLEST_BYTES), _LARGEST_BYTES)


def choose_update(
    optimizer: OptimizerFacts,
    *,
    update: str = "auto",
    shared: bool = True,
    has_masters: bool = False,
    alone: bool = False,
) -> ChosenUpdate:
    """Choose how one optimizer's weights are updated. Pure.

    Args:
        optimizer: What matters of it.
        update: The request: `auto`, `sharded` or `replicated`.
        shared: Whether gradients are summed in shared memory.
        has_masters: Whether weights have float32 masters, which every rank keeps.
        alone: Whether there is one rank only, whose share is everything.

    Raises:
        ConfigError: the request is unknown, or not possible.
    """
    if update not in UPDATES:
        raise ConfigError(f"update={update!r} is unknown; choose {', '.join(UPDATES)}")
    if update == "replicated":
        return ChosenUpdate(by=None, why="asked for")
    if alone:
        return ChosenUpdate(by=None, why="there is one rank")
    by, why = optimizer.shards_by, optimizer.why
    if not shared:
        by, why = None, "gradients are not summed in shared memory here"
    elif has_masters:
        by, why = None, "every rank keeps float32 masters of bfloat16 weights"
    elif optimizer.scattered is not None:
        by, why = None, f"{optimizer.scattered} is not contiguous in memory"
    if update == "sharded":
        if by is None:
            raise ConfigError(
                f'update="sharded" is not possible: {why}; pass update="auto" or "replicated"'
            )
        return ChosenUpdate(by=by, why=f"asked for; {why}")
    if by is not None and not optimizer.keeps_state:
        return ChosenUpdate(
            by=None,
            why="the optimizer keeps no state: moving weights would cost as much as it saves",
        )
    return ChosenUpdate(by=by, why=why)
