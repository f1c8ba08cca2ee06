"""Why workers cannot be started, found without starting any."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hpctrain.data.mapped import MapSource
from hpctrain.data.workers import (
    explain_unpicklable,
    has_main_guard,
    trouble_with_function,
)
from mpi_tests.datasets import Noisy


@pytest.mark.parametrize(
    ("script", "guarded"),
    [
        ("import a\nmain()\n", False),
        ("if __name__ == '__main__':\n    main()\n", True),
        ('if "__main__" == __name__:\n    main()\n', True),
        ("if __name__ == '__main__' and ready:\n    main()\n", True),
        ("def f():\n    if __name__ == '__main__':\n        main()\nf()\n", False),
        ("if x == '__main__':\n    main()\n", False),
        ("this is no Python", True),
        ("", False),
    ],
)
def test_a_guard_is_seen(script, guarded):
    assert has_main_guard(script) == guarded


class Transform:
    def __init__(self, function):
        self.function = function


class Deep(Noisy):
    def __init__(self, part):
        super().__init__(9)
        self.rows = np.zeros(10)
        self.transform = Transform(part)


def test_the_part_that_does_not_travel_is_found():
    error = TypeError("cannot pickle")
    told = explain_unpicklable(MapSource(Deep(lambda x: x), None), None, error)
    assert "dataset.transform.function (" in told
    assert "<lambda>, test_data_worker_trouble.py line" in told
    told = explain_unpicklable(MapSource(Deep(threading.Lock()), None), None, error)
    assert "dataset.transform.function (a _thread.lock)" in told
    told = explain_unpicklable(MapSource(Deep(1), lambda s: s), None, error)
    assert told.startswith("collate (")
    told = explain_unpicklable(MapSource(Deep(1), None), lambda number: None, error)
    assert told.startswith("worker_init_fn (")
    assert "or use num_workers=0" in told


def test_functions_that_travel_are_let_through():
    assert trouble_with_function("collate", None) is None
    assert trouble_with_function("collate", has_main_guard) is None
    assert trouble_with_function("collate", list) is None
    assert "top level" in trouble_with_function("collate", lambda samples: samples)
