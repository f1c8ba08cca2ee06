"""`hpctrain data`: shards written by several ranks, described, checked, and found broken."""

from __future__ import annotations

import json

import numpy as np

from mpi_tests.launch.commands import HPCTRAIN, run

TWO_RANKS = [*HPCTRAIN, "run", "-n", "2", "-m", "hpctrain", "data"]
PREPARE = """
def double(batch):
    return {"x": batch["x"] * 2, "y": batch["y"]}

def fail(batch):
    raise RuntimeError("no such calibration")
"""


def test_shards_from_writing_to_breaking(tmp_path):
    x = np.arange(300.0).reshape(100, 3)
    np.savez(tmp_path / "set.npz", x=x, y=np.arange(100))
    (tmp_path / "prepare.py").write_text(PREPARE)
    words = ["shard", "set.npz", "--to", "out", "--samples-per-shard", "9"]
    done = run(*TWO_RANKS, *words, "--map", "prepare:double", cwd=tmp_path)
    assert done.code == 0, done.text
    assert "100 samples in 12 shards" in done.out
    assert "written by 2 ranks" in done.out

    failing = run(
        *TWO_RANKS, *words, "--overwrite", "--map", "prepare:fail", "--to", "bad", cwd=tmp_path
    )
    assert failing.code == 2, failing.text
    assert failing.err.count("RuntimeError: no such calibration") == 1, failing.err
    assert not (tmp_path / "bad" / "manifest.json").exists()

    well = run(*TWO_RANKS, "verify", "out", cwd=tmp_path)
    assert (well.code, "12 shards, 0 broken files" in well.out) == (0, True), well.text
    victims = sorted((tmp_path / "out").glob("shard-*.x.npy"))
    data = bytearray(victims[4].read_bytes())
    data[-1] ^= 1
    victims[4].write_bytes(data)
    victims[7].unlink()
    broken = run(*TWO_RANKS, "verify", "out", "--json", cwd=tmp_path)
    assert broken.code == 1, broken.text
    report = json.loads(broken.out[broken.out.index("{") :].replace("[0] ", ""))
    assert len(report["broken"]) == 2
    assert f"{victims[4].name} has changed" in report["broken"][0]
    assert f"{victims[7].name} is missing" in report["broken"][1]


def test_several_files_are_joined_as_it_is_said(tmp_path):
    for number in range(2):
        np.save(tmp_path / f"p{number}.npy", np.full((10, 3), number))
    words = ["shard", "p0.npy", "p1.npy", "--to", "out"]
    unsaid = run(*TWO_RANKS, *words, cwd=tmp_path)
    assert unsaid.code == 2, unsaid.text
    assert "2 files: say --join rows where their rows follow each other" in unsaid.err
    for join, told in (("rows", "20 samples"), ("columns", "10 samples")):
        done = run(*TWO_RANKS, *words[:-1], join, "--join", join, cwd=tmp_path)
        assert done.code == 0, done.text
        assert told in done.out
