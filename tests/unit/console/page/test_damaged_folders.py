"""A run folder whose files are cut anywhere, garbled or hold numbers that are none: every question is answered."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from console.config.run_folder import ProcessRecord, RunFolder
from console.page.files.values import BadQuestionError
from console.page.run_data import RunData
from tests.helpers.page.real_server import told_run

WORDS = (b"NaN", b"Infinity", b"-1e999", b"null", b'"x"', b"[]", b"{}", b"9" * 400)
QUESTIONS = ("series", "metrics", "samples", "lanes", "problems", "cost", "weights")


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, bytes]:
    """The files of a run by their names in its folder."""
    folder = told_run(tmp_path / "sound").folder
    folder.services.mkdir(exist_ok=True)
    folder.write_record(ProcessRecord(name="trainer", pid=1, started_ticks=1, state="paused", since_s=1.0))
    gaps = {"policy_version": 3, "history": 0, "group_id": "g3", "gaps": {"0": "AAAAAA=="}}
    (folder.path / "logprob_gaps.jsonl").write_text(json.dumps(gaps) + "\n")
    summary = {"audit": {"dropped": {"stale": 2}}, "refused_chunks": {"gen-0": {"STALE": 1}}, "restarts": {"reward": 1}}
    folder.summary.write_text(json.dumps(summary))
    plan = {"revision": "1", "expected_tokens_per_second": 5.0, "next_purchases": [{"gain": 0.1, "num_gpus": 1}]}
    folder.plans.write_text(json.dumps(plan) + "\n")
    folder.devices.write_text(json.dumps({"site": "", "gpus": {"H100": 1}}))
    files = (path for path in folder.path.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in files}


def damaged(content: bytes, draw: random.Random) -> bytes | None:
    """Cut, with other values, with other bytes, gone, or as it was."""
    how = draw.choice(("cut", "values", "bytes", "gone", "sound"))
    if how == "cut":
        return content[: draw.randrange(len(content) + 1)]
    for _ in range(8) if how == "values" else ():
        begin = content.find(b":", draw.randrange(len(content) + 1)) + 1
        end = content.find(b",", begin)
        if 0 < begin < end:
            content = content[:begin] + draw.choice(WORDS) + content[end:]
    garbled = bytearray(content)
    for _ in range(8) if how == "bytes" and content else ():
        garbled[draw.randrange(len(garbled))] = draw.randrange(256)
    return None if how == "gone" else bytes(garbled)


def answers(data: RunData) -> Iterator[object]:
    """All that the page would ask."""
    yield data.facts()
    for what in QUESTIONS:
        yield data.answer(what, {})
    for sort in ("changed", "longest"):
        for each in data.answer("samples", {"sort": sort})["samples"][:3]:
            yield data.answer("lanes", {"sample": each["key"]})
            with suppress(BadQuestionError):
                yield data.answer("sample", {"step": str(each["step"]), "key": each["key"]})


def test_every_question_is_answered_whatever_the_files_hold(tmp_path: Path, sound: dict[str, bytes]) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        folder = RunFolder(tmp_path / str(seed))
        folder.create()
        for name, content in sound.items():
            if (left := damaged(content, draw)) is not None:
                (folder.path / name).write_bytes(left)
        for answer in answers(RunData(folder)):
            json.dumps(answer, allow_nan=False)
