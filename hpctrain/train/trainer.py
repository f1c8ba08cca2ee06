"""The trainer: the loop with everything around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpctrain.data import Loader
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.exit_codes import REQUEUE
from hpctrain.optim import EMA
from hpctrain.replica import Replica, Step
from hpctrain.saver import Restored, Saver
from hpctrain.train.arguments import check_arguments, count_batches
from hpctrain.train.checkpoints import make_saver
from hpctrain.train.computing import MAIN, evaluate, supervised
from hpctrain.train.config import Checkpoint, Faults, Logging
from hpctrain.train.figures import (
    Guard,
    Interval,
    StepTimer,
    cpu_seconds,
    describe_steps,
    measure_use,
)
from hpctrain.train.progress import MetricSchedules, Monitor, Progress, RunState
from hpctrain.train.recording import Recorder, make_summary, open_directory
from hpctrain.world import World, exit_code_of

if TYPE_CHECKING:
    from hpctrain.grid import Grid

__all__ = ["EVENTS", "Trainer"]

EVENTS = ("start", "step", "epoch", "evaluated", "saved", "end")

StepFunction = Callable[["Trainer", Any], Any]
Listener = Callable[["Trainer", Mapping[str, Any]], object]


class Trainer:
    """Trains replicas on a loader's batches, with evaluation, checkpoints and logs.

    Collective to make and to run: every rank passes the same arguments.

    Args:
        world: The ranks.
        replica: From `hpctrain.distribute`; or several by name, which `step` trains.
        loader: The training data.
        loss: The mean over a batch of what the model returns and the target. The last part of a
            batch is the target, the others are the model's inputs. None: the model gets the
            whole batch and returns an object or a dict with a `loss`.
        step: Makes one step itself, for several optimizers or custom losses: it gets the
            trainer and a batch, calls `replica.backward` and `trainer.update(name)`, and returns a
            loss, or a dict of numbers.
        metrics: By name: one value a sample, of what the model returns and the target.
        evaluation: The data to evaluate on.
        epochs: How often all samples are used; 1 where neither is given.
        steps: Steps of the whole training, instead.
        schedules: By the name of its replica (`model` for a single one): stepped at every step that
            moved the weights.
        epoch_schedules: The same, stepped at the end of every epoch. Schedules that need a metric
            (ReduceLROnPlateau), here or there, are stepped after every evaluation instead.
        schedule_metric: The result of an evaluation that those get; None: the monitor's.
        ema: Averages of weights by the name of their replica, or that of a single one: updated at
            every step that moved the weights, saved, and evaluated.
        evaluate_ema: Whether evaluations are of the average, or of the last weights.
        evaluate_every_epochs: Epochs between evaluations.
        evaluate_every_steps: Steps between evaluations, instead.
        monitor: Which evaluations are better, and when to stop early.
        directory: The run directory; None keeps nothing.
        checkpoint: How checkpoints are made, in the run directory; None makes none.
        faults: Signals and failures that checkpoints are made for.
        logging: What is written and shown.
        timer: From `hpctrain.train.time_steps`, to split the time of steps.
        config: The resolved configuration as TOML, kept in the run directory.
        grid: The grid that the model was divided on, and the loaders too.

    Raises:
        ConfigError: arguments are wrong or do not go together.
    """

    def __init__(
        self,
        world: World,
        replica: Replica | Mapping[str, Replica],
        loader: Loader,
        *,
        loss: Callable[..., Tensor] | None = None,
        step: StepFunction | None = None,
        metrics: Mapping[str, Callable[..., Tensor]] | None = None,
        evaluation: Loader | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        schedules: Mapping[str, Any] | None = None,
        epoch_schedules: Mapping[str, Any] | None = None,
        schedule_metric: str | None = None,
        ema: EMA | Mapping[str, EMA] | None = None,
        evaluate_ema: bool = True,
        evaluate_every_epochs: int = 1,
        evaluate_every_steps: int | None = None,
        monitor: Monitor | None = None,
        directory: str | Path | None = None,
        checkpoint: Checkpoint | None = None,
        faults: Faults | None = None,
        logging: Logging | None = None,
        timer: StepTimer | None = None,
        config: str | None = None,
        grid: Grid | None = None,
    ) -> None:
        self.world = world
        self.grid = grid
        self.replicas = dict(replica) if isinstance(replica, Mapping) else {MAIN: replica}
        self.loader = loader
        self.loss = loss
        self.metrics = dict(metrics or {})
        self.evaluation = evaluation
        self.schedules = dict(schedules or {})
        self.epoch_schedules = dict(epoch_schedules or {})
        self.epochs = 1 if epochs is None and steps is None else epochs
        self.steps = steps
        self.monitor = monitor or Monitor()
        self.emas = dict(ema) if isinstance(ema, Mapping) else {MAIN: ema} if ema else {}
        """Averages of weights, by the name of their replica."""
        self.progress = Progress()
        """Progress of the run, over all its jobs."""
        self._make_step = step or supervised
        self._every_epochs, self._every_steps = evaluate_every_epochs, evaluate_every_steps
        self._directory = None if directory is None else Path(directory)
        self._checkpoint, self._faults = checkpoint, faults or Faults()
        self._logging = logging or Logging()
        self._best = Monitor(checkpoint.keep_best) if checkpoint and checkpoint.keep_best else None
        self._config = config
        self._listeners: dict[str, list[Listener]] = {event: [] for event in EVENTS}
        self._interval = Interval(timer)
        self._evaluates_ema = evaluate_ema
        self._by_metric = MetricSchedules(
            self._named_schedules(), metric=schedule_metric, monitor=self.monitor
        )
        watched = [one.name for one in (self.monitor, self._best) if one is not None]
        check_arguments(
            has_loss=loss is not None,
            has_step=step is not None,
            measured=("loss", *self.metrics) if evaluation is not None else (),
            watched=[*watched, *([self._by_metric.metric] if self._by_metric else [])],
            needs_evaluation=self._by_metric.describe(),
            epochs=epochs,
            steps=steps,
            replicas=self.replicas,
            belonging=(*self.schedules, *self.epoch_schedules, *self.emas),
            saves=checkpoint is not None,
            has_directory=directory is not None,
            loggers=self._logging.loggers,
            num_batches=count_batches(loader),
        )
        self._guard = Guard(world, self.replicas.values(), self._faults)
        self._recorder: Recorder | None = None
        self._saver: Saver | None = None
        self._saved_step: int | None = None
        self._due = False
        self._steps: dict[str, Step] = {}
        self.has_stepped = False
        """Whether this job has computed a batch."""
        self.is_refused = False
        """Whether `fit` rejected its arguments before training, on all ranks."""
        self._mark = self._began = time.perf_counter()
        self._cpu_s = 0.0
        self._used: dict[str, Any] | None = None

    def on(self, event: str, function: Listener) -> None:
        """Call `function(trainer, facts)` on all ranks at every such event.

        Args:
            event: `start`, `step`, `epoch`, `evaluated`, `saved` or `end`.
            function: Gets the trainer and what is known: a dict with the step and its numbers.

        Raises:
            ConfigError: there is no such event.
        """
        if event not in self._listeners:
            raise ConfigError(f"event={event!r} is unknown; choose one of {', '.join(EVENTS)}")
        self._listeners[event].append(function)

    @property
    def replica(self) -> Replica:
        """The first replica, or the only one."""
        return next(iter(self.replicas.values()))

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole training, where that is known."""
        if self.steps is not None:
            return self.steps
        batches = count_batches(self.loader)
        per_epoch = None if batches is None else -(-batches // self.replica.accumulate)
        return None if per_epoch is None else per_epoch * (self.epochs or 0)

    @property
    def step(self) -> int:
        """Steps of the whole run so far."""
        return self.progress.step

    def stop(self, reason: str) -> None:
        """End the training after this step, on all ranks."""
        self.progress.stop_reason = reason

    def update(self, name: str = MAIN) -> Step:
        """Step a replica, and its schedule if the weights moved."""
        if name not in self.replicas:
            raise ConfigError(f"there is no replica {name!r}; there are {', '.join(self.replicas)}")
        return self.advance(name, self.replicas[name].step())

    def advance(self, name: str, done: Step) -> Step:
        """Step the schedule and the average of a replica if a step of it moved the weights."""
        self._due = self._due or done.due
        if done.due:
            self._steps[name] = done
        schedule, ema = self.schedules.get(name), self.emas.get(name)
        if schedule in self._by_metric:
            schedule = None
        if (schedule is not None or ema is not None) and done:
            if schedule is not None:
                schedule.step()
            if ema is not None:
                ema.update()
        return done

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A block whose errors about arguments all ranks raise together."""
        try:
            yield
        except (CheckpointError, ConfigError):
            self.is_refused = True
            raise

    def fit(self) -> dict[str, Any]:
        """Collective: train until the goal, resuming from the newest checkpoint if there is one.

        Returns:
            The summary, as it stands in summary.json.

        Raises:
            SystemExit: with code 75 on all ranks, saved, after a signal or at the end of the time.
        """
        with self.refusing():
            directory, lock = open_directory(self.world, self._directory)
        recorder = self._recorder = Recorder(
            self.world,
            directory,
            self._logging,
            self.progress,
            goal=(self.num_steps, self.epochs),
            config=self._config,
        )
        state, failure = "failed", None
        try:
            with self.refusing():
                restored = self._open()
            self._begin(restored)
            self._train()
            self._finish()
            self._used = measure_use(
                self.world,
                cpu_s=cpu_seconds() - self._cpu_s,
                seconds=time.perf_counter() - self._began,
            )
            state = "finished"
        except BaseException as error:
            if exit_code_of(error) == REQUEUE:
                state = "stopped"
            else:
                failure = f"rank {self.world.rank}: {type(error).__name__}: {error}"
            raise
        finally:
            summary = self._summary(state, failure)
            if recorder.is_open or not self.is_refused:  # what is refused leaves an old run alone
                recorder.summarise(summary, anyone=failure is not None)
            recorder.close(summary)
            if lock is not None:
                lock.release()
        self._tell("end", summary)
        return summary

    def _open(self) -> Restored | None:
        """Collective: restore, and start writing after what was restored."""
        recorder, restored = self._recording, None
        if self._checkpoint is not None and recorder.directory is not None:
            state = RunState(self.progress, self.monitor, self._best)
            self._saver = make_saver(
                self.world,
                recorder.directory.checkpoints,
                self.replicas,
                self.loader,
                {"trainer": state} | self._named_schedules() | self._named_averages(),
                checkpoint=self._checkpoint,
                faults=self._faults,
                note={"config": self._config},
            )
            self._saver.on("saved", self._on_saved)
            restored = self._saver.restore()
        recorder.open()
        return restored

    def _begin(self, restored: Restored | None) -> None:
        """Record and show where this job starts."""
        recorder = self._recording
        if restored is not None:
            self._saved_step = restored.step
            facts = {"path": restored.path, "num_ranks": self.world.size}
            recorder.journal.remark("resumed", facts)
        if self.monitor.is_exhausted:
            self._stop_early()
        if restored is not None and self._is_done():
            recorder.say(self.progress.describe_end(epochs=self.epochs, steps=self.steps))
        recorder.summarise(self._summary("running", None))
        self._mark = self._began = time.perf_counter()
        self._cpu_s, self._used = cpu_seconds(), None
        self._tell("start", {"step": self.step, "resumed": restored is not None})

    def _named_schedules(self) -> dict[str, Any]:
        both = {"schedule": self.schedules, "epoch-schedule": self.epoch_schedules}
        return {f"{kind}-{name}": one for kind, all in both.items() for name, one in all.items()}

    def _named_averages(self) -> dict[str, Any]:
        alone = len(self.replicas) == 1
        return {"ema" if alone else f"ema-{name}": ema for name, ema in self.emas.items()}

    def _train(self) -> None:
        if any(replica.accumulate > 1 for replica in self.replicas.values()):
            self.loader.look_ahead()
        while not self._is_done():
            for batch in self.loader:
                self._turn(batch)
                if self._is_done():
                    return
            if self.progress.epochs_done < self.loader.epoch:  # a stream
                self._due = False
                self._flush()
                if self._due:
                    self._end_step({})
                self._end_epoch()
                self._pass_boundary(stepped=self._due)

    def _is_done(self) -> bool:
        return self.progress.is_done(epochs=self.epochs, steps=self.steps)

    def _turn(self, batch: Any) -> None:
        """Collective: one batch."""
        before = [replica.num_steps for replica in self.replicas.values()]
        self._due = False
        last = self.loader.is_last is True
        for replica in self.replicas.values():
            replica.begin_batch(last=last)
            replica.measures_norm = self._is_logged(self.step + 1)
        told = self._make_step(self, batch)
        self.has_stepped = True
        numbers = dict(told) if isinstance(told, Mapping) else {"loss": told}
        if last:
            self._flush()
        if before != [r.num_steps for r in self.replicas.values()] and not self._due:
            raise ConfigError(
                "the step function called replica.step(); call trainer.update(name) instead, which "
                "also steps the schedule"
            )
        self.progress.samples += self.loader.global_samples
        self._interval.saw(
            numbers,
            num_samples=self.loader.num_samples,
            global_samples=self.loader.global_samples,
        )
        if self._due:
            self._end_step(numbers)
        if last:
            self._end_epoch()
        if self._due:
            self._pass_boundary(stepped=True)
            self._mark = time.perf_counter()

    def _flush(self) -> None:
        """Collective: step what is left of an accumulation window at the end of an epoch."""
        for name, replica in self.replicas.items():
            self.advance(name, replica.step(flush=True))

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self._logging.every_steps == 0

    def _end_step(self, numbers: Mapping[str, Any]) -> None:
        self.progress.step += 1
        self._interval.stepped(time.perf_counter() - self._mark)
        self._tell("step", {"step": self.step, **numbers})
        if self._is_logged(self.step):
            left_s = None if self._saver is None else self._saver.agreed.left_s
            figures = self._interval.close(self.world)
            self._recording.step(figures, describe_steps(self._steps), left_s=left_s)
            self._guard.look(figures, step=self.step)
        self._guard.step(self.step)
        if self._every_steps is not None and self.step % self._every_steps == 0:
            self._evaluate()

    def _end_epoch(self) -> None:
        self.progress.epochs_done += 1
        for schedule in self.epoch_schedules.values():
            if schedule not in self._by_metric:
                schedule.step()
        if self._every_steps is None and self.progress.epochs_done % self._every_epochs == 0:
            self._evaluate()
        facts = {"samples": self.progress.samples, **self.progress.fresh_results}
        self._recording.measure("epoch", facts)
        self._tell("epoch", {"step": self.step, "epoch": self.progress.epochs_done, **facts})

    def _evaluate(self) -> None:
        """Collective: evaluate, and decide whether to stop early."""
        if self.evaluation is None:
            return
        began = time.perf_counter()
        results = evaluate(
            self.replica,
            self.evaluation,
            self.loss,
            self.metrics,
            ema=self.emas.get(next(iter(self.replicas))),
            averaged=self._evaluates_ema,
            grid=self.grid,
        )
        self.progress.results, self.progress.evaluated_step = results, self.step
        self._by_metric.step(results)
        best = self.monitor.judge(results, step=self.step)
        self._recording.evaluated(results, best=best, seconds=time.perf_counter() - began)
        self._tell("evaluated", {"step": self.step, "best": best, **results})
        if self.monitor.is_exhausted:
            self._stop_early()

    def _stop_early(self) -> None:
        self.stop(f"{self.monitor.num_worse} evaluations without a better {self.monitor.name}")

    def _pass_boundary(self, *, stepped: bool) -> None:
        """Collective: a checkpoint if one is due, or if these weights are the best so far."""
        if self._saver is None:
            return
        fresh = self.progress.fresh_results
        is_best = self._best is not None and bool(fresh) and self._best.judge(fresh, step=self.step)
        if stepped:
            self._saver.boundary(metrics=fresh)
        if is_best and self._saved_step != self._saver.step:
            self._saver.save(metrics=fresh)

    def _finish(self) -> None:
        """Collective: a last evaluation and a last checkpoint, where there were later steps."""
        if self.step > 0 and self.progress.evaluated_step != self.step:
            self._evaluate()
        if self._saver is not None:
            if self._saved_step != self._saver.step:
                self._saver.save(metrics=self.progress.fresh_results, wait=True)
            self._saver.close()
        if self.progress.stop_reason is not None:
            self._recording.say(f"stopped early: {self.progress.stop_reason}")

    def _on_saved(self, step: int) -> None:
        self._saved_step = step
        self._recording.journal.remark("saved", {})
        self._tell("saved", {"step": self.step})

    def _tell(self, event: str, facts: Mapping[str, Any]) -> None:
        for function in self._listeners[event]:
            function(self, facts)

    @property
    def _recording(self) -> Recorder:
        if self._recorder is None:
            raise ConfigError("this trainer is not running; call fit()")
        return self._recorder

    def _summary(self, state: str, failure: str | None) -> dict[str, Any]:
        recorder = self._recorder
        return make_summary(
            self.replica,
            self.progress,
            self.monitor,
            state=state,
            failure=failure,
            earlier_s=0.0 if recorder is None else recorder.earlier_s,
            job_s=time.perf_counter() - self._began,
            num_steps=self.num_steps,
            used=self._used,
        )
