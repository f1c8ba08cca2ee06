"""Files, shards, staging and one copy per node, on all ranks together."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain as hpc
import hpctrain.data
from hpctrain.data.storage.writing import write_shards
from hpctrain.errors import ConfigError, DataError

ROWS = 37


@pytest.fixture
def folder(world):
    """One folder that all ranks see."""
    made = tempfile.mkdtemp(prefix="mpi-tests-data-") if world.rank == 0 else None
    path = Path(world.comm.bcast(made, root=0))
    yield path
    world.comm.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)


def write(world, function):
    """Let rank 0 write once no rank reads any more, and all others wait for it."""
    world.comm.Barrier()
    if world.rank == 0:
        function()
    world.comm.Barrier()


def arrays():
    return {
        "x": np.arange(ROWS * 6, dtype="f4").reshape(ROWS, 2, 3),
        "y": np.arange(ROWS, dtype="i8"),
    }


@pytest.mark.parametrize("form", ["dict", "tuple", "array"])
def test_shards_hold_what_was_written(world, folder, form):
    given = arrays()
    data = {"dict": given, "tuple": tuple(given.values()), "array": given["x"]}[form]
    source = hpc.data.ArraySource(data)
    manifest = write_shards(world, source, folder / "out", samples_per_shard=5)
    assert (manifest.num_samples, len(manifest.shards), manifest.layout) == (ROWS, 8, form)
    opened = hpc.files(world, folder / "out")
    wanted = np.array([36, 0, 5, 4, 4, 20])
    got = opened.take(wanted)
    parts = [got] if form == "array" else list(got.values()) if form == "dict" else list(got)
    for part, column in zip(parts, given.values(), strict=False):
        assert np.array_equal(part, column[wanted])
    assert opened.take(np.array([], np.int64)) is not None
    if form == "dict":
        assert list(hpc.files(world, folder / "out", columns=["y"]).take(wanted)) == ["y"]
    with pytest.raises(ConfigError, match="holds shards already"):
        write_shards(world, source, folder / "out", samples_per_shard=5)


def halve(batch):
    """Keep every second sample, as another dtype."""
    return {"z": batch["y"][::2].to(torch.int16)}


def test_shards_through_a_function_that_drops_samples(world, folder):
    source = hpc.data.ArraySource(arrays())
    manifest = write_shards(world, source, folder, samples_per_shard=10, change=halve)
    opened = hpc.files(world, folder)
    assert len(opened) == manifest.num_samples == 5 + 5 + 5 + 4
    wanted = np.concatenate([np.arange(10 * k, min(10 * k + 10, ROWS), 2) for k in range(4)])
    assert np.array_equal(opened.take(np.arange(19))["z"], wanted.astype("i2"))
    with pytest.raises(ConfigError, match="KeyError: 'nosuch'"):
        write_shards(
            world, source, folder / "b", samples_per_shard=10, change=lambda batch: batch["nosuch"]
        )


def test_a_broken_shard_is_named_on_all_ranks(world, folder):
    source = hpc.data.ArraySource(arrays())
    manifest = write_shards(world, source, folder, samples_per_shard=5)
    victim = folder / manifest.shards[3].files[1].name
    write(world, lambda: os.truncate(victim, 130))
    with pytest.raises(DataError, match="is truncated: 130 bytes instead of") as caught:
        hpc.files(world, folder)
    assert len(set(world.comm.allgather(str(caught.value)))) == 1
    assert victim.name in str(caught.value)
    world.comm.Barrier()
    write(world, victim.unlink)
    with pytest.raises(DataError, match=f"{victim.name} is missing"):
        hpc.files(world, folder)
    write(world, (folder / "manifest.json").unlink)
    with pytest.raises(DataError, match=r"manifest\.json is missing.*rows=.*columns="):
        hpc.files(world, folder)


def test_files_of_every_kind_read_alike(world, folder):
    given = arrays()

    def make():
        import h5py
        import netCDF4
        import zarr

        np.save(folder / "x.npy", given["x"])
        np.save(folder / "y.npy", given["y"])
        np.savez_compressed(folder / "a.npz", **given, mean=np.float32(3), scale=np.ones(3))
        with h5py.File(folder / "a.h5", "w") as file:
            file["x"], file["y"], file["note"] = given["x"], given["y"], "text"
        group = zarr.open_group(str(folder / "a.zarr"), mode="w")
        for name, array in given.items():
            group.create_array(name, data=array)
        with netCDF4.Dataset(folder / "a.nc", "w") as file:
            for number, size in enumerate(given["x"].shape):
                file.createDimension(f"d{number}", size)
            file.createVariable("x", "f4", ("d0", "d1", "d2"))[:] = given["x"]
            file.createVariable("y", "i8", ("d0",))[:] = given["y"]

    write(world, make)
    wanted = np.array([30, 2, 2, 7, 36, 0])
    for name in ("a.npz", "a.h5", "a.zarr", "a.nc"):
        source = hpc.files(world, folder / name, columns=["x", "y"])
        assert len(source) == ROWS, name
        batch = source.take(wanted)
        assert np.array_equal(batch["x"], given["x"][wanted]), name
        assert np.array_equal(batch["y"], given["y"][wanted]), name
        assert len(source.take(wanted[:0])["y"]) == 0
        assert set(hpc.files(world, folder / name).take(wanted)) == {"x", "y"}, name
        assert list(hpc.files(world, folder / name, columns=["y"]).take(wanted)) == ["y"], name
    columns = [folder / "x.npy", folder / "y.npy"]
    both = hpc.files(world, columns=columns).take(wanted)
    assert np.array_equal(both[0], given["x"][wanted])
    assert np.array_equal(both[1], given["y"][wanted])
    named = hpc.files(world, columns={"a": columns[0], "b": columns[1]}).take(wanted)
    assert np.array_equal(named["b"], given["y"][wanted])
    with pytest.raises(ConfigError, match="no column 'q'; it has"):
        hpc.files(world, folder / "a.h5", columns=["q"])
    with pytest.raises(DataError, match=r"nosuch\.npy is missing"):
        hpc.files(world, folder / "nosuch.npy")
    write(world, lambda: os.truncate(folder / "y.npy", 140))
    with pytest.raises(DataError, match=r"y\.npy is truncated"):
        hpc.files(world, columns=columns)
    write(world, lambda: os.truncate(folder / "a.h5", 900))
    with pytest.raises(DataError, match=r"a\.h5 is truncated"):
        hpc.files(world, folder / "a.h5")


def test_several_files_are_rows_or_columns_as_it_is_said(world, folder):
    """Parts of the rows must not become columns, which half of the samples would be lost by."""
    given = arrays()["x"]
    paths = [folder / "p0.npy", folder / "p1.npy"]
    write(world, lambda: [np.save(p, given[k::2][:18]) for k, p in enumerate(paths)])
    both = rf"files\(world, rows=\['{paths[0]}', '{paths[1]}'\]\).*columns=\['{paths[0]}'"
    with pytest.raises(ConfigError, match=both):
        hpc.files(world, *paths)
    with pytest.raises(ConfigError, match=r"share\(world, rows=.*may be parts or columns|one kind"):
        hpc.share(world, *paths)
    rows = np.array([35, 0, 17, 18, 18, 5])
    wanted = np.concatenate([given[::2][:18], given[1::2][:18]])
    for source in (
        hpc.files(world, rows=paths),
        hpc.share(world, rows=paths),
        hpc.share(world, rows=[*map(str, paths)], chunk_bytes=64),
    ):
        assert len(source) == 36
        assert np.array_equal(source.take(rows), wanted[rows])
    for source in (hpc.files(world, columns=paths), hpc.share(world, columns=paths)):
        assert len(source) == 18
        assert np.array_equal(source.take(rows % 18)[1], given[1::2][rows % 18])
    write(world, lambda: np.save(paths[1], given[:5]))
    with pytest.raises(ConfigError, match=r"have \[18, 5\] rows, so they are not columns"):
        hpc.share(world, *paths)
    with pytest.raises(ConfigError, match=r"p1\.npy has 5; .* are rows="):
        hpc.files(world, columns=paths)
    assert len(hpc.files(world, rows=paths)) == 23
    write(world, lambda: np.save(paths[1], np.zeros((4, 7), "f4")))
    with pytest.raises(ConfigError, match=r"p1\.npy has .*7.* must have the same columns"):
        hpc.files(world, rows=paths)
    loader = hpc.Loader(world, hpc.files(world, rows=[paths[0]] * 3), global_batch=8)
    mine = [batch.shape[0] for batch in loader]
    assert world.comm.allreduce(sum(mine)) == 54


@pytest.mark.parametrize("kind", ["npz", "compressed", "pt", "tuple"])
def test_a_folder_of_archives_is_its_rows(world, folder, kind):
    given = arrays()

    def make():
        for number, rows in enumerate(np.array_split(np.arange(ROWS), 12)):
            part = {name: array[rows] for name, array in given.items()}
            path = folder / f"part-{number}"
            if kind in ("npz", "compressed"):
                save = np.savez if kind == "npz" else np.savez_compressed
                save(path.with_suffix(".npz"), **part, note=np.float32(number))
            else:
                tensors = {name: torch.from_numpy(array) for name, array in part.items()}
                content = {**tensors, "epoch": 3} if kind == "pt" else tuple(tensors.values())
                torch.save(content, path.with_suffix(".pt"))
        (folder / "README.md").write_text("twelve parts")

    write(world, make)
    source = hpc.files(world, folder)
    wanted = np.array([36, 0, 5, 4, 4, 20, 11])
    batch = source.take(wanted)
    batch = dict(zip("xy", batch, strict=True)) if kind == "tuple" else batch
    for name, array in given.items():
        assert np.array_equal(batch[name], array[wanted]), name
    loader = hpc.Loader(world, source, global_batch=8)
    mine = [int(i) for b in loader for i in (b[1] if kind == "tuple" else b["y"])]
    assert sorted(sum(world.comm.allgather(mine), [])) == list(range(ROWS))  # noqa: RUF017
    if kind == "tuple":
        with pytest.raises(ConfigError, match="is a tuple of tensors; leave columns= out"):
            hpc.files(world, folder, columns=["y"])
        return
    assert list(hpc.files(world, folder, columns=["y"]).take(wanted)) == ["y"]
    shared = hpc.share(world, folder, columns=["y"])
    assert np.array_equal(shared.data["y"], given["y"])
    copy = write_shards(world, source, folder / "shards", samples_per_shard=9)
    assert copy.num_samples == ROWS


def test_files_that_differ_by_rank_are_refused(world, folder):
    own = folder / f"{world.rank}.npy"
    np.save(own, np.zeros((ROWS, 2), "f4" if world.rank % 2 else "f8"))
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"files: columns \(name, dtype, shape.*float32"):
            hpc.files(world, own)
    np.save(own, np.full((ROWS, 2), world.rank))  # of one form: only their content tells them apart
    source = hpc.files(world, own)
    if world.size > 1:
        with pytest.raises(ConfigError, match=r"ranks? 1.* but not the same ones"):
            hpc.Loader(world, source, global_batch=8)


def as_seen(batch):
    """What `--map` gets is told by what it leaves."""
    kinds = {type(part) for part in batch.values()}
    return {"was_tensor": np.full(len(batch["y"]), kinds == {torch.Tensor})}


def test_a_function_gets_tensors_from_every_kind_of_file(world, folder):
    import h5py

    given = arrays()
    write(world, lambda: np.savez(folder / "a.npz", **given))

    def make():
        with h5py.File(folder / "a.h5", "w") as file:
            file["x"], file["y"] = given["x"], given["y"]

    write(world, make)
    for name in ("a.npz", "a.h5"):
        source = hpc.files(world, folder / name)
        write_shards(world, source, folder / f"of-{name}", samples_per_shard=9, change=as_seen)
        seen = hpc.files(world, folder / f"of-{name}").take(np.arange(ROWS))
        assert np.all(seen["was_tensor"]), name


def test_columns_whose_names_are_alike_keep_their_files_apart(world, folder):
    given = {name: np.full(7, number) for number, name in enumerate(["a b", "column0", "X", "x"])}
    source = hpc.data.ArraySource(given)
    write_shards(world, source, folder / "out", samples_per_shard=7)
    got = hpc.files(world, folder / "out").take(np.arange(7))
    assert {name: int(part[0]) for name, part in got.items()} == {
        "a b": 0,
        "column0": 1,
        "X": 2,
        "x": 3,
    }
    source = hpc.data.ArraySource({1: np.zeros(7), "1": np.ones(7)})
    with pytest.raises(ConfigError, match="not all different as text"):
        write_shards(world, source, folder / "bad", samples_per_shard=7)


def look(shared, answers):
    """In a worker: the same memory, which cannot be written to."""
    try:
        shared.data["x"][0] = 1
        wrote = True
    except ValueError:
        wrote = False
    answers.put((float(shared.take(np.array([5]))["y"][0]), wrote))


def test_one_copy_per_node_is_read_by_all_and_by_workers(world, folder):
    given = arrays()
    root = world.size - 1
    shared = hpc.share(world, given if world.rank == root else None, root=root, chunk_bytes=100)
    assert len(shared) == ROWS
    for name, array in given.items():
        assert np.array_equal(shared.data[name], array)
        assert not shared.data[name].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        shared.data["y"][0] = 3
    batch = shared.take(np.array([3, 1]))
    assert batch["y"].tolist() == [3, 1]
    batch["y"][0] = 9  # the batch belongs to the caller
    assert shared.data["y"][3] == 3
    if world.rank == 0:
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        worker = context.Process(target=look, args=(shared, answers))
        worker.start()
        assert answers.get(timeout=60) == (5.0, False)
        worker.join(60)
        answers.close()
        answers.join_thread()
    world.comm.Barrier()


def test_share_reads_files_in_stripes(world, folder):
    given = arrays()
    write(world, lambda: [np.save(folder / f"{k}.npy", v) for k, v in given.items()])
    shared = hpc.share(world, str(folder / "x.npy"), folder / "y.npy", chunk_bytes=64)
    assert np.array_equal(shared.data[0], given["x"])
    assert np.array_equal(shared.data[1], given["y"])
    with pytest.raises(DataError, match=r"z\.npy is missing"):
        hpc.share(world, folder / "z.npy")
    with pytest.raises(ConfigError, match="bfloat16"):
        hpc.share(world, torch.zeros(3, dtype=torch.bfloat16) if world.rank == 0 else None)
    with pytest.raises(ConfigError, match="no data on root=0"):
        hpc.share(world, None)
    with pytest.raises(ConfigError, match="is a list"):
        hpc.share(world, [1, 2] if world.rank == 0 else None)


def test_staging_where_every_task_has_a_temporary_folder_of_its_own(world, folder, monkeypatch):
    (folder / f"tmp-{world.rank}").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / f"tmp-{world.rank}"))
    write(world, lambda: (folder / "a.bin").write_bytes(b"abc"))
    copy = hpc.stage(world, folder / "a.bin")
    assert copy.read_bytes() == b"abc"
    assert len(set(world.node.allgather(copy))) == 1
    write(world, lambda: (folder / "a.bin").write_bytes(b"abcd"))
    if world.size > 1:  # the last rank does not see what the node's first rank made
        sees = pathlib_exists_but_for(copy.parent.parent) if world.rank == world.size - 1 else None
        if sees is not None:
            monkeypatch.setattr(Path, "exists", sees)
        with pytest.raises(DataError, match=rf"rank {world.size - 1} of .*not visible here"):
            hpc.stage(world, folder / "a.bin")
        monkeypatch.undo()


def pathlib_exists_but_for(folder):
    """As on a node whose ranks have each a mount of their own."""
    really = Path.exists
    return lambda path: really(path) and folder not in path.parents


def test_staging_copies_once_and_again_after_a_change(world, folder, capfd):
    if world.num_nodes > 1:
        pytest.skip("nodes that are namespaces have one disk between them")
    source, disk = folder / "set", folder / "disk"

    def make():
        (source / "deep").mkdir(parents=True)
        (source / "a.bin").write_bytes(b"abc" * 1000)
        (source / "deep" / "b.bin").write_bytes(b"")

    write(world, make)
    first = hpc.stage(world, source, to=disk)
    assert (first / "a.bin").read_bytes() == b"abc" * 1000
    assert (first / "deep" / "b.bin").exists()
    capfd.readouterr()
    assert hpc.stage(world, source, to=disk) == first
    if world.rank == 0:
        assert "exists already" in capfd.readouterr().err
    world.comm.Barrier()
    write(world, lambda: os.truncate(first / "a.bin", 5))  # damaged on the node
    assert hpc.stage(world, source, to=disk) == first
    assert (first / "a.bin").stat().st_size == 3000
    world.comm.Barrier()
    write(world, lambda: (source / "a.bin").write_bytes(b"new"))
    second = hpc.stage(world, source / "a.bin", to=disk)
    assert second.read_bytes() == b"new"
    third = hpc.stage(world, source, to=disk)
    assert third != first
    assert (third / "a.bin").read_bytes() == b"new"
    with pytest.raises(DataError, match="nosuch is missing"):
        hpc.stage(world, folder / "nosuch", to=disk)
    world.comm.Barrier()
    left = sorted(path.name for path in (disk / f"hpctrain-staged-{os.getuid()}").iterdir())
    assert not [name for name in left if name.startswith(".")]
