"""What a divided update decides without communicating: memory, kinds of optimizers, the choice."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.fusion import is_dense, like_parameter
from hpctrain.replica import choose_update, optimizer_facts
from hpctrain.update.pieces import flat_gradient, flat_memory, make_inner, make_pieces, take_options
from hpctrain.update.sharing import Fragment, shards_by
from hpctrain.world.shared_memory import PrivateView

DENSE = {
    "plain": torch.randn(6, 5),
    "transposed": torch.randn(6, 5).t(),
    "channels_last": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "permuted": torch.randn(4, 3, 2).permute(2, 0, 1),
    "inside": torch.randn(50)[10:40].view(5, 6),
    "number": torch.tensor(3.0),
    "one": torch.randn(1, 1, 1),
    "one_strided": torch.randn(8, 8)[:1, :1],
    "empty": torch.randn(0, 3),
}
SCATTERED = {
    "rows": torch.randn(6, 5)[::2],
    "columns": torch.randn(6, 5)[:, :3],
    "expanded": torch.randn(1, 5).expand(4, 5),
    "overlapping": torch.randn(9).as_strided((3, 4), (2, 1)),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_memory_and_back(name):
    tensor = DENSE[name]
    assert is_dense(tensor)
    flat = flat_memory(tensor)
    assert flat.shape == (tensor.numel(),)
    if tensor.numel():
        assert flat.data_ptr() == tensor.data_ptr()
        assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
    seen = like_parameter(torch.cat([torch.zeros(3), flat])[3:], tensor)
    assert torch.equal(seen, tensor)
    assert seen.stride() == tensor.stride()


@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_memory_is_not_dense(name):
    assert not is_dense(SCATTERED[name])


@pytest.mark.parametrize("name", DENSE)
def test_any_gradient_in_the_order_of_the_parameter(name):
    parameter = DENSE[name]
    values = torch.randn(parameter.shape)
    gradients = [values, values.double(), torch.ones(()).expand(parameter.shape)]
    if parameter.dim() >= 2:
        gradients += [values.transpose(0, 1).contiguous().transpose(0, 1), values.to_sparse()]
    for gradient in gradients:
        flat = flat_gradient(gradient, parameter)
        assert flat.dtype == gradient.dtype  # a state may be wider than its parameter
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        assert torch.equal(like_parameter(flat, parameter), dense)


def test_a_gradient_in_the_right_order_is_not_copied():
    parameter = DENSE["channels_last"]
    gradient = torch.randn_like(parameter)
    assert flat_gradient(gradient, parameter).data_ptr() == gradient.data_ptr()


class Told(torch.optim.SGD):
    shards_by = "parameter"


class Untold(torch.optim.SGD):
    pass


class Mistaken(torch.optim.SGD):
    shards_by = "rows"


def over(kind, **options):
    return kind([torch.nn.Parameter(torch.ones(3, 2))], **options)


def test_kinds_of_optimizers():
    every = {name: getattr(torch.optim, name) for name in torch.optim.__all__ if name[0].isupper()}
    by = {
        name: shards_by(over(kind))[0]
        for name, kind in every.items()
        if isinstance(kind, type) and kind is not torch.optim.Optimizer
    }
    whole = {name for name, how in by.items() if how == "parameter"}
    assert whole == {"Adafactor", "Muon"} & by.keys()
    assert {name for name, how in by.items() if how is None} == {"LBFGS", "SparseAdam"}
    assert shards_by(over(Told, lr=1)) == (
        "parameter",
        "Told says that it can be divided by parameter",
    )
    assert shards_by(over(Untold, lr=1))[0] is None
    assert "Untold is not known" in shards_by(over(Untold, lr=1))[1]
    with pytest.raises(ConfigError, match=r"Mistaken\.shards_by='rows' is unknown; choose"):
        shards_by(over(Mistaken, lr=1))


def choose(optimizer, update="auto", shared=True, alone=False):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [f"p{i}" for i in range(len(parameters))]
    facts = optimizer_facts(optimizer, names, parameters)
    return choose_update(facts, update=update, shared=shared, alone=alone)


def test_the_choice():
    adam, plain = over(torch.optim.Adam), over(torch.optim.SGD, lr=0.1)
    assert choose(adam).by == "element"
    assert choose(over(Told, lr=0.1)).by == "parameter"
    assert choose(adam, "replicated").by is None
    assert choose(adam, "replicated").why == "asked for"
    assert choose(adam, shared=False).why == "gradients are not summed in shared memory here"
    assert "keeps no state" in choose(plain).why
    assert choose(plain).by is None
    assert choose(plain, "sharded").by == "element"
    assert choose(over(torch.optim.SGD, lr=0.1, momentum=0.9)).by == "element"
    assert choose(over(Untold, lr=0.1)).by is None
    for update in ("auto", "sharded"):
        assert choose(adam, update, shared=False, alone=True).by is None
    scattered = torch.optim.Adam([torch.nn.Parameter(torch.randn(4, 4)[:, :2])])
    assert choose(scattered).why == "p0 is not contiguous in memory"
    for optimizer, shared in ((adam, False), (over(Untold, lr=0.1), True), (scattered, True)):
        with pytest.raises(ConfigError, match=r'"sharded" is not possible: .*pass update="auto"'):
            choose(optimizer, "sharded", shared=shared)
    with pytest.raises(ConfigError, match="choose auto, sharded, replicated"):
        choose(adam, "both")


def test_an_inner_optimizer_follows_the_users():
    parameters = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(6))]
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hooks are the user's"))
    pieces = make_pieces([Fragment(0, 2, 4), Fragment(1, 0, 3)], parameters, whole=False)
    inner = make_inner(optimizer, pieces)
    optimizer.param_groups[0]["lr"] = 0.25
    take_options(inner, optimizer)
    for piece in pieces:
        piece.tensor.grad = torch.ones_like(piece.tensor)
    versions = [p._version for p in parameters]
    inner.step()
    assert parameters[0].tolist() == [1, 1, 0.75, 0.75]
    assert parameters[1].tolist() == [0.5, 0.5, 0.5, 1, 1, 1]
    # A graph that was made before the step must notice.
    assert all(p._version > before for p, before in zip(parameters, versions, strict=True))
    assert not optimizer.state


def test_writing_to_a_private_view_is_noticed_however_it_is_done(tmp_path):
    size = 8 * mmap.PAGESIZE
    with open(tmp_path / "block", "wb+") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        shared = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.float32)
        view = PrivateView(file.fileno(), 0, size)
    if view.is_written():
        pytest.skip("the kernel does not tell, so that every view counts as written")
    seen = view.tensor(torch.float32, num_elements=size // 4)
    shared.fill_(1)
    assert seen.sum() == size // 4
    assert not view.is_written()
    seen.data[1500] = 5
    assert view.is_written()
    shared.fill_(2)
    assert seen[1500] == 5
    assert seen[0] == 2  # another page
    view.refresh()
    assert not view.is_written()
    assert torch.equal(seen, shared)
