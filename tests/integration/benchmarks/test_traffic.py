"""The bytes that a trainer's processes really exchange, next to the formula that the planner charges."""

from __future__ import annotations

import json

import pytest

from benchmarks.trainer import traffic


@pytest.mark.grid
@pytest.mark.timeout(180)
@pytest.mark.skipif(not traffic.has_own_network(), reason="needs unshare, ip and the right to a network namespace")
def test_what_is_counted_is_what_the_formula_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert traffic.main(["--quick", "--processes", "2", "--dtypes", "bfloat16", "--json"]) == 0
    (trainer,) = json.loads(capsys.readouterr().out)["trainers"]
    counted, formula = trainer["counted"], trainer["formula"]
    # So small a model that headers and calls show.
    assert 1.0 <= counted["score"] / formula["score"] < 1.2
    # Gloo adds gradients up by an all-reduce, which sends them twice: 2 bytes gathered twice, and 4 bytes twice.
    assert 1.45 <= counted["train"] / formula["train"] < 1.65
