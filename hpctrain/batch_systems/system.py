"""The interface of a batch system. One module of this package, or of a plug-in, is one system.

A system says what it can do by what it fills in. The groups below are optional: a system that only
names its variables is recognised inside its jobs; with directives and a template it renders jobs;
with its client commands it submits them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpctrain import programs
from hpctrain.batch_systems import launchers
from hpctrain.batch_systems.job import JobState, JobUse, PlannedJob, Template
from hpctrain.batch_systems.launchers import LauncherRow
from hpctrain.errors import ConfigError, JobError
from hpctrain.programs import Answer

__all__ = ["LONG_OPTION", "Ask", "BatchSystem", "Refused", "ask_program", "given", "unreadable"]

_LIMIT_S = 60.0
LONG_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.+))?")

Ask = Callable[[Sequence[str], "Path | None"], "Answer | None"]
"""Runs an argument vector with a file as standard input; None if there is no such program."""


def ask_program(
    words: Sequence[str], stdin: Path | None = None, *, limit_s: float = _LIMIT_S
) -> Answer | None:
    """Run a client command of a batch system, with a time limit.

    Raises:
        JobError: it timed out.
    """
    answer = programs.ask(words, limit_s=limit_s, stdin=stdin)
    if answer.hung:
        raise JobError(
            f"{words[0]} did not answer within {limit_s:g} s; the batch system may be down: try "
            "again later"
        )
    return None if answer.missing else answer


class Refused(JobError):
    """The batch system did not accept the job: nothing of it is queued."""


class BatchSystem:
    """A batch system: a table of names, argument vectors out, answers in."""

    # Identity.
    name: str
    """Name used in site profiles, templates and the list of submitted jobs."""
    title: str
    """Name for people to read."""
    tools: tuple[str, ...] = ()
    """Programs whose presence on PATH shows that it is installed."""

    # Inside a job.
    job_variables: tuple[str, ...] = ()
    """All are set in every job; the first holds the job id."""
    variable_prefixes: tuple[str, ...] = ()
    """Prefixes of variables that belong to the batch system."""
    end_time_variable: str = ""
    """Holds the Unix time at which the allocation ends."""
    index_variable: str = ""
    """Holds the array task if the job id does not; 0 means no array."""
    launcher: LauncherRow | None = None
    """The variables of its own launcher."""
    mpirun_variables: tuple[tuple[str, str], ...] = ()
    """Names and values that MPICH's mpirun needs in its environment inside a job."""

    # Rendering.
    templates: tuple[Template, ...] = ()
    template_folder: Path | None = None
    """Where its templates are, for a plug-in; they extend `base.sh.j2`."""
    directive_prefix: str = ""
    option: re.Pattern[str] = LONG_OPTION
    """The form of an additional directive: groups for its name and its value."""
    option_form: str = "--name=value"
    """That form, for messages."""
    managed: tuple[str, ...] = ()
    """Options that hpctrain writes itself, or that would change the script."""
    lacks: tuple[str, ...] = ()
    """Which of constraint, qos, reservation, memory and array_limit have no directive."""
    has_arrays = True
    first_index = 0
    """Of the tasks of an array."""
    resubmits = False
    """Whether a restart is a new job, submitted by the script itself."""
    requeues_by_code = False
    """Whether the batch system requeues by exit code, without counting."""
    has_expedited_restarts = False
    one_gpu_per_rank = False
    overlap_options: tuple[str, ...] = ()
    """What a step needs to run on a node that another step may still hold."""

    # Client commands.
    reads_script_from_stdin = False
    has_accounting = False
    """Whether `ask_use` can report what any job used."""

    def cluster(self, environ: Mapping[str, str]) -> str | None:
        """The name of the cluster whose job ids these are, inside a job."""
        return None

    def time_left_words(self, job: str, index: int | None) -> list[str] | None:
        """The command that prints the time left to a job; None where none is known."""
        return None

    def read_time_left(self, said: str, *, now_s: float) -> float | None:
        """The seconds in what that command printed; None where there is no limit."""
        return None

    def activity_words(self, job: str) -> list[str] | None:
        """The command that shows whether a job still runs; None if there is none."""
        return None

    def read_activity(self, answer: Answer) -> str | None:
        """Its answer: "over", "ending" (its processes are being killed), "alive", or None."""
        return None

    def directives(self, plan: PlannedJob) -> list[str]:
        """The options of all directives, without the prefix, in order."""
        return []

    def manages(self, name: str, value: str | None) -> bool:
        """Whether an additional directive is one that hpctrain writes itself.

        Batch systems accept beginnings of long names, so these count too.
        """
        return any(known.startswith(name) for known in self.managed)

    def rank_words(self, plan: PlannedJob) -> list[str]:
        """The launcher and its options that start all ranks."""
        return launchers.rank_words(plan)

    def launch_words(self, plan: PlannedJob) -> list[str]:
        """The words that start all ranks, the site's options included; the command follows."""
        return [*self.rank_words(plan), *plan.site.launch_options]

    def node_words(self, plan: PlannedJob) -> list[str]:
        """The words that start one process on every node, without MPI."""
        return launchers.node_words(plan)

    def local_rank_variable(self, plan: PlannedJob) -> str:
        """The variable with which the launcher gives a rank its place on the node."""
        if self.launcher is not None and plan.template.launcher == self.launcher.name:
            return self.launcher.local_rank[0]
        return launchers.local_rank_variable(plan.mpi)

    def passed_signals(self, plan: PlannedJob) -> dict[str, str]:
        """What the batch shell sends to the launcher for each signal; "" only makes it wait.

        MPICH's mpirun passes TERM on, and dies of USR2.
        """
        signal = plan.request.signal
        passed = "TERM" if plan.mpi == "mpich" and signal in ("USR2", "HUP") else signal
        return {"TERM": "TERM", signal: passed}

    def check(self, plan: PlannedJob) -> None:
        """Refuse what this batch system cannot do.

        Raises:
            ConfigError: an option that it has no directive for, or that it cannot combine.
        """
        request = plan.request
        wanted: dict[str, object] = {
            "constraint": plan.constraint,
            "qos": plan.qos,
            "reservation": request.reservation,
            "memory": plan.memory_mib,
            "array_limit": request.array_limit,
        }
        for what in self.lacks:
            if wanted[what]:
                raise ConfigError(
                    f"{what} {wanted[what]} cannot be written for {self.name}; leave it out, or "
                    "give the site's own way as --directive"
                )
        if request.expedite and not self.has_expedited_restarts:
            raise ConfigError(
                f"{self.name} has no expedited restarts, only Slurm from 25.11; leave it out"
            )
        if not (request.max_requeues and self.resubmits):
            return
        if request.after:
            raise ConfigError(
                f"a restart in {self.name} is a new job, which --after and --chain jobs would not "
                "wait for; use either those or --requeue"
            )
        if request.script is None:
            raise ConfigError(
                f"{self.name} requeues by submitting the script again, which needs its path; "
                "render it into a file with -o, or submit it"
            )

    def manifest(self, plan: PlannedJob) -> dict[str, object]:
        """What a template that renders a manifest is filled with, besides the plan."""
        raise ConfigError(f"hpctrain renders scripts for {self.title}, not manifests")

    def why_no_expedite(self, ask: Ask) -> str | None:
        """Why expedited restarts would be refused here; None where they would not, or unknown."""
        return None

    def version(self, ask: Ask) -> tuple[int, int] | None:
        """The installed version; None where it is not installed or does not answer."""
        return None

    def submit_words(self, script: Path, *, index: int | None = None) -> list[str]:
        """The command that submits a script; `index` where hpctrain numbers tasks itself."""
        raise ConfigError(self.not_submitted)

    @property
    def not_submitted(self) -> str:
        """Why hpctrain submits nothing to this system, and what to do instead."""
        return f"hpctrain does not submit to {self.title}; write a script by hand"

    def read_id(self, said: str) -> str:
        """The job's id in what that command printed."""
        raise ConfigError(self.not_submitted)

    def cancel_words(self, job: str) -> list[str]:
        """The command that cancels a job."""
        raise ConfigError(self.not_submitted)

    def ask_state(self, job: str, ask: Ask) -> list[JobState]:
        """The state of a job, one entry per task; empty where the batch system does not know it."""
        return []

    def ask_use(self, job: str, ask: Ask) -> tuple[list[JobUse], str]:
        """What a job used, from accounting; else why that is not known."""
        return [], f"{self.name} has no accounting that hpctrain can query"

    def log_name(self, name: str, job: str, task: int | None) -> str:
        """The file in the log directory that a job writes to."""
        return f"{name}-{job}.out"

    def task_id(self, job: str, task: int) -> str:
        """The id of one task of an array, counted from 0."""
        return f"{job}_{task + self.first_index}"

    def split_task(self, job: str) -> tuple[str, int | None]:
        """The array and the batch system's own index in the id of a task; None where it is none."""
        return job, None

    def submit(self, script: Path, ask: Ask, *, index: int | None = None) -> str:
        """Submit a script and return the job's id.

        Raises:
            Refused: the batch system is not here, or refuses.
            JobError: it answers without an id; the job may be queued all the same.
        """
        words = self.submit_words(script, index=index)
        answer = ask(words, script if self.reads_script_from_stdin else None)
        if answer is None:
            raise Refused(
                f"{words[0]} is not on PATH, so jobs cannot be submitted to {self.title} from "
                "here; submit from a login node, or use `hpctrain job render`"
            )
        if answer.code != 0:
            raise Refused(
                f"{words[0]} refused {script} (exit code {answer.code}): {answer.err.strip()}"
            )
        return self.read_id(answer.out)

    def cancel(self, job: str, ask: Ask) -> None:
        """Cancel a job.

        Raises:
            JobError: the batch system is not here or refuses.
        """
        words = self.cancel_words(job)
        answer = ask(words, None)
        if answer is None or answer.code != 0:
            why = "is not on PATH" if answer is None else f"refused: {answer.err.strip()}"
            raise JobError(f"{words[0]} {why}; job {job} was not cancelled")


def unreadable(program: str, said: str) -> JobError:
    """The error for an answer without a job id."""
    return JobError(
        f"{program} answered {said.strip()!r}, which contains no job id; check with the batch "
        "system whether the job is queued"
    )


def given(*pairs: tuple[str, object]) -> list[str]:
    """Options with their values, where there is a value."""
    return [f"{option}{value}" for option, value in pairs if value not in (None, "")]
