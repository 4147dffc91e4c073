# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, with the permissions that were asked for."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from tfdist import _files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: pathlib.Path):
    target = tmp_path / "profile.json"
    _files.write(target, "old")
    with pytest.raises(RuntimeError, match="the disk is full"), _files.opened(target) as file:
        file.write(b"ne")
        raise RuntimeError("the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("name", ["absent/a.json", "folder"])
def test_error_of_a_file_that_cannot_be_written_names_it(tmp_path: pathlib.Path, name: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=f"{name}'$"):
        _files.write(tmp_path / name, "x")
    with pytest.raises(
        OSError, match=f"^--json: the file can't be written .*; give .* Received: --json={tmp_path / name}$"
    ):
        _files.check_writable(tmp_path / name, "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_links_are_followed_and_what_is_no_file_is_written_at_once(tmp_path: pathlib.Path):
    (tmp_path / "link").symlink_to("real")
    _files.write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "x"
    reader, writer = os.pipe()
    _files.write(f"/dev/fd/{writer}", "y")
    os.close(writer)
    assert os.read(reader, 2) == b"y"
    os.close(reader)
    os.mkfifo(tmp_path / "pipe")
    _files.check_writable(tmp_path / "pipe", "--json")
    with (tmp_path / "real").open("ab") as file:
        _files.write(f"/dev/fd/{file.fileno()}", "z")
    assert (tmp_path / "real").read_text() == "xz"
    _files.write("/dev/stderr", "")


@pytest.mark.parametrize(("permissions", "expected"), [(None, 0o640), (0o644, 0o644)])
def test_a_new_file_has_permissions_by_umask_or_as_given(tmp_path: pathlib.Path, permissions, expected):
    before = os.umask(0o027)
    try:
        _files.write(tmp_path / "new", "x", permissions)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == expected
