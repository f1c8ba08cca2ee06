"""Rules about how jobs end: signals, requeueing and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.rules_ranks import uses_gpus
from hpctrain.submit.lint.script import Script
from hpctrain.submit.lint.shell import Command

__all__ = ["RULES"]

_NAMES = {"10": "USR1", "12": "USR2", "15": "TERM"}
_KEEPS = re.compile(r"\$\?|\$\{\?|PIPESTATUS|^exit$|^wait\b")


def _signal(script: Script) -> tuple[str, int | None, int, bool] | None:
    """The warning's name, lead in seconds, line, and whether only the batch shell gets it."""
    option = script.option("signal")
    if option is None:
        return None
    if script.batch == "lsf":
        minutes = script.number("signal-lead")
        lead = None if minutes is None else 60 * minutes
        return option.value.removeprefix("SIG"), lead, option.line, False
    match = re.fullmatch(r"(?:([BR]+):)?(?:SIG)?(\w+)(?:@(\d+))?", option.value)
    if match is None:
        return None
    to, name, lead_s = match.groups()
    return _NAMES.get(name, name), int(lead_s) if lead_s else 60, option.line, "B" in (to or "")


def _caught(command: Command) -> set[str]:
    """The signals that a trap catches."""
    if command.words[:1] != ("trap",):
        return set()
    return {_NAMES.get(word, word.removeprefix("SIG")) for word in command.words[2:]}


def _traps(script: Script) -> list[Command]:
    """Traps of the warning before the end; TERM ends the ranks as well and needs no passing on."""
    signal = _signal(script)
    warnings = {"USR1", "USR2", *([signal[0]] if signal else [])}
    return [command for command in script.commands if _caught(command) & warnings]


def _no_trap(script: Script) -> Iterator[tuple[int, str]]:
    signal = _signal(script)
    caught = {name for command in script.commands for name in _caught(command)}
    if signal and signal[3] and signal[0] not in caught:
        yield signal[2], f"{signal[0]} goes to the batch shell, which does not trap it"


def _foreground(script: Script) -> Iterator[tuple[int, str]]:
    if _traps(script):
        for start in script.trainings:
            if not start.command.in_background:
                yield start.line, f"{start.name} runs in the foreground of a trap"


def _one_wait(script: Script) -> Iterator[tuple[int, str]]:
    waits = [c for c in script.commands if c.words[:1] == ("wait",)]
    looped = re.search(r"^\s*(while|until)\b", script.text, re.MULTILINE)
    if _traps(script) and len(waits) == 1 and not looped:
        yield waits[0].line, "one wait after a trap"


def _bare_wait(script: Script) -> Iterator[tuple[int, str]]:
    if any(start.command.in_background for start in script.trainings):
        for command in script.commands:
            if command.words == ("wait",):
                yield command.line, "wait without a process id answers 0"


def _no_wait(script: Script) -> Iterator[tuple[int, str]]:
    for start in script.work:
        after = [s for s in script.starts if start.command.before(s.command) and s is not start]
        stays = any(s.name == "wait" or not s.is_small or s.command.tested for s in after)
        if start.command.in_background and not start.command.function and not stays:
            yield start.line, f"{start.name} runs in the background, and the script ends"


def _usr1(script: Script) -> Iterator[tuple[int, str]]:
    signal = _signal(script)
    if signal and signal[0] == "USR1" and uses_gpus(script):
        yield signal[2], "USR1 warns ranks that use NCCL"


def _no_step(script: Script) -> Iterator[tuple[int, str]]:
    signal = _signal(script)
    steps = script.opaque or any(start.launcher for start in script.starts)
    if signal and not signal[3] and not steps and script.trainings:
        yield signal[2], f"{signal[0]} goes to the steps of srun, and there is none"


def _late(script: Script) -> Iterator[tuple[int, str]]:
    signal, option = _signal(script), script.option("time")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?", option.value) if option else None
    if not signal or signal[1] is None or not match:
        return
    days, *fields = (int(field or 0) for field in match.groups())
    hours, minutes, seconds = fields
    if match.group(4) is None and script.batch != "lsf":
        hours, minutes, seconds = 0, hours, minutes
    walltime_s = 86400 * days + 3600 * hours + 60 * minutes + seconds
    if 0 < walltime_s <= signal[1]:
        yield signal[2], f"the warning comes {signal[1]} s before the end of {walltime_s} s"


