"""A model whose parameters lie in shards over the data dimension, by torch's FSDP2.

torch gathers a unit's parameters before it runs, frees them after it, and sends each rank its shard
of the gradients. What is added here, so that the result is that of one process or is refused:

- Which parameters a rank has used is noted; those that it has not count as zeros, so that every
  rank sends messages of the same size. A rank without samples sends zeros as well.
- Every gather and every reduction goes into a digest. Ranks that take different branches would mix
  each other's parameters where sizes are the same, and torch does not see it.
- After an update no unit keeps weights that were gathered before it.
- Ranks that share memory gather and reduce there, where torch lets others do that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hpctrain import torch_backend  # its names load MPI when they are used
from hpctrain.errors import ConfigError
from hpctrain.pieces import local_tensor
from hpctrain.sharding.kinds import ShardKind
from hpctrain.sharding.units import ModuleFacts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.torch_backend import NodeStaging

__all__ = [
    "Sharding",
    "module_facts",
    "shard_model",
    "sharding_of",
    "trouble_with_model",
    "trouble_with_torch",
]

_ATTRIBUTE = "_hpctrain_sharding"
_OLDEST = "2.6"
_OLDEST_ON_CPU = "2.7"
_FORGETS_DTENSORS = torch.__version__ < "2.10"
"""Whether a DTensor that only C++ refers to, such as a gradient, may lose its attributes."""
_GATHER, _REDUCE = 0, 1
_NEEDED = (
    "_all_gather_result",
    "_to_sharded",
    "_training_state",
    "fsdp_params",
    "is_unsharded",
    "post_backward",
    "pre_backward",
    "pre_forward",
    "reduce_grads",
    "unshard",
)
"""What is used of torch's parameter groups, which are its own affair."""


def module_facts(model: nn.Module) -> tuple[list[ModuleFacts], dict[int, int]]:
    """A model's tree as the choice of units sees it, and the elements of each parameter."""
    numbers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    facts = []
    for name, module in model.named_modules():
        own = []
        for parameter in module.parameters(recurse=False):
            number = numbers.setdefault(id(parameter), len(numbers))
            sizes[number] = parameter.numel()
            own.append(number)
        facts.append(
            ModuleFacts(
                name=name,
                kind=type(module).__name__,
                is_container=isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict),
                is_callable=type(module).forward is not nn.Module.forward,
                parameters=frozenset(own),
            )
        )
    return facts, sizes


@dataclass(eq=False, slots=True)
class _Unit:
    """One of torch's parameter groups, and the calls of it that are seen."""

    name: str
    group: Any
    used: set[int] = field(default_factory=set)
    """Parameters that a backward pass has used here since the last exchange, by id of the shard."""
    has_run: bool = False
    """Whether it was run on this rank since the last exchange, to be differentiated."""
    held: list[Tensor | None] = field(default_factory=list)
    """Gradients of the last pass, where torch forgets what only its C++ refers to."""


