"""The time left: what batch systems are asked, how answers are read, how rarely they are asked."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import LaunchError
from hpctrain.faults import allocation
from hpctrain.faults.allocation import Allocation, ask_program, question, read_answer
from hpctrain.world import detect


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, ["squeue", "--noheader", "--jobs", "7", "--format", "%L"]),
        ({"PBS_JOBID": "7.srv"}, ["qstat", "-f", "-F", "json", "7.srv"]),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, ["bjobs", "-noheader", "-o", "time_left", "7"]),
        (
            {"LSB_JOBID": "7", "LSB_JOBINDEX": "3"},
            ["bjobs", "-noheader", "-o", "time_left", "7[3]"],
        ),
        ({"FLUX_JOB_ID": "ƒ2x"}, ["flux", "job", "timeleft"]),
        ({"JOB_ID": "7", "PE_HOSTFILE": "h"}, None),
    ],
)
def test_questions(environ, words):
    assert question(detect(environ)) == words


PBS = '{{"Jobs": {{"7.srv": {{"Resource_List": {{"walltime": "02:00:00"}}, {0}}}}}}}'
STARTED = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(1_700_000_000))


@pytest.mark.parametrize(
    ("system", "said", "seconds"),
    [
        ("Slurm", "1-02:03:04\n", 93784),
        ("Slurm", "59:30\n", 3570),
        ("Slurm", "UNLIMITED\n", None),
        ("Slurm", "INVALID\n", None),
        ("Slurm", "", None),
        ("PBS", PBS.format('"resources_used": {"walltime": "00:30:00"}'), 5400),
        ("PBS", PBS.format('"resources_used": {}'), 7200),
        ("PBS", PBS.format(f'"stime": "{STARTED}"'), 7100),
        ("PBS", PBS.format(f'"stime": "{STARTED}", "resources_used": {{"walltime": "3:0:0"}}'), 0),
        ("PBS", "{}", None),
        ("PBS", "qstat: Unknown Job Id", None),
        ("LSF", "1:05 L\n", 3900),
        ("LSF", "- \n", None),
        ("Flux", "3541\n", 3541),
        ("Flux", "infinity\n", None),
        ("Flux", "0\n", 0),
        ("Grid Engine", "1", None),
    ],
)
def test_answers(system, said, seconds):
    assert read_answer(system, said, now_s=1_700_000_100) == seconds


@given(st.sampled_from(["Slurm", "PBS", "LSF", "Flux"]), st.text(max_size=40))
def test_no_answer_breaks_a_training(system, said):
    left = read_answer(system, said, now_s=0.0)
    assert left is None or left >= 0


def test_the_variable_beats_every_command():
    end = int(time.time()) + 1000
    for environ in (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(end)},
        {"PBS_JOBID": "7", "HPCTRAIN_END_TIME": str(end)},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1", "HPCTRAIN_END_TIME": str(end)},
        {"HPCTRAIN_END_TIME": str(end)},
    ):
        here = Allocation(detect(environ), ask=lambda words: pytest.fail(f"asked {words}"))
        assert 990 < here.time_left_s() <= 1000
    assert Allocation(detect({"HPCTRAIN_END_TIME": "1"})).time_left_s() == 0
    with pytest.raises(LaunchError, match="HPCTRAIN_END_TIME='soon' is not a whole number"):
        detect({"HPCTRAIN_END_TIME": "soon"})


def test_a_command_is_asked_once_and_later_again_in_a_thread(monkeypatch):
    answers = ["10:00", None, "20:00"]
    asked = []

    def ask(words):
        asked.append(words)
        return answers[len(asked) - 1]

    here = Allocation(detect({"SLURM_JOB_ID": "7"}), ask=ask)
    assert 599 < here.time_left_s() <= 600
    assert here.time_left_s() < 600
    assert len(asked) == 1
    monkeypatch.setattr(allocation, "_AGAIN_S", -1.0)
    for expected in (600, 1200):  # no answer keeps what was known
        here.time_left_s()
        here._asking.join(10)
        monkeypatch.setattr(allocation, "_AGAIN_S", 600.0)
        assert expected - 5 < here.time_left_s() <= expected
        monkeypatch.setattr(allocation, "_AGAIN_S", -1.0)
    assert len(asked) == 3


def test_outside_a_job_nobody_is_asked():
    here = Allocation(detect({}), ask=lambda words: pytest.fail(f"asked {words}"))
    assert here.time_left_s() is None


def test_programs_that_are_missing_or_fail_are_no_answer():
    assert ask_program(["no-such-program"]) is None
    assert ask_program(["false"]) is None
    assert ask_program(["echo", "7"]) == "7\n"
