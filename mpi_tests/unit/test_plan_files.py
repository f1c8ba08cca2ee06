"""Profiles, machine files, fits and advice."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.predict import (
    Costs,
    Layer,
    Link,
    Machine,
    Profile,
    RankLayout,
    advise,
    find_machine,
    machine_names,
    predict,
    read_profile,
    write_machine,
    write_profile,
)
from hpctrain.predict.advice import cost_of
from hpctrain.predict.costs import allreduce_s
from hpctrain.predict.fit import (
    CollectiveSample,
    ComputeSample,
    Measurement,
    fit_contention,
    fit_costs,
    fit_machine,
)
from hpctrain.predict.machine import parse_machine, render_machine, sourced_keys
from hpctrain.predict.profile import parse_profile

LINK = Link(latency_s=1e-5, bytes_per_s=1e9)
PROFILE = Profile(
    machine="here",
    model="a model",
    batch=32,
    input_s=0.001,
    forward_s=0.01,
    layers=tuple(
        Layer(name=f"l{i}", backward_s=0.002, gradient_bytes=4_000_000) for i in range(10)
    ),
    update_s=0.002,
    samples=1000,
    parameters=10_000_000,
    bytes_per_sample=12,
    error=0.01,
)
MACHINE = Machine(
    name="m",
    title='a "machine" of\nours',
    ranks_per_node=4,
    costs=Costs(topology="ring", intra=LINK, inter=replace(LINK, latency_error=0.25)),
    engines={"mpi": Costs(topology="hierarchical", intra=LINK, inter=LINK)},
    jitter=0.02,
    contention=((1, 1.0), (2, 1.125), (4, 1.5)),
    contention_error=0.125,
    memory_bytes_per_node=1 << 36,
    measured=True,
    as_of="2026-01-02",
    sources={"inter.latency_s": "a book"},
)


@pytest.mark.parametrize("name", machine_names())
def test_every_number_of_a_machine_file_has_a_source(name):
    import tomllib
    from importlib import resources

    text = (resources.files("hpctrain.predict") / "machines" / f"{name}.toml").read_text()
    machine = find_machine(name)
    assert set(machine.sources) == sourced_keys(tomllib.loads(text))
    assert all(len(source) >= len("assumption") for source in machine.sources.values())
    assert machine.as_of
    assert not machine.measured
    assert parse_machine(render_machine(machine), name) == machine
    found = predict(PROFILE, machine, 1024)
    assert 0 < found.efficiency.low < found.efficiency.value < found.efficiency.high


def test_files_give_back_what_was_written(tmp_path):
    write_profile(PROFILE, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == PROFILE
    write_machine(MACHINE, tmp_path / "m.toml")
    assert find_machine(tmp_path / "m.toml") == MACHINE
    with pytest.raises(ConfigError, match=r"must end in .toml"):
        write_machine(MACHINE, tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "x"}, "has schema 'x'; this version reads 'hpctrain.profile/1'"),
        ({"batch": 0}, "batch=0 must be a whole number, at least 1"),
        ({"forward_s": -1}, "forward_s=-1 must be finite and not negative"),
        ({"forward_s": "1"}, "forward_s='1' must be a number"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"name": "a"}]}, "layer 0 of p lacks backward_s, gradient_bytes"),
        ({"colour": 1}, "p has unknown keys: colour"),
    ],
)
def test_profiles_that_are_refused(change, message):
    good = {"schema": "hpctrain.profile/1", "model": "m", "batch": 1, "forward_s": 1, "update_s": 0}
    good["layers"] = [{"name": "a", "backward_s": 0.1, "gradient_bytes": 4}]
    assert parse_profile(json.dumps(good), "p").gradient_bytes == 4
    with pytest.raises(ConfigError, match=message):
        parse_profile(json.dumps(good | change), "p")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('topology = "ring"', 'topology = "rings"', "topology='rings'; choose one of ring"),
        ("ranks_per_node = 4", "ranks_per_node = 0", "ranks_per_node=0 must be a whole number"),
        ("jitter = 0.02", "jiter = 0.02", "has unknown keys: jiter; the known ones are"),
        ("bytes_per_s = 1000000000.0", "bytes_per_s = 0", "bytes_per_s=0 must be above 0"),
        ("ranks = [\n    1,\n    2,", "ranks = [\n    2,\n    1,", "must rise, beginning with 1"),
        (
            "slowdown = [\n    1.0,\n    1.125",
            "slowdown = [\n    1.0,\n    0.5",
            "never be below it",
        ),
        ('"inter.latency_s" =', '"inter.colour" =', "unknown keys: inter.colour"),
        ("schema =", "schema", "is not TOML"),
    ],
)
def test_machines_that_are_refused(old, new, message):
    text = render_machine(MACHINE)
    assert old in text
    with pytest.raises(ConfigError, match=message):
        parse_machine(text.replace(old, new), "m")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[intra]\nlatency_s = ", "[intra]\nlatency_s = -", "[intra]: latency_s=-"),
        ("[intra]\nlatency_s", "[intra]\nlatency", "[intra] lacks latency_s"),
        ('[engines.mpi]\ntopology = "', '[engines.mpi]\ntopology = "x', "[engines.mpi]: topo"),
        ("[engines.mpi]", "[engines.mpii]", "[engines] has unknown keys: mpii"),
        ("[engines.mpi.inter]\nlat", "[engines.mpi.inter]\nnat", "[engines.mpi.inter] lacks"),
        (
            "ranks = [\n    1,\n    2,",
            "ranks = [\n    1,\n    2.5,",
            "[contention]: ranks=2.5 must be",
        ),
        ("jitter = ", "jitter = -", "m.toml: jitter=-"),
    ],
)
def test_errors_in_a_machine_name_file_and_section(old, new, message, tmp_path):
    costs = replace(MACHINE.costs, topology="ring")
    text = render_machine(replace(MACHINE, engines={"mpi": costs}, sources={}))
    assert old in text
    (tmp_path / "m.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as found:
        find_machine(tmp_path / "m.toml")
    assert str(found.value).startswith(str(tmp_path / "m.toml"))
    assert message in str(found.value)


def test_contention_is_read_off_and_goes_on_by_the_logarithm():
    assert [MACHINE.slowdown(n) for n in (1, 2, 4)] == [1.0, 1.125, 1.5]
    assert MACHINE.slowdown(3) == pytest.approx(1.125 + 0.375 * 0.585, abs=1e-3)
    assert 1.5 < MACHINE.slowdown(8) < MACHINE.slowdown(16) < 2.5
    flat = replace(MACHINE, contention=((1, 1.0),))
    assert flat.slowdown(64) == 1.0


sizes = (4096, 1 << 16, 1 << 20, 1 << 24, 1 << 26)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["ring", "halving", "hierarchical"]),
    st.floats(1e-6, 1e-3),
    st.floats(1e7, 1e11),
    st.floats(1e-6, 1e-3),
    st.floats(1e6, 1e10),
)
def test_a_fit_finds_the_costs_that_made_the_times(topology, near_s, near, far_s, far):
    costs = Costs(
        topology=topology,
        intra=Link(latency_s=near_s, bytes_per_s=max(near, 2 * far)),
        inter=Link(latency_s=far_s, bytes_per_s=far),
        crowding=0.4 if topology == "hierarchical" else 0.0,
    )
    samples = [
        CollectiveSample(
            engine="e",
            num_ranks=count,
            ranks_per_node=per_node,
            num_bytes=size,
            seconds=allreduce_s(size, RankLayout(num_ranks=count, ranks_per_node=per_node), costs),
        )
        for count, per_node in ((2, 2), (4, 4), (2, 1), (4, 1), (8, 2))
        for size in sizes
    ]
    found = fit_costs(samples, topology)
    for sample in samples:
        assert allreduce_s(sample.num_bytes, sample.layout, found) == pytest.approx(
            sample.seconds, rel=0.02
        )
    unseen = RankLayout(num_ranks=64, ranks_per_node=4)
    assert allreduce_s(1 << 22, unseen, found) == pytest.approx(
        allreduce_s(1 << 22, unseen, costs), rel=0.05
    )


def _measured(count: int, seconds: float) -> Measurement:
    layout = RankLayout(num_ranks=count, ranks_per_node=count)
    costs = Costs(topology="hierarchical", intra=LINK, inter=LINK)
    samples = [
        CollectiveSample(
            engine="mpi",
            num_ranks=count,
            ranks_per_node=count,
            num_bytes=size,
            seconds=allreduce_s(size, layout, costs),
        )
        for size in sizes
        if count > 1
    ]
    compute = ComputeSample(ranks_on_node=count, seconds=seconds, jitter=0.01)
    return Measurement(collectives=tuple(samples), compute=compute, memory_bytes_per_node=1 << 34)


def test_a_machine_from_measurements(tmp_path):
    launches = [_measured(1, 0.1), _measured(2, 0.11), _measured(4, 0.14)]
    assert [
        Measurement.from_json(json.loads(json.dumps(m.as_json()))) for m in launches
    ] == launches
    machine = fit_machine(launches, title="ours", name="ours")
    assert machine.contention == ((1, 1.0), (2, pytest.approx(1.1)), (4, pytest.approx(1.4)))
    assert machine.engines["mpi"].intra.latency_s == pytest.approx(1e-5, rel=1e-3)
    assert machine.engines["mpi"].intra.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert machine.measured
    slow = replace(launches[1].collectives[0], seconds=9.0)  # one launch was disturbed
    odd = replace(launches[1], collectives=(slow, *launches[1].collectives[1:]))
    again = fit_machine([*launches, odd, *launches], title="ours", name="ours")
    assert again.engines["mpi"].intra == machine.engines["mpi"].intra
    write_machine(machine, tmp_path / "ours.toml")
    assert find_machine(tmp_path / "ours.toml") == machine
    with pytest.raises(ConfigError, match="is relative to one rank alone"):
        fit_contention([launches[1].compute])
    with pytest.raises(ConfigError, match="no collective was measured"):
        fit_machine(launches[:1], title="")
    with pytest.raises(ConfigError, match="at least two sizes"):
        fit_costs(launches[1].collectives[:1], "ring")


def test_advice():
    costs = Costs(topology="ring", intra=LINK, inter=LINK)
    slow = replace(MACHINE, engines={}, costs=costs, contention=((1, 1.0),))
    predictions = [predict(PROFILE, slow, n, engine="torch") for n in (1, 8, 64)]
    advice = advise(PROFILE, slow, predictions, efficiency=0.8, num_samples=10**6)
    assert advice.efficient_ranks == 1
    asked = next(cost for cost in advice.costs if cost.num_ranks == advice.ranks_to_ask)
    assert not [
        cost
        for cost in advice.costs
        if cost.hours < asked.hours and cost.node_hours <= asked.node_hours
    ]
    assert advice.num_ranks == 64
    assert advice.wire == "bf16"
    assert advice.accumulate is not None
    assert advice.accumulate > 1
    text = "\n".join(advice.lines(0.8))
    assert "communication that backward does not hide" in text
    assert f"ask for {advice.nodes_to_ask} ({advice.ranks_to_ask} ranks), faster for no" in text
    assert "than 1 rank, the most of these that keep 80%" in text
    costs = advice.costs
    assert costs[2].hours < costs[0].hours
    assert costs[2].node_hours == pytest.approx(16 * costs[2].hours)
    assert cost_of(predictions[0], 3600).hours == pytest.approx(1 / predictions[0].samples_per_s)
    with pytest.raises(ConfigError, match="efficiency=0"):
        advise(PROFILE, slow, predictions, efficiency=0)


def test_a_wire_is_advised_where_the_engine_has_it():
    costs = Costs(topology="ring", intra=replace(LINK, bytes_per_s=1e10), inter=LINK)
    slow = replace(MACHINE, engines={}, costs=costs)

    def advice(num_ranks, machine=slow, engine="torch"):
        return advise(PROFILE, machine, [predict(PROFILE, machine, num_ranks, engine=engine)])

    found = advice(64)
    assert found.wire == "bf16"
    assert found.compression_gain > 0.05
    words = f'wire="bf16" between nodes shortens a step by {found.compression_gain:.0%}'
    assert words in "\n".join(found.lines(0.8))
    for none in (advice(4), advice(62)):  # one node; nodes of different sizes
        assert (none.wire, none.compression_gain) == (None, 0.0)
        assert "compression" not in "\n".join(none.lines(0.8))
    assert advice(62, engine="mpi").wire == "bf16"


@pytest.fixture
def files(tmp_path):
    write_profile(PROFILE, tmp_path / "p.json")
    write_machine(MACHINE, tmp_path / "m.toml")
    return ["--profile", str(tmp_path / "p.json"), "--machine", str(tmp_path / "m.toml")]


def test_the_verb_prints_a_table_that_says_simulated(files, capsys):
    assert main(["plan", *files, "--ranks", "8,1,64", "--train-samples", "1e6"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SIMULATED: a model on ")
    assert "computing as on here\n" in out, "a profile's times are those of where it was measured"
    assert "node-hours" in out
    assert main(["plan", "--machines"]) == 0
    assert "perlmutter-gpu" in capsys.readouterr().out


def test_the_verb_speaks_json(files, capsys):
    options = ["--ranks", "4,8", "--bucket-mib", "8", "--wire-bits", "16", "--accumulate", "2"]
    assert main(["plan", *files, *options, "--topology", "tree", "--cycle-ms", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simulated"] is True
    assert [each["num_ranks"] for each in data["predictions"]] == [4, 8]
    assert all(each["simulated"] for each in data["predictions"])
    exchange = data["predictions"][0]["exchange"]
    assert exchange["bucket_bytes"] == 8 << 20
    assert (exchange["wire_ratio"], exchange["cycle_s"], exchange["accumulate"]) == (0.5, 0.001, 2)


def test_the_verb_predicts_a_wire(files, capsys):
    step_s = {}
    for wire in ("none", "bf16"):
        options = ["--ranks", "4,64", "--engine", "mpi", "--wire", wire, "--json"]
        assert main(["plan", *files, *options]) == 0
        one, several = json.loads(capsys.readouterr().out)["predictions"]
        assert (one["exchange"]["wire"], several["exchange"]["wire"]) == ("none", wire)
        step_s[wire] = several["step_s"]["value"]
    num_bytes = sum(layer.gradient_bytes for layer in PROFILE.layers)
    spared = num_bytes * 2 * 15 / 16 / 2 / LINK.bytes_per_s  # half of what 16 nodes send
    assert step_s["none"] - step_s["bf16"] == pytest.approx(spared)
    assert main(["plan", *files, "--ranks", "8", "--wire", "bf16", "--wire-bits", "16"]) != 0
    assert "--wire bf16 and --wire-bits 16; give one" in capsys.readouterr().err


def test_strong_scaling_divides_the_batch(files, capsys):
    assert main(["plan", *files, "--ranks", "4,8", "--global-batch", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert [(each["batch"], each["global_batch"]) for each in found] == [(16, 64), (8, 64)]
    assert found[1]["compute_s"] == pytest.approx(found[0]["compute_s"] / 2)


def test_strong_efficiency_counts_from_one_rank_with_the_whole_batch(files, capsys):
    ranks = ["--ranks", "1,8,64", "--global-batch", "64"]
    assert main(["plan", *files, *ranks, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alone, *others = found["predictions"]
    for each in others:
        speedup = each["samples_per_s"] / alone["samples_per_s"]
        assert each["efficiency"]["value"] == pytest.approx(speedup / each["num_ranks"])
    assert alone["efficiency"]["value"] == pytest.approx(1)


def test_strong_advice_looks_at_the_share_of_a_rank():
    profile = replace(PROFILE, update_s=0.0)
    share = profile.at_batch(1)
    wide = Link(latency_s=0.0, bytes_per_s=1e9)
    machine = replace(MACHINE, costs=Costs(topology="ring", intra=wide, inter=wide), engines={})
    found = predict(share, machine, 32, is_strong=True)
    narrow = replace(machine, costs=replace(machine.costs, intra=replace(wide, bytes_per_s=1e11)))
    found = predict(share, narrow, 32, is_strong=True)
    assert advise(profile, narrow, [found]).compression_gain > 0.2
    update = predict(replace(share, update_s=1.0), machine, 32, is_strong=True)
    assert "the update" in advise(replace(profile, update_s=1.0), machine, [update]).limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "give whole numbers from 1 on"),
        (["--ranks", "a"], "give whole numbers from 1 on"),
        (["--ranks", "4", "--time", "2h", "--site", "x"], "--time, --site is for a rehearsal"),
        (["--ranks", "4", "--rehearse", "--epochs", "0"], "--epochs 0 must be at least 1"),
        (["--ranks", "3", "--global-batch", "64"], "does not divide over 3 ranks"),
        ([], "--machine and --ranks"),
        (["--ranks", "1", "--machine", "nosuch"], "no machine 'nosuch'; there are cpu-"),
        (["--ranks", "1", "--profile", "nosuch.json"], "nosuch.json cannot be read"),
        (["--measure-profile", "x"], "needs CONFIG.toml or --subject"),
        (["--measure-profile", "x", "--subject", "nosuch.py:a"], "no Python file nosuch.py"),
    ],
)
def test_what_the_verb_refuses(files, options, message, capsys):
    assert main(["plan", *files, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_fit_says_how_unsure_it_is_and_who_disturbed_it(files, tmp_path, capsys):
    quick, same, slow = (
        ComputeSample(ranks_on_node=n, seconds=s, jitter=0.001)
        for n, s in ((1, 1.0), (2, 0.9), (2, 1.2))
    )
    assert fit_contention([quick, same]) == (((1, 1.0), (2, 1.0)), 1.0)  # nothing lost: unknown
    assert fit_contention([quick, slow])[1] == 0.5  # one launch each
    assert fit_contention([quick, quick, slow, slow])[1] == pytest.approx(0.001 / 0.2)
    slower = replace(slow, seconds=1.26)
    assert fit_contention([quick, quick, slow, slower])[1] == pytest.approx(0.03 / 1.23 / 0.23)
    loaded = replace(MACHINE, foreign_load=0.34)
    write_machine(loaded, tmp_path / "m.toml")
    assert (tmp_path / "m.toml").read_text().startswith("# Other processes used 34% of the cores")
    assert find_machine(tmp_path / "m.toml").foreign_load == 0.34
    assert main(["plan", *files, "--ranks", "4"]) == 0
    assert "under 34% background load: do not trust it" in capsys.readouterr().out
    assert main(["bench", "fit", "--ranks", "1,0", str(tmp_path / "x.toml")]) == 2
    assert "at least 1" in capsys.readouterr().err
    assert main(["bench", "fit", "--repeats", "0", str(tmp_path / "x.toml")]) == 2
    assert "--repeats 0 must be at least 1" in capsys.readouterr().err


def test_a_network_that_was_not_measured_is_not_for_free(files, tmp_path, capsys):
    samples = [
        CollectiveSample(
            engine="mpi",
            num_ranks=2,
            ranks_per_node=2,
            num_bytes=size,
            seconds=1e-5 + size / 1e9,
        )
        for size in (4096, 1 << 20)
    ]
    costs = fit_costs(samples, "ring")
    assert costs.inter.is_unknown
    assert not costs.intra.is_unknown
    fitted = replace(MACHINE, ranks_per_node=2, costs=costs, engines={})
    write_machine(fitted, tmp_path / "m.toml")
    assert main(["plan", *files, "--ranks", "2,8"]) == 2
    assert "give --ranks-per-node 8 if they fit on one node" in capsys.readouterr().err
    assert main(["plan", *files, "--ranks", "2,8", "--ranks-per-node", "8"]) == 0


def test_predicting_needs_neither_torch_nor_mpi(files):
    code = (
        "import sys; from hpctrain.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or bool({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "plan", *files, "--ranks", "4"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
