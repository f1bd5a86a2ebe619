"""Whatever a reward model answers concerns that sample only: its neighbours are scored and the worker lives on."""

import asyncio
import math
import subprocess
import sys
from contextlib import contextmanager

import pytest

from penstock.clients.scoring import ScoringSession
from penstock.network.connection import Connection
from penstock.network.rpc import wait_until_serving
from penstock.rewards.score_messages import check_score
from penstock.v1 import types_pb2
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.models.remote import RemoteModel
from services.reward.pool import ScoringPool
from tests.helpers.brokers.scripted_scoring import ScriptedBroker, scoring_item
from tests.helpers.console import ROOT, environment
from tests.helpers.ports import free_address
from tests.helpers.rewards.odd_rewards import GOOD, KINDS, RETURNED
from tests.helpers.serving import serving
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow


def assert_only_the_odd_one_differs(kind, expected, scores):
    assert [check_score(score) for score in scores] == [None, None, None], kind
    assert [scores[0].value, scores[2].value] == [1.0, 1.0], kind
    assert types_pb2.ScoreStatus.Name(scores[1].status) == f"SCORE_STATUS_{expected}", (kind, scores[1])
    assert len(scores[1].message) <= 1024, kind
    assert math.isfinite(scores[1].value), kind
    assert scores[1].ByteSize() < 8192, kind


def test_the_table_has_at_least_35_kinds():
    assert len(KINDS) >= 35


@pytest.mark.parametrize("form", ["judge", "judge_async", "Batch"])
async def test_the_worker_outlives_every_odd_answer(form):
    kinds = RETURNED if form == "Batch" else KINDS
    script = [scoring_item(index, completion=text) for index, text in enumerate(_surrounded(kinds))]
    broker = ScriptedBroker(script)
    model = build_model(f"tests.helpers.rewards.odd_rewards:{form}")
    # A real one that errs as often would be waited for.
    config = RewardModelConfig(max_batch_size=3, timeout_s=20, max_retries=0, max_error_share=1)
    async with serving(broker.service()) as (_, target):
        session = ScoringSession(Connection(target), run_id="r", worker_id="w", max_leases=12)
        pool = ScoringPool(source=session, model=model, config=config)
        tasks = [asyncio.create_task(session.run()), asyncio.create_task(pool.run())]
        try:
            await until(lambda: len(broker.results) == len(script) or any(map(asyncio.Task.done, tasks)), timeout_s=40)
            assert not any(map(asyncio.Task.done, tasks)), "the worker ended"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await model.close()

    for index, (kind, (_, expected)) in enumerate(kinds.items()):
        assert_only_the_odd_one_differs(kind, expected, [broker.results[3 * index + part] for part in range(3)])


@pytest.mark.parametrize("form", ["judge", "judge_async", "Batch"])
async def test_a_served_model_fails_that_one_sample_of_a_batch(form):
    kinds = RETURNED if form == "Batch" else KINDS
    with reward_server(form) as address:
        assert await wait_until_serving(address, timeout_s=40)
        model = RemoteModel(f"grpc://{address}")
        for kind, (_, expected) in kinds.items():
            items = [scoring_item(index, completion=text) for index, text in enumerate((GOOD, kind, GOOD))]
            assert_only_the_odd_one_differs(kind, expected, await model.score(items, timeout_s=20))
        await model.close()


def _surrounded(kinds):
    return [text for kind in kinds for text in (GOOD, kind, GOOD)]


@contextmanager
def reward_server(form):
    address = free_address()
    command = [sys.executable, "-m", "console", "reward", "serve", f"tests.helpers.rewards.odd_rewards:{form}"]
    process = subprocess.Popen([*command, "--listen", address], cwd=ROOT, env=environment())
    try:
        yield address
        assert process.poll() is None, "the server ended"
    finally:
        process.terminate()
        process.wait(timeout=20)
