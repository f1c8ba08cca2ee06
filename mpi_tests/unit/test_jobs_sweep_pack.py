"""Sweeps over points, and environments in one archive."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.submit.pack import outside_paths, pack_environment, relocatable
from hpctrain.submit.sweep import (
    fill,
    grid_points,
    list_points,
    random_points,
    read_results,
    sweep_commands,
    write_sweep,
)


def test_a_grid_has_all_combinations():
    points = grid_points(["lr=0.1,0.01", "batch=32,64"])
    assert points[1] == {"lr": "0.1", "batch": "64"}
    assert len(points) == 4


@given(st.integers(1, 50), st.integers(0, 10))
def test_random_points_are_fixed_by_their_seed_and_in_range(count, seed):
    draws = ["lr=loguniform(1e-5,1e-1)", "w=uniform(-1,1)", "n=int(2,4)", "o=choice(sgd,adam)"]
    points = random_points(draws, count=count, seed=seed)
    assert points == random_points(draws, count=count, seed=seed)
    for point in points:
        assert -5 <= math.log10(float(point["lr"])) <= -1
        assert -1 <= float(point["w"]) <= 1
        assert point["n"] in "234"
        assert point["o"] in ("sgd", "adam")


@pytest.mark.parametrize(
    "make",
    [
        lambda: grid_points(["lr"]),
        lambda: grid_points(["lr=1,"]),
        lambda: grid_points(["lr=1", "lr=2"]),
        lambda: grid_points(["run_dir=1"]),
        lambda: grid_points(["a=" + ",".join(map(str, range(1001)))]),
        lambda: random_points(["lr=normal(0,1)"], count=1, seed=0),
        lambda: random_points(["lr=uniform(1,0)"], count=1, seed=0),
        lambda: random_points(["lr=loguniform(0,1)"], count=1, seed=0),
        lambda: random_points(["lr=int(0.5,2)"], count=1, seed=0),
        lambda: random_points(["lr=uniform(a,b)"], count=1, seed=0),
        lambda: random_points(["lr=int(0,2)"], count=0, seed=0),
        lambda: list_points("{}"),
        lambda: list_points("[]"),
        lambda: list_points('[{"a": 1}, {"b": 1}]'),
        lambda: list_points('[{"a": []}]'),
        lambda: list_points("["),
        lambda: fill(["x", "{lr}"], {}, run_dir=Path("d"), index=0),
        lambda: fill(["x"], {"lr": "1"}, run_dir=Path("d"), index=0),
    ],
)
def test_what_is_no_sweep_is_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_placeholders_are_filled_and_nothing_else():
    command = fill(
        ["train", "--lr={lr}", "{run_dir}/x", '{"json": 1}', "{{lr}}"],
        {"lr": "$(id) {index}"},
        run_dir=Path("runs/3"),
        index=3,
    )
    assert command == ("train", "--lr=$(id) {index}", "runs/3/x", '{"json": 1}', "{$(id) {index}}")


WRITE = (
    "import json,sys; json.dump({'loss': float(sys.argv[1])}, open(sys.argv[2]+'/result.json','w'))"
)


def test_a_sweep_on_this_machine_and_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["--", sys.executable, "-c", WRITE, "{x}", "{run_dir}"]
    assert main(["sweep", "run", "--grid", "x=3,nan,1,oops", *command]) == 1
    assert "point 3 ended with exit code 1" in capsys.readouterr().err
    assert "ValueError" in (tmp_path / "sweep" / "0003" / "log.txt").read_text()
    rows = read_results(tmp_path / "sweep", "loss", largest=False)
    assert [row["x"] for row in rows] == ["1", "3", "nan", "oops"]
    assert [row["x"] for row in read_results(tmp_path / "sweep", "loss", largest=True)][:2] == [
        "3",
        "1",
    ]
    assert main(["sweep", "table", "--metric", "loss"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["index", "x", "loss"]
    assert main(["sweep", "run", "--grid", "x=1,2", *command]) == 2
    assert "another sweep" in capsys.readouterr().err
    assert main(["sweep", "run", "--dir", "new", "--grid", "x=1,2", "--", "nosuch", "{x}"]) == 2
    assert "nosuch cannot be started" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "points.json").write_text(json.dumps([{"x": 1.5}, {"x": 2}]))
    assert main(["sweep", "run", "--dir", "two", "--list", "points.json", *command]) == 0
    assert main(["sweep", "table", "--dir", "nowhere"]) == 2
    assert main(["sweep", "run", "--random", "x=int(1,2)", *command]) == 2


def test_a_sweep_of_trainings_from_a_file_is_ranked_by_their_summaries(tmp_path, capsys):
    points, folder = grid_points(["optimizer.lr=3,1,2"]), tmp_path / "sweep"
    write_sweep(folder, points, [["one that nobody ran"]])
    write_sweep(folder, points, sweep_commands(folder, points, ["train", "{optimizer.lr}"]))
    for index, state in enumerate(["finished", "finished", "failed"]):
        summary = {"state": state, "metrics": {"accuracy": 0.5 + index, "loss": None, "x": "y"}}
        (folder / f"000{index}" / "summary.json").write_text(json.dumps(summary))
    rows = read_results(folder, "accuracy", largest=True)
    assert [(row["index"], row["accuracy"]) for row in rows] == [(1, 1.5), (0, 0.5), (2, None)]
    assert main(["sweep", "table", "--dir", str(folder), "--metric", "nosuch"]) == 2
    assert "there are accuracy, loss" in capsys.readouterr().err
    assert main(["sweep", "table", "--dir", str(folder), "--metric", "optimizer.lr"]) == 2


def test_a_sweep_that_cannot_be_submitted_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "submit", "--grid", "x=1,2", "--time", "1h"]
    for wrong in (["--site", "nowhere"], ["--directive=--nodes=3"], ["--gpus-per-node", "9"]):
        assert main([*words, *wrong, "--", "train", "{x}"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("env") / "small"
    made = [sys.executable, "-m", "venv", "--without-pip", prefix]
    subprocess.run(made, check=True, timeout=60)
    tool = prefix / "bin" / "tool"
    tool.write_text(f"#!{prefix}/bin/python\nimport sys\nprint(sys.prefix, sys.argv[1:])\n")
    tool.chmod(0o755)
    (prefix / "bin" / "other").write_text("#!/bin/sh\n")
    return prefix


def test_a_packed_environment_works_where_it_is_unpacked(environment, tmp_path):
    archive = tmp_path / "env.tar.gz"
    assert pack_environment(environment, archive) > 5
    assert [path.name for path in tmp_path.iterdir()] == ["env.tar.gz"]
    place = tmp_path / "other place"
    place.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", place], check=True, timeout=60)
    done = subprocess.run(
        [place / "bin" / "tool", "a b"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{place} ['a b']\n", done.stderr
    assert (place / "bin" / "other").read_text() == "#!/bin/sh\n"
    (tmp_path / "linked").symlink_to(environment)
    tool = (environment / "bin" / "tool").read_bytes()
    assert relocatable(tool, tmp_path / "linked") == relocatable(tool, environment) != tool
    with tarfile.open(archive) as packed:
        assert {member.uid for member in packed} == {0}


def test_what_is_outside_is_named_and_what_is_no_environment_is_refused(environment, tmp_path):
    site = next((environment / "lib").glob("python*")) / "site-packages"
    (site / "mine.pth").write_text("/some/checkout\nimport os\n")
    assert outside_paths(environment) == ["/some/checkout"]
    (site / "mine.pth").unlink()
    (site / "__editable___mine_0_1_finder.py").write_text(
        "MAPPING: dict[str, str] = {'mine': '/some/other/mine'}\n"
    )
    assert outside_paths(environment) == ["/some/other/mine"]
    (site / "__editable___mine_0_1_finder.py").unlink()
    assert relocatable(b"\x7fELF", environment) == b"\x7fELF"
    assert relocatable(b"#!/usr/bin/python3\n", environment) == b"#!/usr/bin/python3\n"
    blank = Path("/a b")  # where pip lets sh start the interpreter
    script = b"#!/bin/sh\n'''exec' \"/a b/bin/python3\" \"$0\" \"$@\"\n' '''\nimport sys\n"
    assert relocatable(script, blank) == script.replace(b"/a b/bin/", b'$(dirname -- "$0")/')
    with pytest.raises(ConfigError, match="not a virtual environment"):
        pack_environment(tmp_path, tmp_path / "x.tar")
    with pytest.raises(ConfigError, match=r"must end in .tar"):
        pack_environment(environment, tmp_path / "x.zip")
    with pytest.raises(ConfigError, match="cannot be written"):
        pack_environment(environment, tmp_path / "no" / "x.tar")
