"""Wires: what they encode comes back within the rounding of their format."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.replica.policy import Options, choose
from hpctrain.replica.wire_state import WireUse, trouble_with_wire_state
from hpctrain.wire import NONE, Bf16Wire, Wire, add_decoded, make_wire, wire_names
from mpi_tests.built import OUTSIDE
from mpi_tests.unit.test_policy import facts

ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}


def through(wire: Wire, values: torch.Tensor) -> torch.Tensor:
    encoded = wire.encode(values, "test")
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == wire.num_bytes(values.numel())
    came = torch.full_like(values, 7.0)
    wire.decode(encoded, came)
    return came


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.7, 1.0, 1e6, 1e30])
def test_values_come_back_within_half_a_unit(name, dtype, scale):
    values = torch.randn(999, dtype=dtype, generator=torch.Generator().manual_seed(3)) * scale
    came = through(make_wire(name), values)
    large = values.abs() > values.abs().max() * 2**-12
    error = ((came - values).abs() / values.abs())[large]
    assert error.max() <= ROUNDING[name]
    assert (came - values).abs().max() <= values.abs().max() * ROUNDING[name]


@pytest.mark.parametrize("name", ROUNDING)
def test_what_is_special_arrives(name):
    wire = make_wire(name)
    assert through(wire, torch.zeros(5)).tolist() == [0.0] * 5
    assert through(wire, torch.empty(0)).tolist() == []
    came = through(wire, torch.tensor([1.0, float("inf"), float("-inf"), float("nan")]))
    assert came[:3].tolist() == [1.0, float("inf"), float("-inf")]
    assert came[3].isnan()
    assert through(wire, torch.tensor([3e38, -3e38])).isfinite().all()


@given(st.integers(1, 5), st.integers(0, 40))
def test_sums_are_of_what_was_decoded(num_peers, size):
    """The first peer's view: all others have what its seeds say."""
    wire = make_wire("bf16")
    flats = [
        torch.randn(size, generator=torch.Generator().manual_seed(n)) for n in range(num_peers)
    ]
    counts = [size, *[0] * (num_peers - 1)]

    def alltoall(sent, to, come):
        assert sum(to) == sent.numel() == wire.num_bytes(size)
        return torch.cat([wire.encode(flat, "term") for flat in flats])

    total = flats[0].clone()
    add_decoded(
        total,
        wire,
        "test",
        counts=counts,
        rank=0,
        alltoall=alltoall,
        allgather=lambda mine, _: mine,
    )
    wanted = torch.zeros(size)
    for flat in flats:
        wanted += flat.bfloat16().float()
    assert torch.equal(total, wanted.bfloat16().float())


def test_names():
    assert wire_names()[:3] == (NONE, "bf16", "fp16")
    assert make_wire(NONE) is None
    with pytest.raises(ConfigError, match="wire='fp8' is unknown; choose none, bf16, fp16"):
        make_wire("fp8")
    check = "import sys, hpctrain.wire; hpctrain.wire.NONE; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_a_wire_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    assert "feedback" not in wire_names()
    monkeypatch.syspath_prepend(str(OUTSIDE))
    assert wire_names()[-1] == "feedback"
    assert make_wire("feedback").name == "feedback"
    info = tmp_path / "broken_wire-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-wire\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpctrain.wires]\nbroken = math:pi\nbf16 = math:pi\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"not a subclass of hpctrain\.wire\.Wire"):
        make_wire("broken")
    assert isinstance(make_wire("bf16"), Bf16Wire)  # nobody takes a name of this package's


class Learned(Bf16Wire):
    """A state that all ranks have in common."""

    name = "learned"
    shares_state = True

    def state_dict(self):
        return {"scale": 3.0}


def test_what_a_state_belongs_to(monkeypatch):
    monkeypatch.syspath_prepend(str(OUTSIDE))
    here = WireUse(make_wire("feedback"), [0, 0, 1, 1], "mpi with memory shared by [2, 2] ranks")
    saved = here.common_state()
    assert "state" not in saved
    assert trouble_with_wire_state(saved, here.common_state()) is None
    for changed, why in [
        (replace(here, nodes=[0, 1, 2, 3]), "it is of 2 nodes, and this run has 4"),
        (replace(here, nodes=[0, 1, 0, 1]), "its ranks were placed otherwise on their nodes"),
        (replace(here, exchange="torch"), "this run's is torch"),
        (replace(here, wire=Learned()), "this run's wire is learned"),
        (replace(here, wire=make_wire("bf16")), "this run has no wire with a state"),
    ]:
        assert why in trouble_with_wire_state(saved, changed.common_state())


def test_a_state_that_all_ranks_have_in_common_goes_anywhere():
    here = WireUse(Learned(), [0, 1], "mpi")
    assert here.common_state()["state"] == {"scale": 3.0}
    assert here.own_state() == {}
    there = WireUse(Learned(), [0, 1, 2], "torch")
    assert trouble_with_wire_state(here.common_state(), there.common_state()) is None


def test_most_wires_have_no_state():
    use = WireUse(make_wire("fp16"), [0, 1], "mpi")
    assert not use.wire.has_state
    assert use.common_state() == use.own_state() == {}


def test_where_a_wire_is_used():
    two = facts(ranks=4, nodes=2)
    assert choose(two, Options(wire="bf16")).wire == "bf16"
    assert not choose(two, Options(wire="bf16")).overlap
    assert choose(facts(ranks=4, nodes=1), Options(wire="bf16")).wire == NONE
    with pytest.raises(ConfigError, match="leave out overlap=True"):
        choose(two, Options(wire="bf16", overlap=True))
    with pytest.raises(ConfigError, match="compression="):
        choose(two, Options(wire="bf16", horovod_fusion=True))
