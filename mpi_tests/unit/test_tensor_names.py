"""Names without the wrappers of torch.compile."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.replica.checks import own_statistics
from hpctrain.replica.naming import named_parameters
from hpctrain.tensor_names import are_plain, fit_keys, plain_keys, plain_name

words = st.lists(
    st.sampled_from(["layer", "0", "weight", "x_orig_mod", "_orig_module"]), min_size=1
)


@given(words, st.data())
def test_wrappers_go_wherever_they_are(parts, data):
    plain = ".".join(parts)
    wrapped = list(parts)
    for place in data.draw(st.lists(st.integers(0, len(parts) - 1), max_size=3)):
        wrapped.insert(place, "_orig_mod")
    assert plain_name(".".join(wrapped)) == plain
    assert plain_name(plain) == plain
    assert are_plain([".".join(wrapped)]) == ("_orig_mod" not in wrapped)


def test_states_fit_whatever_was_compiled():
    plain, whole, part = {"0.w": 1, "1.w": 2}, ["_orig_mod.0.w", "_orig_mod.1.w"], ["0._orig_mod.w"]
    assert plain_keys(dict.fromkeys(whole)) == dict.fromkeys(plain)
    assert fit_keys(plain, whole) == dict(zip(whole, plain.values(), strict=True))
    assert fit_keys(plain, [*part, "1.w"]) == {"0._orig_mod.w": 1, "1.w": 2}
    assert fit_keys(dict(zip(whole, (1, 2), strict=True)), plain) == plain
    assert fit_keys({"2.w": 3, **plain}, whole)["2.w"] == 3  # for whoever refuses it
    both = {"w": 1, "_orig_mod.w": 2}
    assert plain_keys(both) == both  # nothing is lost


def test_messages_name_parameters_as_the_model_does():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    compiled = torch.compile(inner, backend="eager")
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    assert named_parameters(compiled, optimizer)[0] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert "statistics of 1 are each" in own_statistics(compiled, 2)[0][1]
