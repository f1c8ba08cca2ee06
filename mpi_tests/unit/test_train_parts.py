"""The parts of a training that need no ranks: plan, journal, lock, monitor, lines, watching."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.batch_systems import find_system_titled
from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.faults.allocation import ask_job
from hpctrain.programs import Answer
from hpctrain.train.building import call, find_function, find_loss, find_metric, find_optimizer
from hpctrain.train.config import parse_config
from hpctrain.train.directory import Lock, RunDirectory, holder_of, is_alive
from hpctrain.train.display import (
    Live,
    Standing,
    Ticker,
    duration,
    ending_line,
    follow,
    status_line,
)
from hpctrain.train.figures import summarise
from hpctrain.train.journal import Journal, read_lines
from hpctrain.train.plan import count_samples, plan_ahead
from hpctrain.train.progress import Monitor, Progress

CONFIG = """
[model]
build = "torch.nn:Linear"
args = { in_features = 10, out_features = 5, bias = false }
[data]
build = "numpy:zeros"
args = { shape = [1000, 10] }
[train]
global_batch = 96
epochs = 3
loss = "mse_loss"
[optimizer]
lr = 0.1
"""


def plan_of(*settings, num_ranks=4, ranks_per_node=2, tmp_path=None):
    return plan_ahead(
        parse_config(CONFIG, settings), tmp_path, num_ranks=num_ranks, ranks_per_node=ranks_per_node
    )


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.loss=mse_los", "mse_loss"),
        ("optimizer.name=adamw", "did you mean AdamW"),
    ],
)
def test_a_plan_finds_what_the_run_would_not(setting, told):
    with pytest.raises(ConfigError, match=told):
        plan_of(setting)


def test_a_batch_that_no_epoch_fills_is_remarked_on():
    assert (
        "more than there are samples: each step has 1,000"
        in plan_of("train.global_batch=2000").describe()
    )
    assert "more than" not in plan_of().describe()


def test_the_plan_of_a_configuration():
    plan = plan_of()
    assert (plan.num_nodes, plan.rank_batch) == (2, (24, 24))
    assert (plan.num_samples, plan.steps_per_epoch, plan.num_steps) == (1000, 11, 33)
    assert plan.engine == "mpi"
    weights = 50 * 4
    assert plan.memory.weights == plan.memory.gradients == weights
    assert plan.memory.optimizer_state == 2 * weights  # AdamW's two moments
    assert plan.update == "sharded by element"
    assert plan.memory.per_rank == 2 * weights
    # docs/node.md: (n + 1) S of gradients, S of new weights, the state once; and n S of weights
    assert plan.memory.per_node == (2 + 1 + 2 + 1 + 2) * weights
    alone = plan_of(num_ranks=1, ranks_per_node=1)
    assert (alone.engine, alone.update) == ("local", "replicated")
    assert alone.memory.per_rank == alone.memory.per_node == 4 * weights
    averaged = plan_of("ema.decay=0.9").memory  # once a node
    assert averaged.averages == averaged.per_node - plan.memory.per_node == weights
    assert plan_of("ema.decay=0.9", num_ranks=1, ranks_per_node=1).memory.per_rank == 5 * weights


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (("train.accumulate=4",), {"rank_batch": (6, 6), "steps_per_epoch": 11}),
        (("train.steps=7", "train.global_batch=7"), {"num_steps": 7, "rank_batch": (1, 2)}),
        (("data.drop_last=true",), {"steps_per_epoch": 10}),
        (("engine.update=replicated",), {"update": "replicated"}),
        (("engine.bucket_bytes=1000",), {"update": "replicated"}),
    ],
)
def test_what_keys_do_to_a_plan(settings, found):
    settings = [s for s in settings if not s.startswith("train.steps")] + [
        s for s in settings if s.startswith("train.steps")
    ]
    text = (
        CONFIG.replace("epochs = 3\n", "") if any("train.steps" in s for s in settings) else CONFIG
    )
    plan = plan_ahead(parse_config(text, settings), None, num_ranks=4, ranks_per_node=2)
    assert {name: getattr(plan, name) for name in found} == found


def test_masters_and_stateless_optimizers_in_a_plan():
    weights = 50
    pure = plan_of("precision.kind=bf16-pure")
    assert pure.memory.weights == 2 * weights
    assert pure.memory.optimizer_state == (8 + 4) * weights
    assert plan_of("optimizer.name=SGD").memory.optimizer_state == 0


def test_impossible_plans_are_refused():
    with pytest.raises(ConfigError, match="'local' is for one rank"):
        plan_of("engine.name=local")
    with pytest.raises(ConfigError, match="ranks_per_node=5 of num_ranks=4"):
        plan_of(ranks_per_node=5)


def test_dry_run_prints_the_plan(tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text(CONFIG)
    words = ["train", str(file), "--dry-run", "-n", "8", "--ranks-per-node", "4"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        **plan_of(num_ranks=8, ranks_per_node=4).as_json(),
        "rank_batch": [12, 12],
    }
    assert main(words) == 0
    assert "a rank's batch" in capsys.readouterr().out
    assert main(["train", str(file), "--json"]) == 2
    assert main(["train", str(file), "-n", "0"]) == 2


def test_what_is_named_and_not_there():
    with pytest.raises(ConfigError, match="there is no module 'nosuchmodule'"):
        find_function("nosuchmodule:f", "model.build")
    with pytest.raises(ConfigError, match="did you mean Linear"):
        find_function("torch.nn:Linaer", "model.build")
    with pytest.raises(ConfigError, match="is not a function"):
        find_function("math:pi", "model.build")
    with pytest.raises(ConfigError, match="did you mean cross_entropy"):
        find_loss("crossentropy")
    with pytest.raises(ConfigError, match="did you mean accuracy"):
        find_metric("acuracy")
    with pytest.raises(ConfigError, match="did you mean AdamW"):
        find_optimizer("AdmW")
    with pytest.raises(ConfigError, match=r"missing a required argument: 'out_features'"):
        call(torch.nn.Linear, {"in_features": 1}, "model.args")
    with pytest.raises(
        ConfigError, match=r"has no argument 'outfeatures'; did you mean out_features"
    ):
        call(torch.nn.Linear, {"in_features": 1, "outfeatures": 2}, "model.args")
    assert find_optimizer("LAMB").__name__ == "LAMB"


def test_metrics_have_one_value_a_sample():
    out, wanted = torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])
    assert find_metric("accuracy")[1](out, wanted).tolist() == [1.0, 0.0]
    assert find_metric("mae")[1](torch.ones(2, 3), torch.zeros(2, 3)).tolist() == [1.0, 1.0]
    assert find_metric("mse")[1](2 * torch.ones(2, 3), torch.zeros(2, 3)).tolist() == [4.0, 4.0]
    sequences = torch.zeros(2, 5, 3)  # samples, classes, places
    sequences[:, 2] = 1
    assert find_metric("accuracy")[1](sequences, torch.tensor([[2, 2, 0], [2, 2, 2]])).tolist() == [
        pytest.approx(2 / 3),
        1.0,
    ]


def test_samples_are_counted_whatever_the_data_are():
    assert count_samples(np.zeros((7, 2))) == 7
    assert count_samples([1, 2, 3]) == 3
    assert count_samples(torch.utils.data.TensorDataset(torch.zeros(4, 2))) == 4


def test_a_journal_that_goes_on_has_no_line_twice(tmp_path):
    progress = Progress()
    journal = Journal(tmp_path, progress)
    journal.open()
    for step in range(1, 6):
        progress.step = step
        journal.measure("step", {"loss": float("nan") if step == 2 else 1.0 / step})
        if step == 3:
            saved = progress.state_dict()
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # killed in the middle of a line
    again = Progress()
    again.load_state_dict(saved)
    journal = Journal(tmp_path, again)
    journal.open()
    journal.remark("resumed", {})
    for step in (4, 5):
        again.step = step
        journal.measure("step", {"loss": 0.0})
    journal.close()
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert [line["seq"] for line in lines] == [1, 2, 3, 3, 4, 5]
    assert lines[1]["loss"] is None  # JSON has no NaN
    times = [line["time_s"] for line in lines]
    assert times == sorted(times)


def test_one_job_at_a_time_in_a_directory(tmp_path):
    lock = Lock(tmp_path, job_id="17")
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .*, job 17"):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()
    assert holder_of(tmp_path) is None


def test_stale_locks_are_recognised(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = {"host": socket.gethostname(), "pid": gone.pid, "started": 0.0, "job_id": None}
    far = {**mine, "host": "elsewhere", "job_id": "6"}
    for holder, silent_s, alive in (
        (mine, 0, False),
        ({**mine, "pid": os.getpid()}, 0, False),  # its number belongs to another process now
        ({**far, "job_id": "5"}, 0, False),  # requeued: the same job
        (far, 0, True),
        (far, 1000, False),  # nobody has touched it for long
        ({}, 0, True),
    ):
        path = tmp_path / "run.lock"
        path.write_text(json.dumps(holder))
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - silent_s))
        assert is_alive(holder, silent_s=silent_s, job_id="5") is alive
        if not alive:
            Lock(tmp_path, job_id="5").release()
            continue
        with pytest.raises(ConfigError, match=r"wait 5 minutes or remove .*run\.lock"):
            Lock(tmp_path, job_id="5")
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def test_the_lock_of_a_killed_job_elsewhere_is_taken_when_the_batch_system_says_so(tmp_path):
    far = {"host": "elsewhere", "pid": 1, "started": 0.0, "job_id": "6"}
    far |= {"batch_system": "Slurm", "cluster": "big"}
    asked = []

    def answers(*words):
        left = list(words)

        def ask(batch_system, job):
            asked.append((batch_system, job))
            return left.pop(0)

        return ask

    def attempt(holder, *words, **more):
        (tmp_path / "run.lock").write_text(json.dumps(holder))
        mine = {"job_id": "7", "batch_system": "Slurm", "cluster": "big"} | more
        Lock(tmp_path, ask=answers(*words), **mine).release()

    attempt(far, "over")
    attempt(far, "ending", "over")  # its processes are still being killed
    assert asked == [("Slurm", "6")] * 3
    for word in ("alive", None):
        with pytest.raises(ConfigError, match="in use by process 1 on elsewhere, job 6"):
            attempt(far, word)
    asked.clear()
    for other in ({"cluster": "small"}, {"cluster": None}, {"batch_system": "PBS"}):
        with pytest.raises(ConfigError, match="in use"):  # whose job 6 may be another
            attempt(far, **other)
    with pytest.raises(ConfigError, match="in use"):
        attempt({**far, "job_id": None})
    assert asked == []


@pytest.mark.parametrize(
    ("batch", "code", "out", "err", "said"),
    [
        ("Slurm", 0, "RUNNING\n", "", "alive"),
        ("Slurm", 0, "PENDING\n", "", "alive"),
        ("Slurm", 0, "COMPLETING\n", "", "ending"),
        ("Slurm", 0, "CANCELLED\n", "", "over"),
        ("Slurm", 0, "", "", "over"),
        ("Slurm", 1, "", "slurm_load_jobs error: Invalid job id specified\n", "over"),
        ("Slurm", 1, "", "Unable to contact slurm controller\n", None),
        ("PBS", 0, "Job id ...", "", "alive"),
        ("PBS", 35, "", "Job has finished", "over"),
        ("PBS", 153, "", "Unknown Job Id", "over"),
        ("PBS", 1, "", "cannot connect to server", None),
    ],
)
def test_whether_another_job_has_ended_is_the_batch_systems_word(batch, code, out, err, said):
    answer = Answer(code=code, out=out, err=err)
    assert find_system_titled(batch).read_activity(answer) == said
    assert ask_job("Flux", "1") is None


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    st.sampled_from(["min", "max"]),
    st.integers(1, 4),
)
def test_monitors_remember_the_best_and_lose_patience(values, way, patience):
    monitor, resumed = (
        Monitor(f"{way}:x", patience=patience),
        Monitor(f"{way}:x", patience=patience),
    )
    better = max if way == "max" else min
    for step, value in enumerate(values):
        so_far = values[:step]
        expected = not so_far or (better(value, better(so_far)) == value and value not in so_far
                                  and value != better(so_far))  # fmt: skip
        assert monitor.judge({"x": value}, step=step) == expected
        resumed.load_state_dict(monitor.state_dict())
        assert resumed.is_exhausted == monitor.is_exhausted
    assert monitor.best == better(values)
    since = len(values) - 1 - values.index(better(values))
    assert monitor.num_worse == since
    assert monitor.is_exhausted == (since >= patience)


def test_monitors_refuse_and_nan_is_never_best():
    monitor = Monitor("max:x", min_delta=0.5)
    assert not monitor.judge({"x": float("nan")}, step=1)
    assert monitor.judge({"x": 1.0}, step=2)
    assert not monitor.judge({"x": 1.4}, step=3)
    with pytest.raises(ConfigError, match="the evaluation has no 'x'; it has loss"):
        monitor.judge({"loss": 1.0}, step=4)
    for wrong in ("loss", "mean:loss", "min:"):
        with pytest.raises(ConfigError, match="min:NAME or max:NAME"):
            Monitor(wrong)


def test_figures_weigh_samples_and_name_the_slowest():
    told = np.array([[3.0, 0.2, 0.1, 0.05], [1.0, 0.3, 0.25, 0.01], [0.0, 0.2, 0.1, 0.02]])
    figures = summarise(
        ["loss"],
        np.array([[1.0], [5.0], [0.0]]),
        told,
        phases=("forward_s", "exchange_s"),
        samples_a_step=60.0,
    )
    assert figures.numbers == {"loss": 2.0}
    assert figures.step_s == 0.3
    assert figures.samples_per_s == pytest.approx(200.0)
    assert figures.slowest == (1, pytest.approx(2.5))  # waiting in the exchange is not work


def test_lines_for_people():
    standing = Standing(
        step=50, epoch=2, num_steps=100, num_epochs=4, loss=0.5, samples_per_s=1234.4,
        step_s=2.0, left_s=3700, slowest=(3, 1.5),
    )  # fmt: skip
    assert status_line(standing) == (
        "epoch 2/4, step 50/100, loss 0.5, 1,234 samples/s, ETA 1m40s, "
        "1h01m left in the allocation, slowest rank 3 (1.50x)"
    )
    assert status_line(Standing(step=1, epoch=1)) == "epoch 1, step 1"
    assert [duration(s) for s in (0, 59.6, 3599, 3600)] == ["0s", "1m00s", "59m59s", "1h00m"]


def test_the_steps_of_a_run_are_not_told_with_the_seconds_of_a_job():
    once = {"state": "finished", "steps": 400, "job_steps": 400, "seconds": 90, "job_seconds": 90}
    assert ending_line(once) == "finished after 400 steps in 1m30s"
    resumed = {**once, "job_steps": 100, "job_seconds": 21}
    assert ending_line(resumed) == (
        "finished after 400 steps in 1m30s, of which 100 in this job's 21s"
    )


def test_a_plain_log_speaks_ever_more_rarely():
    ticker = Ticker()
    said = [now for now in range(100_000) if ticker.is_due(now)]
    gaps = np.diff(said)
    assert said[0] == 0
    assert gaps[0] == 5
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] == 600
    assert len(said) < 250


def test_a_live_display_moves_and_says(capsys):
    display = Live(100)
    display.show(Standing(step=3, epoch=1, num_steps=9, loss=0.5))
    display.say("an evaluation [of a kind]")
    display.close()
    out = capsys.readouterr().out
    assert "epoch 1, step 3/9, loss 0.5" in out
    assert "an evaluation [of a kind]" in out
    assert "\x1b[" in out


def run_directory(tmp_path, state, *, failure=None):
    directory = RunDirectory(tmp_path)
    directory.make()
    progress = Progress()
    journal = Journal(tmp_path, progress)
    journal.open()
    progress.step = 10
    journal.measure("step", {"loss": 0.5, "samples_per_s": 10.0, "step_s": 1.0})
    journal.measure("eval", {"loss": 0.25, "best": True, "seconds": 1.0})
    journal.close()
    directory.write_summary({"state": state, "num_steps": 40, "failure": failure})
    return directory


@pytest.mark.parametrize(
    ("state", "code", "told"),
    [
        ("finished", 0, "finished: epoch 1, step 10/40, loss 0.5"),
        ("stopped", 75, "stopped: "),
        ("failed", 1, "failed: "),
        ("running", 1, "lost: "),  # nobody holds the lock: killed without a summary
    ],
)
def test_watching_a_run_that_has_ended(tmp_path, capsys, state, code, told):
    run_directory(tmp_path, state, failure="rank 1: ValueError: x")
    assert main(["watch", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert told in out
    assert "evaluation at step 10: loss 0.25 (best so far)" in out
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] == told.partition(":")[0]
    assert shown["last"]["kind"] == "eval"


def test_watching_follows_until_the_end(tmp_path, capsys):
    directory = run_directory(tmp_path, "running")
    lock = Lock(tmp_path)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            lock.release()
            directory.write_summary({"state": "finished"})

    assert follow(tmp_path, every_s=0.5, pause=pause) == 0
    assert pauses == [0.5, 0.5]
    out = capsys.readouterr().out
    assert out.count("evaluation at step 10") == 1
    assert out.strip().endswith("loss 0.5, 10 samples/s")


def test_watching_nothing_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "nosuch")]) == 2
    assert main(["watch", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_an_old_run_is_put_aside(tmp_path):
    directory = run_directory(tmp_path / "run", "finished")
    assert directory.put_aside() == tmp_path / "run.1"
    assert directory.put_aside() is None
    directory.make()
    assert directory.put_aside() == tmp_path / "run.2"


def test_a_run_that_has_reached_its_goal_says_what_would_prolong_it():
    progress = Progress()
    progress.step, progress.epochs_done = 69, 3
    by_epochs = progress.describe_end(epochs=3, steps=None)
    assert by_epochs.startswith("nothing is left to do: 3 of 3 epochs are done; raise epochs")
    by_steps = progress.describe_end(epochs=None, steps=60)
    assert "60 steps were requested, and 69 are already done; raise steps" in by_steps
    fewer = progress.describe_end(epochs=2, steps=None)
    assert "2 epochs were requested, and 3 are already done; raise epochs" in fewer
    progress.stop_reason = "2 evaluations without a better loss"
    assert "2 evaluations without a better loss" in progress.describe_end(epochs=3, steps=None)
