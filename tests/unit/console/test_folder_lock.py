"""What a console says that finds the folder of its run locked."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from console.config import folder_lock
from console.config.folder_lock import LOCK_NAME, locked
from penstock.config import ConfigError


def test_a_holder_that_has_not_named_itself_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LOCK_NAME

    def name_it(_seconds: float) -> None:
        path.write_text('{"pid": 7, "host": "there"}', encoding="utf-8")

    monkeypatch.setattr(folder_lock.time, "sleep", name_it)
    with path.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"under way \(process 7 on there\); stop it first"), locked(tmp_path):
            pass


def test_only_who_holds_the_lock_is_named_in_it(tmp_path: Path) -> None:
    here = rf"under way \(process {os.getpid()} on {socket.gethostname()}\)"
    with locked(tmp_path), pytest.raises(ConfigError, match=here), locked(tmp_path):
        pass
    assert not (tmp_path / LOCK_NAME).read_text(encoding="utf-8")
