"""Rules about directives: whether the batch system reads them, and what it makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.script import (
    PREFIXES,
    Option,
    Script,
    gpus_per_node,
    num_nodes,
    tasks_per_node,
)

__all__ = ["RULES"]

_PLACEHOLDER = re.compile(r"%[A-Za-z]|\{\{|\$|[<\[]")
_LIKE_ONE = re.compile(r"(!?#!?|\s+#)([A-Za-z]{3,8})\s*(?=--?[A-Za-z])")
_OFF = re.compile(r"#\s+#?(SBATCH|PBS|BSUB)\s+-")
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.IGNORECASE)
_WHOLE = ("ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-task", "cpus-per-gpu")
_TYPOGRAPHIC = re.compile("[\u2013\u2014\u2212\u201c\u201d\u2018\u2019\u00a0]")
_SBATCH = frozenset(
    re.findall(
        r"\S+",
        """
        account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters
        comment constraint container container-id contiguous core-spec cores-per-socket cpu-bind
        cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error
        exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-
        freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-
        pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind
        mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes
        ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output
        overcommit oversubscribe parsable partition power prefer priority profile propagate qos
        quiet reboot requeue reservation resv-ports segment share signal sockets-per-node spread-job
        stepmgr switches tasks-per-node test-only thread-spec threads-per-core time time-min tmp
        tres-bind tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey
        wrap
        """,
    )
)
"""The long options of sbatch, from 22.05 to 25.05."""
_GONE = {"workdir": "chdir"}
_HOURS = (12, 24, 36, 48, 72, 96, 120, 168)
_CONFLICT = re.compile(r"(<{7}|>{7}) \S|={7}$")


def _after_command(script: Script) -> Iterator[tuple[int, str]]:
    for line in sorted({option.line for option in script.options if not option.active}):
        yield line, f"a directive after the first command (line {script.first_command})"


def _variable(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        torque = script.batch == "pbs" and re.fullmatch(
            r"[^$]*(\$\{?PBS_\w+\}?[^$]*)+", option.value
        )
        if not option.active or torque:
            continue
        if "$" in option.value or option.value.startswith("~"):
            yield option.line, f"{option.name} has {option.value!r}"


def _misspelt(script: Script) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(script.lines[: script.first_command or None], 1):
        match = _LIKE_ONE.match(line)
        if re.match(r"\s*(SBATCH|PBS|BSUB)\s+-", line):
            yield number, f"{line.split()[0]!r} without # is a command"
        if match is None:
            continue
        before, name = match.groups()
        right = before == "#" and f"#{name}" in PREFIXES and line[len(name) + 1] in " \t"
        near = get_close_matches(name.upper(), ("SBATCH", "BSUB", "#PBS"), 1, 0.8)
        if not right and (near or name.upper() == "PBS"):
            yield number, f"{(before + name).strip()!r} is not a directive to the batch system"


def _switched_off(script: Script) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(script.lines[: script.first_command or None], 1):
        if _OFF.match(line):
            yield number, f"{line.split('-')[0].strip()!r} is a comment to the batch system"


def _if_all_are(script: Script) -> str:
    return "note" if any(option.active for option in script.options) else "warning"


def _placeholder(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        if re.search(r"<[A-Za-z][\w -]*>|^\.\.\.|/path/to/", option.value):
            yield option.line, f"{option.name} is still {option.value!r}"
    for command in script.commands:
        for word in command.words:
            if re.search(r"/\.\.\.(/|$)|/path/to/|^<[a-z_ -]+>$", word) and not re.search(
                r"\s", word
            ):
                yield command.line, f"{word!r} is a placeholder that was not filled in"
                break


def _repeated(script: Script) -> Iterator[tuple[int, str]]:
    seen: dict[str, Option] = {}
    for option in script.options:
        before = seen.get(option.name)
        once = option.name not in ("", "l", "R", "W", "mail-type", "constraint")
        if option.active and once and before and not _agree(before.value, option.value):
            yield option.line, f"{option.name} was {before.value!r} in line {before.line}"
        if option.active:
            seen[option.name] = option


def _agree(one: str, other: str) -> bool:
    """Whether two values say the same: also `1` and `a100:1`."""
    return (
        one == other or f":{one}" == other[-len(one) - 1 :] or f":{other}" == one[-len(other) - 1 :]
    )


def _no_walltime(script: Script) -> Iterator[tuple[int, str]]:
    if script.batch and script.option("time") is None:
        yield 1, "there is no walltime"


def _bad_walltime(script: Script) -> Iterator[tuple[int, str]]:
    option = script.option("time")
    if option is None or _PLACEHOLDER.search(option.value):
        return
    fields = [int(field) for field in re.findall(r"\d+", option.value)]
    overflow = re.search(r":([6-9]\d|\d{3,})(:|$)", option.value)
    if not option.value:
        yield option.line, "the walltime is empty"
    elif script.batch == "slurm" and fields and not _TIME.fullmatch(option.value.lstrip("-")):
        yield option.line, f"walltime {option.value!r} is refused"
    elif option.value.startswith("-") or (fields and not any(fields)) or overflow:
        yield option.line, f"walltime {option.value!r} is zero, negative or past 59"


def _short_walltime(script: Script) -> Iterator[tuple[int, str]]:
    option = script.option("time")
    unclear = r"\d+(:\d+)?" if script.batch != "lsf" else r"\d+"
    if option is not None and re.fullmatch(unclear, option.value):
        unit = "seconds" if ":" in option.value or script.batch == "pbs" else "minutes"
        yield option.line, f"the last field of walltime {option.value!r} is {unit}"


def _if_very_short(script: Script) -> str:
    """1:00 and 24:00 are likely to be meant as hours; 10:00 and 30 are as likely minutes."""
    option = script.option("time")
    first, colon, _ = (option.value if option else "").partition(":")
    if not colon:
        return "warning" if script.batch == "pbs" else "note"
    return "warning" if int(first) < 5 or int(first) in _HOURS else "note"


def _bad_memory(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        if option.name in ("mem", "mem-per-cpu", "mem-per-gpu"):
            given = [option.value]
        else:
            given = re.findall(r":mem=([^:+,]*)", option.value) if option.name == "select" else []
        for value in given:
            if not re.fullmatch(r"\d+\s*[KMGT]?[BW]?", value, re.I) and not re.match(
                r"\$|\{", value
            ):
                yield option.line, f"memory {value!r} is refused"


def _no_folder(script: Script) -> Iterator[tuple[int, str]]:
    told = set()
    for option in script.options:
        if not option.active or option.name not in ("output", "error") or "/" not in option.value:
            continue
        folder = option.value.rpartition("/")[0] or "/"
        top = re.match(r"/[^/]+(/[^/]+)?", folder)
        elsewhere = top and not script.exists(top.group())  # a path of another machine
        if folder in told or _PLACEHOLDER.search(folder) or elsewhere or folder.startswith("~"):
            continue
        told.add(folder)
        if not script.exists(folder):
            yield option.line, f"there is no folder {folder!r}"


def _no_shebang(script: Script) -> Iterator[tuple[int, str]]:
    if script.batch and not script.text.startswith("#!"):
        yield 1, "the first line names no shell"


def _refused(script: Script) -> str:
    meant = re.match(r"\s*#?\s*!?/(usr/)?bin/", script.text)
    return "warning" if script.batch == "slurm" or meant else "note"


def _carriage_returns(script: Script) -> Iterator[tuple[int, str]]:
    line = next((n for n, line in enumerate(script.lines, 1) if line.endswith("\r")), None)
    if line is not None:
        yield line, "lines end with a carriage return"


def _tasks_disagree(script: Script) -> Iterator[tuple[int, str]]:
    nodes, tasks = script.number("nodes"), script.number("ntasks")
    each, option = script.number("ntasks-per-node"), script.option("ntasks")
    if option and nodes and tasks and each and nodes * each != tasks:
        yield option.line, f"{nodes} nodes of {each} tasks are not {tasks} tasks"
    elif option and nodes and tasks and tasks < nodes:
        yield option.line, f"{tasks} tasks on {nodes} nodes: sbatch reduces the job to {tasks}"


def _typographic(script: Script) -> Iterator[tuple[int, str]]:
    directives = {option.line for option in script.options}
    for number, line in enumerate(script.lines, 1):
        words = line.partition(" #")[0]
        read = number in directives or (number == 1 and line.startswith("#!"))
        if read and (match := _TYPOGRAPHIC.search(words)):
            yield (
                number,
                f"{match.group()!r} (U+{ord(match.group()):04X}) is not a shell character",
            )


def _syntax(script: Script) -> Iterator[tuple[int, str]]:
    markers = [n for n, line in enumerate(script.lines, 1) if _CONFLICT.match(line)]
    if len(markers) > 1:
        yield markers[0], "a conflict marker of git is left in"
    elif script.syntax:
        match = re.search(r"line (\d+): (.*)", script.syntax)
        line, said = (int(match.group(1)), match.group(2)) if match else (1, script.syntax)
        yield min(line, len(script.lines)), f"bash -n: {said.strip()}"


def _refused_options(script: Script) -> Iterator[tuple[int, str]]:
    for option in script.options:
        name, value = option.name, option.value
        if not name:
            yield option.line, f"{value!r} is not an option of sbatch"
        elif value.startswith("="):
            yield option.line, f"the value of {name} is {value!r}"
        elif name in _WHOLE and not re.search(r"\d+$|[{$<%]", value):
            yield option.line, f"{name} is {value!r}, and no number"
        elif len(name) < 3 or any(known.startswith(name) for known in _SBATCH):
            continue  # sbatch takes any beginning of an option's name
        elif near := _GONE.get(name) or "".join(get_close_matches(name, _SBATCH, 1, 0.85)):
            yield option.line, f"sbatch has no option --{name}; there is --{near}"


def _tasks_not_started(script: Script) -> Iterator[tuple[int, str]]:
    option = script.option("ntasks", "ntasks-per-node", "ntasks-per-gpu")
    started = script.opaque or any(s.launcher for s in script.starts)
    if option and not started and script.trainings and num_nodes(script) in (1, None):
        tasks = tasks_per_node(script) or 1
        if tasks > 1:
            name = script.trainings[0].name
            yield option.line, f"{tasks} tasks are requested, and {name} starts once"


def _spread(script: Script) -> str:
    gpus, tasks = gpus_per_node(script), tasks_per_node(script)
    meant = gpus and gpus[0] == tasks and not any(s.spawns for s in script.trainings)
    return "warning" if num_nodes(script) is None or meant else "note"


RULES = (
    Rule(
        id="J01",
        why="Batch systems stop reading directives at the first command; what follows is ignored.",
        cure="Move it above the first command.",
        check=_after_command,
    ),
    Rule(
        id="J02",
        why="No shell reads directives: variables and ~ are not expanded.",
        cure="Write the value out, or give the option on the command line of sbatch, qsub or bsub.",
        check=_variable,
    ),
    Rule(
        id="J03",
        why="It looks like a directive and is ignored.",
        cure="Write #SBATCH, #PBS or #BSUB at the start of the line, and a blank after it.",
        check=_misspelt,
    ),
    Rule(
        id="J17",
        why="With a blank after the # it is a comment; perhaps it was meant to be.",
        cure="#SBATCH to switch it on, ##SBATCH to make plain that it is off.",
        check=_switched_off,
        level=_if_all_are,
    ),
    Rule(
        id="J18",
        why="A template placeholder was not replaced: the job is refused or finds nothing.",
        cure="Write the real value.",
        check=_placeholder,
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
        cure="Give the expected time with a margin: --time=02:00:00.",
        check=_no_walltime,
        level="note",
    ),
    Rule(
        id="J06",
        why="It is refused, or the job is killed at once or at an unintended time.",
        cure="Write HH:MM:SS with minutes and seconds below 60.",
        check=_bad_walltime,
    ),
    Rule(
        id="J07",
        why="A bare number is minutes in Slurm and LSF and seconds in PBS; 1:30 is 90 seconds in "
        "Slurm and PBS and 90 minutes in LSF.",
        cure="Write all three fields, HH:MM:SS; for LSF both, HH:MM.",
        check=_short_walltime,
        level=_if_very_short,
    ),
    Rule(
        id="J08",
        why="Batch systems take whole numbers with K, M, G or T.",
        cure="Write 1536M for 1.5G.",
        check=_bad_memory,
    ),
    Rule(
        id="J09",
        why="The job fails at once without a log; mkdir in the script is too late.",
        cure="Make the folder before submitting.",
        check=_no_folder,
    ),
    Rule(
        id="J10",
        why="Slurm refuses it; others run it in the login shell, whatever that is.",
        cure="Begin with #!/bin/bash.",
        check=_no_shebang,
        level=_refused,
    ),
    Rule(
        id="J11",
        why="The shell treats the carriage return as part of each word.",
        cure="sed -i 's/\\r$//' SCRIPT",
        check=_carriage_returns,
    ),
    Rule(
        id="J12",
        why="The batch system keeps one of the numbers, gives fewer nodes, or spreads ranks "
        "unevenly.",
        cure="Give --nodes and --ntasks-per-node, and leave --ntasks out.",
        check=_tasks_disagree,
        batches=("slurm",),
    ),
    Rule(
        id="J13",
        why="A word processor or a web page turned a hyphen or a quote into another character; "
        "neither the shell nor the batch system accepts it.",
        cure="Retype it: - ' \"",
        check=_typographic,
    ),
    Rule(
        id="J14",
        why="The shell stops there, if it starts at all.",
        cure="Fix it until `bash -n SCRIPT` is silent.",
        check=_syntax,
    ),
    Rule(
        id="J16",
        why="sbatch refuses the script: options have two hyphens or one letter, no blank around =, "
        "and quotes around values of several words.",
        cure="--nodes=2 or -N 2; --job-name='two words'.",
        check=_refused_options,
        batches=("slurm",),
    ),
    Rule(
        id="J15",
        why="Without a launcher one process starts, on the first node; the cores of the other "
        "tasks are idle and may be on other nodes.",
        cure="Start it with srun, or request one task: --nodes=1 --ntasks=1 --cpus-per-task=N.",
        check=_tasks_not_started,
        level=_spread,
        batches=("slurm",),
    ),
)
