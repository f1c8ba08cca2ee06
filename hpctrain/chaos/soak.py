"""A training that is killed at random moments, again and again, and must end as if it never was."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpctrain.chaos.attempt import Attempt
from hpctrain.chaos.checking import AttemptLog, check_samples, stitch
from hpctrain.chaos.damage import SmallDisk, flip_byte, num_bytes_of, valid_checkpoints
from hpctrain.chaos.soak_subject import BATCH, NUM_SAMPLES, log_name
from hpctrain.errors import LaunchError
from hpctrain.exit_codes import DIED
from hpctrain.faults import Injection

__all__ = ["KINDS", "Outcome", "Round", "Soak"]

KINDS = ("rank", "mpirun", "save", "disk")
"""SIGKILL to a rank, to mpirun, to a rank in the middle of a save; disk full."""
_CODES = {"rank": DIED, "mpirun": DIED, "save": DIED, "disk": 1, "end": 0}
MOST_RANKS = 4
_PAUSE_S = 0.02
_LONGEST_S = 1.0
"""Most seconds from an attempt's first step to its end; it has more steps than fit into that."""
_STEPS_A_ROUND = 60
_SAVE_S = 60.0
_DAMAGE = 0.25
"""Probability that a byte of the newest checkpoint is changed between two attempts."""
_SUBJECT = "hpctrain.chaos.soak_subject"


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One attempt and its end."""

    kind: str
    ranks: int
    from_step: int | None
    """Where it resumed; None: it was killed before that."""
    last_step: int
    """The last step that a rank completed."""
    code: int | None
    damaged: str | None
    """The checkpoint that was damaged before this attempt."""
    seconds: float
    trouble: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a soak went."""

    seed: int
    rounds: list[Round]
    num_steps: int
    num_epochs: int
    num_samples: int
    accuracy: float | None
    undisturbed_accuracy: float
    same_weights: bool | None
    """Bit for bit; None where the number of ranks changed."""
    trouble: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not self.trouble and not any(one.trouble for one in self.rounds)

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        return {**asdict(self), "good": self.good}