def _no_append(script: Script) -> Iterator[tuple[int, str]]:
    requeue = script.option("requeue")
    command = next((c for c in script.commands if "scontrol requeue" in c.text), None)
    mode = script.option("open-mode")
    if (requeue or command) and (mode is None or mode.value != "append"):
        yield requeue.line if requeue else command.line if command else 1, "requeued, not appended"


def _lost_code(script: Script) -> Iterator[tuple[int, str]]:
    work = [start.command for start in script.work]
    if any(command.in_background for command in work):
        work += [c for c in script.commands if c.words[:1] == ("wait",) and len(c.words) > 1]
    for command in work:
        if command.in_background or command.function:
            continue
        name = next((s.name for s in script.work if s.command is command), "wait")
        if re.fullmatch(r"true|:|echo\b.*", command.otherwise, re.DOTALL) and name != "wait":
            yield command.line, f"the exit code of {name} becomes 0"
            return
        after = _after(script, command)
        if script.strict or command.tested or not after or _runs(script, after[-1]):
            continue
        if not _KEEPS.search(after[0].text):
            yield command.line, f"the exit code of {name} is lost"
            return


def _runs(script: Script, command: Command) -> bool:
    """Whether a command does work of the job, so that its exit code is the one to keep."""
    return any(s.command is command and (s.runs_python or s in script.work) for s in script.starts)


def _after(script: Script, command: Command) -> list[Command]:
    """What the script itself runs after a command, beyond its pipe and its `||`."""
    rest = list(script.commands[script.commands.index(command) + 1 :])
    while rest and (rest[0].captured or rest[0].text in f"{command.pipe_to} {command.otherwise}"):
        rest.pop(0)
    return [other for other in rest if command.before(other) and not other.captured]


def _lost_in_pipe(script: Script) -> Iterator[tuple[int, str]]:
    if "pipefail" in script.shell or "PIPESTATUS" in script.shell:
        return
    for start in script.work:
        if start.command.pipe_to and not start.command.in_background:
            yield start.line, f"the pipe gives the exit code of its end, not that of {start.name}"


def _not_strict(script: Script) -> Iterator[tuple[int, str]]:
    if script.batch and script.commands and not script.strict:
        yield script.first_command or 1, "there is no set -e"


RULES = (
    Rule(
        id="J40",
        why="--signal=B: reaches only the batch shell, which dies of it by default.",
        cure="trap 'kill -USR2 $pid' USR2, with the launcher in the background and wait; or leave "
        "B: out.",
        check=_no_trap,
        batches=("slurm",),
    ),
    Rule(
        id="J41",
        why="A shell runs its traps only when the command in the foreground has ended: too late.",
        cure="Start the launcher with & and wait for it.",
        check=_foreground,
    ),
    Rule(
        id="J42",
        why="The signal ends the wait, the script continues, and the job ends while ranks run.",
        cure="wait again, in a loop, until no signal came.",
        check=_one_wait,
    ),
    Rule(
        id="J43",
        why="The job is COMPLETED even if ranks failed.",
        cure='pid=$! after the launcher, then wait "$pid".',
        check=_bare_wait,
    ),
    Rule(
        id="J44",
        why="A library may use USR1 itself, and the warning is lost.",
        cure="Use USR2.",
        check=_usr1,
        level="note",
    ),
    Rule(
        id="J45",
        why="The warning comes when the job starts, or not at all.",
        cure="Shorten the lead or lengthen the walltime.",
        check=_late,
    ),
    Rule(
        id="J46",
        why="The restart truncates the log, and with it the reason for the restart.",
        cure="#SBATCH --open-mode=append",
        check=_no_append,
        batches=("slurm",),
    ),
    Rule(
        id="J47",
        why="The job is COMPLETED although the training failed, and jobs that wait for it start.",
        cure="set -e, or code=$? right after and exit $code at the end.",
        check=_lost_code,
    ),
    Rule(
        id="J48",
        why="The job is COMPLETED although the training failed.",
        cure="set -o pipefail",
        check=_lost_in_pipe,
    ),
    Rule(
        id="J49",
        why="A failed module load or cd goes unnoticed, and the job continues in the wrong "
        "environment.",
        cure="set -euo pipefail above the first command.",
        check=_not_strict,
        level="note",
    ),
    Rule(
        id="J52",
        why="The job ends with its script, and the batch system kills what still runs.",
        cure='pid=$! after it, and wait "$pid" at the end.',
        check=_no_wait,
    ),
    Rule(
        id="J53",
        why="Without B: the signal reaches job steps only; a program that the batch shell starts "
        "directly gets nothing.",
        cure="Start it with srun, or use --signal=B: and a trap.",
        check=_no_step,
        batches=("slurm",),
    ),
)
