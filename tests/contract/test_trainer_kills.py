"""kill -9 of a trainer: what is trained, and the curves, are those of a run that nobody killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.v1 import trainer_pb2
from tests.helpers.dying_trainer import MOMENTS
from tests.helpers.scripted_training_broker import ScriptedTrainingBroker
from tests.helpers.serving import serving
from tests.helpers.training import run_document, running_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 5


class OrderedBroker(ScriptedTrainingBroker):
    """Hands out in the order of submission, also what it hands out again: every run sees the same data."""

    def _next(self, hello, room):
        self.ready.sort(key=list(self.prompts).index)
        return super()._next(hello, room)


def document_of(folder: Path, model: Path, target: str, num_minibatches: int) -> dict:
    folder.mkdir()
    document = run_document(
        folder, model, target, num_steps=NUM_STEPS, checkpoint_every_steps=1, num_eval_prompts=0, keep_checkpoints=9
    )
    document["algorithm"]["num_minibatches"] = num_minibatches
    return document


async def run_to_its_end(document: dict, *, resume: bool) -> list[dict]:
    """What metrics.jsonl says of each step."""
    async with running_trainer() as trainer:
        run_dir = Path(await trainer.start(document, resume=resume))
        finished = (await trainer.events(timeout_s=120))[-1].finished
    assert finished.outcome == trainer_pb2.RUN_OUTCOME_COMPLETED, finished.message
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Awaitable[list[dict]]]:
    """The metrics of a whole run, by its optimiser steps a batch."""
    known: dict[int, list[dict]] = {}

    async def metrics_of(num_minibatches: int) -> list[dict]:
        if num_minibatches not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            async with serving(OrderedBroker().service()) as (_, target):
                document = document_of(folder, model, target, num_minibatches)
                known[num_minibatches] = await run_to_its_end(document, resume=False)
        return known[num_minibatches]

    return metrics_of


@pytest.mark.parametrize(
    ("moment", "num_minibatches"),
    [*((moment, 1) for moment in MOMENTS), pytest.param("after a step", 2, id="between a batch's optimiser steps")],
)
async def test_a_run_killed_at_any_moment_trains_what_it_would_have_trained(
    tmp_path, model, uninterrupted, moment, num_minibatches
):
    broker = OrderedBroker()
    async with serving(broker.service()) as (_, target):
        document = document_of(tmp_path / "run", model, target, num_minibatches)
        path = tmp_path / "document.json"
        path.write_text(json.dumps(document))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tests.helpers.dying_trainer", str(path), moment),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert await process.wait() == -signal.SIGKILL
        assert not broker.is_closed
        metrics = await run_to_its_end(document, resume=True)

    books = broker.books()
    assert (books.trained, books.in_flight, books.balanced) == (NUM_STEPS * 2 * 4, 0, True)
    assert [line["policy_version"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    for found, expected in zip(metrics, await uninterrupted(num_minibatches), strict=True):
        for name in ("loss/loss", "loss/entropy", "loss/ratio", "optimizer/grad_norm", "reward/mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (name, found["policy_version"])
