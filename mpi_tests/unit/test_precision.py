"""The pure parts of precision: arithmetic, pieces of the arena, the scale, options."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, namedtuple
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.fusion.layout import ParameterSpec, cut_into_runs, plan
from hpctrain.precision import LossScaling
from hpctrain.precision.casting import Casting
from hpctrain.precision.gradients import (
    clip_factor,
    excluded_from_clipping,
    multiply,
    sum_of_squares,
)
from hpctrain.precision.loss_scaling import Scaler, check_choice
from hpctrain.replica.window import Step

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@given(
    numels=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    halves=st.sets(st.integers(0, 11)),
    apart=st.sets(st.integers(0, 11)),
    bucket_bytes=st.one_of(st.none(), st.integers(1, 400)),
)
def test_runs_hold_every_gradient_once_and_nothing_else(numels, halves, apart, bucket_bytes):
    specs = [
        ParameterSpec(
            name=f"p{i}",
            numel=n,
            dtype="bfloat16" if i in halves else "float32",
            device="cpu",
            itemsize=2 if i in halves else 4,
        )
        for i, n in enumerate(numels)
    ]
    for bucket in plan(specs, bucket_bytes=bucket_bytes):
        runs = cut_into_runs(bucket, frozenset(apart))
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            holding = [
                kind for a, b, kind in runs if a <= offset and offset + specs[index].numel <= b
            ]
            assert holding == [index in apart]
        assert all(a < b <= bucket.flags for a, b, _ in runs)
        assert [b for _, b, _ in runs[:-1]] == [a for a, _, _ in runs[1:]]
        assert all(first[2] != then[2] for first, then in pairwise(runs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 1024, 1025, 100_000])
def test_sums_of_squares(dtype, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    rounded = values.to(torch.complex128) if dtype.is_complex else values.double()
    summed = sum_of_squares([values, values[:1]], CPU)
    assert summed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = rounded.abs().square().sum() + rounded[0].abs().square()
    assert summed.item() == pytest.approx(exact.item(), rel=2e-6)
    for bad in (math.inf, -math.inf, math.nan):
        values[numel // 2] = bad
        assert not math.isfinite(sum_of_squares([values], CPU).item())


def test_a_sum_does_not_depend_on_the_number_of_threads():
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    sums = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.add(sum_of_squares([values], CPU).item())
    finally:
        torch.set_num_threads(before)
    assert len(sums) == 1


def test_nothing_to_sum():
    assert sum_of_squares([], CPU).item() == 0.0


@given(st.floats(0, 1e30), st.floats(1e-3, 1e3))
def test_clipped_norms_stay_within_the_limit(norm, limit):
    factor = clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item()
    assert 0 < factor <= 1
    assert norm * factor <= limit * (1 + 1e-12)
    assert factor == 1 or norm > limit - 1e-6


def test_multiplying_by_one_touches_nothing():
    values = torch.ones(3)
    multiply([values], torch.tensor(1.0))
    assert values._version == 0
    multiply([values], torch.tensor(0.5))
    assert values.tolist() == [0.5] * 3


def test_groups_left_out_are_counted_in_the_optimizers_order():
    groups = [{"params": [1, 2]}, {"params": [3], "clip": False}, {"params": [4], "clip": True}]
    assert excluded_from_clipping(groups) == {2}
    assert excluded_from_clipping(groups[:1]) == frozenset()


@settings(deadline=None)  # the first step of an optimizer takes seconds
@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_moves_as_torchs_does(overflows):
    options = LossScaling(init_scale=64.0, growth_interval=4, max_skips=3)
    mine = Scaler(options, CPU)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    in_a_row = 0
    for overflow in overflows:
        theirs.scale(weight * 0).sum().backward()
        weight.grad = torch.full((1,), math.inf if overflow else 0.0)
        theirs.step(optimizer)
        theirs.update()
        mine.update(torch.tensor(float(overflow)))
        in_a_row = in_a_row + 1 if overflow else 0
        assert mine.scale.item() == theirs.get_scale()
        assert mine.num_in_a_row == in_a_row
        assert mine.is_last_chance == (in_a_row >= 2)
    assert mine.num_skipped == sum(overflows)
    again = Scaler(options, CPU)
    again.load_state_dict(mine.state_dict())
    assert again.state_dict() == mine.state_dict()
    assert again.is_last_chance == mine.is_last_chance


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="has scale and _growth_tracker; given: state"):
        Scaler(LossScaling(), CPU).load_state_dict({"state": {}})


def test_averages_of_64_ranks_do_not_overflow_where_sums_do():
    """Losses are divided by the total weight beforehand: what is summed are parts of a mean."""
    generator = torch.Generator().manual_seed(3)
    largest = torch.finfo(torch.float16).max
    gradients = (torch.rand(64, 1000, generator=generator) * 0.1 + 0.9) * largest
    scaled = gradients.half()
    late, early = torch.zeros(1000, dtype=torch.float16), torch.zeros(1000, dtype=torch.float16)
    for rank in range(64):
        late += scaled[rank]
        early += (gradients[rank] / 64).half()
    assert torch.isinf(late).all()
    assert torch.isfinite(early).all()
    assert torch.allclose(early.float(), gradients.mean(0), rtol=64 * 2**-11)


def test_outputs_of_every_shape_become_float32():
    def model(x, scale):
        hidden = x @ x
        return {"a": hidden, "b": [hidden * scale, (hidden.long(), "text")], "c": None}

    for precision, inner in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        seen = []

        def watched(*arguments, seen=seen, **named):
            result = model(*arguments, **named)
            seen.append(result["a"].dtype)
            return result

        result = Casting(precision, "cpu").forward(watched, (torch.ones(2, 2),), {"scale": 2.0})
        assert seen == [inner]
        assert result["a"].dtype == result["b"][0].dtype == torch.float32
        assert result["b"][1][0].dtype == torch.int64
        assert result["b"][1][1] == "text"
    pure = Casting("bf16-pure", "cpu").forward(
        lambda x, index: (x, index), (torch.ones(1), torch.arange(2)), {}
    )
    assert [part.dtype for part in pure] == [torch.float32, torch.int64]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0 must be above 0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0 must be at least 1"),
        ({"max_skips": 0}, "max_skips=0 must be at least 1"),
    ],
)
def test_scaling_out_of_range(values, message):
    with pytest.raises(ConfigError, match=message):
        LossScaling(**values)


def test_tf32_is_for_gpus():
    def check(device_type):
        check_choice("tf32", device_type=device_type, scaling=None, clip_norm=None, clip_value=None)

    check("cuda")
    with pytest.raises(ConfigError, match="use 'fp32' or 'bf16' there"):
        check("cpu")


def test_what_a_step_tells():
    nothing = Step(due=False, note="accumulating")
    assert not nothing
    assert (nothing.reason, nothing.skipped, nothing.learning_rate) == ("accumulating", False, None)
    assert (nothing.scale, nothing.norm) == (None, None)
    assert Step(due=True, note="stepped", learning_rates=(0.1, 0.2)).learning_rate == 0.1


class Output(OrderedDict):
    """As transformers' outputs are: a dictionary whose entries are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """An output that cannot be written to."""

    loss: torch.Tensor
    inner: Output
    name: str
    made: int = dataclasses.field(init=False, default=3)


