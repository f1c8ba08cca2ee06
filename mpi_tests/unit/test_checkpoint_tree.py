"""State trees are stored without loss, or refused with the place."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpctrain.checkpoint.agreeing import first_difference, heads_of
from hpctrain.checkpoint.loading import differences, flatten_like, refuse_misfit
from hpctrain.checkpoint.parts import TensorSpec, Tree, pack, unpack
from hpctrain.checkpoint.tree import flatten
from hpctrain.errors import CheckpointError
from mpi_tests.checkpoints import bits

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


numbers = st.one_of(
    st.integers(), st.floats(), st.complex_numbers(allow_nan=True), st.booleans(), st.none()
)
texts = st.text(st.characters(exclude_categories=()), max_size=8)
keys = st.one_of(st.sampled_from(["$", "name", "/", "0", ""]), texts, st.integers(), st.booleans())
arrays = npst.arrays(
    dtype=st.one_of(
        npst.floating_dtypes(endianness="?"),
        npst.integer_dtypes(endianness="?"),
        npst.complex_number_dtypes(),
        npst.boolean_dtypes(),
        npst.unicode_string_dtypes(max_len=3),
        npst.datetime64_dtypes(),
    ),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
tensors = st.builds(
    lambda shape, dtype: (
        torch.arange(math.prod(shape) * 8)
        .to(torch.uint8)[: math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .reshape(shape)
        if math.prod(shape)
        else torch.empty(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]),
)
leaves = st.one_of(
    numbers,
    texts,
    st.binary(max_size=8),
    st.sampled_from([torch.float16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2])]),
    arrays,
    arrays.filter(lambda a: a.size).map(lambda a: a.reshape(-1)[0]),
    tensors,
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(keys, st.tuples(keys, keys)), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_every_tree_comes_back(tree):
    assert bits(unpack(pack(tree))) == bits(tree)
    json.loads(json.dumps(flatten(tree).skeleton, allow_nan=False))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    for tensor in (raw.view(dtype), raw.view(dtype)[0], raw.view(dtype)[:0]):
        assert bits(unpack(pack(tensor))) == bits(tensor)


def test_views_ties_and_parameters():
    base = torch.arange(12.0).reshape(3, 4)
    weight = torch.nn.Parameter(torch.ones(2))
    tree = {"t": base.t(), "row": base[1], "wide": base[0].expand(5, 4), "a": weight, "b": weight}
    tree |= {"conj": torch.tensor([1 + 2j]).conj(), "again": base[1], "graph": (weight * 2)}
    made = unpack(pack(tree))
    for name, value in tree.items():
        assert torch.equal(made[name], value), name
    assert made["row"] is made["again"]
    assert made["a"] is made["b"]
    assert type(made["a"]) is torch.nn.Parameter
    made["row"].fill_(0)
    assert made["t"].sum() == base.sum()  # overlapping, not the same: separate afterwards
    assert len(flatten(tree).tensors) == 6


def test_module_versions_survive():
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert unpack(pack(state))._metadata == state._metadata


def test_keys_that_look_alike_stay_apart():
    tree = {0: torch.zeros(1), "0": torch.ones(1), "a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert bits(unpack(pack(tree))) == bits(tree)


class Odd(dict):
    pass


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (object(), "of type object"),
        (Odd(), "Odd"),
        (defaultdict(int), "collections.defaultdict"),
        ({1, 2}, "of type set"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "device meta"),
        (np.array([object()]), "numpy array of object"),
        (np.zeros(1, [("a", "f4")]), "numpy array of"),
        (np.zeros(2).view(np.recarray), "recarray"),
        (lambda: 0, "function"),
    ],
    ids=repr,
)
def test_refused_with_the_place(bad, what):
    with pytest.raises(CheckpointError, match=r"state\['opt'\]\[2\]\[\(1, 'x'\)\] ") as caught:
        flatten({"opt": [0, 1, {(1, "x"): bad}]})
    assert what in str(caught.value)


def test_circles_and_depth_are_refused():
    circle: list[object] = []
    circle.append([circle])
    with pytest.raises(CheckpointError, match=r"state\[0\]\[0\] contains itself"):
        flatten(circle)
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    with pytest.raises(CheckpointError, match="levels deep"):
        flatten(deep)
    with pytest.raises(CheckpointError, match="has the key frozenset"):
        flatten({frozenset(): 1})


def test_fingerprints_and_heads():
    one = {"a": 1, "b": {"x": torch.ones(3), 2: None}}
    two = {"b": {2: None, "x": torch.zeros(3)}, "a": 1}
    assert flatten(one).fingerprint() == flatten(two).fingerprint()
    assert flatten(one).fingerprint() != flatten({**one, "a": 1.0}).fingerprint()
    assert heads_of(flatten(one).tensors) != heads_of(flatten(two).tensors)
    wide = torch.arange(1 << 20).reshape(1024, 1024)
    assert heads_of({"x": wide.t()}) == heads_of({"x": wide.t().contiguous()})
    mine, theirs = flatten({"a": 1}).leaves, flatten({"a": 2, "b": 0}).leaves
    assert first_difference(mine, theirs) == "state['a'] is 1 and on rank 0 2"
    assert first_difference({"a": "1"}, {"a": "1", "b": "2"}) == "b is not there"
    assert first_difference({"a": "1", "b": "2"}, {"a": "1"}) == "b is not on rank 0"
    assert first_difference(mine, dict(mine)) is None


def test_another_model_is_named():
    found = {"layer.weight": (4, 3), "layer.bias": (4,), "head.weight": (2, 4)}
    wanted = {"layer.weights": (4, 3), "layer.bias": (5,), "head.weight": (2, 4)}
    assert differences(found, dict(found)) == []
    assert differences(found, wanted) == [
        "layer.weights 4x3 is missing in it; it has layer.weight 4x3 instead",
        "layer.bias is 4 in it and 5 here",
        "it has layer.weight 4x3, which is not here",
    ]
    assert differences({}, {f"w{i}": () for i in range(9)})[-1] == "and 4 more differences"


def test_misfits_by_key():
    model = torch.nn.Linear(3, 2)
    flat = flatten({"model": model.state_dict(), "tied": [model.weight, model.weight]})
    specs = {n: TensorSpec("float32", tuple(t.shape), {}) for n, t in flat.tensors.items()}
    tree = Tree(flat.skeleton, specs)
    refuse_misfit(tree, flatten_like({"model": torch.nn.Linear(3, 2).state_dict()}))
    refuse_misfit(tree, flatten_like({"tied": [torch.ones(2, 3), torch.ones(2, 3)]}))
    with pytest.raises(CheckpointError, match="weight is 2x3 in it and 2x4 here"):
        refuse_misfit(tree, flatten_like({"model": torch.nn.Linear(4, 2).state_dict()}))
    with pytest.raises(CheckpointError, match="contains no ema"):
        refuse_misfit(tree, flatten_like({"ema": {}}))
