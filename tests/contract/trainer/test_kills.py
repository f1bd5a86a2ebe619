"""kill -9 of a trainer: what is trained, and the curves, are those of a run that nobody killed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.trainer.run import prompt_feeder
from tests.helpers.brokers.scripted_training import ScriptedTrainingBroker
from tests.helpers.serving import serving
from tests.helpers.trainers.dying_trainer import MOMENTS, SUBMIT_BATCH_GROUPS, run_until
from tests.helpers.trainers.training import run_alone, run_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]
NUM_STEPS = 6
RESUMPTION = "resumption"
ALGORITHMS = {
    "grpo": {},
    # The third optimiser step is then the first of a batch's two.
    "minibatches": {"num_minibatches": 2},
    "replay": {"name": "tba", "kl_coefficient": 0.01, "num_replayed_groups": 2},
}


class OrderedBroker(ScriptedTrainingBroker):
    """Hands out in the order of submission, also what it hands out again: every run sees the same data."""

    def _next(self, hello, room):
        self.ready.sort(key=list(self.prompts).index)
        return super()._next(hello, room)


@pytest.fixture(autouse=True)
def _as_in_the_killed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_feeder, "SUBMIT_BATCH_GROUPS", SUBMIT_BATCH_GROUPS)


def document_of(folder: Path, model: Path, target: str, algorithm: str) -> dict:
    folder.mkdir()
    document = run_document(
        folder, model, target, num_steps=NUM_STEPS, checkpoint_every_steps=1, num_eval_prompts=0, keep_checkpoints=1
    )
    document["algorithm"] |= ALGORITHMS[algorithm]
    # One sample a pack.
    return document | {"trainer": {"tokens_per_pack": 16}}


async def run_to_its_end(document: dict, *, resume: bool) -> list[dict]:
    """What metrics.jsonl says of each step."""
    run_dir = await run_alone(document, resume=resume)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "completed", summary["message"]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Awaitable[list[dict]]]:
    """The metrics of a whole run, by the name of its algorithm's settings."""
    known: dict[str, list[dict]] = {}

    async def metrics_of(algorithm: str) -> list[dict]:
        if algorithm not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            async with serving(OrderedBroker(max_queued=1).service()) as (_, target):
                document = document_of(folder, model, target, algorithm)
                known[algorithm] = await run_to_its_end(document, resume=False)
        return known[algorithm]

    return metrics_of


@pytest.mark.parametrize(
    ("moment", "algorithm"),
    [
        *((moment, "grpo") for moment in MOMENTS if not moment.startswith(RESUMPTION)),
        ("step: after an optimiser step", "minibatches"),
        ("step: after an optimiser step", "replay"),
    ],
)
async def test_a_run_killed_at_any_moment_trains_what_it_would_have_trained(
    tmp_path, model, uninterrupted, moment, algorithm
):
    await check_deaths([moment], tmp_path, model, uninterrupted, algorithm)


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment.startswith(RESUMPTION)])
async def test_a_run_killed_again_while_it_resumes_does_too(tmp_path, model, uninterrupted, moment):
    await check_deaths(["step: after the broker heard of a step", moment], tmp_path, model, uninterrupted, "grpo")


async def check_deaths(moments, tmp_path, model, uninterrupted, algorithm):
    """A run that dies at each of these moments in turn, then comes to its end."""
    broker = OrderedBroker(max_queued=1)
    async with serving(broker.service()) as (_, target):
        document = document_of(tmp_path / "run", model, target, algorithm)
        for number, moment in enumerate(moments):
            await run_until(moment, document, resume=number > 0)
            assert not broker.is_closed
        metrics = await run_to_its_end(document, resume=True)

    books = broker.books()
    assert (books.trained, books.in_flight, books.balanced) == (NUM_STEPS * 2 * 4, 0, True)
    assert [line["policy_version"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    for found, expected in zip(metrics, await uninterrupted(algorithm), strict=True):
        assert found.get("step/replayed_samples") == expected.get("step/replayed_samples")
        for name in ("loss/loss", "loss/entropy", "loss/ratio", "optimizer/grad_norm", "reward/mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (name, found["policy_version"])
