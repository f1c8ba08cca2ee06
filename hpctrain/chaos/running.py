"""Scenarios, one after the other, on one training that must end as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpctrain.chaos.attempt import Attempt
from hpctrain.chaos.checking import compare_ends
from hpctrain.chaos.damage import SmallDisk, flip_byte, num_bytes_of, truncate, valid_checkpoints
from hpctrain.chaos.scenarios import Scenario, patterns
from hpctrain.checkpoint import Entry
from hpctrain.errors import CheckpointError, LaunchError
from hpctrain.faults import FaultKind, Injection
from hpctrain.train import Config, load_config, to_toml

__all__ = [
    "EVERY_STEPS",
    "Chain",
    "Row",
    "shorten",
    "steps_for",
    "write_config",
]

EVERY_STEPS = 2
"""Steps between checkpoints."""


def write_config(
    file: Path, settings: Sequence[str], scratch: Path, name: str, *, num_steps: int
) -> Path:
    """Write a shortened copy whose run directory is in `scratch`; where it is.

    Raises:
        ConfigError: the configuration is wrong, or cannot be shortened.
    """
    config = shorten(load_config(file, settings), file.resolve().parent, num_steps=num_steps)
    config = replace(config, logging=replace(config.logging, directory=str(scratch / name)))
    copy = scratch / f"{name}.toml"
    copy.write_text(to_toml(config))
    return copy


def shorten(config: Config, folder: Path, *, num_steps: int) -> Config:
    """The same training with few steps, a checkpoint every second one, and every guard on. Pure.

    Weights are each rank's own, all of them, and updated by itself: a node's ranks that divide the
    update overwrite each other's weights at every step, which repairs a flipped bit.

    Args:
        config: The user's.
        folder: What its files are relative to.
        num_steps: Of the whole training.
    """
    data, schedule = config.data, config.schedule
    return replace(
        config,
        data=replace(
            data,
            files=tuple(str(folder / name) for name in data.files),
            evaluation_files=tuple(str(folder / name) for name in data.evaluation_files),
        ),
        train=replace(
            config.train, epochs=None, steps=num_steps, patience=None, evaluate_every_steps=None
        ),
        schedule=replace(schedule, warmup_steps=min(schedule.warmup_steps, num_steps // 2)),
        engine=replace(config.engine, update="replicated", share_parameters=False),
        checkpoint=replace(
            config.checkpoint,
            enabled=True,
            every_s="auto",
            every_steps=EVERY_STEPS,
            keep_last=3,
            keep_best=None,
            keep_best_count=1,
            keep_every_hours=None,
        ),
        logging=replace(config.logging, every_steps=1, tensorboard=False, display="off"),
        faults=replace(
            config.faults,
            signals=("SIGUSR2", "SIGUSR1", "SIGTERM"),
            sentinel_every_steps=1,
            nonfinite="stop",
        ),
    )


_PAUSE_S = 2.0
_INSIDE: dict[str, FaultKind] = {
    "launcher-signal": "hold",
    "bit": "bit",
    "nan": "nan",
    "pause": "pause",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How a scenario went."""

    name: str
    done: str
    expected: str
    happened: str
    seconds: float
    """From the disturbance to the end, or of the whole launch if nothing happened."""
    good: bool


def steps_for(num_scenarios: int) -> int:
    """Steps that a training must have to be disturbed so often."""
    return (EVERY_STEPS + 2) * (num_scenarios + 2)


