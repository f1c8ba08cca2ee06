"""Two who save into one directory find each other out."""

from __future__ import annotations

import json
import subprocess
import sys

from hpctrain.checkpoint import write_checkpoint
from hpctrain.checkpoint.directory import Neighbours, describe_owner, in_writing, sweep
from hpctrain.checkpoint.format import OWNER, number_of


def test_a_checkpoint_that_somebody_else_has_made_since(tmp_path):
    write_checkpoint(tmp_path, {}, step=1)
    first, second = Neighbours(tmp_path), Neighbours(tmp_path)
    first.look()
    second.look()
    assert first.find_other_writer() is None
    path = write_checkpoint(tmp_path, {}, step=2)
    first.wrote(number_of(path), 2)
    assert first.find_other_writer() is None
    told = second.find_other_writer()
    assert str(path) in told
    assert f"process {describe_owner(None)['process']} on" in told
    assert "give each its own directory" in told
    second.look()  # it resumes from there
    assert second.find_other_writer() is None


def test_an_old_checkpoint_that_was_put_back_is_no_stranger(tmp_path):
    old = write_checkpoint(tmp_path, {}, step=1)
    away = old.rename(tmp_path / "away")
    neighbours = Neighbours(tmp_path)
    neighbours.wrote(5, 50)
    away.rename(old)
    assert neighbours.find_other_writer() is None


def test_a_process_that_lives_is_a_neighbour_and_a_dead_one_is_not(tmp_path):
    neighbours = Neighbours(tmp_path)
    assert neighbours.find_running_writer() is None
    path = write_checkpoint(tmp_path, {}, step=1)
    assert neighbours.find_running_writer() is None  # of this process
    code = (
        "import json; from hpctrain.checkpoint.directory import describe_owner;"
        "print(json.dumps(describe_owner('77')), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        (path / OWNER).write_text(other.stdout.readline())
        told = neighbours.find_running_writer()
        other.communicate("\n")
    assert f"process {other.pid} on" in told
    assert ", job 77" in told
    assert neighbours.find_running_writer() is None


def test_what_this_process_writes_is_no_leftover(tmp_path):
    partial = tmp_path / ".partial-checkpoint-000001-step-1.ab"
    partial.mkdir()
    me = describe_owner(None)
    (partial / OWNER).write_text(json.dumps(me))
    in_writing.add(partial)
    assert sweep(tmp_path, me) == []
    in_writing.discard(partial)
    assert sweep(tmp_path, me) == [partial]
