"""`penstock audit` on what a run left: the equation, the tables, the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from console.inspect.audit_report import audit_command
from console.view.outcome import loss_by_length
from penstock.config import ConfigError
from penstock.v1 import broker_pb2
from penstock.wire.audit_json import audit_document
from tests.helpers.console import document, write_document

BOOKS = broker_pb2.Audit(
    submitted=200,
    trained=150,
    dropped={"stale": 30, "zero_variance": 10},
    in_flight=10,
    balanced=True,
    rows=[
        broker_pb2.AuditRow(submit_version=3, max_tokens=0, in_flight=10),
        broker_pb2.AuditRow(submit_version=3, max_tokens=64, trained=120, dropped={"zero_variance": 10}),
        broker_pb2.AuditRow(submit_version=4, max_tokens=256, trained=30, dropped={"stale": 30}),
    ],
    submitted_by_version=[
        broker_pb2.SubmittedRow(submit_version=3, submitted=140),
        broker_pb2.SubmittedRow(submit_version=4, submitted=60),
    ],
)


def _folder(tmp_path: Path, audit: dict[str, Any] | None) -> Path:
    """The folder of a run that ended."""
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    write_document(folder, document(tmp_path))
    (folder / "summary.json").write_text(json.dumps({"audit": audit, "max_staleness_seen": 1, "steps": 5}))
    return folder


def _lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def _audit(folder: Path, *, by_version: bool = False, as_json: bool = False) -> int:
    return audit_command(str(folder), broker=None, runs_dir=folder.parent, by_version=by_version, as_json=as_json)


def test_shares_of_trained_and_dropped_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _audit(_folder(tmp_path, dict(audit_document(BOOKS)))) == 0
    first, second, bias, heading, *rows = _lines(capsys)
    assert " ".join(bias) == "lost by length: 50 % of samples over 128 tokens, 8 % of shorter ones"
    assert " ".join(first) == (
        "audit: submitted 200 = trained 150 + dropped 40 (stale 30, zero_variance 10) + in flight 10: balanced"
    )
    assert " ".join(second) == "staleness at most 1, policy version 5"
    assert heading[-4:] == ["stale", "zero_variance", "in", "flight"]
    assert rows == [
        ["0", "0", "0.0", "0", "0.0", "-", "0", "0", "10"],
        ["33-64", "120", "80.0", "10", "25.0", "7.7", "0", "10", "0"],
        ["129-256", "30", "20.0", "30", "75.0", "50.0", "30", "0", "0"],
    ]


def test_a_version_that_does_not_balance_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = broker_pb2.Audit()
    books.CopyFrom(BOOKS)
    books.submitted_by_version[1].submitted = 61
    books.balanced = False
    assert _audit(_folder(tmp_path, dict(audit_document(books))), by_version=True) == 1
    first, _second, _bias, _heading, *rows = _lines(capsys)
    assert first[-2:] == ["NOT", "BALANCED"]
    assert rows == [["3", "140", "120", "0", "10", "10", "yes"], ["4", "61", "30", "30", "0", "0", "NO"]]


def test_agents_sessions_stand_beside_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    books = broker_pb2.Audit()
    books.CopyFrom(BOOKS)
    books.sessions.CopyFrom(broker_pb2.SessionAudit(opened=9, put=5, dropped={"idle": 1, "expired": 2}, open=1))
    assert _audit(_folder(tmp_path, dict(audit_document(books)))) == 0
    said = "agents' sessions: 9 opened = 5 put + 3 dropped (expired 2, idle 1) + 1 open"
    assert " ".join(_lines(capsys)[1]) == said


def test_json_is_the_whole_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _audit(_folder(tmp_path, dict(audit_document(BOOKS))), as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == audit_document(BOOKS)


def test_books_without_rows_are_their_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    totals = {"submitted": 8, "trained": 8, "dropped": {}, "in_flight": 0, "balanced": True}
    assert _audit(_folder(tmp_path, totals)) == 0
    assert len(_lines(capsys)) == 2


def _row(max_tokens: int, trained: int, lost: int) -> dict[str, Any]:
    dropped = {"stale": lost} if lost else {}
    return {"submit_version": 0, "max_tokens": max_tokens, "trained": trained, "dropped": dropped, "in_flight": 0}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], None),
        ([_row(64, 9, 0), _row(128, 9, 0)], None),
        ([_row(64, 9, 3)], None),
        ([_row(0, 0, 50), _row(64, 90, 10), _row(128, 15, 5)], "25 % of samples over 64 tokens, 10 % of shorter ones"),
        (
            [_row(64, 90, 0), _row(128, 18, 0), _row(256, 0, 6), _row(512, 0, 6)],
            "40 % of samples over 64 tokens, 0 % of shorter ones",
        ),
    ],
)
def test_the_longest_fifth_is_set_beside_the_rest(rows: list[dict[str, Any]], words: str | None) -> None:
    found = loss_by_length({"rows": rows})
    assert found == (f"lost by length: {words}" if words else None)


def test_a_run_that_left_no_counters_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it left no counters"):
        _audit(_folder(tmp_path, None))
