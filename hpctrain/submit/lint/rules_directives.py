"""Rules about directives: whether the batch system reads them, and what it makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.script import Option, Script

__all__ = ["RULES"]

_PLACEHOLDER = re.compile(r"%[A-Za-z]|\{\{|\$")


def _after_command(script: Script) -> Iterator[tuple[int, str]]:
    for line in sorted({option.line for option in script.options if not option.active}):
        yield line, f"a directive after the first command (line {script.first_command})"


def _variable(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        if option.active and "$" in option.value:
            yield option.line, f"{option.name} has {option.value!r}"


def _misspelt(script: Script) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(script.lines, 1):
        if re.match(r"#\s+(SBATCH|PBS|BSUB)\s+-|#(sbatch|pbs|bsub)\s+-|#(SBTACH|SBACTH)\s", line):
            yield number, f"{line.split('-')[0].strip()!r} is a comment to the batch system"


def _repeated(script: Script) -> Iterator[tuple[int, str]]:
    seen: dict[str, Option] = {}
    for option in script.options:
        before = seen.get(option.name)
        once = option.name not in ("l", "R", "W", "mail-type")
        if option.active and once and before and before.value != option.value:
            yield option.line, f"{option.name} was {before.value!r} in line {before.line}"
        if option.active:
            seen[option.name] = option


def _no_walltime(script: Script) -> Iterator[tuple[int, str]]:
    if script.batch and script.option("time") is None:
        yield 1, "there is no walltime"


def _bad_walltime(script: Script) -> Iterator[tuple[int, str]]:
    option = script.option("time")
    if option is None or _PLACEHOLDER.search(option.value):
        return
    fields = [int(field) for field in re.findall(r"\d+", option.value)]
    overflow = re.search(r":([6-9]\d|\d{3,})(:|$)", option.value)
    if option.value.startswith("-") or (fields and not any(fields)) or overflow:
        yield option.line, f"walltime {option.value!r} is zero, negative or past 59"


def _ambiguous_walltime(script: Script) -> Iterator[tuple[int, str]]:
    option = script.option("time")
    if option is None:
        return
    unclear = r"\d+(:\d+)?" if script.batch != "lsf" else r"\d+"
    if re.fullmatch(unclear, option.value):
        yield option.line, f"walltime {option.value!r}"


def _bad_memory(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        if option.name in ("mem", "mem-per-cpu", "mem-per-gpu"):
            given = [option.value]
        else:
            given = re.findall(r":mem=([^:+,]*)", option.value) if option.name == "select" else []
        for value in given:
            if not re.fullmatch(r"\d+\s*[KMGT]?B?", value, re.IGNORECASE):
                yield option.line, f"memory {value!r} is refused"


def _no_folder(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        if not option.active or option.name not in ("output", "error") or "/" not in option.value:
            continue
        folder = option.value.rpartition("/")[0] or "/"
        if not _PLACEHOLDER.search(folder) and not script.exists(folder):
            yield option.line, f"there is no folder {folder!r}"


def _no_shebang(script: Script) -> Iterator[tuple[int, str]]:
    if script.batch and not script.text.startswith("#!"):
        yield 1, "the first line names no shell"


def _carriage_returns(script: Script) -> Iterator[tuple[int, str]]:
    line = next((n for n, line in enumerate(script.lines, 1) if line.endswith("\r")), None)
    if line is not None:
        yield line, "lines end with a carriage return"


def _tasks_disagree(script: Script) -> Iterator[tuple[int, str]]:
    nodes, tasks = script.number("nodes"), script.number("ntasks")
    each, option = script.number("ntasks-per-node"), script.option("ntasks")
    if option and nodes and tasks and each and nodes * each != tasks:
        yield option.line, f"{nodes} nodes of {each} tasks are not {tasks} tasks"


RULES = (
    Rule(
        id="J01",
        why="Batch systems stop reading directives at the first command; what follows is ignored.",
        cure="Move it above the first command.",
        check=_after_command,
    ),
    Rule(
        id="J02",
        why="No shell reads directives: the variable is not expanded.",
        cure="Write the value out, or give the option on the command line of sbatch, qsub or bsub.",
        check=_variable,
    ),
    Rule(
        id="J03",
        why="It looks like a directive and is ignored.",
        cure="Write #SBATCH, #PBS or #BSUB at the start of the line, without a blank inside.",
        check=_misspelt,
    ),
    Rule(
        id="J04",
        why="Only the last of the two counts.",
        cure="Keep one.",
        check=_repeated,
    ),
    Rule(
        id="J05",
        why="The site's default applies, which may be minutes or days.",
        cure="Say how long it takes, with a margin: --time=02:00:00.",
        check=_no_walltime,
    ),
    Rule(
        id="J06",
        why="It is accepted, and the job is killed at once or at another time than meant.",
        cure="Write HH:MM:SS with minutes and seconds below 60.",
        check=_bad_walltime,
    ),
    Rule(
        id="J07",
        why="A bare number is minutes in Slurm and LSF and seconds in PBS; 1:30 is 90 seconds in "
        "Slurm and PBS and 90 minutes in LSF.",
        cure="Write all three fields, HH:MM:SS; for LSF both, HH:MM.",
        check=_ambiguous_walltime,
    ),
    Rule(
        id="J08",
        why="Batch systems take whole numbers with K, M, G or T.",
        cure="Write 1536M for 1.5G.",
        check=_bad_memory,
    ),
    Rule(
        id="J09",
        why="The job ends at once, and without a log that says so.",
        cure="Make the folder before submitting.",
        check=_no_folder,
    ),
    Rule(
        id="J10",
        why="Slurm refuses it; others run it in whatever shell they like.",
        cure="Begin with #!/bin/bash.",
        check=_no_shebang,
    ),
    Rule(
        id="J11",
        why="The shell takes the carriage return for a part of each word.",
        cure="sed -i 's/\\r$//' SCRIPT",
        check=_carriage_returns,
    ),
    Rule(
        id="J12",
        why="The batch system keeps one of the numbers and spreads ranks unevenly.",
        cure="Give --nodes and --ntasks-per-node, and leave --ntasks out.",
        check=_tasks_disagree,
        batches=("slurm",),
    ),
)
