"""A program for tests: save, or load and save again, a state that is cut over the ranks.

mpirun -n N python -m mpi_tests.launch.resharding FOLDER [STEP_TO_EXPECT] STEP
"""

from __future__ import annotations

import sys

import torch

import hpctrain as hpc
from mpi_tests.checkpoints import bits
from mpi_tests.sharding import cut_state, join, whole_state


def state_of(world, step):
    """Pieces that are cut in another way at every step, and a whole tensor."""
    pieces = cut_state(whole_state(), world.rank, world.size, turn=step)
    return {"pieces": pieces, "whole": torch.arange(4.0)}


def main(folder: str, *steps: str) -> None:
    """Load what is expected, if anything is, and save the same under the next step."""
    *expected, step = map(int, steps)
    with hpc.init(seed=7, device="cpu", num_threads=1) as world:
        store = hpc.Store(world, folder, keep=hpc.Keep(last=2), writers_per_node=2)
        state = state_of(world, step)
        loaded = store.load(like={"pieces": state["pieces"]})
        assert (loaded is None) == (not expected)
        if loaded is not None:
            assert loaded.step == expected[0]
            assert bits(join(loaded.state)) == bits(join(state))
            state = loaded.state
        store.save(state, step=step, wait=True)
        if world.rank == 0:
            print(f"{world.size} ranks saved step {step}")


if __name__ == "__main__":
    main(*sys.argv[1:])