def half_outputs(kind):
    loss, logits = torch.ones((), dtype=kind), torch.ones(2, 3, dtype=kind)
    output = Output(loss=loss)
    output["logits"], output["count"] = logits, 7
    pair = namedtuple("pair", "out extra")
    return Frozen(loss, output, "x"), output, pair(output, [logits]), SimpleNamespace(loss=loss)


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_outputs_of_any_class_come_back_in_float32_as_what_they_are(precision, kind):
    made = half_outputs(kind)
    frozen, output, both, space = Casting(precision, "cpu").forward(lambda: made, (), {})
    assert type(frozen) is Frozen
    assert (frozen.loss.dtype, frozen.name, frozen.made) == (torch.float32, "x", 3)
    assert frozen.inner.logits.dtype == frozen.inner["logits"].dtype == torch.float32
    assert type(output) is Output
    assert output.loss is output["loss"]
    assert (output.loss.dtype, output["count"]) == (torch.float32, 7)
    assert (both.out.logits.dtype, both.extra[0].dtype) == (torch.float32,) * 2
    assert space.loss.dtype == torch.float32
    assert made[0].loss.dtype == made[1].logits.dtype == kind  # the model's own are untouched


def test_an_output_of_transformers_comes_back_as_itself():
    modeling = pytest.importorskip("transformers.modeling_outputs")
    given_out = modeling.CausalLMOutput(
        loss=torch.ones((), dtype=torch.bfloat16), logits=torch.ones(2, 3, dtype=torch.bfloat16)
    )
    out = Casting("bf16", "cpu").forward(lambda: given_out, (), {})
    assert type(out) is modeling.CausalLMOutput
    assert out.logits.dtype == out["logits"].dtype == out.loss.dtype == torch.float32
    assert out.hidden_states is None
    assert list(out) == ["loss", "logits"]
    inside = Casting("bf16-pure", "cpu").forward(
        lambda batch: batch.logits.dtype, (modeling.CausalLMOutput(logits=torch.ones(2)),), {}
    )
    assert inside == torch.bfloat16
