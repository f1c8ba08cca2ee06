"""What chaos decides without starting anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hpctrain.chaos.checking import AttemptLog, check_samples, compare_ends, stitch
from hpctrain.chaos.damage import flip_byte, truncate, valid_checkpoints
from hpctrain.chaos.running import Row, shorten, steps_for
from hpctrain.chaos.scenarios import SCENARIOS, choose, patterns
from hpctrain.chaos.table import render_rows
from hpctrain.checkpoint import write_checkpoint
from hpctrain.errors import ConfigError
from hpctrain.faults.injection import Injection, parse_injection
from hpctrain.train.config import load_config
from mpi_tests.launch.commands import ROOT


def test_an_instruction_survives_the_environment():
    one = Injection(what="signal", rank=1, step=3, signal="SIGUSR2")
    assert parse_injection(one.text()) == one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "not in the format of `hpctrain chaos`"),
        ('{"what": "fire", "rank": 0, "step": 1}', "choose one of signal, pause"),
        ('{"what": "signal", "rank": 0, "step": 1}', "needs signal"),
        ('{"what": "signal", "rank": 0, "step": 1, "signal": "SIGNO"}', "no signal"),
        ('{"what": "nan", "rank": 0, "step": 0}', "from rank 0 and step 1"),
        ('{"what": "nan", "rank": 0}', "step"),
    ],
)
def test_instructions_that_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_injection(text)


class Trained:
    """As much of a replica as an injection looks at."""

    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("what", ["bit", "nan"])
def test_one_element_changes_at_its_step_alone(what):
    one, trained = Injection(what=what, rank=0, step=2), Trained()
    before = trained.model[0].weight.detach().clone()
    one.act(1, [trained])
    assert torch.equal(before, trained.model[0].weight)
    one.act(2, [trained])
    after = trained.model[0].weight.detach()
    assert int((before != after).sum()) == 1
    if what == "bit":
        apart = before.view(torch.int32) ^ after.view(torch.int32)
        assert bin(int(apart.sum())).count("1") == 1
        assert after.isfinite().all()
    else:
        assert int(after.isnan().sum()) == 1


def test_a_disk_that_takes_no_more(tmp_path):
    script = (
        "from hpctrain.faults.injection import Injection\n"
        "Injection(what='disk', rank=0, step=1, num_bytes=1000).act(1, [])\n"
        "for name, size in (('small', 1000), ('large', 1001)):\n"
        "    with open(name, 'wb') as file:\n"
        "        file.write(bytes(size))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert "File too large" in done.stderr, done.stderr
    assert (tmp_path / "small").stat().st_size == 1000


def step(epoch, *samples):
    return epoch, samples


def test_lost_steps_are_not_in_the_lineage():
    first = AttemptLog(from_step=0, steps={1: step(0, 0, 1), 2: step(0, 2, 3), 3: step(1, 9, 9)})
    second = AttemptLog(from_step=2, steps={3: step(1, 1, 2), 4: step(1, 3, 0)})
    lineage = stitch([first, second])
    assert lineage == {1: (0, (0, 1)), 2: (0, (2, 3)), 3: (1, (1, 2)), 4: (1, (3, 0))}
    assert check_samples(lineage, num_steps=4, num_epochs=2, num_samples=4) == []


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({1: step(0, 0, 1)}, "without [2]"),
        ({1: step(0, 0, 1), 2: step(0, 2, 2)}, "1 samples missing, 1 seen more than once"),
        ({1: step(0, 0, 1), 2: step(0, 2, 3), 3: step(1, 0, 1)}, "3 steps instead of 2"),
        ({1: step(0, 0, 1), 2: step(0, 2, 7)}, "1 samples missing"),
    ],
)
def test_lineages_that_are_wrong(steps, words):
    wrong = check_samples(steps, num_steps=2, num_epochs=1, num_samples=4)
    assert words in "; ".join(wrong)


def make_checkpoint(directory, number, **tensors):
    return write_checkpoint(directory, {"model": tensors}, step=number)


@pytest.mark.parametrize("damage", [truncate, flip_byte])
def test_damage_is_found(tmp_path, damage):
    make_checkpoint(tmp_path, 1, a=torch.randn(1000))
    make_checkpoint(tmp_path, 2, a=torch.randn(1000))
    newest = valid_checkpoints(tmp_path)[-1]
    assert newest.step == 2
    damage(newest.path)
    assert [entry.step for entry in valid_checkpoints(tmp_path)] == [1]


def test_ends_are_compared_bit_by_bit_or_within_a_tolerance(tmp_path):
    values = torch.randn(100)
    other = values.clone()
    other[7] *= 1 + 1e-6
    for name, tensor in (("a", values), ("b", values), ("c", other)):
        make_checkpoint(tmp_path / name, 1, w=tensor)
    make_checkpoint(tmp_path / "d", 2, w=values)
    assert compare_ends(tmp_path / "a", tmp_path / "b", tolerance=0) is None
    assert "first in model.w" in compare_ends(tmp_path / "a", tmp_path / "c", tolerance=0)
    assert compare_ends(tmp_path / "a", tmp_path / "c", tolerance=1e-5) is None
    assert "step 2 instead of 1" in compare_ends(tmp_path / "a", tmp_path / "d", tolerance=0)


def test_a_configuration_is_shortened():
    file = ROOT / "examples" / "train" / "digits_mlp.toml"
    short = shorten(load_config(file, []), file.parent, num_steps=12)
    assert (short.train.steps, short.train.epochs, short.train.patience) == (12, None, None)
    assert short.schedule.warmup_steps == 6
    assert (short.checkpoint.every_steps, short.checkpoint.keep_best) == (2, None)
    assert short.optimizer == load_config(file, []).optimizer


def test_scenarios_by_name_in_their_order():
    assert [one.name for one in choose(["pause", "kill"])] == ["kill", "pause"]
    assert choose(None) == list(SCENARIOS.values())
    assert choose(None)[-1].name == "pause"  # it lets the run end
    with pytest.raises(ConfigError, match="no scenario is called fire; there are kill"):
        choose(["fire"])
    assert patterns(SCENARIOS["nan"], rank=1, next=4, n=2) == [
        "NonFiniteError: .*NaN at step 4 on rank 1 of 2"
    ]
    assert steps_for(2) > 2 * 3


def test_the_table_says_what_happened():
    rows = [
        Row(name="kill", done="d", expected="e", happened="exit code 3", seconds=1.25, good=False)
    ]
    head, line = render_rows(rows).splitlines()
    assert head.split("  ")[0] == "scenario"
    assert "exit code 3" in line
    assert line.endswith("1.2")
