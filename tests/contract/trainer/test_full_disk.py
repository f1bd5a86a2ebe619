"""A disk that is full for a while: the run ends by name, leaves nothing half written, and is resumed."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from penstock.v1 import trainer_pb2
from services.trainer.checkpoints import checkpoint, rank_files
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.metrics import JsonLines
from services.trainer.run import training_run as run_module
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.full_disk import largest_file
from tests.helpers.serving import serving
from tests.helpers.trainers.training import run_alone, run_document
from tests.helpers.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_STEPS = 4
FULL_AT_STEP = 3
SMALLER_THAN_WEIGHTS = 100_000


def outcome_of(run_dir: Path) -> tuple[str, str]:
    summary = json.loads((run_dir / "summary.json").read_text())
    return summary["outcome"], summary["message"]


def is_of_the_publication(path: Path, _parts: object, **_details: object) -> bool:
    return path.name.startswith(f"v{FULL_AT_STEP}-")


def is_of_the_checkpoint(_path: Path, state: checkpoint.ResumeState) -> bool:
    return state.num_steps == 2


def is_of_the_metrics(lines: JsonLines, text: str) -> bool:
    """Once: a moment later, with the run's last checkpoint, the disk takes the line."""
    line = json.loads(text)
    is_it = "reward/mean" in line and line["policy_version"] == FULL_AT_STEP and not hasattr(lines, "was_refused")
    if is_it:
        lines.was_refused = True
    return is_it


@pytest.mark.parametrize(
    ("owner", "name", "is_it"),
    [
        pytest.param(rank_files, "write_together", is_of_the_publication, id="publication"),
        pytest.param(checkpoint, "_write_state", is_of_the_checkpoint, id="checkpoint"),
        pytest.param(JsonLines, "_write", is_of_the_metrics, id="metrics"),
    ],
)
async def test_a_disk_that_is_full_at_one_moment_costs_no_sample(
    tmp_path, model, monkeypatch, owner, name, is_it
) -> None:
    document = run_document(tmp_path, model, "", num_steps=NUM_STEPS, checkpoint_every_steps=2, num_eval_prompts=0)
    original = getattr(owner, name)

    def refused(*args, **kwargs):
        if not is_it(*args, **kwargs):
            return original(*args, **kwargs)
        if owner is rank_files:
            # The kernel refuses it, and large files of other threads with it; small ones would take the log along.
            with largest_file(SMALLER_THAN_WEIGHTS):
                return original(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    broker = ScriptedTrainingBroker()
    async with serving(broker.service()) as (_, target):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refused)
            run_dir = await run_alone(document | {"broker": target})
        outcome, message = outcome_of(run_dir)
        assert outcome == "failed"
        assert message.startswith(f"{run_dir}: the disk is full: "), message
        assert f"penstock run --resume {run_dir}" in message
        assert len(message.splitlines()) == 1
        # A publication that was under way goes on in its thread.
        await until(lambda: not list(run_dir.rglob("*.tmp")), timeout_s=30)
        assert all(checkpoint.is_complete(path) for path in (run_dir / "checkpoints").glob("step_*"))
        assert not broker.is_closed
        await run_alone(document | {"broker": target}, resume=True)
    assert outcome_of(run_dir) == ("completed", "")
    steps = [line["policy_version"] for line in JsonLines(run_dir / "metrics.jsonl").read()]
    assert steps == list(range(1, NUM_STEPS + 1))
    books = broker.books()
    assert (books.submitted, books.trained, books.in_flight, books.balanced) == (32, 32, 0, True)


async def test_a_log_that_takes_no_more_hides_no_end_of_a_run(tmp_path, model, monkeypatch) -> None:
    class FullLog:
        def __getattr__(self, _level):
            return self._refuse

        def _refuse(self, *_words, **_facts):
            raise OSError(errno.ENOSPC, "No space left on device")

    ended = []
    original = RunEvents.finish
    monkeypatch.setattr(run_module, "_log", FullLog())
    monkeypatch.setattr(
        RunEvents, "finish", lambda self, outcome, **told: (ended.append(outcome), original(self, outcome, **told))
    )
    with pytest.raises(OSError, match="No space left"):
        await run_alone(run_document(tmp_path, model, "127.0.0.1:1", num_steps=1))
    assert ended == [trainer_pb2.RUN_OUTCOME_FAILED]
