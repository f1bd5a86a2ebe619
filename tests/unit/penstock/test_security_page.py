"""What docs/security.md says nobody can do is shown by tests that exist, and its routes are those that are served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_tests_are_named():
    assert len(NAMED) >= 25


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path, name):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_cannot_names_a_test():
    section = PAGE.partition("## What an attacker can and cannot do")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and not line.startswith(("| cannot", "|---"))]
    assert rows
    assert [row for row in rows if "`tests/" not in row] == []
