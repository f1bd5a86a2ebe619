"""Held-out rows that changed since a checkpoint are warned of, since accuracy is then of other rows."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from services.trainer.data.row_digests import warn_of_held_out

FORMER, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("saved", "now", "fields"),
    [
        ({"": FORMER}, {"": FORMER}, []),
        ({"": FORMER}, {"": OTHER}, ["data.eval"]),
        ({"easy": FORMER, "hard": FORMER}, {"easy": FORMER, "hard": OTHER}, ["data.eval (hard)"]),
        # A source more, or one fewer, has no accuracy before or after that could be compared.
        ({"easy": FORMER}, {"hard": OTHER}, []),
    ],
)
def test_changed_held_out_rows_are_named(saved: dict[str, str], now: dict[str, str], fields: list[str]) -> None:
    with capture_logs() as logs:
        warn_of_held_out(json.dumps(saved), now)
    assert [line["field"] for line in logs] == fields
    assert all(line["log_level"] == "warning" for line in logs)


@pytest.mark.parametrize("saved", [None, "", "[1]", "{", "null"])
def test_a_checkpoint_that_says_nothing_of_them_is_resumed(saved: str | None) -> None:
    with capture_logs() as logs:
        warn_of_held_out(saved, {"": OTHER})
    assert logs == []
