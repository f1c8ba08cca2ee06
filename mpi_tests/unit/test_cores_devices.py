"""Cores, threads and devices: the rules, without a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.engines.node import divides_nodes, domain_of
from hpctrain.errors import ConfigError
from hpctrain.log import format_ranges
from hpctrain.world.cores import CoreMap, choose_cores, parse_cpus, share_of_cores
from hpctrain.world.devices import DeviceInfo, choose_index, find_shared

cpu_sets = st.frozensets(st.integers(0, 300), min_size=1)


@given(cpu_sets)
def test_cpu_lists_round_trip(cpus):
    assert parse_cpus(format_ranges(cpus)) == cpus


def test_long_lists_are_cut():
    assert format_ranges(range(0, 20, 2), limit=2) == "0,2,... (8 more ranges)"


@given(st.integers(1, 64), st.integers(1, 16))
def test_one_shared_mask_is_divided_evenly(num_cpus, num_ranks):
    masks = [frozenset(range(num_cpus))] * num_ranks
    shares = [share_of_cores(masks, i, {}) for i in range(num_ranks)]
    assert set(shares) == {max(1, num_cpus // num_ranks)}


def test_ranks_bound_apart_keep_their_cores():
    masks = [frozenset({0, 1, 2, 3}), frozenset({4, 5})]
    assert [share_of_cores(masks, i, {}) for i in range(2)] == [4, 2]


def test_hardware_threads_count_once():
    core_of = {0: 0, 1: 1, 2: 0, 3: 1}
    assert share_of_cores([frozenset(range(4))], 0, core_of) == 2


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 2), st.integers(1, 12))
def test_cores_are_divided_without_loss(num_domains, cores_each, threads, num_ranks):
    cores = num_domains * cores_each
    cpus = range(cores * threads)
    core_map = CoreMap(
        core_of={cpu: cpu % cores for cpu in cpus},
        domain_of={cpu: (cpu % cores) // cores_each for cpu in cpus},
    )
    chosen = choose_cores(frozenset(cpus), num_ranks, core_map)
    assert len(chosen) == num_ranks
    assert all(chosen)
    if num_ranks <= cores:
        assert sum(map(len, chosen)) == len(cpus)
        assert frozenset().union(*chosen) == frozenset(cpus)
        sizes = [len({core_map.core_of[cpu] for cpu in own}) for own in chosen]
        assert max(sizes) - min(sizes) <= 1
    if (
        num_ranks <= cores
        and num_ranks % num_domains == 0
        and cores_each % (num_ranks // num_domains) == 0
    ):
        assert all(len({core_map.domain_of[cpu] for cpu in own}) == 1 for own in chosen)


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"), [(1, 3, 0), (4, 3, 3), (8, 0, 0), (4, 0, 0)]
)
def test_the_only_device_or_the_local_rank(visible, local_rank, index):
    chosen = choose_index(
        num_visible=visible, local_rank=local_rank, local_size=4, allow_shared=False
    )
    assert chosen == index


def test_more_ranks_than_devices_are_refused_unless_asked_for():
    with pytest.raises(ConfigError, match=r"6 ranks on this node see 4 GPUs; start at most 4"):
        choose_index(num_visible=4, local_rank=5, local_size=6, allow_shared=False)
    assert choose_index(num_visible=4, local_rank=5, local_size=6, allow_shared=True) == 1


def test_two_ranks_on_one_gpu_are_found_by_uuid_and_host():
    def gpu(uuid: str) -> DeviceInfo:
        return DeviceInfo(kind="cuda", index=0, name="GPU", uuid=uuid)

    apart = [("a", gpu("1")), ("a", gpu("2")), ("b", gpu("1")), ("a", DeviceInfo(kind="cpu"))]
    assert find_shared(apart) == []
    assert find_shared([*apart, ("a", gpu("2"))]) == [[1, 4]]


# Who shares memory


def test_a_mask_within_one_domain_has_that_domain():
    core_map = CoreMap(core_of={}, domain_of={0: 0, 1: 0, 2: 1, 3: 1})
    assert domain_of({2, 3}, core_map) == 1
    assert domain_of({1, 2}, core_map) is None
    assert domain_of({7}, core_map) is None  # of which the kernel says nothing
    assert domain_of((), core_map) is None


@pytest.mark.parametrize(
    ("places", "divided"),
    [
        ([(0, 0), (0, 0), (0, 1), (0, 1)], True),
        ([(0, 0), (0, 1), (0, 0), (0, 1), (9, 1), (9, 1)], True),
        ([(0, 0), (0, 0), (0, 1)], False),  # the last would be alone
        ([(0, 0), (0, 0), (9, 1), (9, 1)], False),  # one domain a node
        ([(0, 0), (0, 0), (0, 1), (0, None)], False),  # not bound
        ([(0, 0)], False),
    ],
)
def test_nodes_are_divided_where_every_rank_has_company(places, divided):
    assert divides_nodes(places) is divided
