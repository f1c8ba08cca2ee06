"""How a replica works, chosen from facts: the cases by hand, and rules that hold for all facts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.engines import capabilities_of
from hpctrain.errors import ConfigError
from hpctrain.predict import RankLayout, default_exchange
from hpctrain.replica import OptimizerFacts, Options, ReplicaFacts, choose
from hpctrain.replica.policy import UPDATES, bucket_size, may_share_memory

MIB = 1 << 20
SGD = OptimizerFacts(keeps_state=False, why="SGD updates every element independently")
COUPLED = OptimizerFacts(shards_by=None, why="it couples parameters")


def facts(engine="mpi", ranks=4, nodes=1, device="cpu", size=64 * MIB, **more):
    return ReplicaFacts(
        num_ranks=ranks,
        num_nodes=nodes,
        sharing_ranks=more.pop("sharing", -(-ranks // nodes)),
        device_type=device,
        engine=capabilities_of(engine),
        gradient_bytes=size,
        **more,
    )


@pytest.mark.parametrize(
    ("given_facts", "options", "mode", "overlap", "bucket", "update"),
    [
        (facts("local", ranks=1), Options(), "alone", False, None, "replicated"),
        (facts("mpi", ranks=1), Options(), "alone", False, None, "replicated"),
        (facts("mpi", ranks=1), Options(overlap=True), "arena", True, 8 * MIB, "replicated"),
        (facts(), Options(), "node", False, None, "sharded by element"),
        (facts(), Options(update="replicated"), "node", False, None, "replicated"),
        (facts(nodes=2), Options(), "node", False, None, "sharded by element"),
        (facts(nodes=4), Options(), "arena", True, 8 * MIB, "replicated"),
        (facts(), Options(overlap=True), "arena", True, 8 * MIB, "replicated"),
        (facts(), Options(overlap=False), "node", False, None, "sharded by element"),
        (facts(), Options(bucket_bytes=MIB), "arena", False, MIB, "replicated"),
        (facts(has_spare_cores=True), Options(bucket_bytes=MIB), "arena", True, MIB, "replicated"),
        (facts("torch"), Options(), "arena", True, 8 * MIB, "replicated"),
        (facts("torch"), Options(overlap=False), "arena", False, None, "replicated"),
        (facts("torch", size=MIB), Options(), "arena", False, None, "replicated"),
        (facts("horovod"), Options(), "arena", True, 8 * MIB, "replicated"),
        (facts("horovod"), Options(horovod_fusion=True), "horovod", True, None, "replicated"),
        (
            facts("horovod", ranks=1),
            Options(horovod_fusion=True),
            "horovod",
            False,
            None,
            "replicated",
        ),
        (
            facts("horovod", size=MIB),
            Options(horovod_fusion=True, overlap=False),
            "horovod",
            False,
            None,
            "replicated",
        ),
        (facts("mpi", device="cuda"), Options(), "arena", True, 8 * MIB, "replicated"),
        (facts(optimizers=(SGD,)), Options(), "node", False, None, "replicated"),
        (
            facts(optimizers=(SGD,)),
            Options(update="sharded"),
            "node",
            False,
            None,
            "sharded by element",
        ),
        (facts(has_masters=True), Options(), "node", False, None, "replicated"),
    ],
)
def test_what_is_chosen(given_facts, options, mode, overlap, bucket, update):
    choice = choose(given_facts, options)
    assert (choice.mode, choice.overlap, choice.bucket_bytes) == (mode, overlap, bucket)
    assert [str(one) for one in choice.update] == [update]
    assert choice.why


@pytest.mark.parametrize(
    ("given_facts", "options", "words"),
    [
        (facts(), Options(update="both"), "choose auto, sharded, replicated"),
        (facts("torch"), Options(update="sharded"), "are not summed in shared memory"),
        (facts(optimizers=(COUPLED,)), Options(update="sharded"), "couples parameters"),
        (facts(has_masters=True), Options(update="sharded"), "masters"),
        (facts("torch"), Options(share_parameters=True), "needs a sharded update"),
        (facts("horovod"), Options(horovod_fusion=True, update="sharded"), "not possible"),
        (
            facts(optimizers=(OptimizerFacts(), SGD)),
            Options(share_parameters=True),
            "keeps no state",
        ),
    ],
)
def test_what_is_not_possible_is_refused(given_facts, options, words):
    with pytest.raises(ConfigError, match=words):
        choose(given_facts, options)


def test_one_of_several_optimizers_may_be_divided():
    choice = choose(facts(optimizers=(OptimizerFacts(), COUPLED)))
    assert [one.by for one in choice.update] == ["element", None]
    assert choice.divides_update
    scattered = OptimizerFacts(scattered="head.weight")
    assert "head.weight is not contiguous" in choose(facts(optimizers=(scattered,))).update[0].why


any_facts = st.builds(
    lambda engine, ranks, per_node, device, size, optimizers, masters, spare: ReplicaFacts(
        num_ranks=ranks,
        num_nodes=-(-ranks // per_node),
        sharing_ranks=min(ranks, per_node),
        device_type=device,
        engine=capabilities_of(engine),
        gradient_bytes=size,
        optimizers=tuple(optimizers),
        has_masters=masters,
        has_spare_cores=spare,
    ),
    st.sampled_from(["local", "mpi", "horovod", "torch"]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(0, 1 << 32),
    st.lists(st.sampled_from([OptimizerFacts(), SGD, COUPLED]), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
any_options = st.builds(
    Options,
    overlap=st.sampled_from([None, True, False]),
    bucket_bytes=st.sampled_from([None, 1, 25 * MIB]),
    update=st.sampled_from(UPDATES),
    share_parameters=st.booleans(),
    horovod_fusion=st.booleans(),
)


@given(any_facts, any_options)
def test_rules_that_always_hold(some_facts, options):
    try:
        choice = choose(some_facts, options)
    except ConfigError:
        assert options.update == "sharded" or options.share_parameters
        return
    assert choice == choose(some_facts, options)
    assert len(choice.update) == len(some_facts.optimizers)
    alone = some_facts.num_ranks == 1
    can_share = may_share_memory(
        some_facts.engine, some_facts.device_type, some_facts.num_ranks, options
    )
    assert (choice.mode == "node") == (can_share and some_facts.sharing_ranks > 1)
    assert (choice.mode == "horovod") == options.horovod_fusion
    assert choice.mode != "alone" or alone
    assert not choice.divides_update or choice.mode == "node"
    if choice.mode in ("node", "alone"):
        assert not choice.overlap
        assert choice.bucket_bytes is None
    if options.overlap is not None and choice.mode in ("arena", "horovod"):
        assert choice.overlap == options.overlap
    if options.bucket_bytes is not None and choice.mode == "arena":
        assert choice.bucket_bytes == options.bucket_bytes
    if options.update == "sharded" and not alone:
        assert all(one.by is not None for one in choice.update)
    if options.update == "replicated":
        assert not choice.divides_update


@given(any_facts, st.integers(0, 1 << 32))
def test_a_larger_model_never_stops_overlapping(some_facts, more):
    larger = replace(some_facts, gradient_bytes=some_facts.gradient_bytes + more)
    small, large = choose(some_facts), choose(larger)
    assert small.mode == large.mode
    assert large.overlap or not small.overlap
    if large.overlap:
        assert large.bucket_bytes == bucket_size(larger.gradient_bytes)


@given(
    st.sampled_from(["mpi", "horovod", "torch"]),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 1 << 30),
    st.booleans(),
)
def test_the_predictor_chooses_the_same(engine, count, per_node, size, on_gpu):
    layout = RankLayout(num_ranks=count, ranks_per_node=per_node)
    found = default_exchange(engine, layout, gradient_bytes=size, on_gpu=on_gpu)
    chosen = choose(
        facts(
            engine,
            ranks=count,
            nodes=layout.num_nodes,
            sharing=layout.local_ranks,
            device="cuda" if on_gpu else "cpu",
            size=size,
        )
    )
    assert found.divided_update == chosen.divides_update
    assert (found.overlap, found.bucket_bytes) == (chosen.overlap, chosen.bucket_bytes)


def test_choosing_imports_neither_torch_nor_mpi():
    program = (
        "import sys\n"
        "from hpctrain.engines import capabilities_of\n"
        "from hpctrain.replica import ReplicaFacts, choose\n"
        "facts = ReplicaFacts(num_ranks=4, num_nodes=1, sharing_ranks=4, device_type='cpu',\n"
        "              engine=capabilities_of('mpi'), gradient_bytes=1 << 26)\n"
        "assert choose(facts).mode == 'node'\n"
        "raise SystemExit(bool({'torch', 'mpi4py.MPI', 'horovod'} & set(sys.modules)))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


STATE = Options(shard_state=True)


@pytest.mark.parametrize(
    ("given_facts", "options", "mode", "bucket", "update"),
    [
        (facts(ranks=1), STATE, "alone", None, "replicated"),
        (facts(), STATE, "node", None, "sharded by element"),
        (facts(optimizers=(SGD,)), STATE, "node", None, "sharded by element"),
        (facts(nodes=2), STATE, "slices", 8 * MIB, "sharded by element"),
        (facts(sharing=2), STATE, "slices", 8 * MIB, "sharded by element"),
        (facts(), replace(STATE, bucket_bytes=MIB), "slices", MIB, "sharded by element"),
        (facts("torch"), STATE, "slices", 8 * MIB, "sharded by element"),
        (facts("torch", device="cuda"), STATE, "slices", 8 * MIB, "sharded by element"),
        (facts("horovod", size=MIB), STATE, "slices", 4 * MIB, "sharded by element"),
    ],
)
def test_divided_state_is_once_a_node_or_in_slices(given_facts, options, mode, bucket, update):
    chosen = choose(given_facts, options)
    assert (chosen.mode, chosen.bucket_bytes, str(chosen.update[0])) == (mode, bucket, update)
    assert not chosen.overlap


@pytest.mark.parametrize(
    ("optimizers", "told"),
    [
        ((COUPLED,), "it couples parameters; use an optimizer that treats every element"),
        ((OptimizerFacts(shards_by="parameter"),), "treats every element alone"),
        ((OptimizerFacts(scattered="a.weight"),), "a.weight is not contiguous"),
        ((OptimizerFacts(), OptimizerFacts()), "with 2 optimizers"),
    ],
)
def test_state_that_cannot_be_divided_is_refused(optimizers, told):
    for num_nodes in (1, 2):
        with pytest.raises(ConfigError, match=told):
            choose(facts(nodes=num_nodes, optimizers=optimizers), STATE)