class Soak:
    """Rounds of killing and restarting.

    Args:
        scratch: An empty folder.
        num_rounds: How often it is killed.
        seed: Of the moments, kinds and numbers of ranks.
        ranks: Of every attempt; None: each has 1 to 4.
        timeout_s: Of one attempt.
        tell: Is given every round as it is known.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        num_rounds: int,
        seed: int,
        ranks: int | None = None,
        timeout_s: float = 600.0,
        tell: Callable[[Round], object] = lambda one: None,
    ) -> None:
        self._scratch, self._directory = scratch, scratch / "disturbed"
        self._checkpoints = self._directory / "checkpoints"
        self._num_rounds, self._seed, self._ranks = num_rounds, seed, ranks
        self._timeout_s, self._tell = timeout_s, tell
        self._num_steps = _STEPS_A_ROUND * (num_rounds + 1)
        self._random = random.Random(seed)
        self._logs: list[AttemptLog] = []
        self._attempt: Attempt | None = None
        self._disk: SmallDisk | None = None
        self._checkpoint_bytes = 0

    def run(self) -> Outcome:
        """Kill it as often as requested, let it finish, and check the result.

        Raises:
            LaunchError: it does not end well undisturbed.
        """
        try:
            alone = self._undisturbed()
            self._checkpoints.mkdir(parents=True)
            newest = valid_checkpoints(self._scratch / "undisturbed" / "checkpoints")[-1]
            self._checkpoint_bytes = num_bytes_of(newest.path)
            self._disk = SmallDisk(self._checkpoints, self._checkpoint_bytes)
            rounds = []
            for number, kind in enumerate([*self._kinds(), "end"]):
                rounds.append(self._round(number, kind))
                self._tell(rounds[-1])
            return self._conclude(rounds, alone)
        finally:
            if self._attempt is not None:
                self._attempt.end()
            if self._disk is not None:
                self._disk.unmount()

    def _kinds(self) -> list[str]:
        """Every kind as often as the others, in any order."""
        kinds = [KINDS[i % len(KINDS)] for i in range(self._num_rounds)]
        self._random.shuffle(kinds)
        return kinds

    def _launch(
        self, folder: str, number: int, ranks: int, pause_s: float, injection: Injection | None
    ) -> Attempt:
        words = ["run", "-n", str(ranks), "-m", _SUBJECT, str(self._scratch / folder), str(number)]
        self._attempt = Attempt(
            [*words, str(self._num_steps), str(pause_s)],
            self._scratch / f"{folder}-{number}.log",
            injection=injection,
        )
        return self._attempt

    def _undisturbed(self) -> dict[str, object]:
        folder = self._scratch / "undisturbed"
        folder.mkdir(parents=True)
        attempt = self._launch(folder.name, 0, self._ranks or 2, 0.0, None)
        code = attempt.wait(self._timeout_s)
        if code != 0:
            said = "\n".join(attempt.text.splitlines()[-20:])
            raise LaunchError(f"the undisturbed training failed (exit code {code}):\n{said}")
        return _read_result(folder)

    def _round(self, number: int, kind: str) -> Round:
        """One attempt, from its start to its end."""
        ranks = self._ranks or self._random.randint(1, MOST_RANKS)
        valid = valid_checkpoints(self._checkpoints)
        damaged = None
        if len(valid) > 1 and self._random.random() < _DAMAGE:
            damaged = valid.pop().path
            flip_byte(damaged)
        injection = self._prepare(kind, valid[-1].step if valid else 0)
        pause_s = 0.0 if kind == "end" else _PAUSE_S
        attempt = self._launch(self._directory.name, number, ranks, pause_s, injection)
        kills = kind in ("rank", "mpirun", "save")
        trouble = self._kill(attempt, number, ranks, kind) if kills else []
        code = attempt.wait(self._timeout_s)
        seconds = time.time() - attempt.began
        if self._disk is not None:
            self._disk.empty()
        begun, log, path = _read_logs(self._directory, number, ranks)
        self._logs += [log] if begun else []
        trouble += [f"left behind: {one}" for one in attempt.leftovers()]
        if path is not None and Path(path) not in [entry.path for entry in valid]:
            trouble.append(f"resumed from {Path(path).name}, which is not valid")
        if begun and valid and log.from_step != valid[-1].step:
            trouble.append(f"resumed from step {log.from_step}, not {valid[-1].step}")
        if code != _CODES[kind]:
            trouble.append(f"exit code {code}, see {attempt.output}")
        return Round(
            kind=kind,
            ranks=ranks,
            from_step=log.from_step if begun else None,
            last_step=max(log.steps, default=0),
            code=code,
            damaged=None if damaged is None else damaged.name,
            seconds=seconds,
            trouble=tuple(trouble),
        )

    def _prepare(self, kind: str, step: int) -> Injection | None:
        """Fill the disk; where none could be mounted, by a limit inside the process."""
        if kind != "disk":
            return None
        if self._disk is not None and self._disk.is_mounted:
            self._disk.fill()
            return None
        limit = self._checkpoint_bytes // 2
        return Injection(what="disk", rank=0, step=step + 1, num_bytes=limit)

    def _kill(self, attempt: Attempt, number: int, ranks: int, kind: str) -> list[str]:
        """SIGKILL, at a random moment after the first step; why it could not be, if so."""
        rank = self._random.randrange(ranks)
        delay_s = self._random.uniform(0.0, _LONGEST_S)
        log = self._directory / log_name(number, rank)
        if not attempt.wait_until(
            lambda: log.exists() and log.read_bytes().count(b"\n") > 1, self._timeout_s
        ):
            return [f"no step was made, see {attempt.output}"]
        time.sleep(delay_s)
        pid = json.loads(log.read_text().splitlines()[0])["pid"]
        if kind == "save":
            before = set(self._checkpoints.glob(".partial-*"))
            if not attempt.wait_until(
                lambda: not before >= set(self._checkpoints.glob(".partial-*")), _SAVE_S
            ):
                return [f"nothing was saved, see {attempt.output}"]
        try:
            if kind == "mpirun":
                pid = psutil.Process(attempt.process.pid).children()[0].pid
            psutil.Process(pid).kill()
        except (psutil.NoSuchProcess, IndexError):
            return [f"it had ended before it was killed, see {attempt.output}"]
        return []

    def _conclude(self, rounds: list[Round], alone: dict[str, object]) -> Outcome:
        num_epochs = self._num_steps * BATCH // NUM_SAMPLES
        trouble = check_samples(
            stitch(self._logs),
            num_steps=self._num_steps,
            num_epochs=num_epochs,
            num_samples=NUM_SAMPLES,
        )
        end = _read_result(self._directory) if rounds[-1].code == 0 else {}
        if end.get("accuracy") != alone["accuracy"]:
            trouble.append(f"accuracy {end.get('accuracy')} instead of {alone['accuracy']}")
        same = None if self._ranks is None else end.get("digest") == alone["digest"]
        if same is False:
            trouble.append("the weights differ from those of the undisturbed run")
        return Outcome(
            seed=self._seed,
            rounds=rounds,
            num_steps=self._num_steps,
            num_epochs=num_epochs,
            num_samples=NUM_SAMPLES,
            accuracy=end.get("accuracy"),  # type: ignore[arg-type]
            undisturbed_accuracy=alone["accuracy"],  # type: ignore[arg-type]
            same_weights=same,
            trouble=trouble,
        )


def _read_result(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "result.json").read_text())
    return found


def _read_logs(directory: Path, number: int, ranks: int) -> tuple[bool, AttemptLog, str | None]:
    """Whether an attempt began to train, what it did, and the checkpoint that it resumed from."""
    heads: list[dict[str, Any]] = []
    steps: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank in range(ranks):
        log = directory / log_name(number, rank)
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []  # whole lines
        for line in map(json.loads, lines):
            if "pid" in line:
                heads.append(line)
            else:
                epoch, samples = steps.get(line["step"], (line["epoch"], ()))
                steps[line["step"]] = (epoch, (*samples, *line["samples"]))
    if not heads:
        return False, AttemptLog(from_step=0), None
    return True, AttemptLog(from_step=heads[0]["from_step"], steps=steps), heads[0]["path"]
