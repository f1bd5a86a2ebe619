"""The order of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG_FILES, by_turns


@pytest.mark.parametrize("name", LONG_FILES)
def test_a_file_that_begins_early_is_there(name: str) -> None:
    assert (Path(__file__).parents[1] / name).is_file()


def test_files_that_compute_run_beside_those_that_wait() -> None:
    tests = Path(__file__).parents[1]
    contract, unit = (
        [tests / kind / f"test_{n}.py" for n in range(num)] for kind, num in (("contract", 2), ("unit", 4))
    )
    assert by_turns([*contract, *unit]) == [contract[0], unit[0], unit[1], contract[1], unit[2], unit[3]]
