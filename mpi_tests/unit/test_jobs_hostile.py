"""Hostile strings in every field: refused, or in the script exactly as they were meant.

Each script that is made is run with launchers that only record: nothing but the command may run.
"""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpctrain.errors import ConfigError
from hpctrain.submit import Request, render
from mpi_tests.unit.jobs_kit import Recorder, ask, site
from mpi_tests.unit.test_jobs_render import shellcheck

MARK = "pwned"
INJECTIONS = [
    *("$(touch pwned)", "`touch pwned`", "; touch pwned", "& touch pwned &", "| touch pwned"),
    *("'; touch pwned; '", '"; touch pwned; "', "\ntouch pwned\n", "\rtouch pwned", "\\"),
    *("a\x00b", "{{ 7 * 7 }}", "{% raw %}", "${HOME}", "*", "~", "#", "!!", "-rf", "--", ""),
    *("a\u2028b", "a\u0085b", "\ud800", "\u202eevil", "%j", "a b", "é", ")", "}", "\t", "\x1b[31m"),
    *("x\n#SBATCH --uid=0", "0-9", "x=y", "../../x", "<(touch pwned)", ">pwned", "EOF", "$'\\n'"),
]
HOSTILE = st.one_of(
    st.sampled_from(INJECTIONS),
    st.text(max_size=12),
    st.text(alphabet="'\"\\$`(){}[];&|<>*?~#!% -=\n\r\tab", max_size=12),
    st.tuples(st.sampled_from(["a", "slurm", "12"]), st.sampled_from(INJECTIONS)).map("".join),
)
SOON = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEXTS = {"name", "partition", "account", "qos", "constraint", "reservation", "log_dir"}
TEXTS |= {"snapshot", "after_kind", "signal", "pack", "venv", "template", "mpi", "image", "script"}
LISTS = {"after", "stage", "prologue", "modules", "source", "directives"}
NUMBERS = {
    *("walltime_s", "num_nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "memory_mib"),
    *("array_size", "array_limit", "max_requeues", "signal_lead_s"),
}


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with tempfile.TemporaryDirectory() as folder:
        yield Recorder(Path(folder))


def outcome(**fields: object) -> tuple[str | None, str]:
    """The script of a request with these fields, or None and why it was refused."""
    try:
        return render(ask(**fields), site()), ""
    except ConfigError as error:
        return None, str(error)


def attempt(**fields: object) -> str | None:
    return outcome(**fields)[0]


def check_script(recorder: Recorder, script: str, command: tuple[str, ...]) -> list[list[str]]:
    """It is one shell script with directives on top, and starts this command and nothing else."""
    assert subprocess.run(["bash", "-n"], input=script.encode()).returncode == 0
    header, _, body = script.partition("set -euo pipefail")
    assert all(line.startswith("#") or not line for line in header.splitlines())
    assert "#SBATCH" not in body
    recorder.run(script)
    assert not list(recorder.work.rglob(f"{MARK}*")), script
    calls = recorder.calls()
    started = [call for call in calls if tuple(call[-len(command) :]) == command]
    assert len(started) <= 1
    assert {call[0] for call in calls} <= {"srun", "sbcast", "module", "scontrol"}
    return started


def test_every_field_is_looked_at_here():
    fields = {field.name for field in dataclasses.fields(Request)}
    assert fields == TEXTS | LISTS | NUMBERS | {"commands", "environment", "restart_on", "expedite"}


@SOON
@given(words=st.lists(HOSTILE, min_size=1, max_size=5))
@example(words=["'", '"', "$x"])
def test_the_command_arrives_as_it_was_given(recorder, words):
    command = ("python", *words)
    script, why = outcome(commands=(command,))
    if script is None:
        assert "U+" in why  # only what cannot be printed is refused in a command
        return
    assert len(check_script(recorder, script, command)) == 1


@SOON
@given(value=HOSTILE)
def test_the_value_of_a_variable_arrives_as_it_was_given(recorder, value):
    (recorder.bin / "srun").write_text('#!/bin/bash\nprintf %s "$GIVEN" >"$RECORD.value"\n')
    try:
        script = attempt(environment={"GIVEN": value})
        if script is not None:
            assert recorder.run(script).returncode == 0
            assert Path(f"{recorder.record}.value").read_bytes().decode() == value
            assert not list(recorder.work.rglob(f"{MARK}*"))
    finally:
        Recorder(recorder.bin.parent)


@pytest.mark.parametrize("field", sorted(TEXTS | LISTS | {"environment"}))
def test_no_field_smuggles_anything_in(recorder, field):
    command = ("python", "train.py")

    @SOON
    @given(value=HOSTILE)
    def feed(value: str) -> None:
        given_value: object = value
        if field in LISTS:
            given_value = (value,)
        elif field == "environment":
            given_value = {value: "x"}
        script = attempt(commands=(command,), **{field: given_value})
        if script is not None:
            check_script(recorder, script, command)

    feed()


@pytest.mark.parametrize("field", sorted(NUMBERS))
def test_numbers_are_in_their_range_or_refused(field):
    hints = typing.get_type_hints(Request)
    assert int in (hints[field], *typing.get_args(hints[field]))

    @SOON
    @given(st.integers(-(10**12), 10**12))
    def feed(value: int) -> None:
        script, why = outcome(**{field: value})
        if script is None:
            assert str(value) in why or "array" in why
            return
        assert value >= 0
        assert subprocess.run(["bash", "-n"], input=script.encode()).returncode == 0

    feed()


SITE_TEXTS = sorted({"title", "source", "partition", "qos", "constraint", "node_local", "mpi"})
SITE_LISTS = ["directives", "launch_options", "cpu_masks", "modules", "image_options", "select"]


@pytest.mark.parametrize("field", [*SITE_TEXTS, *SITE_LISTS, "environment", "gpu_variable"])
def test_no_site_smuggles_anything_in(recorder, field):
    command = ("python", "train.py")

    @SOON
    @given(value=HOSTILE)
    def feed(value: str) -> None:
        given_value: object = (value,) if field in SITE_LISTS else value
        if field == "environment":
            given_value = {"GIVEN": value}
        try:
            profile = dataclasses.replace(site(), **{field: given_value})
            script = render(ask(commands=(command,), stage=("x",), gpus_per_node=2), profile)
        except ConfigError:
            return
        check_script(recorder, script, command)

    feed()


@settings(SOON, max_examples=12)
@given(words=st.lists(HOSTILE, min_size=1, max_size=4), value=HOSTILE)
def test_shellcheck_has_nothing_to_say(words, value):
    script = attempt(commands=(("python", *words),), environment={"A": value})
    if script is not None:
        shellcheck(script)
