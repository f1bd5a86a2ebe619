"""A session that is finished without a reward is judged by the endpoint's reward server."""

from __future__ import annotations

import json

import openai
import pytest

from penstock.network.rpc import service_of
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.serving import serving
from tests.helpers.waiting import until


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """Right where the completion is the answer; abstains without one."""

    def __init__(self):
        self.items = []

    async def Score(self, request, _context):
        (item,) = request.items
        self.items.append(item)
        if not item.answer:
            return reward_pb2.ScoreResponse(scores=[types_pb2.Score(status=types_pb2.SCORE_STATUS_ABSTAINED)])
        value = float(item.completion_text == item.answer)
        score = types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=value, model="judge")
        return reward_pb2.ScoreResponse(scores=[score])

    def service(self):
        return service_of(self)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


async def ask(bench, session):
    messages = [{"role": "user", "content": "2+3?"}]
    await bench.client(session, "task").chat.completions.create(model="tiny", messages=messages)


async def test_the_reward_server_judges_the_last_answer_and_abstaining_drops_the_session(model):
    judge = Judge()
    async with serving(judge.service()) as (_, target), endpoint_bench(model, lambda _: "5", reward=target) as bench:
        for session in ("s1", "s2", "s3"):
            await ask(bench, session)
        abstained = await bench.reward("s3")
        right = await bench.reward("s1", answer="5", metadata={"level": 1})
        wrong = await bench.reward("s2", answer="6", metadata={"level": 1})
        (group,) = await bench.groups(1)
        await until(lambda: bench.outcomes["reward_abstained"] == 1)
    assert (abstained["status"], abstained["reward"]) == ("abstained", None)
    assert [(told["status"], told["reward"]) for told in (right, wrong)] == [("ok", 1.0), ("ok", 0.0)]
    assert [(t.score.value, t.score.model) for t in group.trajectories] == [(1.0, "judge"), (0.0, "judge")]
    item = judge.items[-1]
    assert [(turn.role, turn.content) for turn in item.messages] == [("user", "2+3?")]
    assert (item.completion_text, json.loads(item.metadata_json)) == ("5", {"level": 1})


async def test_a_session_outlives_a_reward_server_that_is_away(model, monkeypatch):
    monkeypatch.setattr("services.generator.openai.session_reward.SCORE_PATIENCE_S", 0.2)
    async with endpoint_bench(model, reward="127.0.0.1:1") as bench:
        await ask(bench, "s1")
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await bench.reward("s1")
        assert (await bench.reward("s1", 1.0))["status"] == "ok"
