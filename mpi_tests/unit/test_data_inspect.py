"""`hpctrain data inspect`, and what it says of files that are none."""

from __future__ import annotations

import json
import os
import pickle
import resource

import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.data.storage.shards import (
    ColumnSpec,
    ShardFile,
    ShardManifest,
    Shards,
    ShardSpec,
    check_shard,
    digest_file,
    read_manifest,
    write_manifest,
)


def shards_in(folder):
    """A folder of two shards, written by hand."""
    shards = []
    for number, rows in enumerate((4, 3)):
        path = folder / f"shard-{number}.npy"
        np.save(path, np.full((rows, 2), number, "f4"))
        file = ShardFile(name=path.name, num_bytes=path.stat().st_size, digest=digest_file(path))
        shards.append(ShardSpec(num_samples=rows, files=(file,)))
    column = ColumnSpec(name="x", dtype="<f4", shape=(2,))
    manifest = ShardManifest(layout="dict", columns=(column,), shards=tuple(shards))
    write_manifest(folder, manifest)
    return manifest


def test_shards_are_described(tmp_path, capsys):
    manifest = shards_in(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert main(["data", "inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "kind": "shards",
        "num_samples": 7,
        "num_shards": 2,
        "num_bytes": manifest.num_bytes,
        "columns": [{"name": "x", "dtype": "<f4", "shape": [2]}],
    }
    assert main(["data", "inspect", str(tmp_path)]) == 0
    assert "7 samples in 2 shards" in capsys.readouterr().out


def test_archives_are_described(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", x=np.zeros((5, 3), "i2"))
    assert main(["data", "inspect", str(tmp_path / "a.npz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["num_samples"]) == ("npz", 5)
    assert found["columns"] == [{"name": "x", "dtype": "<i2", "shape": [3]}]


@pytest.mark.parametrize(
    ("name", "content", "code", "word"),
    [
        ("a.npy", None, 1, "a.npy is missing"),
        ("a.npy", b"\x93NUMPY", 1, "is truncated, or its format does not match its name"),
        ("a.npz", b"PK", 1, "is truncated, or its format does not match its name"),
        ("a.txt", b"1 2 3", 2, "what '.txt' files hold is unknown"),
        ("manifest.json", b"{}", 1, "is not a manifest of shards"),
        ("manifest.json", b'{"format": "x", "version": 9}', 1, "version 9"),
    ],
)
def test_what_is_none_is_refused_by_name(tmp_path, capsys, name, content, code, word):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["data", "inspect", str(path)]) == code
    assert word in capsys.readouterr().err


def test_every_damage_is_found(tmp_path):
    manifest = shards_in(tmp_path)
    assert [check_shard(tmp_path, manifest, number) for number in (0, 1)] == [[], []]
    path = tmp_path / "shard-0.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"\xff")
    assert "checksum" in check_shard(tmp_path, manifest, 0)[0]
    path.write_bytes(good + b"1")
    assert "too long" in check_shard(tmp_path, manifest, 0)[0]
    path.unlink()
    assert "is missing" in check_shard(tmp_path, manifest, 0)[0]
    lying = ShardManifest(
        layout="dict",
        columns=(ColumnSpec(name="x", dtype="<f8", shape=(2,)),),
        shards=manifest.shards,
    )
    assert "instead of" in check_shard(tmp_path, lying, 1)[0]


def many_shards(folder, count):
    """So many shards of two samples each, all with the content of one file."""
    np.save(folder / "one.npy", np.arange(2))
    shards = []
    for number in range(count):
        path = folder / f"shard-{number}.npy"
        os.link(folder / "one.npy", path)
        file = ShardFile(name=path.name, num_bytes=path.stat().st_size, digest="")
        shards.append(ShardSpec(num_samples=2, files=(file,)))
    column = ColumnSpec(name="data", dtype="<i8", shape=())
    write_manifest(folder, ShardManifest(layout="array", columns=(column,), shards=tuple(shards)))


def test_more_shards_than_a_process_may_open(tmp_path):
    many_shards(tmp_path, 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        source = Shards(tmp_path)
        everything = np.arange(600)
        for _ in range(2):
            assert np.array_equal(source.take(everything), everything % 2)
        assert np.array_equal(pickle.loads(pickle.dumps(source)).take(everything), everything % 2)
        shuffled = np.random.default_rng(1).permutation(600)
        assert np.array_equal(source.take(shuffled), shuffled % 2)
        assert len(os.listdir("/proc/self/fd")) < 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
