"""Tensor-train layers against the dense layers that they stand for."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck

import hpctrain as hpc
from hpctrain.errors import ConfigError
from hpctrain.nn import TTEmbedding, TTLinear, balanced_factors, factorise
from hpctrain.nn.cores import decompose, multiply_out
from hpctrain.nn.factors import TrainShape, choose_shape, full_ranks
from hpctrain.nn.orders import SMALL_PRODUCTS, lookup_orders, product_orders, up_to

TRAINS = st.integers(2, 4).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 4), min_size=count, max_size=count),
        st.lists(st.integers(1, 4), min_size=count, max_size=count),
        st.lists(st.integers(1, 5), min_size=count - 1, max_size=count - 1),
    )
)


def shape_of(drawn) -> TrainShape:
    rows, columns, ranks = drawn
    return TrainShape(
        rows=math.prod(rows),
        columns=math.prod(columns),
        row_factors=tuple(rows),
        column_factors=tuple(columns),
        ranks=tuple(ranks),
    )


def apart(a, b):
    return float(((a - b).norm() / b.norm()).detach())


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("size", "num_cores", "factors"),
    [
        (768, 3, (8, 8, 12)),
        (3072, 3, (12, 16, 16)),
        (50257, 3, (34, 37, 40)),  # 29 x 1733 has no good factors: 63 rows of padding
        (50000, 3, (25, 40, 50)),
        (64, 2, (8, 8)),
        (7, 3, (2, 2, 2)),
        (1, 4, (1, 1, 1, 1)),
    ],
)
def test_factors_that_are_chosen(size, num_cores, factors):
    assert balanced_factors(size, num_cores) == factors


@given(st.integers(1, 20_000), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_factors_are_balanced_and_enough(size, num_cores):
    factors = balanced_factors(size, num_cores)
    assert len(factors) == num_cores
    assert math.prod(factors) >= size
    best = math.ceil(size ** (1 / num_cores) - 1e-9)  # as many equal ones would do
    assert sum(factors) <= 1.25 * num_cores * best
    # No factor can be smaller: there is no more padding than rounding up asks for.
    if math.prod(factors) > size:
        assert all(math.prod(factors) // f * (f - 1) < size for f in factors[-1:])


def test_both_sizes_are_spread_over_the_cores_alike():
    shape = choose_shape(3072, 768, ranks=8)
    assert shape.row_factors == (12, 16, 16)
    assert shape.column_factors == (12, 8, 8)
    assert shape.core_shapes == ((1, 12, 12, 8), (8, 16, 8, 8), (8, 16, 8, 1))


def test_a_rank_for_all_is_cut_to_what_is_possible():
    shape = choose_shape(8, 8, ranks=1000)
    assert shape.ranks == full_ranks((2, 2, 2), (2, 2, 2)) == (4, 4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ranks": 0}, "ranks=0 must be a whole number, at least 1"),
        ({"ranks": (2,)}, r"ranks=\(2,\) has 1 numbers, and 3 cores have 2 bonds"),
        ({"ranks": (2, 99)}, r"ranks\[1\]=99 is more than 4"),
        ({"ranks": 2, "num_cores": 1}, "2 to 8 cores, not 1"),
        ({"ranks": 2, "row_factors": (2, 2)}, r"multiply to 4, and must to at least 8; \(2, 4\)"),
        ({"ranks": 2, "row_factors": (2, 4), "num_cores": 3}, "row_factors 2, num_cores 3"),
        ({"ranks": 2, "row_factors": (2, 4), "column_factors": (2, 2, 2)}, "column_factors 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        choose_shape(8, 8, **options)


# ---------------------------------------------------------------- orders


def all_costs(shape):
    """Every way to contract pair by pair, by trying them all: (fixed, each) of each."""
    count = shape.num_cores
    sizes = {"b": 1}
    first = {"b"}
    operands = [first]
    for k in range(count):
        sizes |= {f"i{k}": shape.row_factors[k], f"j{k}": shape.column_factors[k]}
        first.add(f"j{k}")
        bonds = {f"r{n}" for n in (k - 1, k) if 0 <= n < count - 1}
        operands.append({f"i{k}", f"j{k}"} | bonds)
    sizes |= {f"r{n}": rank for n, rank in enumerate(shape.ranks)}

    def search(held, fixed, each):
        if len(held) == 1:
            yield fixed, each
        for a, b in itertools.combinations(range(len(held)), 2):
            work = 2 * math.prod(sizes[index] for index in held[a] | held[b])
            others = [h for n, h in enumerate(held) if n not in (a, b)]
            batched = "b" in held[a] | held[b]
            both = [*others, held[a] ^ held[b]]
            yield from search(both, fixed + work * (not batched), each + work * batched)

    return set(search(operands, 0, 0))


@given(TRAINS.filter(lambda drawn: len(drawn[0]) <= 3))
@settings(max_examples=30, deadline=None)
def test_no_order_is_cheaper_at_any_batch(drawn):
    shape = shape_of(drawn)
    orders, costs = product_orders(shape), all_costs(shape)
    for batch in (1, 2, 3, 5, 8, 13, 21, 50, 100, 1000, 10**6):
        least = min(fixed + batch * each for fixed, each in costs)
        assert up_to(orders, batch).flops(batch) == least


def lookup_costs(shape, first, last, *, table):
    """Every way to make a table of cores first..last, or rows of it: (fixed, each) of each."""
    if not table:
        yield from lookup_costs(shape, first, last, table=True)
    if first == last:
        yield 0, 0
    ends = (1, *shape.ranks, 1)
    columns = math.prod(shape.column_factors[first : last + 1])
    rows = math.prod(shape.row_factors[first : last + 1]) if table else 1
    for middle in range(first, last):
        work = 2 * ends[first] * ends[middle + 1] * ends[last + 1] * columns * rows
        for left in lookup_costs(shape, first, middle, table=table):
            for right in lookup_costs(shape, middle + 1, last, table=table):
                each = left[1] + right[1] + work * (not table)
                yield left[0] + right[0] + work * table, each


@given(TRAINS)
@settings(max_examples=30, deadline=None)
def test_no_order_of_lookup_is_cheaper_at_any_batch(drawn):
    shape = shape_of(drawn)
    orders = lookup_orders(shape)
    costs = set(lookup_costs(shape, 0, shape.num_cores - 1, table=False))
    for batch in (1, 2, 3, 5, 8, 13, 21, 50, 100, 1000, 10**6):
        counted = batch * SMALL_PRODUCTS
        least = min(fixed + counted * each for fixed, each in costs)
        assert up_to(orders, batch).flops(counted) == least


@given(TRAINS, st.sampled_from([1, 2, 7, 40, 300]))
@settings(max_examples=40, deadline=None)
def test_every_order_gives_what_the_dense_weight_gives(drawn, batch):
    shape = shape_of(drawn)
    torch.manual_seed(0)
    layer = TTLinear(
        shape.columns,
        shape.rows,
        ranks=tuple(min(pair) for pair in zip(shape.ranks, full(shape), strict=True)),
        in_factors=shape.column_factors,
        out_factors=shape.row_factors,
        dtype=torch.float64,
    )
    x = torch.randn(batch, shape.columns, dtype=torch.float64)
    assert apart(layer(x), x @ layer.to_dense().T + layer.bias) < 1e-12
    rows = TTEmbedding(
        shape.rows,
        shape.columns,
        ranks=layer.shape.ranks,
        row_factors=shape.row_factors,
        column_factors=shape.column_factors,
        dtype=torch.float64,
    )
    ids = torch.randint(shape.rows, (batch,))
    for _, order in rows.orders:  # all of them, whatever the batch
        rows.orders = ((None, order),)
        assert apart(rows(ids), rows.to_dense()[ids]) < 1e-12


def full(shape):
    return full_ranks(shape.row_factors, shape.column_factors)


def test_the_order_depends_on_the_batch():
    shape = choose_shape(50, 30, ranks=10)
    few, many = (up_to(product_orders(shape), batch) for batch in (1, 1000))
    assert few.text == "(((x 1) 2) 3)"
    assert many.text == "(x ((1 2) 3))"  # the dense weight
    assert many.flops(1000) < few.flops(1000)
    assert few.flops(1) < many.flops(1)


def test_cores_are_not_multiplied_beyond_the_limit():
    shape = choose_shape(50, 30, ranks=10)
    orders = product_orders(shape, merge_limit=1499)  # the dense weight has 1500
    assert up_to(orders, 10**9).text != "(x ((1 2) 3))"
    rows = lookup_orders(shape, merge_limit=1)
    assert len(rows) == 1
    assert {step.kind for step in rows[0][1].steps} == {"gather", "multiply"}
    assert {step.kind for step in lookup_orders(shape)[-1][1].steps} == {"merge", "gather"}


# ---------------------------------------------------------------- factorising a matrix


@given(TRAINS, st.floats(0.01, 0.9))
@settings(max_examples=40, deadline=None)
def test_the_error_that_is_asked_for_is_kept(drawn, error):
    shape = shape_of(drawn)
    torch.manual_seed(1)
    matrix = torch.randn(shape.rows, shape.columns, dtype=torch.float64)
    exact = choose_shape(
        shape.rows,
        shape.columns,
        ranks=None,
        row_factors=shape.row_factors,
        column_factors=shape.column_factors,
    )
    made = decompose(matrix, exact, error=error)
    assert made.error == pytest.approx(apart(multiply_out(made.cores, made.shape), matrix))
    assert made.error <= error


def test_full_ranks_are_exact_and_a_lower_rank_is_found():
    torch.manual_seed(0)
    dense = nn.Linear(24, 30, dtype=torch.float64)
    exact = TTLinear.from_dense(dense, ranks=10**6)
    assert exact.report().error < 1e-14
    small = TTLinear(24, 30, ranks=(3, 2), dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(small.to_dense())
    again = TTLinear.from_dense(dense, error=1e-10)
    assert again.shape.ranks == (3, 2)
    assert TTLinear.from_dense(dense, ranks=10**6).shape.ranks == (3, 2)
    x = torch.randn(5, 24, dtype=torch.float64)
    assert apart(again(x), dense(x)) < 1e-10


def test_fewer_ranks_more_error():
    torch.manual_seed(0)
    dense = nn.Linear(64, 64)
    errors = [TTLinear.from_dense(dense, ranks=r).report().error for r in (1, 4, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.9  # noise has no structure that a small train could have


def test_a_zero_weight():
    dense = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(dense.weight)
    layer = TTLinear.from_dense(dense, ranks=4)
    assert layer.report().error == 0
    assert not layer(torch.randn(3, 8)).any()


def test_low_precision_has_its_limits():
    torch.manual_seed(0)
    dense = nn.Linear(16, 16)
    assert TTLinear.from_dense(dense, error=1e-6).report().error <= 1e-6
    with pytest.raises(ConfigError, match=r"error=1e-09 is out of reach in torch.float32"):
        TTLinear.from_dense(dense, error=1e-9)
    half = TTLinear.from_dense(dense.bfloat16(), error=0.05)
    assert half.report().error <= 0.05
    assert half.cores[0].dtype is torch.bfloat16


# ---------------------------------------------------------------- layers


def dense_pair(bias=True):
    """Sizes that need padding on both sides."""
    torch.manual_seed(2)
    dense = nn.Linear(13, 11, bias, dtype=torch.float64)
    return dense, TTLinear.from_dense(dense, ranks=100, in_factors=(2, 3, 3), out_factors=(2, 2, 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3, 4), (0,)])
def test_linear_is_the_dense_layer(bias, lead):
    dense, layer = dense_pair(bias)
    x = torch.randn(*lead, 13, dtype=torch.float64)
    assert layer(x).shape == dense(x).shape
    assert torch.allclose(layer(x), dense(x), rtol=0, atol=1e-13)


def test_linear_gradients():
    layer = TTLinear(
        5, 7, ranks=(2, 3), in_factors=(2, 1, 3), out_factors=(2, 2, 2), dtype=torch.float64
    )
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for _, order in layer.orders:
        layer.orders = ((None, order),)
        assert gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_embedding_gradients():
    layer = TTEmbedding(
        7, 5, padding_idx=2, ranks=(2, 2), row_factors=(2, 2, 2), dtype=torch.float64
    )
    ids = torch.tensor([[0, 6, 2], [5, 5, 1]])
    for _, order in layer.orders:
        layer.orders = ((None, order),)
        assert gradcheck(lambda *_: layer(ids), tuple(layer.parameters()))


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_embedding_is_the_dense_layer(padding_idx):
    torch.manual_seed(3)
    dense = nn.Embedding(29, 6, padding_idx=padding_idx, dtype=torch.float64)
    layer = TTEmbedding.from_dense(dense, ranks=100, row_factors=(3, 2, 5))
    ids = torch.randint(29, (4, 9))
    ids[0, :3] = torch.tensor([3, 28, 0])
    assert torch.allclose(layer(ids), dense(ids), rtol=0, atol=1e-13)
    assert torch.allclose(layer.to_dense(), dense.weight, rtol=0, atol=1e-13)
    assert layer(ids.int()).equal(layer(ids))
    assert layer(ids[:0]).shape == (0, 9, 6)


def test_rows_of_the_padding_do_not_exist():
    layer = TTEmbedding(29, 6, ranks=3, row_factors=(3, 2, 5))  # 30 rows
    for order in dict.fromkeys(order for _, order in layer.orders):
        layer.orders = ((None, order),)
        for wrong in (29, 30, -1, 10**6):
            with pytest.raises(IndexError, match="out of range"):
                layer(torch.tensor([0, wrong]))
    dense = layer.to_dense()
    assert dense.shape == (29, 6)


def test_a_padding_row_is_zero_and_trains_nothing():
    layer = TTEmbedding(20, 6, padding_idx=-2, ranks=3)
    assert layer.padding_idx == 18
    assert not layer(torch.tensor([18, 18])).any()
    assert layer.to_dense()[17].any()
    assert not layer.to_dense()[18].any()
    layer(torch.tensor([18, 18])).sum().backward()
    assert not any(core.grad.any() for core in layer.cores)


def test_initial_weights_have_the_variance_of_torch():
    torch.manual_seed(11)
    ours, theirs, rows = [], [], []
    for _ in range(12):
        ours.append(TTLinear(96, 120, ranks=12).to_dense())
        theirs.append(nn.Linear(96, 120).weight)
        rows.append(TTEmbedding(120, 96, ranks=12).to_dense())
    ours, theirs, rows = (torch.stack(each).detach() for each in (ours, theirs, rows))
    # A wide margin: products of three normal numbers have heavy tails.
    assert float(ours.var() / theirs.var()) == pytest.approx(1.0, abs=0.2)
    assert float(rows.var()) == pytest.approx(1.0, abs=0.2)
    assert abs(float(ours.mean())) < 0.02 * float(ours.std())
    bias = torch.stack([TTLinear(96, 120, ranks=2).bias.detach() for _ in range(20)])
    assert float(bias.abs().max()) <= 96**-0.5
    assert float(bias.var()) == pytest.approx(1 / (3 * 96), rel=0.1)


@pytest.mark.parametrize(
    "layer",
    [TTLinear(13, 11, ranks=3), TTEmbedding(13, 11, 4, ranks=3)],
    ids=["linear", "embedding"],
)
def test_habits_of_modules(layer):
    batch = torch.arange(13) if isinstance(layer, TTEmbedding) else torch.randn(3, 13)
    twin = copy.deepcopy(layer)
    assert twin(batch).equal(layer(batch))
    twin.reset_parameters()
    assert not twin(batch).equal(layer(batch))
    twin.load_state_dict(layer.state_dict())
    assert twin(batch).equal(layer(batch))
    assert list(layer.state_dict())[-3:] == ["cores.0", "cores.1", "cores.2"]
    assert pickle.loads(pickle.dumps(layer))(batch).equal(layer(batch))
    assert f"{layer.report().compression:.1f} x" in repr(layer)
    meta = copy.deepcopy(layer).to("meta")
    assert meta(batch.to("meta")).shape == layer(batch).shape
    real = meta.to_empty(device="cpu")
    real.reset_parameters()
    assert real(batch).isfinite().all()


def test_compiled_by_torch():
    model = nn.Sequential(
        TTEmbedding(29, 6, 1, ranks=3), nn.Flatten(0, 1), TTLinear(6, 11, ranks=3)
    )
    fast = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for batch in (2, 40):
        ids = torch.randint(29, (batch, 5))
        assert torch.allclose(fast(ids), model(ids), atol=1e-6)
        fast(ids).square().sum().backward()
        mine = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(ids).square().sum().backward()
        for grad, p in zip(mine, model.parameters(), strict=True):
            assert torch.allclose(grad, p.grad, rtol=1e-4, atol=1e-5)
        model.zero_grad()


def test_autocast_rounds_what_it_rounds_in_dense_layers():
    rows, linear = TTEmbedding(29, 8, ranks=3), TTLinear(8, 8, ranks=3)
    ids = torch.randint(29, (5,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rows(ids).dtype is nn.Embedding(29, 8)(ids).dtype is torch.float32
        assert linear(rows(ids)).dtype is torch.bfloat16
    assert torch.allclose(linear(rows(ids)), rows(ids) @ linear.weight.T + linear.bias, atol=1e-5)


def test_modules_that_use_a_weight_themselves():
    torch.manual_seed(4)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    before = block(x)
    block.linear1 = TTLinear.from_dense(block.linear1, ranks=100)
    with torch.no_grad():  # torch's fast path reads linear1.weight
        assert torch.allclose(block(x), before, atol=1e-12)
    assert torch.allclose(block(x), before, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TTLinear.from_dense(nn.Linear(4, 4)), "either ranks= or error="),
        (lambda: TTLinear.from_dense(nn.Linear(4, 4), ranks=1, error=0.1), "and not both"),
        (lambda: TTLinear.from_dense(nn.Linear(4, 4), error=1.5), "error=1.5 must be a relative"),
        (lambda: TTLinear.from_dense(nn.Embedding(4, 4), ranks=1), "takes an nn.Linear, not a Emb"),
        (lambda: TTLinear.from_dense(nn.Linear(4, 4, device="meta"), ranks=1), "meta device"),
        (lambda: TTLinear(4, 4, ranks=1, dtype=torch.int64), "must be a floating-point"),
        (lambda: TTLinear(4, 0, ranks=1), "out_features=0 must be"),
        (lambda: TTLinear(4, 4, ranks=1)(torch.randn(2, 5)), "last dimension is 5, and must be 4"),
        (lambda: TTEmbedding(4, 4, 4, ranks=1), "padding_idx=4 must be within 4"),
        (
            lambda: TTEmbedding.from_dense(nn.Embedding(4, 4, max_norm=1.0, sparse=True), ranks=1),
            "an embedding with max_norm, sparse",
        ),
        (
            lambda: TTEmbedding.from_dense(
                nn.Embedding.from_pretrained(torch.ones(4, 4), padding_idx=1), ranks=1
            ),
            "the row of padding_idx=1 is not zero",
        ),
    ],
)
def test_refusals(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_how_a_dense_layer_was_trained_is_kept():
    dense = nn.Linear(8, 8).eval().requires_grad_(False)
    dense.bias.requires_grad_(True)
    layer = TTLinear.from_dense(dense, ranks=2)
    assert not layer.training
    assert [core.requires_grad for core in layer.cores] == [False] * 3
    assert layer.bias.requires_grad
    assert layer.bias.equal(dense.bias)
    assert layer.bias is not dense.bias


# ---------------------------------------------------------------- models


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 256), "down": nn.Linear(256, 64)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 2)
        self.head = nn.Linear(64, 4)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return self.head(self.norm(x).mean(1))


def test_layers_are_replaced_by_the_patterns_of_their_names(capsys):
    torch.manual_seed(0)
    model = Model()
    ids = torch.randint(1000, (2, 5))
    done = factorise(model, ["*.embed", "*.up", "attention.*", "head"], ranks=8)
    assert isinstance(model.embed, TTEmbedding)
    assert isinstance(model.blocks[1]["up"], TTLinear)
    assert isinstance(model.blocks[1]["down"], nn.Linear)
    assert list(done.replaced) == ["embed", "blocks.0.up", "blocks.1.up"]
    assert set(done.kept) == {"attention.out_proj", "head"}
    count = sum(p.numel() for p in model.parameters())
    assert done.parameters_after == count
    shown = capsys.readouterr().out
    assert shown == f"{done}\n"
    assert "head stays dense: as a tensor train it would have" in shown
    assert f"the model: {count:,} parameters instead of {done.parameters_before:,}" in shown
    model(ids).sum().backward()
    assert all(core.grad is not None for core in model.embed.cores)


def test_a_small_error_gives_the_same_model():
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():  # what a trained layer may be like: of low rank
        for block in model.blocks:
            block["up"].weight.copy_(TTLinear(64, 256, ranks=4).weight)
    before = copy.deepcopy(model)
    done = hpc.nn.factorise(model, "*.up", error=1e-4, say=None)
    assert [one.shape.ranks for one in done.replaced.values()] == [(4, 4), (4, 4)]
    ids = torch.randint(1000, (2, 5))
    assert apart(model(ids), before(ids)) < 1e-4


def test_what_cannot_be_replaced_is_refused_and_nothing_is_changed():
    model = Model()
    with pytest.raises(
        ConfigError, match=r"pattern '\*.wrong' matches no linear or embedding layer"
    ):
        factorise(model, ["*.up", "*.wrong"], ranks=2)
    with pytest.raises(ConfigError, match="matches no linear"):
        factorise(model, "norm", ranks=2)
    with pytest.raises(ConfigError, match="no pattern is given"):
        factorise(model, [], ranks=2)
    with pytest.raises(ConfigError, match="ranks=0 must be"):
        factorise(model, "*.up", ranks=0)
    with pytest.raises(ConfigError, match="either ranks= or error="):
        factorise(model, "*.up")
    with pytest.raises(ConfigError, match=r"blocks.0.up: error=1e-12 is out of reach"):
        factorise(model, "*.up", error=1e-12)
    model.head = nn.Linear(64, 1000, bias=False)
    model.head.weight = model.embed.weight
    with pytest.raises(ConfigError, match=r"embed.weight is shared with head.weight"):
        factorise(model, "*.embed", ranks=2)
    assert not any(isinstance(module, TTLinear | TTEmbedding) for module in model.modules())
