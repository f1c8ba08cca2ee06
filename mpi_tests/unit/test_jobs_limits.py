"""Limits of queues: nodes and walltime, what is refused and which queue would take it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.submit import load_site, render
from hpctrain.submit.limits import Queue, check_limits, queue_from_table
from mpi_tests.unit.jobs_kit import SITES, ask, site

HOUR = 3600
BINS = Queue(max_nodes=100, max_walltime=((10, 2 * HOUR), (100, 6 * HOUR)))
LONG = Queue(max_nodes=4, max_walltime=((None, 24 * HOUR),))
BIG = Queue(min_nodes=64, max_walltime=((None, HOUR),))
QUEUES = {"batch": BINS, "long": LONG, "big": BIG, "secret": Queue(by_request=True)}


def check(queue: str, num_nodes: int, hours: float, **more: str) -> None:
    walltime_s = round(hours * HOUR)
    check_limits(QUEUES, queue, num_nodes=num_nodes, walltime_s=walltime_s, site="Here", **more)


@pytest.mark.parametrize(
    ("queue", "num_nodes", "hours"),
    [
        ("batch", 1, 2),
        ("batch", 10, 2),
        ("batch", 11, 6),
        ("batch", 100, 6),
        ("long", 4, 24),
        ("big", 64, 1),
        ("big", 100_000, 1),
        ("secret", 9999, 8000),
        ("unheard of", 9999, 8000),
        ("", 9999, 8000),
    ],
)
def test_jobs_at_their_limits_are_taken(queue, num_nodes, hours):
    check(queue, num_nodes, hours)


@pytest.mark.parametrize(
    ("queue", "num_nodes", "hours", "told"),
    [
        ("batch", 10, 2.01, "a job on 10 nodes at most 02:00:00, and 02:00:36 was requested; no"),
        ("batch", 4, 3, "use --partition long (1 to 4 nodes, 24:00:00)"),
        ("batch", 101, 1, "takes 1 to 100 nodes, and 101 were requested; use --partition big (64"),
        ("batch", 101, 2, "no queue in the profile takes it: request less"),
        ("big", 63, 1, "takes 64 nodes or more, and 63 were requested; use --partition batch (1"),
        ("big", 4, 1, "02:00:00 on at most 10 nodes, 06:00:00 on at most 100 nodes), or --partiti"),
        ("long", 1, 25, "Here: queue long gives a job on 1 node at most 24:00:00"),
    ],
)
def test_what_is_refused_names_site_queue_limit_and_the_queue_that_takes_it(
    queue, num_nodes, hours, told
):
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        check(queue, num_nodes, hours)
    assert str(caught.value).startswith(f"Here: queue {queue} ")
    assert "secret" not in str(caught.value)


@given(
    queue=st.sampled_from(sorted(QUEUES)),
    num_nodes=st.integers(1, 200),
    walltime_s=st.integers(1, 40 * HOUR),
)
def test_a_queue_that_is_proposed_takes_the_job(queue, num_nodes, walltime_s):
    job = {"num_nodes": num_nodes, "walltime_s": walltime_s, "site": "Here"}
    try:
        check_limits(QUEUES, queue, **job)
    except ConfigError as error:
        proposed = re.findall(r"--partition (\w+)", str(error))
        assert queue not in proposed
        for other in proposed:
            check_limits(QUEUES, other, **job)
        for other in {"batch", "long", "big"} - {*proposed, queue}:
            with pytest.raises(ConfigError):
                check_limits(QUEUES, other, **job)


def test_limits_by_size_are_read_in_any_order():
    table = {"max_nodes": 9, "max_walltime": {"9": "6h", "3": "30m"}}
    assert queue_from_table("it", table).max_walltime == ((3, 1800), (9, 6 * HOUR))
    assert queue_from_table("it", {"max_walltime": "2 d"}).walltime_s(12345) == 48 * HOUR
    assert queue_from_table("it", {}).why_not(12345, 10**9) == ""


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("lumi", {"walltime_s": 30 * 86400, "num_nodes": 4}, "at most 48:00:00, and 720:00:00"),
        ("lumi", {"walltime_s": 60 * HOUR, "num_nodes": 4}, "--partition small-g"),
        ("aurora", {"num_nodes": 4}, "prod takes 256 to 10624 nodes, and 4.*debug-scaling"),
        ("polaris", {"num_nodes": 4}, "prod takes 10 to 496 nodes, and 4.*preemptable"),
        ("frontier", {"walltime_s": 6 * HOUR}, "at most 02:00:00.*--partition extended"),
        ("frontier", {"walltime_s": 13 * HOUR, "num_nodes": 500}, "at most 12:00:00"),
        ("perlmutter", {"qos": "debug", "num_nodes": 9}, "debug takes 1 to 8.*--qos regular"),
        ("alps", {"partition": "debug", "num_nodes": 2}, "on 2 nodes at most 00:45:00"),
        ("juwels", {"walltime_s": 25 * HOUR}, "booster gives"),
        ("isambard-ai", {"walltime_s": 25 * HOUR}, "workq gives"),
        ("leonardo", {"walltime_s": 25 * HOUR}, "--qos boost_qos_lprod"),
        ("marenostrum5", {"num_nodes": 101}, "acc_ehpc takes 1 to 100 nodes"),
        ("jean-zay", {"walltime_s": 21 * HOUR}, "--qos qos_gpu_h100-t4"),
        ("snellius", {"walltime_s": 121 * HOUR}, "gpu_h100 gives"),
    ],
)
def test_jobs_past_the_limits_of_the_shipped_sites_are_refused(name, fields, told):
    with pytest.raises(ConfigError, match=told):
        render(ask(**{"account": "p", **fields}), site(name))


def test_a_queue_of_ones_own_changes_only_what_it_says(tmp_path):
    (tmp_path / "lumi.toml").write_text(
        'inherits = "lumi"\n[queues.standard-g]\nmax_nodes = 2000\n[queues.ours]\nmax_nodes = 2\n'
    )
    mine = load_site("lumi", [tmp_path, *SITES])
    assert mine.queues["standard-g"] == Queue(max_nodes=2000, max_walltime=((None, 48 * HOUR),))
    assert {"ours", "small-g"} < set(mine.queues)
    render(ask(account="p", num_nodes=2000), mine)
    with pytest.raises(ConfigError, match="ours takes 1 to 2 nodes"):
        render(ask(account="p", num_nodes=3, partition="ours"), mine)


def test_a_queue_that_the_profile_does_not_know_is_mentioned(capsys):
    words = [
        "job",
        "render",
        "--site",
        "lumi",
        "--account",
        "p",
        "--time",
        "30d",
        "--nodes",
        "9999",
    ]
    assert main([*words, "--partition", "standart-g", "--", "python", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --partition=standart-g" in said
    assert (
        "# Note: nodes and walltime are not checked: the profile has limits of standard-g" in said
    )
    assert "none of standart-g\n" in said


def test_a_refused_submission_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ["job", "submit", "--site", "lumi", "--account", "p", "--time", "30d"]
    assert main([*words, "--", "python", "train.py"]) == 2
    assert "queue standard-g gives a job on 1 node at most 48:00:00" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
