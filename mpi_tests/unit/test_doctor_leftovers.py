"""`doctor --clean`: what it takes for left behind, and what it leaves alone."""

from __future__ import annotations

import mmap
import os
import time

from hpctrain.doctor.leftovers import find_leftovers, remove_leftovers

OURS = "hpctrain-1-0123456789abcdef"


def make(folder, name, *, age_s=3600.0):
    path = folder / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def names(found):
    return {one.path.name for one in found}


def test_old_files_with_a_known_name_are_found_and_removed(tmp_path):
    for name in (
        OURS,
        "mpich_shm_x",
        "vader_segment.h.1",
        "sm_segment.h.2",
    ):
        make(tmp_path, name)
    make(tmp_path, "mine.txt")
    make(tmp_path, "hpctrain-results.csv")
    found = find_leftovers([tmp_path])
    assert names(found) == {
        OURS,
        "mpich_shm_x",
        "vader_segment.h.1",
        "sm_segment.h.2",
    }
    assert {one.owner for one in found} == {"hpctrain", "MPICH", "Open MPI"}
    assert remove_leftovers(found) == []
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["hpctrain-results.csv", "mine.txt"]


def test_what_is_young_open_mapped_or_a_link_is_left_alone(tmp_path):
    make(tmp_path, "hpctrain-2-0123456789abcdef", age_s=5)
    opened = make(tmp_path, "hpctrain-3-0123456789abcdef")
    mapped = make(tmp_path, "mpich_shm_mapped")
    (tmp_path / "hpctrain-4-0123456789abcdef").symlink_to(opened)
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    with opened.open("rb"):
        assert names(find_leftovers([tmp_path])) == set()
    memory.close()
    assert names(find_leftovers([tmp_path])) == {"hpctrain-3-0123456789abcdef", "mpich_shm_mapped"}


def test_a_folder_that_is_not_there(tmp_path):
    assert find_leftovers([tmp_path / "nosuch"]) == []
