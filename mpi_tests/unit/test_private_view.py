"""A rank's own view of shared memory: every way of writing to it is found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hpctrain.world.shared_memory import PrivateView

PAGES = 64
BYTES = PAGES * os.sysconf("SC_PAGESIZE")
LOOKS = 32
"""After so many, the kernel's table has been read whatever the number of page faults."""


@pytest.fixture
def view():
    descriptor = os.memfd_create("hpctrain-test")
    os.truncate(descriptor, BYTES)
    yield PrivateView(descriptor, 0, BYTES)
    os.close(descriptor)


def settled(view: PrivateView) -> torch.Tensor:
    """All of it, read once, and looked at until nothing new is faulted in."""
    tensor = view.tensor(torch.uint8, num_elements=BYTES)
    assert int(tensor.sum()) == 0
    for _ in range(2 * LOOKS):
        assert not view.is_written()
    return tensor


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.data[5:6].fill_(1),
        lambda tensor: tensor.numpy().__setitem__(BYTES - 1, 1),
    ],
)
def test_the_first_write_to_any_page_is_found_at_once(view, write):
    tensor = settled(view)
    write(tensor)
    assert view.is_written()
    assert view.is_written(), "until it is refreshed"
    view.refresh()
    assert not view.is_written()
    assert int(tensor.sum()) == 0
    settled(view)
    write(tensor)
    assert view.is_written()


_WRITE = """
import os, sys
memory = os.open(f"/proc/{sys.argv[1]}/mem", os.O_WRONLY)
assert os.pwrite(memory, b"\\1", int(sys.argv[2])) == 1
"""


def test_a_write_by_another_process_is_found_soon(view):
    tensor = settled(view)
    words = [sys.executable, "-I", "-S", "-c", _WRITE, str(os.getpid()), str(tensor.data_ptr())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if "PermissionError" in done.stderr:
        pytest.skip("this system does not let a process write to its parent's memory")
    assert done.returncode == 0, done.stderr
    assert int(tensor.sum()) == 1
    assert any(view.is_written() for _ in range(LOOKS))
