"""The starting side of `hpctrain run`: the right mpirun, its ranks' output, its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from hpctrain import freed_memory, log
from hpctrain.exit_codes import REQUEUE
from hpctrain.install import loaded_mpi, matching_mpirun
from hpctrain.launch.command import (
    Hosts,
    explain_unstarted,
    launch_command,
    launch_environment,
)
from hpctrain.launch.program import Program, meeting_point
from hpctrain.launch.relay import CONTROL_VARIABLE, Listener, Outcome
from hpctrain.launch.screen import Screen
from hpctrain.launch.script import make_log_dir
from hpctrain.world import (
    count_oom_kills,
    current_launch,
    detect,
    note_failed_hosts,
)

__all__ = ["start"]

# After one rank has failed, MPI ends the others; if it does not within this time, we do.
_GRACE_S = 3.0
# A rank that was stopped (SIGSTOP) at SIGTERM has been resumed: all may save for this long.
_STOPPED_S = 7.0
_SURVIVORS_S = 1.0
_LOOK_S = 0.5
_PASS_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
_OWN_PREFIX = "HPCTRAIN_"
"""hpctrain's own variables: sweep requests, injected faults, trace folder."""
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a batch system sends when the time is nearly over."""


def start(
    program: Program,
    environ: Mapping[str, str],
    *,
    num_ranks: int,
    hosts: Hosts | None = None,
    log_dir: Path | None = None,
    quiet: bool = False,
    variables: Sequence[str] = (),
) -> int:
    """Start the ranks with the mpirun that belongs to mpi4py's MPI, and stay until they end.

    Args:
        program: What each rank runs.
        environ: The environment to hand on.
        num_ranks: How many ranks.
        hosts: Where; None is here.
        log_dir: Where each rank's output is kept as well.
        quiet: Show rank 0 alone (errors of any rank that ends the job are shown all the same).
        variables: Names in `environ` that ranks on other hosts get as well.

    Returns:
        The exit code: the failing rank's own, 130 after Ctrl-C, 143 after a second SIGTERM or one
        that found a stopped rank, else mpirun's.
    """
    program.check()
    if log_dir is not None:
        make_log_dir(log_dir)
    mpirun, version = matching_mpirun(loaded_mpi(), environ.get("PATH", ""))
    live = sys.stdout.isatty()
    screen = Screen(
        out=sys.stdout.buffer,
        err=sys.stderr.buffer,
        label=live,
        live=live,
        num_ranks=num_ranks,
        only_rank=0 if quiet else None,
    )
    listener = Listener(screen=screen, remote=hosts is not None, num_ranks=num_ranks)
    extra = {**listener.environment, **freed_memory.launch_variables(environ)}
    if program.is_command:  # scripts agree on a place by MPI
        extra.update(meeting_point(hosts.slots[0][0] if hosts else None))
    extra.update(
        launch_environment(
            version,
            num_ranks=num_ranks,
            num_cores=len(os.sched_getaffinity(0)),
            batch_system=detect(environ).batch_system,
        )
    )
    if live:
        extra["HPCTRAIN_COLUMNS"] = str(shutil.get_terminal_size().columns)
    child_environ = {**environ, **{k: environ.get(k, v) for k, v in extra.items()}}
    own = [n for n in environ if n.startswith(_OWN_PREFIX) and n != CONTROL_VARIABLE]
    names = dict.fromkeys((*extra, *_PASS_ON, *own, *variables))
    pass_on = [name for name in names if name in child_environ]
    command = launch_command(
        mpirun, version, num_ranks=num_ranks, root=os.geteuid() == 0, hosts=hosts, pass_on=pass_on
    )
    command += [sys.executable, "-m", "hpctrain", "run"]
    if log_dir is not None:
        command += ["--log-dir", str(log_dir)]
    job = _Job([*command, "--", *program.words()], child_environ, listener, hosts)
    return job.stay()


class _Job:
    """A running mpirun with its ranks."""

    def __init__(
        self,
        command: list[str],
        environ: Mapping[str, str],
        listener: Listener,
        hosts: Hosts | None,
    ) -> None:
        self.listener = listener
        self.hosts = hosts
        self.mpirun = command[0]
        self.num_oom_kills = count_oom_kills()
        self._next_look = 0.0
        # A session of its own: Ctrl-C comes to us alone, and we end the ranks in order.
        self.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=_users_stdin(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for pipe, stream in ((self.process.stdout, "out"), (self.process.stderr, "err")):
            if pipe is not None:
                listener.watch(pipe.fileno(), stream)

    def stay(self) -> int:
        """Show output until mpirun ends; end it when a rank has failed or the user interrupts."""
        interrupted: int | None = None
        warned: list[int] = []
        below: dict[int, psutil.Process] = {}

        def interrupt(number: int, _frame: object) -> None:
            nonlocal interrupted
            interrupted = number

        def warn(number: int, frame: object) -> None:
            if number == signal.SIGTERM and number in warned:
                interrupt(number, frame)  # second request
            warned.append(number)

        before = {n: signal.signal(n, warn) for n in _WARNINGS}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
        num_passed_on = 0
        try:
            deadline: float | None = None
            while self.process.poll() is None:
                self.listener.pump(0.2)
                while num_passed_on < len(warned):
                    self._pass_on(warned[num_passed_on])
                    num_passed_on += 1
                if deadline is None and interrupted is not None:
                    _announce_end(interrupted)
                    _resume(self._below(below))
                    self.process.send_signal(signal.SIGTERM)
                    deadline = time.monotonic() + _GRACE_S
                if deadline is None and self._failure() is not None:
                    deadline = time.monotonic() + _GRACE_S
                if signal.SIGTERM in warned and self._resume_ranks() and deadline is None:
                    interrupted = signal.SIGTERM
                    deadline = time.monotonic() + _STOPPED_S
                if deadline is not None:
                    self._below(below)
                    if time.monotonic() > deadline:
                        self._kill(below)
            if deadline is not None:
                _end_survivors(below.values())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.process.poll() is None:
                self._kill(below)
        self.listener.drain(timeout_s=2.0)
        self.listener.close()
        return self._conclude(interrupted, warned)

    def _pass_on(self, number: int) -> None:
        """Hand a warning to the ranks: those of this host, for one is enough where they agree.

        A rank without a handler dies of it; a training that saves on signals continues until then.
        """
        name = signal.Signals(number).name
        pids = self.listener.local_pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, number)
        if pids:
            more = "; send it again to end them now" if number == signal.SIGTERM else ""
            log.notice(f"{name} passed on to {len(pids)} ranks{more}")
        else:
            log.notice(f"{name}: no rank runs on this host; asking mpirun to end them")
            self.process.send_signal(signal.SIGTERM)

    def _below(self, known: dict[int, psutil.Process]) -> list[psutil.Process]:
        """Every process below mpirun; those that lose their parents meanwhile stay known."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                known.setdefault(process.pid, process)
        return list(known.values())

    def _resume_ranks(self) -> bool:
        """Resume ranks of this host that are stopped: they cannot even end by SIGTERM. Any?"""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        stopped = []
        for rank, pid in self.listener.local_ranks().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if _resume([process, *process.children(recursive=True)]):
                    stopped.append(rank)
        if not stopped:
            return False
        was, has = ("was", "has") if len(stopped) == 1 else ("were", "have")
        log.notice(
            f"{log.name_ranks(stopped)} {was} stopped (SIGSTOP) and {has} been resumed; ranks "
            f"that have not exited in {_STOPPED_S:g} s will be killed"
        )
        return True

    def _failure(self) -> Outcome | None:
        """The rank that failed first; later ones are usually its victims."""
        failed = [outcome for outcome in self.listener.outcomes if outcome.code != 0]
        told = [outcome for outcome in failed if outcome.code > 0]
        first_gone = sorted(failed, key=lambda outcome: self.listener.gone.index(outcome.rank))
        return next(iter([*told, *first_gone]), None)

    def _left_early(self, failed: Outcome) -> Outcome | None:
        """The rank that called os._exit(0) before one was killed: MPI takes that for a death."""
        gone = self.listener.gone
        earlier = (
            outcome
            for outcome in self.listener.outcomes
            if outcome.code == 0
            and outcome.cause == "os._exit(0)"
            and gone.index(outcome.rank) < gone.index(failed.rank)
        )
        return next(earlier, None)

    def _conclude(self, interrupted: int | None, passed_on: Sequence[int]) -> int:
        code = self.process.wait(timeout=10)
        if code < 0:  # mpirun itself was killed
            code = 128 - code
        left = [outcome.code for outcome in self.listener.outcomes]
        if interrupted == signal.SIGTERM and left == [REQUEUE] * self.listener.num_ranks:
            return REQUEUE  # ended by the first SIGTERM after all: everything is saved
        if interrupted is not None:
            name = _name(interrupted)
            log.notice(f"interrupted by {name}; all ranks ended; exit code {128 + interrupted}")
            return 128 + interrupted
        screen = self.listener.screen
        failed = self._failure()
        if failed is None:
            sys.stderr.buffer.write(screen.launcher_words)
            sys.stderr.flush()
            absent = self.listener.num_ranks - self.listener.num_present
            if code != 0 and absent > 0:
                log.notice(explain_unstarted(self.mpirun, code, absent, _find_unknown(self.hosts)))
            return code
        sys.stderr.buffer.write(screen.hidden.get(failed.rank, b""))
        sys.stderr.flush()
        if failed.code < 0:
            # Hydra gives the bare number of a signal and says so; Open MPI and shells 128 more.
            if code < 65 and b"(signal" in screen.launcher_words:
                code += 128
            ended_by = next((number for number in passed_on if code == 128 + number), None)
            if ended_by is not None:
                log.notice(
                    f"rank {failed.rank} on {failed.host} was killed by the {_name(ended_by)} "
                    "passed on to it, because no Saver or other handler was installed yet; all "
                    f"ranks ended; exit code {code}"
                )
                return code
            early = self._left_early(failed)
            if early is not None:
                log.notice(
                    f"rank {early.rank} on {early.host} called os._exit(0) while other ranks were "
                    "still running, so the MPI launcher killed those; all ranks ended; let every "
                    "rank reach the end of `with hpc.init()`"
                )
                return 128 + signal.SIGKILL if code == 0 else code
            killed = count_oom_kills() - self.num_oom_kills
            why = f"; the OOM killer killed {killed} here" if killed > 0 else ""
            cause = f"{failed.cause}{why}"
            log.notice(f"rank {failed.rank} on {failed.host}: {cause}; all ranks ended")
            note_failed_hosts(current_launch(), [failed.host])
            return 128 + signal.SIGKILL if code == 0 else code
        return failed.code

    def _kill(self, known: dict[int, psutil.Process]) -> None:
        """End mpirun and everything below it that it did not end itself."""
        for process in self._below(known):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, as it should
                process.kill()
        self.process.kill()
        self.process.wait(timeout=10)


def _name(number: int) -> str:
    return "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name


def _announce_end(number: int) -> None:
    """Say why the ranks get SIGTERM now, before one of them names it as what made it stop."""
    log.notice(
        f"{_name(number)}: all ranks get SIGTERM; those with a Saver save first; ranks that have "
        f"not exited in {_GRACE_S:g} s are killed"
    )


def _resume(processes: Iterable[psutil.Process]) -> bool:
    """Resume stopped processes; True if there were some."""
    found = False
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found = True
                process.resume()
    return found


def _end_survivors(processes: Iterable[psutil.Process]) -> None:
    """End what outlived mpirun: children of ranks, and ranks that it left behind."""
    alive = [process for process in processes if _is_alive(process)]
    _resume(alive)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=_SURVIVORS_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _users_stdin() -> int | None:
    """Hand standard input on, except a terminal: mpirun in its own session cannot read one."""
    return subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None


def _find_unknown(hosts: Hosts | None) -> list[str] | None:
    """Hosts whose names mean nothing here; None where all ranks were to be started here."""
    if hosts is None:
        return None
    unknown = []
    for host, _ in hosts.slots:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            unknown.append(host)
    return unknown
