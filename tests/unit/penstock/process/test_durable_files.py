"""A file is replaced whole or left as it was."""

import errno
import os

import pytest

from penstock.process import durable_files
from penstock.process.durable_files import replace_file


def test_a_file_is_replaced_with_the_permissions_asked_for(tmp_path):
    path = tmp_path / "kept.json"
    replace_file(path, "old", mode=0o600)
    replace_file(path, "new", mode=0o600)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]


def test_a_disk_that_refuses_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    replace_file(path, "old")

    def refuse(_descriptor):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(durable_files.os, "fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["kept.json"]