class Sharding:
    """A sharded model, as `shard_model` made it.

    Args:
        model: torch has sharded it.
        mesh: Over which ranks.
        kind: `gradients` or `parameters`.
        units: Names of its units.
        whole_gradients: Whether gradients stay whole until the exchange.
        in_stages: Whether it is a stage of a pipeline, through which several micro-batches pass
            between one gather and one reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        kind: ShardKind,
        units: Sequence[str],
        *,
        whole_gradients: bool,
        in_stages: bool = False,
    ) -> None:
        self.mesh = mesh
        self.kind = kind
        self.names = tuple(units)
        self.whole_gradients = whole_gradients
        self.in_stages = in_stages
        self.is_silent = False
        """Whether this rank has no samples in the backward pass that runs: it sends zeros."""
        self.num_messages = 0
        self._model = model
        self._digest = 0
        self._units = [self._watch(name, group) for name, group in _groups_of(model, units)]
        self.staging = self._stage()
        """Where ranks of a node gather and reduce; None: torch does it."""
        if whole_gradients or in_stages:
            _fsdp(model).set_requires_gradient_sync(False)
        if in_stages:  # until all is freed, after the pass
            _fsdp(model).set_reshard_after_backward(False)

    def compute_in_bfloat16(self) -> None:
        """Gather weights as bfloat16, and reduce gradients in float32; shards stay as they are.

        Raises:
            ConfigError: the model was run already, so that torch has settled its dtypes.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        modules = dict(self._model.named_modules())
        states = [_fsdp(modules[name])._get_fsdp_state() for name in ["", *self.names]]
        if any(state._is_root is not None and state._mp_policy != policy for state in states):
            raise ConfigError(
                "precision='bf16-pure' comes too late for a sharded model that has run already; "
                "call distribute before its first forward pass"
            )
        for state in states:
            state._mp_policy = policy
        for unit in self._units:
            unit.group.mp_policy = policy

    # What torch does, seen and made the same on all ranks

    def _watch(self, name: str, group: Any) -> _Unit:
        """Put this object between torch and the two calls that communicate."""
        missing = [one for one in _NEEDED if not hasattr(group, one)]
        if missing:
            raise ConfigError(
                f"torch {torch.__version__} has no {missing[0]} in its FSDPParamGroup, by which "
                "gathers are seen here (2.6 to 2.13 have); use one of these, or train it without "
                "shard="
            )
        unit = _Unit(name, group)
        unshard, pre_forward = group.unshard, group.pre_forward
        pre_backward, post_backward = group.pre_backward, group.post_backward

        def gather(async_op: bool = False) -> None:
            was_there = group._all_gather_result is not None or group.is_unsharded
            unshard(async_op)
            if not was_there and group._all_gather_result is not None:
                self._note(unit, _GATHER)

        def forward(*given: Any) -> Any:
            unit.has_run |= torch.is_grad_enabled()
            return pre_forward(*given)

        def backward(*given: Any) -> None:
            unit.has_run = True
            pre_backward(*given)

        def reduce(*given: Any) -> None:
            if unit.has_run:
                self._complete(unit)
            post_backward(*given)
            if _FORGETS_DTENSORS:
                unit.held = [one.sharded_param.grad for one in group.fsdp_params]

        group.unshard, group.pre_forward = gather, forward
        group.pre_backward, group.post_backward = backward, reduce
        return unit

    def _stage(self) -> NodeStaging | None:
        """Let torch gather and reduce in memory that the ranks of a node share."""
        root = _fsdp(self._model)
        if not self._units or not hasattr(root, "set_custom_all_gather"):  # torch before 2.9
            return None
        groups = [unit.group for unit in self._units]
        ranks = {id(one): one for one in (g.mesh_info.shard_process_group for g in groups)}
        process_group = next(iter(ranks.values()))
        is_ours = isinstance(process_group, torch_backend.MpiProcessGroup)
        if not is_ours or len(ranks) > 1 or process_group.size() == 1:
            return None
        sizes = [_whole_bytes(group) for group in groups]
        staging = torch_backend.NodeStaging(
            process_group,
            gathered=sizes,
            reduced=sizes,
            is_clear=lambda: all(group._all_gather_result is None for group in groups),
        )
        modules = dict(self._model.named_modules())
        for name in ["", *self.names]:
            _fsdp(modules[name]).set_custom_all_gather(staging.all_gather)
            _fsdp(modules[name]).set_custom_reduce_scatter(staging.reduce_scatter)
        return staging

    def _note(self, unit: _Unit, what: int) -> None:
        self.num_messages += 1
        self._digest = zlib.crc32(f"{what} {unit.name}".encode(), self._digest)

    def _complete(self, unit: _Unit) -> None:
        """Before a unit's gradients leave: note what was used, and fill in zeros for the rest."""
        for one in unit.group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            if whole is None:
                continue
            has_some = whole.grad is not None or one.unsharded_accumulated_grad is not None
            if has_some and self.is_silent:
                if whole.grad is not None:
                    whole.grad.zero_()  # a mean over no samples is NaN
            elif has_some:
                unit.used.add(id(one.sharded_param))
            elif unit.group.reduce_grads and one.sharded_param.requires_grad:
                whole.grad = torch.zeros_like(whole, requires_grad=False)
        if unit.group.reduce_grads:
            self._note(unit, _REDUCE)

    # Around a step

    @contextmanager
    def silence(self) -> Iterator[None]:
        """A backward pass in which this rank has no samples: it sends zeros, and keeps nothing."""
        kept = self._take_whole()
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False
            self._take_whole()
            for one, gradient, accumulated in kept:
                one._unsharded_param.grad = gradient
                one.unsharded_accumulated_grad = accumulated

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collective: all units are gathered before the block, and freed after it."""
        _fsdp(self._model)._get_fsdp_state()._lazy_init()
        for unit in self._units:
            unit.group.unshard()
            unit.group.wait_for_unshard()
        try:
            yield
        finally:
            self.reshard()

    @contextmanager
    def staged_pass(self) -> Iterator[None]:
        """Collective: any number of micro-batches between one gather and one reduction.

        Ranks may run different numbers of them, also none: every unit is gathered and reduced
        once. With `whole_gradients` it is reduced at the exchange.
        """
        root = _fsdp(self._model)
        with self.gathered():
            for unit in self._units:
                unit.has_run = True  # on some rank; here it may send zeros
            root.set_is_last_backward(False)
            try:
                yield
            finally:
                root.set_is_last_backward(True)
            if not self.whole_gradients:
                self.reduce_whole()

    def _take_whole(self) -> list[tuple[Any, Tensor | None, Tensor | None]]:
        """Take whole gradients off the parameters."""
        taken = []
        for one in (one for unit in self._units for one in unit.group.fsdp_params):
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None:
                taken.append((one, whole.grad, one.unsharded_accumulated_grad))
                whole.grad = one.unsharded_accumulated_grad = None
        return taken

    def reduce_whole(self) -> None:
        """Collective: send each rank its shard of gradients that were kept whole."""
        root = _fsdp(self._model)
        root.set_requires_gradient_sync(True)
        try:
            root._get_fsdp_state()._root_post_backward_final_callback()
        finally:
            root.set_requires_gradient_sync(False)

    @property
    def digest(self) -> int:
        """What was gathered and reduced since the last exchange, in its order, as a number."""
        return self._digest

    def after_evaluating(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call something after each pass without gradients that has gathered a unit.

        Args:
            call: Called on all ranks that have gathered in it.

        Returns:
            Ends that.
        """
        before = 0

        def begin(*_: Any) -> None:
            nonlocal before
            before = self.num_messages

        def end(*_: Any) -> None:
            if not torch.is_grad_enabled() and self.num_messages > before:
                call()

        hooks = (
            self._model.register_forward_pre_hook(begin, prepend=True),
            self._model.register_forward_hook(end),
        )

        def stop() -> None:
            for hook in hooks:
                hook.remove()

        return stop

    def end_window(self) -> None:
        """An exchange has come to its end."""
        self._digest = 0
        for unit in self._units:
            unit.has_run = False

    def used(self) -> set[int]:
        """Parameters that this rank's backward passes have used, by id of the shard."""
        return {one for unit in self._units for one in unit.used}

    def forget(self) -> None:
        """Drop whole gradients and what was noted of them."""
        self._take_whole()
        for unit in self._units:
            unit.used.clear()
            unit.held.clear()

    def recover(self) -> None:
        """After an exception in a pass: the units begin anew.

        Raises:
            ConfigError: this torch cannot.
        """
        state = _fsdp(self._model)._get_fsdp_state()
        if not hasattr(state, "_reset_iter_state"):
            raise ConfigError(
                "a pass of a sharded model was interrupted; to train on after that needs torch >= "
                f"2.13, and this is torch {torch.__version__}; resume from a checkpoint"
            )
        state._reset_iter_state()
        self.end_window()

    @property
    def is_half_way(self) -> bool:
        """Whether a unit is in the middle of a pass: between passes that means an exception."""
        return any(unit.group._training_state.name != "IDLE" for unit in self._units)

    def reshard(self) -> None:
        """Free gathered weights everywhere: they are about to change."""
        for unit in self._units:
            if unit.group.is_unsharded:
                unit.group._to_sharded()

    # What there is

    @property
    def way(self) -> str:
        """How shards get from rank to rank, in words."""
        if self.staging is None:
            return "by torch's process group"
        why_not = self.staging.why_not
        return "in node-shared memory" if why_not is None else f"by messages: {why_not}"

    def shards(self) -> dict[int, str]:
        """The name of the unit of each sharded parameter, by id of the parameter."""
        return {
            id(one.sharded_param): unit.name
            for unit in self._units
            for one in unit.group.fsdp_params
        }

    def find_change(self) -> str | None:
        """Which parameter of the model is none of the shards, in words; None: all are.

        torch puts its own in the place of one that was replaced, without a word.
        """
        params = [one for unit in self._units for one in unit.group.fsdp_params]
        known = {id(one.sharded_param) for one in params}
        known |= {id(getattr(one, "_unsharded_param", None)) for one in params}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                return (
                    f"the parameter {name} was added or replaced since split() has sharded the "
                    "model; call split(grid, model) when the model is complete, and make the "
                    "optimizer over model.parameters() afterwards"
                )
        return None

    def num_bytes(self) -> tuple[int, int, int]:
        """Of parameters: this rank's shards, the largest unit gathered, and everything."""
        units = [
            [one for one in unit.group.fsdp_params if one.sharded_param.numel()]
            for unit in self._units
        ]
        # Of a layer that is divided as well, its own part is gathered.
        whole = [
            sum(one._orig_size.numel() * one.sharded_param.element_size() for one in unit)
            for unit in units
        ]
        shards = [one.sharded_param for unit in units for one in unit]
        local = sum(local_tensor(p).numel() * p.element_size() for p in shards)
        return local, max(whole, default=0), sum(whole)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    kind: ShardKind,
    units: Sequence[str],
    *,
    whole_gradients: bool = False,
    in_stages: bool = False,
) -> Sharding:
    """Collective: cut the parameters of a model into shards over a mesh, in place.

    Args:
        model: Whole, with the same parameters on all ranks.
        mesh: One dimension.
        kind: `parameters`: units are freed after their forward pass and gathered again in the
            backward pass; `gradients`: they stay until the backward pass has used them.
        units: Names of modules that are gathered each for itself, outer before inner.
        whole_gradients: Keep gradients whole between the backward passes of a step, so that they
            are reduced once a step.
        in_stages: The model is a stage of a pipeline: its units are gathered and reduced once for
            all micro-batches of a pass.

    Raises:
        ConfigError: this torch has no such sharding.
    """
    fully_shard = _fully_shard()
    trouble = trouble_with_torch(mesh.device_type)
    if trouble is not None:
        raise ConfigError(trouble)
    options: dict[str, Any] = {"mesh": mesh}
    if kind != "parameters" or in_stages:
        options["reshard_after_forward"] = False
    modules = dict(model.named_modules())
    for name in [*reversed(units), ""]:
        modules[name].register_forward_hook(_give_no_views)
    for name in reversed(units):
        fully_shard(modules[name], **options)
    fully_shard(model, **options)
    sharding = Sharding(
        model, mesh, kind, units, whole_gradients=whole_gradients, in_stages=in_stages
    )
    model.__dict__[_ATTRIBUTE] = sharding
    return sharding


