"""What a console keeps of a run whose trainer writes its files elsewhere, or here."""

import errno
import json
from pathlib import Path

import pytest

from console.config.run_folder import RunFolder
from console.view.outcome import keep_results
from console.view.run_view import Step
from penstock.v1 import trainer_pb2


def steps(*versions, reward):
    return {
        v: Step(version=v, time_s=100.0 + v, metrics={"policy_version": float(v), "reward": reward}) for v in versions
    }


def lines_of(folder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_a_resumed_run_replaces_the_summary_and_the_steps_that_were_taken_again(folder):
    keep_results(folder, trainer_pb2.RunFinished(summary_json='{"steps": 3}'), steps(1, 2, 3, reward=0.25))
    keep_results(folder, trainer_pb2.RunFinished(summary_json='{"steps": 5}'), steps(3, 4, 5, reward=0.5))

    assert json.loads(folder.summary.read_text()) == {"steps": 5}
    rewards = [(line["policy_version"], line["reward"]) for line in lines_of(folder)]
    assert rewards == [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)]


def test_what_a_trainer_wrote_here_itself_stays_as_it_is(folder):
    text = "".join(json.dumps({"policy_version": v, "reward": 0.5, "time": 7.0}) + "\n" for v in (1, 2, 3))
    folder.metrics.write_text(text)

    keep_results(folder, trainer_pb2.RunFinished(summary_json="{}"), steps(3, reward=0.5))

    assert folder.metrics.read_text() == text


def test_steps_that_cannot_be_read_are_not_replaced(folder, monkeypatch):
    keep_results(folder, trainer_pb2.RunFinished(), steps(1, 2, reward=0.25))
    before = folder.metrics.read_text()

    def refuse(*_args, **_options):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            keep_results(folder, trainer_pb2.RunFinished(), steps(3, reward=0.5))

    assert folder.metrics.read_text() == before
