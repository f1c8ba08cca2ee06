"""Rules about how jobs end: signals, requeueing and exit codes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpctrain.submit.lint.rule import Rule
from hpctrain.submit.lint.rules_ranks import uses_gpus
from hpctrain.submit.lint.script import Command, Script

__all__ = ["RULES"]

_NAMES = {"10": "USR1", "12": "USR2", "15": "TERM"}
_CLOSING = re.compile(r"fi|done|\}|esac|;;|else")
_WAIT = re.compile(r"(?:^|[;&|!{]\s*|\b(?:do|then|if|while|until)\s+)wait\b")


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


def _traps(script: Script) -> list[Command]:
    pattern = r"\btrap\b.*\b(SIG)?(USR1|USR2|TERM|10|12|15)\b"
    return [command for command in script.commands if re.search(pattern, command.text)]


def _no_trap(script: Script) -> Iterator[tuple[int, str]]:
    signal = _signal(script)
    caught = {_NAMES.get(w, w) for t in _traps(script) for w in re.findall(r"[A-Z0-9]+", t.text)}
    if signal and signal[3] and not caught & {signal[0], f"SIG{signal[0]}"}:
        yield signal[2], f"{signal[0]} goes to the batch shell, which does not trap it"


def _foreground(script: Script) -> Iterator[tuple[int, str]]:
    if _traps(script):
        for command in script.launches:
            if not command.in_background:
                yield command.line, f"{command.launcher} runs in the foreground of a trap"


def _one_wait(script: Script) -> Iterator[tuple[int, str]]:
    waits = [c for c in script.commands for _ in _WAIT.findall(c.text)]
    looped = re.search(r"\b(while|until)\b", script.shell)
    if _traps(script) and len(waits) == 1 and not looped:
        yield waits[0].line, "one wait after a trap"


def _bare_wait(script: Script) -> Iterator[tuple[int, str]]:
    if any(command.in_background for command in script.launches):
        for command in script.commands:
            if re.fullmatch(r"wait\s*;?", command.text):
                yield command.line, "wait without a process id answers 0"


def _usr1(script: Script) -> Iterator[tuple[int, str]]:
    signal = _signal(script)
    if signal and signal[0] in ("USR1", "10") and uses_gpus(script):
        yield signal[2], "USR1 warns ranks that use NCCL"


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
    trainings = script.trainings
    in_background = any(command.in_background for command in trainings)
    for position, command in enumerate(script.commands):
        awaited = in_background and re.match(r"wait\s+\S", command.text)
        if not (command in trainings or awaited) or command.in_background:
            continue
        what = command.launcher or command.text.split()[0]
        if not awaited and re.search(r"\|\|\s*(true|:|echo)(\s|;|$)", command.text):
            yield command.line, f"what {what} answers is turned into 0"
            continue
        after = [c for c in script.commands[position + 1 :] if not _CLOSING.fullmatch(c.text)]
        if script.strict or not after:
            continue
        kept = re.search(r"\|\||&&\s*exit|^(if|exec)\b|\$\?", command.text)
        if not kept and not re.search(r"\$\?|PIPESTATUS|^exit$", after[0].text):
            yield command.line, f"what {what} answers is forgotten"


def _lost_in_pipe(script: Script) -> Iterator[tuple[int, str]]:
    for command in script.launches:
        piped = re.search(r"(?<!\|)\|(?!\|)", command.text)
        if piped and "pipefail" not in script.shell and "PIPESTATUS" not in script.shell:
            yield command.line, f"the pipe answers, not {command.launcher}"


def _not_strict(script: Script) -> Iterator[tuple[int, str]]:
    if script.commands and not script.strict:
        yield script.first_command or 1, "there is no set -e"


RULES = (
    Rule(
        id="J40",
        why="--signal=B: reaches the batch shell alone, whose default is to die of it.",
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
        why="The signal ends the wait, the script goes on, and the job ends with the ranks alive.",
        cure="wait again, in a loop, until no signal came.",
        check=_one_wait,
    ),
    Rule(
        id="J43",
        why="The job is COMPLETED whatever became of the ranks.",
        cure='pid=$! after the launcher, then wait "$pid".',
        check=_bare_wait,
    ),
    Rule(
        id="J44",
        why="NCCL uses USR1 itself.",
        cure="Use USR2.",
        check=_usr1,
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
        why="A failed module load or cd goes unnoticed, and the job runs on with the wrong things.",
        cure="set -euo pipefail above the first command.",
        check=_not_strict,
    ),
)
