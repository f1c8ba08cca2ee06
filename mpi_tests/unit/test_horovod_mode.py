"""Settings of Horovod's own fusion, groups, and how gradients look on the wire."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.replica.horovod_settings import HorovodTraining, cut_into_groups
from hpctrain.replica.modes.horovod import Wire, check_parameters, near_power_of_two


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fusion": "nosuch"}, "fusion='nosuch' is unknown; use 'arena' or 'horovod'"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"op": "sum"}, "op='sum'"),
        ({"fusion": "horovod", "num_groups": -1}, "num_groups=-1"),
        ({"fusion": "horovod", "gradient_predivide_factor": 0.0}, "predivide_factor=0.0"),
        ({"fusion": "horovod", "gradient_predivide_factor": math.nan}, "predivide_factor=nan"),
        (
            {"fusion": "horovod", "num_groups": 2, "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor=2.0 is silently ignored.*num_groups=2",
        ),
        (
            {"fusion": "horovod", "op": "adasum", "gradient_predivide_factor": 2.0},
            "gradient_predivide_factor.*adasum",
        ),
        ({"fusion": "horovod", "op": "adasum", "compression": "fp16"}, "adasum.*fp16"),
        ({"num_groups": 2}, "num_groups=2.*fusion='horovod'"),
        ({"compression": "fp16"}, "compression='fp16'.*fusion='horovod'"),
        ({"op": "adasum"}, "op='adasum'.*fusion='horovod'"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0.*fusion='horovod'"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ConfigError, match=words):
        HorovodTraining(**settings)


def test_settings_are_frozen_and_the_arena_is_the_default():
    settings = HorovodTraining()
    assert settings.fusion == "arena"
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.fusion = "horovod"


@given(st.lists(st.sampled_from(["float32", "float64"])), st.integers(1, 12))
def test_groups_have_everyone_once_and_one_kind_each(kinds, num_groups):
    groups = cut_into_groups(list(enumerate(kinds)), num_groups)
    assert sorted(member for group in groups for member in group) == list(range(len(kinds)))
    assert all(len({kinds[member] for member in group}) == 1 for group in groups)
    if len(set(kinds)) == 1:
        assert len(groups) == min(num_groups, len(kinds))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wire_and_back(dtype, half):
    gradient = torch.arange(6).reshape(2, 3).to(dtype).t()  # small whole numbers are exact
    wire = Wire(half=half)
    parcel, home = wire.compress(gradient)
    assert parcel.is_contiguous()
    assert parcel.dtype in (torch.float16, torch.float32, torch.float64)
    assert not half or parcel.dtype == torch.float16
    assert half or parcel.dtype != torch.float16  # sums of halves need more room
    arrived = wire.decompress(parcel * 2, home)
    assert arrived is gradient
    assert torch.equal(gradient, torch.arange(0, 12, 2).reshape(2, 3).to(dtype).t())


def test_what_fits_is_not_copied():
    gradient = torch.ones(3)
    parcel, home = Wire(half=False).compress(gradient)
    assert parcel.data_ptr() == gradient.data_ptr()
    assert home is None


def test_conjugated_gradients():
    gradient = torch.tensor([1 + 2j, 3 - 4j]).conj()
    wire = Wire(half=False)
    parcel, home = wire.compress(gradient)
    assert parcel.tolist() == [[1, -2], [3, 4]]
    assert wire.decompress(parcel * 2, home).tolist() == [2 - 4j, 6 + 8j]


def test_division_before_leaving():
    wire = Wire(half=True)
    wire.divisor = 4096.0
    parcel, _ = wire.compress(torch.tensor([4096.0 * 100]))
    assert parcel.tolist() == [100.0]


def test_parameters_too_long_for_horovod_are_named():
    fits = torch.empty(2**31 - 1, device="meta")
    check_parameters(["a"], [fits], adasum=True)
    long = torch.empty(2**31, device="meta")
    with pytest.raises(ConfigError, match=r"parameter b has 2147483648 elements.*fusion='arena'"):
        check_parameters(["a", "b"], [fits, long], adasum=False)
    twice = torch.empty(2**30, dtype=torch.complex64, device="meta")
    with pytest.raises(ConfigError, match="parameter c has 2147483648 elements"):
        check_parameters(["c"], [twice], adasum=False)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_near_power_of_two(value):
    near = near_power_of_two(value)
    assert near <= value < 2 * near
    assert math.frexp(near)[0] == 0.5
