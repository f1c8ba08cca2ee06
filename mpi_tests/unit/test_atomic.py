"""Files that are complete or not there."""

from __future__ import annotations

import pytest

from hpctrain.atomic import replacing, write_atomically


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("content", ["text with \u00e4", b"\x00\x01"])
def test_the_new_one_takes_the_place_of_the_old_one(tmp_path, sync, content):
    path = tmp_path / "file"
    path.write_text("old")
    write_atomically(path, content, sync=sync)
    expected = content.encode() if isinstance(content, str) else content
    assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_one_stays_if_asked_for(tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        write_atomically(path, text, replace=False)
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_one_stays_if_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with replacing(path) as draft:
            draft.write_text("half of")
            assert path.read_text() == "old"
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
