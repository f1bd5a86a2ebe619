"""The order of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG_FILES


@pytest.mark.parametrize("name", LONG_FILES)
def test_a_file_that_begins_early_is_there(name: str) -> None:
    assert (Path(__file__).parents[1] / name).is_file()