def trouble_with_torch(kind: str) -> str | None:
    """Why this torch cannot shard a model on such devices, in words; None: it can. Pure."""
    if kind == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        return (
            f"shard= on CPUs needs torch >= {_OLDEST_ON_CPU} (torch.cpu.Stream.record_event), and "
            f"this is torch {torch.__version__}; use a newer one, or leave shard= out"
        )
    return None


class _NoView(torch.autograd.Function):
    """The same tensor, and no view to autograd; writes to it are still seen."""

    @staticmethod
    def forward(_context: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _give_no_views(_module: nn.Module, _given: Any, out: Any) -> Any:
    """Before torch hooks what a unit returns: writing to a view in place would lose the hook."""

    def own(value: Any) -> Any:
        is_view = isinstance(value, Tensor) and value.requires_grad and value._base is not None
        return _NoView.apply(value) if is_view else value  # type: ignore[no-untyped-call]

    return tree_map(own, out)


def sharding_of(model: nn.Module) -> Sharding | None:
    """How a model was sharded; None: it was not."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Sharding) else None


def trouble_with_model(model: nn.Module, units: Sequence[str]) -> str | None:
    """Why a model cannot be cut into shards, by name; None: it can. Pure."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            return f"{name} is a single number, which torch cannot shard; give it the shape (1,)"
        if parameter.is_complex():
            return f"{name} is complex, and shards are of real numbers; store it as two real ones"
        if parameter.layout is not torch.strided:
            return f"{name} has the layout {parameter.layout}; make it dense"
    modules = dict(model.named_modules())
    taken: set[int] = set()
    for name in [*reversed(units), ""]:
        mine = [p for p in modules[name].parameters() if id(p) not in taken]
        taken.update(map(id, mine))
        kinds = {p.dtype for p in mine if p.requires_grad}
        if len(kinds) > 1:
            shown = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            return (
                f"{name or 'the root'} has parameters of several dtypes ({shown}) in one unit; "
                "convert them, or put those of one dtype into units of their own (units=)"
            )
    return None


def _fully_shard() -> Callable[..., Any]:
    try:
        from torch.distributed.fsdp import fully_shard  # here: loading it takes seconds
    except ImportError:
        raise ConfigError(
            f"sharded models need torch >= {_OLDEST} with torch.distributed.fsdp.fully_shard, and "
            f"this is torch {torch.__version__}; leave shard= out, or use a newer torch"
        ) from None
    return cast("Callable[..., Any]", fully_shard)


def _fsdp(model: nn.Module) -> Any:
    """A model that torch has sharded: it has further methods then."""
    return model


def _whole_bytes(group: Any) -> int:
    """Of the parameters of one of torch's groups when they are gathered, padded."""
    num_elements = sum(one.padded_sharded_param_size.numel() for one in group.fsdp_params)
    itemsize = max(one.sharded_param.element_size() for one in group.fsdp_params)
    return int(num_elements * group.mesh_info.shard_mesh_size * itemsize)


def _groups_of(model: nn.Module, units: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Torch's parameter groups by the name of their module; a module may have none left."""
    modules = dict(model.named_modules())
    for name in ["", *units]:
        state = _fsdp(modules[name])._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.10 has one at most
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        yield from ((name, group) for group in groups)
