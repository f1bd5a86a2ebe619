"""Retried and cancelled turns of agents: a repeated request is answered once; only what was taken is trained on."""

from __future__ import annotations

import asyncio
import json
from itertools import count

import httpx
import openai
import pytest
from aiohttp import web

from services.generator.openai.event_stream import EventStream
from services.generator.openai.idempotency import KeptAnswers, repeat_key
from tests.contract.openai.test_sessions import ask, user, view
from tests.helpers.generators.openai_endpoint import END, endpoint_bench, save_chat_model
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def numbered():
    """Answers that tell each other apart."""
    numbers = count(1)
    return lambda _prompt: f"answer {next(numbers)}"


async def stand(bench, session):
    return await bench.client().get(f"/sessions/{session}", cast_to=object)


async def sibling(bench, *, num_turns=1):
    """Another session of the group, so that it is put."""
    client, messages = bench.client("sibling", "task"), [user("go")]
    for _ in range(num_turns):
        messages += [(await ask(client, messages)).message, user("on")]
    await bench.reward("sibling", 0.0)


def sampled_texts(bench, group):
    """What is trained on in each trajectory with reward 1."""
    texts = []
    for index, trajectory in enumerate(group.trajectories):
        if trajectory.score.value == 1.0:
            _, ids, mask, *_ = view(group, index)
            texts.append(bench.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]))
    return texts


async def post_and_hang_up(bench, session, messages, *, until_turns=None, **more):
    """A client that sends a request, reads nothing of the answer and resets the connection."""
    host, _, port = bench.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    body = json.dumps({"model": "tiny", "messages": messages, **more}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Penstock-Session: {session}\r\nX-Penstock-Group: task\r\n"
    )
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    num_asked = len(bench.engine.requests)
    await until(lambda: len(bench.engine.requests) > num_asked)
    while until_turns is not None and (await stand(bench, session))["turns"] < until_turns:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    writer.transport.abort()


async def take(client, messages, streams):
    answer = await client.chat.completions.create(model="tiny", messages=messages, stream=streams)
    return [chunk async for chunk in answer] if streams else answer


async def test_the_same_key_twice_at_once_is_decoded_once(model):
    async with endpoint_bench(model, numbered()) as bench:
        bench.engine.may_answer.clear()
        client, headers = bench.client("s1", "task"), {"Idempotency-Key": "turn-1"}
        create = client.chat.completions.create
        asked = [
            asyncio.create_task(create(model="tiny", messages=[user("go")], extra_headers=headers)) for _ in range(3)
        ]
        await until(lambda: len(bench.engine.requests) == 1)
        bench.engine.may_answer.set()
        answers = await asyncio.gather(*asked)
        later = await create(model="tiny", messages=[user("go")], extra_headers=headers)
        assert len({answer.model_dump_json() for answer in (*answers, later)}) == 1
        assert len(bench.engine.requests) == 1
        with pytest.raises(openai.BadRequestError, match="came with another request"):
            await create(model="tiny", messages=[user("other")], extra_headers=headers)
        assert (await stand(bench, "s1"))["turns"] == 1
        # Another session's key is another key.
        await bench.client("s2", "task").chat.completions.create(
            model="tiny", messages=[user("go")], extra_headers=headers
        )
        assert len(bench.engine.requests) == 2


async def test_a_stream_that_is_asked_for_again_tells_the_same(model):
    async with endpoint_bench(model, numbered()) as bench:
        client = bench.client("s1", "task")
        texts = []
        for _ in range(2):
            stream = await client.chat.completions.create(
                model="tiny", messages=[user("go")], stream=True, extra_headers={"Idempotency-Key": "k"}
            )
            texts.append("".join([chunk.choices[0].delta.content or "" async for chunk in stream]))
        assert texts == ["answer 1", "answer 1"]
        assert len(bench.engine.requests) == 1


@pytest.mark.parametrize("header", ["Idempotency-Key", "X-Stainless-Retry-Count"])
async def test_an_answer_that_was_lost_on_its_way_is_given_again(model, header):
    async with endpoint_bench(model, numbered()) as bench:
        client = bench.client("s1", "task")
        body = {"model": "tiny", "messages": [user("go")]}
        headers = {header: "0" if header.startswith("X-") else "key-1"}
        await client.chat.completions.create(**body, extra_headers=headers)
        headers = {header: "1" if header.startswith("X-") else "key-1"}
        answer = await client.chat.completions.create(**body, extra_headers=headers)
        assert answer.choices[0].message.content == "answer 1"
        await bench.reward("s1", 1.0)
        await sibling(bench)
        (group,) = await bench.groups(1)
        assert sampled_texts(bench, group) == [f"answer 1{END}"]


