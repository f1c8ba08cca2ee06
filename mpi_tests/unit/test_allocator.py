"""Free memory: who decides what becomes of it, and that it is kept where we do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain import freed_memory
from hpctrain.errors import LaunchError
from hpctrain.world import allocator

_FAULTS = """
import resource, torch
from hpctrain.world.allocator import keep_freed_memory

print(keep_freed_memory())

def step():
    blocks = [torch.empty(4 << 20).fill_(1.0) for _ in range(4)]  # 64 MiB
    del blocks

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def faults_a_step(**environ: str) -> tuple[str, int]:
    names = ("MIMALLOC_PURGE_DELAY", "HPCTRAIN_KEEP_MEMORY", "LD_PRELOAD", "GLIBC_TUNABLES")
    own = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        env={**own, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    words, number = done.stdout.splitlines()
    return words, int(number)


def test_a_step_that_repeats_itself_faults_no_pages():
    pages = (64 << 20) // os.sysconf("SC_PAGESIZE")
    words, plain = faults_a_step(HPCTRAIN_KEEP_MEMORY="0")
    assert words == "as HPCTRAIN_KEEP_MEMORY=0 says"
    words, kept = faults_a_step(**freed_memory.launch_variables({}))
    assert words == "kept for the next step"
    assert kept < pages / 100, f"{kept} of {pages} pages were taken anew, {plain} without"


@pytest.mark.parametrize("choice", [{}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=3"}])
def test_torch_with_an_allocator_of_its_own_says_what_to_do(choice):
    words, _ = faults_a_step(**choice)
    if allocator._torch_has_mimalloc():
        assert "export MIMALLOC_PURGE_DELAY=60000" in words
        assert "hpctrain run" in words
    elif choice:
        assert words == "as GLIBC_TUNABLES=glibc.malloc.mmap_max=3 says"
    else:
        assert words == "kept for the next step"


@pytest.mark.parametrize(
    ("environ", "choice"),
    [
        ({}, None),
        ({"HPCTRAIN_KEEP_MEMORY": "1"}, None),
        ({"HPCTRAIN_KEEP_MEMORY": "0"}, "HPCTRAIN_KEEP_MEMORY=0"),
        ({"MALLOC_TRIM_THRESHOLD_": "1"}, "MALLOC_TRIM_THRESHOLD_=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, "GLIBC_TUNABLES=glibc.malloc.trim"),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, None),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "LD_PRELOAD=/usr/lib/libjemalloc.so.2"),
        ({"LD_PRELOAD": "/usr/lib/libdarshan.so"}, None),
    ],
)
def test_the_users_own_choice_counts(environ, choice):
    found = freed_memory.find_choice(environ)
    assert found == choice or (choice is not None and found.startswith(choice))


def test_ranks_get_the_variable_unless_memory_is_left_alone():
    assert freed_memory.launch_variables({}) == {"MIMALLOC_PURGE_DELAY": "60000"}
    assert freed_memory.launch_variables({"HPCTRAIN_KEEP_MEMORY": "0"}) == {}


def test_a_word_that_is_neither_is_refused():
    with pytest.raises(LaunchError, match="HPCTRAIN_KEEP_MEMORY='yes' is neither 0 nor 1"):
        freed_memory.wants_it_kept({"HPCTRAIN_KEEP_MEMORY": "yes"})
