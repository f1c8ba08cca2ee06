"""Evaluation is exact: the same number to the last digit on any number of ranks."""

from __future__ import annotations

import pytest
import torch

import hpctrain as hpc
from mpi_tests.ranks.test_loader import first_ranks

datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the digits")


def digits():
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)


def nearest_centre(x, y):
    """A classifier that is right often, not always; and the same everywhere."""
    centres = torch.stack([x[y == digit][:20].mean(0) for digit in range(10)])
    return lambda batch: torch.cdist(batch, centres).argmin(1)


def evaluate(world, x, y, classify):
    """Right ones and seen ones over all ranks, and a 10 x 10 table of what was taken for what."""
    table = torch.zeros(100, dtype=torch.int64)
    for a, b in hpc.Loader(world, (x, y), global_batch=256, shuffle=False):
        table += torch.bincount(10 * b + classify(a), minlength=100)
    table = sum(world.comm.allgather(table))
    right, seen = table.view(10, 10).trace().item(), table.sum().item()
    return right / seen, seen, table


def test_accuracy_over_the_digits_is_the_same_on_every_number_of_ranks(world):
    x, y = digits()
    classify = nearest_centre(x, y)
    accuracy, seen, table = evaluate(world, x, y, classify)
    right = (classify(x) == y).sum().item()
    assert seen == len(y) == 1797
    assert accuracy == right / 1797  # to the last digit, without a tolerance
    assert 0.7 < accuracy < 1
    for count in range(1, world.size):
        with first_ranks(world, count) as some:
            if some is not None:
                fewer = evaluate(some, x, y, classify)
                assert fewer[:2] == (accuracy, seen)
                assert torch.equal(fewer[2], table)
