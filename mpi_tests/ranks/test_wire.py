"""Encoded sums on every engine: the same bits on all ranks, within the rounding of the format."""

from __future__ import annotations

import pytest
import torch

from hpctrain.engines import BetweenNodes, NodeGroup
from hpctrain.errors import ConfigError
from hpctrain.wire import Wire, make_wire

ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}


class FixedPoint(Wire):
    """Whole numbers of 2 ** -20: their sum is exact, and is made as they are encoded."""

    name = "fixed"
    sums = "encoded"

    def num_bytes(self, num_elements):
        return 4 * num_elements

    def encode(self, values, key):
        return torch.ldexp(values, torch.tensor(20)).round().to(torch.int32)

    def decode(self, encoded, into):
        into.copy_(torch.ldexp(encoded.to(into.dtype), torch.tensor(-20)))


def values_of(rank, size, dtype):
    seed = torch.Generator().manual_seed(rank)
    return torch.randn(size, dtype=torch.float64, generator=seed).to(dtype)


def check(world, total, size, dtype, name):
    given = [values_of(rank, size, dtype).double() for rank in range(world.size)]
    wanted, terms = sum(given), sum(values.abs() for values in given)
    # Every term is rounded once, by at most half a unit of the largest; so is the sum.
    bound = (terms.max() + wanted.abs().max()) * ROUNDING[name] if size else 0.0
    assert total.dtype == dtype
    assert (total.double() - wanted).abs().max() <= bound if size else True
    everyone = world.comm.allgather(total.numpy().tobytes())
    assert len(set(everyone)) == 1


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("size", [0, 1, 2, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encoded_sums(world, engine, name, size, dtype):
    flat = values_of(world.rank, size, dtype)
    assert engine.allreduce_encoded_(flat, make_wire(name), what="test") is flat
    if world.size == 1:
        assert torch.equal(flat, values_of(0, size, dtype))
        return
    check(world, flat, size, dtype, name)


@pytest.mark.parametrize("name", ROUNDING)
def test_inside_a_node_sums_are_exact(world, engine, name):
    """As if every two ranks were a node."""
    node_of = [rank // 2 for rank in range(world.size)]
    if world.size % 2:
        if world.size > 1:
            with pytest.raises(ConfigError, match="equally many ranks on every node"):
                BetweenNodes(engine, node_of, make_wire(name))
        return
    between = BetweenNodes(engine, node_of, make_wire(name))
    flat = values_of(world.rank, 501, torch.float32)
    between.add_(flat, "test")
    between.close()
    if world.size == 2:
        assert torch.equal(
            flat, values_of(0, 501, torch.float32) + values_of(1, 501, torch.float32)
        )
    else:
        check(world, flat, 501, torch.float32, name)


@pytest.mark.parametrize("size", [0, 1, 2, 1001])
def test_sums_of_what_is_encoded(world, engine, size):
    flat = values_of(world.rank, size, torch.float64)
    engine.allreduce_encoded_(flat, FixedPoint(), what="test")
    if world.size > 1:
        rounded = (values_of(n, size, torch.float64).mul(2**20).round() for n in range(world.size))
        assert torch.equal(flat, sum(rounded) / 2**20)


@pytest.mark.parametrize("name", [*ROUNDING, "fixed"])
@pytest.mark.parametrize("size", [0, 1, 5, 1001])
def test_the_sums_of_a_node_are_encoded_on_their_way_to_others(world, name, size):
    """Every two ranks share memory, as if each half were a node."""
    group = NodeGroup(world.comm, domain=world.rank // 2)
    if world.size < 4:
        group.close()
        return
    assert (group.num_nodes, group.local_size) == (2, 2)
    block = group.allocate(3 * 4 * (size + 1), "test")
    *parts, total = (
        block.tensor(torch.float32, start=4 * (size + 1) * n, num_elements=size + 1)
        for n in range(3)
    )
    mine = values_of(world.rank, size, torch.float32)
    parts[group.local_rank][:size] = mine
    parts[group.local_rank][size] = 1 + 2**-20  # too many digits for 16 bits: travels as it is
    wire = FixedPoint() if name == "fixed" else make_wire(name)
    group.reduce(parts, total, wire=wire, num_encoded=size, key="test")
    came = total.clone()
    group.barrier.wait()
    del parts, total
    block.close()
    group.close()
    assert came[size] == world.size * (1 + 2**-20)
    if name == "fixed":
        pairs = [values_of(n, size, torch.float32) for n in range(4)]
        sums = [pairs[0] + pairs[1], pairs[2] + pairs[3]]
        assert torch.equal(came[:size], sum(one.mul(2**20).round() for one in sums) / 2**20)
    else:
        check(world, came[:size], size, torch.float32, name)


def test_a_state_goes_on_where_it_was_saved(world, engine):
    """With what rounding left out earlier, sums are the same bits; without it they are not."""

    def run(wire, step):
        flat = values_of(7 * world.rank + step, 501, torch.float32)
        return engine.allreduce_encoded_(flat, wire, what="test")

    wire = make_wire("feedback")
    run(wire, 0), run(wire, 1)
    saved = {key: value.clone() for key, value in wire.state_dict().items()}
    wanted = run(wire, 2)
    resumed, new = make_wire("feedback"), make_wire("feedback")
    resumed.load_state_dict(saved)
    assert torch.equal(run(resumed, 2), wanted)
    assert torch.equal(run(new, 2), wanted) == (world.size == 1)
    assert len(saved) == (world.size + 1 if world.size > 1 else 0)
    assert all(torch.equal(resumed.left[key], wire.left[key]) for key in saved)


def test_what_cannot_be_encoded_is_refused(world, engine):
    wire = make_wire("bf16")
    for given in (torch.zeros(4, 4), torch.zeros(3, dtype=torch.int64), torch.zeros(8)[::2]):
        with pytest.raises(ConfigError, match="one-dimensional float32 or float64"):
            engine.allreduce_encoded_(given, wire)