class Chain:
    """One training that is disturbed, restarted, and disturbed again.

    Args:
        file: The user's configuration.
        scratch: An empty folder.
        num_ranks: Of every launch.
        settings: Replaced keys, `train.seed=3`.
        num_steps: Of the training.
        timeout_s: Of one launch.
        tolerance: Largest relative difference between weights at the end; 0: bit for bit.
        tell: Is given every row as it is known.
    """

    def __init__(
        self,
        file: Path,
        scratch: Path,
        *,
        num_ranks: int,
        settings: Sequence[str] = (),
        num_steps: int,
        timeout_s: float = 600.0,
        tolerance: float = 0.0,
        tell: Callable[[Row], object] = lambda row: None,
    ) -> None:
        self._scratch, self._num_ranks = scratch, num_ranks
        self._timeout_s, self._tolerance, self._tell = timeout_s, tolerance, tell
        self._search = [file.resolve().parent]
        self._files = {
            name: write_config(file, settings, scratch, name, num_steps=num_steps)
            for name in ("undisturbed", "disturbed")
        }
        self._checkpoints = scratch / "disturbed" / "checkpoints"
        self._disk: SmallDisk | None = None
        self._attempt: Attempt | None = None
        self._checkpoint_bytes = 0
        self._num_launches = 0

    def run(self, scenarios: Sequence[Scenario]) -> list[Row]:
        """Disturb the training once for each scenario, and let it end.

        Raises:
            LaunchError: it does not even end well undisturbed.
        """
        try:
            self._run_undisturbed()
            return self._run_disturbed(scenarios)
        finally:
            if self._attempt is not None:
                self._attempt.end()
            if self._disk is not None:
                self._disk.unmount()

    def _run_disturbed(self, scenarios: Sequence[Scenario]) -> list[Row]:
        rows = []
        self._checkpoints.mkdir(parents=True)
        reference = valid_checkpoints(self._scratch / "undisturbed" / "checkpoints")[-1]
        self._checkpoint_bytes = num_bytes_of(reference.path)
        self._disk = SmallDisk(self._checkpoints, self._checkpoint_bytes)
        for scenario in scenarios:
            rows.append(self._disturb(scenario))
            self._tell(rows[-1])
        is_over = scenarios[-1].code == 0 and rows[-1].good
        rows.append(self._end(is_over=is_over))
        self._tell(rows[-1])
        return rows

    def _run_undisturbed(self) -> None:
        attempt = self._launch("undisturbed", None)
        code = attempt.wait(self._timeout_s)
        if code != 0:
            said = "\n".join(attempt.text.splitlines()[-20:])
            raise LaunchError(
                f"the undisturbed training failed (exit code {code}); "
                f"`hpctrain train {self._files['undisturbed']} -n {self._num_ranks}` said:\n{said}"
            )

    def _launch(self, name: str, injection: Injection | None) -> Attempt:
        words = ["train", str(self._files[name]), "-n", str(self._num_ranks)]
        self._num_launches += 1
        output = self._scratch / f"launch-{self._num_launches}.log"
        self._attempt = Attempt(words, output, injection=injection, search=self._search)
        return self._attempt

    def _disturb(self, scenario: Scenario) -> Row:
        """One launch that something happens to."""
        bad = None
        if scenario.kind in ("truncate", "byte"):
            bad = self._damage(scenario)
        entries = valid_checkpoints(self._checkpoints)
        last = entries[-1].step if entries else 0
        step = last + EVERY_STEPS + (1 if last % EVERY_STEPS == 0 else 0)
        rank = 0 if scenario.kind == "disk" else self._num_ranks - 1
        mark = self._scratch / f"mark-{scenario.name}"
        injection = self._injection(scenario, rank, step, mark)
        attempt = self._launch("disturbed", injection)
        disturbed = self._act_from_outside(scenario, attempt, mark)
        code = attempt.wait(self._timeout_s)
        seconds = time.time() - (disturbed or attempt.began)
        if self._disk is not None:
            self._disk.empty()
        words = patterns(
            scenario,
            rank=rank,
            next=step + 1,
            n=self._num_ranks,
            bad=bad.path.name if bad else "",
            before=last,
        )
        if last:
            words.append(f"resuming from step {last} ")
        happened = injection is None or disturbed is not None
        return self._judge(
            scenario,
            attempt,
            code,
            seconds,
            words,
            [] if happened else [f"step {step} was never reached"],
        )

    def _damage(self, scenario: Scenario) -> Entry:
        """Damage the newest checkpoint; make two first, where there are fewer."""
        if len(valid_checkpoints(self._checkpoints)) < 2:
            step = 2 * EVERY_STEPS
            asked = Injection(what="signal", rank=0, step=step, signal="SIGUSR2")
            self._launch("disturbed", asked).wait(self._timeout_s)
        entries = valid_checkpoints(self._checkpoints)
        if len(entries) < 2:
            raise CheckpointError(
                f"{self._checkpoints} has fewer than two checkpoints, so none can be damaged"
            )
        (truncate if scenario.kind == "truncate" else flip_byte)(entries[-1].path)
        return entries[-1]

    def _injection(self, scenario: Scenario, rank: int, step: int, mark: Path) -> Injection | None:
        """What happens inside; None: it happens outside."""
        make = partial(Injection, rank=rank, step=step, mark=str(mark))
        if scenario.kind == "rank-signal":
            return make(what="signal", signal=scenario.signal)
        if scenario.kind in ("truncate", "byte"):
            return make(what="signal", signal="SIGUSR2")
        if scenario.kind == "disk":
            if self._disk is not None and self._disk.is_mounted:
                self._disk.fill()
                return None
            return make(what="disk", num_bytes=self._checkpoint_bytes // 2)
        return make(what=_INSIDE[scenario.kind])

    def _act_from_outside(self, scenario: Scenario, attempt: Attempt, mark: Path) -> float | None:
        """What is done from outside while it runs; when the disturbance happened, None: never."""
        if not attempt.wait_until(mark.exists, self._timeout_s) and not mark.exists():
            return None
        happened = mark.stat().st_mtime
        if scenario.kind == "launcher-signal":
            attempt.send(scenario.signal)
            attempt.wait_until(lambda: "passed on" in attempt.text, 20.0)
            mark.unlink()
        elif scenario.kind == "pause":
            time.sleep(_PAUSE_S)
            os.kill(int(mark.read_text()), signal.SIGCONT)
        return happened

    def _judge(
        self,
        scenario: Scenario,
        attempt: Attempt,
        code: int | None,
        seconds: float,
        words: Sequence[str],
        wrong: list[str],
    ) -> Row:
        text = attempt.text
        if code is None:
            wrong.append(f"did not end within {self._timeout_s:g} s")
        elif code != scenario.code:
            wrong.append(f"exit code {code}")
        if seconds > scenario.limit_s:
            wrong.append(f"{seconds:.0f} s")
        wrong += [f"not in the output: {word}" for word in words if not re.search(word, text)]
        wrong += [f"left behind: {one}" for one in attempt.leftovers()]
        if wrong:
            wrong.append(f"see {attempt.output}")
        return Row(
            name=scenario.name,
            done=scenario.done,
            expected=scenario.expected,
            happened="; ".join(wrong) or "as expected",
            seconds=seconds,
            good=not wrong,
        )

    def _end(self, *, is_over: bool) -> Row:
        """Let it come to its end, unless it has, and compare."""
        wrong, began = [], time.time()
        if not is_over:
            attempt = self._launch("disturbed", None)
            code = attempt.wait(self._timeout_s)
            wrong = [f"exit code {code}, see {attempt.output}"] if code != 0 else []
            wrong += [f"left behind: {one}" for one in attempt.leftovers()]
        seconds = time.time() - began
        if not wrong:
            differs = compare_ends(
                self._scratch / "undisturbed" / "checkpoints",
                self._checkpoints,
                tolerance=self._tolerance,
            )
            wrong += [differs] if differs else []
        return Row(
            name="end",
            done="restarted, and not disturbed again",
            expected="the weights of an undisturbed run"
            + (f" within {self._tolerance:g}" if self._tolerance else ", bit for bit"),
            happened="; ".join(wrong) or "as expected",
            seconds=seconds,
            good=not wrong,
        )
