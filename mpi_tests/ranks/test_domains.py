"""Ranks that share memory by NUMA domain: real ranks and memory, domains that are made up."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import optim

import hpctrain as hpc
from hpctrain.engines import Op, mpi
from hpctrain.optim import LAMB
from mpi_tests.ranks.split import Matrices, groups, twins

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.Get_size() < 4, reason="needs two domains of two ranks"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning"),
]


@pytest.fixture(scope="module", params=["neighbours", "every other"])
def engine(request, world):
    """An engine of four ranks, two in each domain."""
    domain = world.rank // 2 if request.param == "neighbours" else world.rank % 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi, "domain_here", lambda: domain)
        connection = hpc.connect(world, "mpi", timeout_s=60)
        assert connection.engine.node_group().local_sizes == [2, 2]
    yield connection.engine
    connection.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_sums_of_all_domains(world, engine, dtype):
    for tensor in (engine.allocate(1000, dtype), torch.empty(1000, dtype=dtype)):
        tensor.copy_(torch.arange(1000) % 8 + world.rank)
        engine.allreduce_(tensor, Op.SUM)
        wanted = 4 * (torch.arange(1000) % 8) + 6
        assert torch.equal(tensor, wanted.to(dtype))


@pytest.mark.parametrize("share", [False, True])
def test_training_equals_one_process_and_every_domain_has_its_own_memory(world, engine, share):
    def adamw(model):
        return optim.AdamW(groups(model), amsgrad=True)

    with twins(world, engine, adamw, update="sharded", share_parameters=share) as t:
        t.train()
        said = str(t.replica.describe())
        assert "a NUMA domain, in" in said
        assert "between NUMA domains" in said


def test_whole_parameters_are_divided_in_each_domain(world, engine):
    with twins(world, engine, lambda m: LAMB(m.parameters(), lr=0.01), model=Matrices) as t:
        t.train()
