"""Which files a data set consists of, and files that are none, without ranks."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli import main
from hpctrain.data.storage import name_files, open_named, open_path
from hpctrain.data.storage.formats import open_npz, open_pt
from hpctrain.data.storage.opening import Named, RowParts, find_parts, name_columns
from hpctrain.errors import ConfigError, DataError


def test_what_is_said_of_files_means_one_thing():
    a, b = Path("a.npy"), Path("b.npy")
    assert name_files("files", ["a.npy"]) == Named((a,))
    assert name_files("files", ["a.h5"], None, ["x"]) == Named((Path("a.h5"),), None, ("x",))
    assert name_files("files", [], ["a.npy", b]) == Named((a, b), "rows")
    assert name_files("files", [], [a, b], ["x"]) == Named((a, b), "rows", ("x",))
    assert name_files("files", [], None, [a, b]) == Named((a, b), "columns")
    assert name_files("files", [], None, {"x": a}) == Named((a,), "columns", ("x",))


@pytest.mark.parametrize(
    ("paths", "rows", "columns", "message"),
    [
        (["a", "b"], None, None, r"files\(world, rows=\['a', 'b'\]\).*columns=\['a', 'b'\]\)"),
        (["a", "b", "c"], None, None, r"rows=\['a', 'b', \.\.\.\]"),
        (["a", "b"], None, ["x"], "can be parts of the rows or columns"),
        (["a"], ["b"], None, "name all files in rows="),
        (["a"], None, {"x": "b"}, "a dict names files"),
        ([], "a.npy", None, r"rows='a\.npy' must be a list, as in rows=\['a\.npy'\]"),
        (["a"], None, "x", "columns='x' must be a list"),
        ([], "p*.npy", None, r"as in rows=sorted\(glob\.glob\('p\*\.npy'\)\)$"),
        ([], None, Path("p?.npy"), r"as in columns=sorted\(glob\.glob\('p\?\.npy'\)\)$"),
        ([["a", "b"]], None, None, r"given as one list; write files\(world, rows=\['a', 'b'\]\)"),
        ([("a",)], None, ["x"], r"given as one list; write files\(world, rows=\['a'\]\)"),
        ([3], None, None, "files: 3 is of type int, and must be the path of a file"),
        ([], ["a", None], None, "None is of type NoneType"),
        ([], None, {"x": np.zeros(2)}, "is of type ndarray"),
        ([], [], None, "rows= is empty"),
        ([], None, None, "got no file"),
    ],
)
def test_what_can_mean_two_things_is_refused(paths, rows, columns, message):
    with pytest.raises(ConfigError, match=message):
        name_files("files", paths, rows, columns)


def test_a_pattern_that_was_not_expanded_is_named(tmp_path):
    np.save(tmp_path / "p0.npy", np.zeros(5))
    for named in (Named((tmp_path / "p*.npy",)), Named((tmp_path / "p*.npy",), "rows")):
        with pytest.raises(DataError, match=r"not expanded here: write rows=sorted\(glob\.glob\("):
            open_named(named)
    odd = tmp_path / "p[1].npy"  # a name, not a pattern
    np.save(odd, np.zeros(5))
    assert len(open_named(Named((odd,)))) == 5


def test_columns_without_being_said_only_where_they_cannot_be_parts(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 3), "f4"))
    np.save(tmp_path / "y.npy", np.zeros(5, "i8"))
    np.save(tmp_path / "z.npy", np.zeros((5, 3), "f4"))
    x, y, z = (tmp_path / f"{name}.npy" for name in "xyz")
    assert name_columns("share", [x, y]) == Named((x, y), "columns")
    with pytest.raises(ConfigError, match=r"hold samples of one kind \(float32, \(3,\)\)"):
        name_columns("share", [x, z])
    np.save(z, np.zeros((4, 3), "f8"))
    with pytest.raises(ConfigError, match=r"have \[5, 4\] rows"):
        name_columns("share", [x, z])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_rows_of_parts_are_those_of_the_whole(lengths, data):
    arrays = {Path(str(k)): np.full(n, k) * 100 + np.arange(n) for k, n in enumerate(lengths)}
    whole = np.concatenate(list(arrays.values()))

    class Part:
        def __init__(self, path):
            self.array = arrays[path]

        def __len__(self):
            return len(self.array)

        def take(self, rows):
            return {"n": self.array[rows], "t": (torch.from_numpy(self.array[rows]),)}

    source = RowParts(list(arrays), Part)
    assert len(source) == len(whole)
    places = st.lists(st.integers(0, max(0, len(whole) - 1)), max_size=9 if len(whole) else 0)
    rows = np.array(data.draw(places), np.int64)
    batch = source.take(rows)
    assert batch["n"].tolist() == batch["t"][0].tolist() == whole[rows].tolist()
    with pytest.raises(ConfigError, match="are not all from 0 to"):
        source.take(np.array([len(whole)]))


def test_parts_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("part-10.pt", "part-2.pth", "part-1.pt", "note.txt", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_parts(tmp_path)] == ["part-1.pt", "part-2.pth", "part-10.pt"]
    (tmp_path / "a.npz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"\.npz and \.pt files"):
        find_parts(tmp_path)


def test_archives_are_mapped_where_they_are_not_compressed(tmp_path):
    given_arrays = {
        "x": np.arange(12.0).reshape(4, 3),
        "fortran": np.asfortranarray(np.arange(12).reshape(4, 3)),
        "odd": np.arange(4, dtype="u1"),
        "text": np.array(["a", "bcd", "", "e"]),
        "records": np.zeros(4, [("a", "<i4"), ("b", "<f8")]),
        "none": np.zeros((0, 3)),
        "one": np.float32(3),
    }
    for save, mapped in ((np.savez, True), (np.savez_compressed, False)):
        save(tmp_path / "a.npz", **given_arrays)
        found = open_npz(tmp_path / "a.npz")
        assert list(found) == list(given_arrays)
        for name, array in given_arrays.items():
            assert np.array_equal(found[name], array), name
            assert found[name].dtype == array.dtype
        assert isinstance(found["x"].base, np.memmap) == mapped
        if mapped:
            with pytest.raises(ValueError, match="read-only"):
                found["x"][0] = 1


def test_archives_that_are_none_are_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros(100))
    os.truncate(path, 300)
    with pytest.raises(DataError, match="is truncated, or its format does not match its name"):
        open_npz(path)
    np.savez(path, x=np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match="holds Python objects, which are not loaded"):
        open_npz(path)
    with zipfile.ZipFile(path, "w") as archive:  # a member that says more than it has
        header = (
            struct.pack("<H", 118)
            + f"{{'descr': '<f8', 'fortran_order': False, 'shape': {(10**6,)}}}".ljust(117).encode()
            + b"\n"
        )
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + header + b"12345678")
    with pytest.raises(DataError, match="is truncated"):
        open_npz(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is truncated, or its format does not match its name"):
        open_npz(path)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def test_tensors_are_loaded_without_running_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    torch.save({"x": torch.zeros(3), "y": Malicious()}, path)
    with pytest.raises(DataError, match="loading them runs code"):
        open_pt(path)
    path.write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(DataError, match="loading them runs code"):
        open_pt(path)
    assert not (tmp_path / "made-by-a-pickle").exists()
    for content in ([torch.zeros(3)], {"epoch": 3}, "text", (), (torch.zeros(3), 4)):
        torch.save(content, path)
        with pytest.raises(DataError, match="is not a table of samples; save a tensor, or a dict"):
            open_pt(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"a\.pt is truncated, or its format does not match"):
        open_pt(path)
    with pytest.raises(DataError, match="is missing"):
        open_path(tmp_path / "nosuch.pt")


def test_tensors_of_old_and_new_files(tmp_path):
    x = torch.arange(12).reshape(4, 3).bfloat16()
    for new in (True, False):
        torch.save(
            {"x": x, "y": torch.arange(4)}, tmp_path / "a.pt", _use_new_zipfile_serialization=new
        )
        batch = open_path(tmp_path / "a.pt").take(np.array([3, 0]))
        assert torch.equal(batch["x"], x[[3, 0]])
        assert list(open_path(tmp_path / "a.pt", columns=["y"]).take(np.array([1]))) == ["y"]
    torch.save(x, tmp_path / "x.pt")
    np.save(tmp_path / "y.npy", np.arange(4))
    pair = open_named(name_files("files", [], None, [tmp_path / "x.pt", tmp_path / "y.npy"]))
    assert pair.take(np.array([2]))[1].tolist() == [2]
    with pytest.raises(ConfigError, match="takes files with one array each"):
        open_named(name_files("files", [], None, [tmp_path / "a.pt", tmp_path / "y.npy"]))


def test_a_folder_that_is_no_data_set_says_what_to_do_with_what_is_in_it(tmp_path):
    with pytest.raises(DataError, match=r"no \.npz or \.pt files.*hpctrain data shard FILE --to"):
        open_path(tmp_path)
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / name, np.zeros(3))
    with pytest.raises(DataError, match=r"rows=\[.*a\.npy', .*b\.npy'\] or columns=\["):
        open_path(tmp_path)


def test_several_files_on_the_command_line_need_a_word(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("p0.npz", x=np.zeros((5, 2)))
    np.savez("p1.npz", x=np.ones((4, 2)))
    assert main(["data", "inspect", str(tmp_path)]) == 0
    assert "parts, 9 samples" in capsys.readouterr().out
    torch.save({"x": torch.zeros(3, 2)}, "a.pt")
    assert main(["data", "inspect", "a.pt"]) == 0
    assert "pt, 3 samples" in capsys.readouterr().out
