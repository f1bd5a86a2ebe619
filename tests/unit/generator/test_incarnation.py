"""A process says whose place it takes only when that one has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.generator import incarnation
from services.generator.incarnation import Incarnation


def test_a_predecessor_is_named_once_it_has_ended_and_a_twin_is_none(tmp_path: Path) -> None:
    first = Incarnation("gen-0", tmp_path / "cache")
    first.begin()
    assert (first.predecessor, first.generator_id.startswith("gen-0-")) == ("", True)
    twin = Incarnation("gen-0", tmp_path / "cache")
    twin.begin()
    assert twin.predecessor == ""
    # As the system does with a process that is killed.
    first.end()
    second = Incarnation("gen-0", tmp_path / "cache")
    second.begin()
    assert second.predecessor == first.generator_id
    second.end()
    third = Incarnation("gen-0", tmp_path / "cache")
    third.begin()
    assert third.predecessor == second.generator_id
    third.end()


def test_without_a_folder_no_predecessor_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    alone = Incarnation("gen-0", tmp_path / "file" / "cache")
    alone.begin()
    alone.end()
    assert alone.predecessor == ""


def test_a_process_of_another_machine_is_never_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Incarnation("gen-0", tmp_path)
    there.begin()
    # A shared folder whose locks each machine keeps for itself: the lock is free here, and its holder lives.
    there.end()
    monkeypatch.setattr(incarnation, "_BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another kernel\n")
    here = Incarnation("gen-0", tmp_path)
    here.begin()
    assert here.predecessor == ""
    here.end()
    successor = Incarnation("gen-0", tmp_path)
    successor.begin()
    assert successor.predecessor == here.generator_id
    successor.end()
