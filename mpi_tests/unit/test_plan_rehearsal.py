"""Jobs on virtual ranks: what would break is found, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.layout import LEAST_PART_BYTES, Item
from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.predict import Layer, Profile, RankLayout, find_machine, write_profile
from hpctrain.predict.model import Range
from hpctrain.predict.rehearsal import (
    Files,
    JobLimits,
    Loading,
    MemoryUse,
    State,
    TrainingRun,
    rehearse,
)
from mpi_tests.loader_plan import samples_of

GPU = find_machine("perlmutter-gpu")
CPU = find_machine("frontera")
STATE = State(
    weights=tuple(Item(name=f"w{i}", num_elements=1 << 20, element_bytes=4) for i in range(8))
)
TRAINING = TrainingRun(num_samples=100_000, global_batch=1024)
ON_512 = RankLayout(num_ranks=512, ranks_per_node=4)
STEP = Range(0.1, 0.09, 0.11)


def found(
    training=TRAINING, state=STATE, layout=ON_512, machine=GPU, **limits
) -> set[tuple[str, str]]:
    done = rehearse(training, state, layout, machine, step_s=STEP, limits=JobLimits(**limits))
    assert done.is_sound == all(item.level == "warning" for item in done.findings)
    return {(item.level, item.part) for item in done.findings}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000), st.integers(1, 300), st.integers(1, 3), st.integers(1, 24), st.booleans()
)
def test_shares_are_those_that_the_loader_plans(samples, batch, accumulate, num_ranks, drop_last):
    training = TrainingRun(
        num_samples=samples, global_batch=batch, accumulate=accumulate, drop_last=drop_last
    )
    each = [list(samples_of(training, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    loading = Loading.of(training, num_ranks)
    totals = [sum(part) for part in zip(*each, strict=True)]
    assert len(totals) == loading.num_batches
    if totals:
        assert sum(totals) == (samples if not drop_last else sum(totals))
        first, last = [part[0] for part in each], [part[-1] for part in each]
        assert (loading.full.fewest, loading.full.most) == (min(first), max(first))
        assert (loading.last.fewest, loading.last.most) == (min(last), max(last))
        assert loading.last.num_empty == last.count(0)
        assert loading.last.global_samples == totals[-1]
    assert training.steps_per_epoch == -(-len(totals) // accumulate)


def test_a_sound_job_has_no_findings():
    assert found() == set()
    assert found(walltime_s=3600, checkpoint_free_bytes=1 << 40) == set()


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"global_batch": 1000}, ("warning", "batch")),
        ({"global_batch": 256}, ("error", "batch")),
        ({"accumulate": 4}, ("error", "batch")),
        ({"accumulate": 3}, ("error", "batch")),
        ({"num_samples": 500}, ("error", "partition")),
        ({"num_samples": 512}, ("warning", "batch")),
        ({"num_samples": 1023, "drop_last": True}, ("error", "batch")),
        ({"warmup_steps": 99}, ("error", "schedule")),
    ],
)
def test_what_would_break_in_the_data_is_found(change, finding):
    assert finding in found(replace(TRAINING, **change))


def test_the_last_batch_may_have_fewer_samples_than_ranks():
    many = RankLayout(num_ranks=900, ranks_per_node=4)
    training = replace(TRAINING, num_samples=1800 + 450, global_batch=1800, even_last=False)
    done = rehearse(training, STATE, many, GPU)
    assert done.loading.last.num_empty == 450
    assert [item.level for item in done.findings] == ["warning"]
    assert "450 ranks have none of it" in done.findings[0].text


def test_memory_time_and_space_are_compared_with_what_there_is():
    huge = replace(STATE, activation_bytes_per_sample=20 << 30)
    assert ("error", "memory") in found(state=huge)
    assert ("error", "memory") in found(
        state=huge, machine=CPU, layout=RankLayout(num_ranks=56, ranks_per_node=56)
    )
    assert ("error", "walltime") in found(walltime_s=9)
    assert ("warning", "walltime") in found(walltime_s=10)
    assert found(walltime_s=5, max_requeues=2) == set()
    size = Files.of(STATE, ON_512).num_bytes
    assert size == 3 * STATE.weight_bytes
    assert ("error", "checkpoint") in found(checkpoint_free_bytes=4 * size - 1)
    assert found(checkpoint_free_bytes=4 * size) == set()
    assert ("error", "checkpoint") in found(checkpoint_free_bytes=4 * size, keep=4)


def test_memory_is_what_the_page_on_nodes_says():
    size, node = STATE.weight_bytes, RankLayout(num_ranks=4, ranks_per_node=4)
    here = MemoryUse.of(STATE, node, rank_batch=1, on_device=False)
    # weights and gradients of each, the sums, the new weights, and Adam's two moments once
    assert here.per_node == 4 * 2 * size + size + size + 2 * size
    there = MemoryUse.of(STATE, node, rank_batch=1, on_device=True)
    assert there.per_rank == 4 * size


def test_checkpoints_are_written_by_a_few_of_each_node():
    large = State(
        weights=(Item(name="w", num_elements=LEAST_PART_BYTES, element_bytes=4),), state_copies=0
    )
    files = Files.of(large, ON_512)
    assert len(files.writers) == 4
    assert len({rank // 4 for rank in files.writers}) == 4
    assert files.largest_part == files.most_on_a_node == LEAST_PART_BYTES


@pytest.fixture
def words(tmp_path):
    profile = Profile(
        machine="",
        model="m",
        batch=2,
        input_s=0,
        forward_s=0.01,
        layers=(Layer(name="a", backward_s=0.02, gradient_bytes=1 << 20),),
        update_s=0.001,
    )
    write_profile(profile, tmp_path / "p.json")
    return ["plan", "--rehearse", "--profile", str(tmp_path / "p.json"), "--machine", "frontier"]


def test_the_verb_rehearses(words, tmp_path, capsys):
    sizes = ["--ranks", "512", "--global-batch", "1024", "--samples", "100000"]
    more = ["--time", "1h", "--site", "frontier", "--save-dir", str(tmp_path / "not" / "yet")]
    assert main([*words, *sizes, *more]) == 0
    out = capsys.readouterr().out
    assert "nothing of this would break" in out
    said = (
        "- placeholders in the job script, to be replaced: account ACCOUNT, command python train.py"
    )
    assert said in out
    assert "--account=ACCOUNT" in out.partition(said)[2]
    assert "#SBATCH --nodes=64" in out
    assert main([*words, *sizes, *more, "--json", "--epochs", "100000"]) == 1
    (data,) = json.loads(capsys.readouterr().out)["rehearsals"]
    assert data["is_sound"] is False
    assert [item["part"] for item in data["findings"]] == ["walltime"]
    assert data["num_steps"] == 98 * 100000
    assert data["placeholders"] == ["account ACCOUNT", "command python train.py"]


def test_what_a_site_has_against_the_job_is_a_finding(words, capsys):
    sizes = ["--ranks", "4", "--global-batch", "8", "--samples", "100", "--time", "1h"]
    assert main([*words, *sizes, "--site", "frontier"]) == 1
    assert "error: job script: Frontier" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs --global-batch"),
        (["--ranks", "8", "--global-batch", "8"], "needs --samples"),
        (["--ranks", "8", "--global-batch", "8", "--samples", "9", "--site", "slurm"], "--time"),
    ],
)
def test_what_a_rehearsal_refuses(words, options, message, capsys):
    assert main([*words, *options]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="keep=0"):
        JobLimits(keep=0)
