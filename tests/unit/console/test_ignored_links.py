"""What git leaves out by name it leaves out as a link too: runs on another disk, an environment that is shared."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.helpers.console import ROOT

NAMES = ("runs", "node_modules", "mutants", ".venv", "build", ".hypothesis", ".penstock")


def test_a_link_in_place_of_an_ignored_folder_is_ignored(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (tmp_path / "elsewhere").mkdir()
    for name in NAMES:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    found = subprocess.run(
        ["git", "-C", str(tmp_path), "status", "--porcelain"], check=True, capture_output=True, text=True
    ).stdout
    assert found.splitlines() == ["?? .gitignore"]