async def test_a_client_that_went_away_in_the_middle_of_a_turn_and_asks_again(model):
    async with endpoint_bench(model, numbered()) as bench:
        bench.engine.may_answer.clear()
        await post_and_hang_up(bench, "s1", [user("go")])
        await until(lambda: bench.engine.num_running == 0)
        bench.engine.may_answer.set()
        client = bench.client("s1", "task")
        first = await ask(client, [user("go")])
        await ask(client, [user("go"), first.message, user("on")])
        await bench.reward("s1", 1.0)
        await sibling(bench)
        (group,) = await bench.groups(1)
        assert sampled_texts(bench, group) == [f"answer 2{END}answer 3{END}"]


async def test_only_the_answer_that_the_agent_went_on_from_is_trained_on(model):
    async with endpoint_bench(model, numbered(), limits={"group_size": 4}, group_size=2) as bench:
        # All of it was sent, and reached nobody: only the agent's next requests tell.
        await post_and_hang_up(bench, "s1", [user("go")], until_turns=1)
        client = bench.client("s1", "task")
        taken = await ask(client, [user("go")])
        assert (await stand(bench, "s1"))["turns_not_taken"] == 1
        await ask(client, [user("go")])
        await ask(client, [user("go"), taken.message, user("on")])
        found = await stand(bench, "s1")
        assert (found["turns"], found["branches"], found["turns_not_taken"]) == (4, 1, 2)
        await bench.reward("s1", 1.0)
        await sibling(bench)
        (group,) = await bench.groups(1)
        assert sampled_texts(bench, group) == [f"answer 2{END}answer 4{END}"]
        assert bench.dropped_branches["not_taken"] == 2


@pytest.fixture
def cut_at_the_end(monkeypatch):
    """Cuts the connections of as many answers as are asked for, before their last bytes are written."""
    left = [0]
    whole, end = web.Response.write_eof, EventStream.end

    def cut(request):
        left[0] -= 1
        request.transport.abort()

    async def write_eof(self, data=b""):
        if left[0] and self._req is not None and b"chat.completion" in (self.body or b""):
            cut(self._req)
        await whole(self, data)

    async def end_stream(self, answers):
        if left[0]:
            cut(self._request)
        await end(self, answers)

    monkeypatch.setattr(web.Response, "write_eof", write_eof)
    monkeypatch.setattr(EventStream, "end", end_stream)
    return left


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_cut_at_its_last_part_is_not_trained_on(model, cut_at_the_end, streams):
    async with endpoint_bench(model, numbered()) as bench:
        client = bench.client("s1", "task")
        first = await ask(client, [user("go")])
        messages = [user("go"), first.message, user("on")]
        cut_at_the_end[0] = 1
        with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError, httpx.ReadError)):
            await take(client, messages, streams)
        found = await stand(bench, "s1")
        assert (found["turns"], found["branches"], found["turns_not_taken"]) == (2, 1, 1)
        await bench.reward("s1", 1.0)
        await sibling(bench)
        (group,) = await bench.groups(1)
        assert sampled_texts(bench, group) == [f"answer 1{END}"]


async def test_a_session_whose_only_answer_was_cut_has_nothing_to_reward(model, cut_at_the_end):
    async with endpoint_bench(model, numbered()) as bench:
        client, headers = bench.client("s1", "task"), {"Idempotency-Key": "k"}
        cut_at_the_end[0] = 1
        with pytest.raises(openai.APIConnectionError):
            await client.chat.completions.create(model="tiny", messages=[user("go")], extra_headers=headers)
        with pytest.raises(openai.BadRequestError, match="no answer that its client took"):
            await bench.reward("s1", 1.0)
        again = await client.chat.completions.create(model="tiny", messages=[user("go")], extra_headers=headers)
        assert again.choices[0].message.content == "answer 1"
        assert (await bench.reward("s1", 1.0))["status"] == "ok"


async def test_kept_answers_are_bounded_by_what_they_take():
    kept = KeptAnswers(max_bytes=100_000)
    for number in range(50):
        async with kept.slot(repeat_key("s", str(number), None, b"x" * 1000)) as slot:
            slot.made = number
    async with kept.slot(repeat_key("s", "49", None, b"x" * 1000)) as slot:
        assert slot.made == 49
    async with kept.slot(repeat_key("s", "0", None, b"x" * 1000)) as slot:
        assert slot.made is None
