"""The OpenAI-compatible endpoint as an API: streams, parameters, errors, with the real client."""

from __future__ import annotations

import json
from io import BytesIO

import aiohttp
import openai
import pytest

from penstock.security import Security
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.waiting import until

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


async def chat(bench, *, messages=HELLO, **more):
    return await bench.client().chat.completions.create(model="tiny", messages=messages, **more)


async def streamed(bench, **more):
    return await collect(await chat(bench, stream=True, **more))


async def collect(stream):
    return [chunk async for chunk in stream]


async def complete(bench, prompt, **more):
    return await bench.client().completions.create(model="tiny", prompt=prompt, **more)


async def test_a_stream_says_what_a_whole_answer_says(model):
    text = "one, two, three: h\u00e9llo \U0001f600!"
    async with endpoint_bench(model, lambda _prompt: text) as bench:
        whole = await chat(bench)
        chunks = await streamed(bench, stream_options={"include_usage": True})
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert whole.choices[0].message.content == "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(bench.tokenizer.encode(text)) + 1
    assert whole.usage.prompt_tokens == len(bench.engine.requests[0].prompt_token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_an_answer_is_not_shown_and_aborts_the_sample(model, is_stream):
    async with endpoint_bench(model, lambda _prompt: "abc STOP never" * 10) as bench:
        if is_stream:
            chunks = await streamed(bench, stop=["STOP", "unused"])
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            choice = (await chat(bench, stop="STOP")).choices[0]
            text, reason = choice.message.content, choice.finish_reason
        assert (text, reason) == ("abc ", "stop")
        await until(lambda: bench.engine.num_running == 0)


async def test_the_next_turn_goes_on_behind_a_stop_string_that_was_sampled(model):
    async with endpoint_bench(model, lambda _prompt: "abc STOP never") as bench:
        client = bench.client("s")
        for _ in range(2):
            response = await client.chat.completions.create(model="tiny", messages=HELLO, stop="STOP")
        again = [*HELLO, response.choices[0].message, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="tiny", messages=again)
        assert bench.engine.prompts[-1].split("abc STOP")[1] == (
            "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_choices_seeds_and_limits_reach_the_engine(model):
    async with endpoint_bench(model, lambda _prompt: "a long answer") as bench:
        response = await chat(bench, n=3, seed=7, temperature=0.5, top_p=0.9, max_completion_tokens=4)
        requests = bench.engine.requests
    assert [choice.finish_reason for choice in response.choices] == ["length"] * 3
    assert response.choices[0].message.content == "a lo"
    assert sorted(request.sampling.seed for request in requests) == [7, 8, 9]
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.max_new_tokens) for r in requests} == {(0.5, 0.9, 4)}


async def test_streamed_choices_are_distinguished(model):
    answers = iter(["first", "other"])
    async with endpoint_bench(model, lambda _prompt: next(answers)) as bench:
        texts = {0: "", 1: ""}
        for chunk in await streamed(bench, n=2):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "first", 1: "other"}


async def test_log_probs_and_token_ids_are_those_that_were_sampled(model):
    async with endpoint_bench(model, lambda _prompt: "abc") as bench:
        choice = (await chat(bench, logprobs=True, extra_body={"return_token_ids": True})).choices[0]
        plain = (await complete(bench, "x", logprobs=0)).choices[0]
        chunks = await streamed(bench, logprobs=True)
    assert [item.token for item in choice.logprobs.content] == ["a", "b", "c"]
    assert [item.logprob for item in choice.logprobs.content] == pytest.approx([-0.01, -0.02, -0.03])
    assert choice.token_ids == [*bench.tokenizer.encode("abc"), bench.tokenizer.eos_token_id]
    assert plain.logprobs.token_logprobs == pytest.approx([-0.01, -0.02, -0.03])
    told = [i.logprob for c in chunks if c.choices[0].logprobs for i in c.choices[0].logprobs.content]
    assert told == pytest.approx([-0.01, -0.02, -0.03])


async def test_a_streamed_tool_call_is_no_content(model):
    said = 'so: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    async with endpoint_bench(model, lambda _prompt: said) as bench:
        chunks = await streamed(bench, tools=TOOLS)
        untold = await chat(bench)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "so: "
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # Nobody asked for tools: text is text.
    assert untold.choices[0].message.content == said


@pytest.mark.parametrize("said", ['<tool_call>{"name": 5}</tool_call>', "<tool_call>{broken", "a <tool_"])
async def test_what_is_no_tool_call_stays_text(model, said):
    async with endpoint_bench(model, lambda _prompt: said) as bench:
        assert (await chat(bench, tools=TOOLS)).choices[0].message.content == said
        chunks = await streamed(bench, tools=TOOLS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said


async def test_text_sessions_go_on_from_their_exact_tokens(model):
    async with endpoint_bench(model, lambda _prompt: "\u00ff") as bench:
        client = bench.client("s")
        first = await client.completions.create(model="tiny", prompt="go: ")
        await client.completions.create(model="tiny", prompt="go: " + first.choices[0].text + "on")
        ids = bench.client("ids")
        given = [5, 6, 7]
        made = await ids.completions.create(model="tiny", prompt=given, extra_body={"return_token_ids": True})
        await ids.completions.create(model="tiny", prompt=[*given, *made.choices[0].token_ids, 9])
        requests = [list(request.prompt_token_ids) for request in bench.engine.requests]
        encode, end = bench.tokenizer.encode, bench.tokenizer.eos_token_id
        view = await bench.client().get("/sessions/s", cast_to=object)
    sampled = [*encode("\u00ff"), end]
    assert requests[1] == [*encode("go: "), *sampled, *encode("on")]
    assert requests[3] == [*given, *sampled, 9]
    assert (view["turns"], view["branches"]) == (2, 1)


async def test_models_are_listed_and_no_other_name_is_taken(model):
    async with endpoint_bench(model) as bench:
        assert [card.id async for card in bench.client().models.list()] == ["tiny"]
        assert (await bench.client().models.retrieve("tiny")).owned_by == "penstock"
        with pytest.raises(openai.NotFoundError) as caught:
            await bench.client().chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert "use 'tiny'" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty is not offered"),
        ({"logit_bias": {"1": 1}}, "logit_bias is not offered"),
        ({"extra_body": {"min_p": 0.1}}, "min_p is not offered"),
        ({"extra_body": {"repetition_penalty": 1.2}}, "repetition_penalty is not offered"),
        ({"extra_body": {"min_tokens": 4}}, "min_tokens is not offered"),
        ({"extra_body": {"bad_words": ["x"]}}, "bad_words is not offered"),
        ({"response_format": {"type": "json_object"}}, "response_format is not offered"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0"),
        ({"n": 1000}, "n: "),
        ({"stop": [""]}, "stop"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "leave no room"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is not offered"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(model, change, said):
    async with endpoint_bench(model) as bench:
        with pytest.raises(openai.BadRequestError) as caught:
            await chat(bench, **change)
        assert bench.engine.requests == []
    assert said in str(caught.value)


@pytest.mark.parametrize("change", [{"temperature": 0.3}, {"top_p": 0.5}, {"n": 2}, {"extra_body": {"top_k": 4}}])
async def test_sessions_sample_as_the_run_is_trained(model, change):
    async with endpoint_bench(model) as bench:
        with pytest.raises(openai.BadRequestError, match="in a session"):
            await bench.client("s").chat.completions.create(model="tiny", messages=HELLO, **change)
        await bench.client("s").chat.completions.create(model="tiny", messages=HELLO, temperature=1.0)


async def test_a_session_ends_at_the_runs_completion_limit(model):
    async with endpoint_bench(model, lambda _prompt: "x" * 30, limits={"max_completion_tokens": 40}) as bench:
        client = bench.client("s")
        choice = (await client.chat.completions.create(model="tiny", messages=HELLO)).choices[0]
        assert choice.finish_reason == "stop"
        longer = [*HELLO, choice.message, {"role": "user", "content": "."}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=longer)
    assert caught.value.code == "context_length_exceeded"


async def test_only_the_token_opens_the_door(model):
    async with endpoint_bench(model, security=Security(token="secret", allows_plain=True)) as bench:
        with pytest.raises(openai.AuthenticationError) as caught:
            await chat(bench)
        assert caught.value.code == "invalid_api_key"
        await bench.client(api_key="secret").chat.completions.create(model="tiny", messages=HELLO)
        async with aiohttp.ClientSession() as session, session.get(f"{bench.base_url[:-3]}/health") as response:
            assert response.status == 200


async def test_a_dead_engine_is_reported_to_clients_and_to_the_process(model):
    async with endpoint_bench(model) as bench:
        bench.engine.is_dead = True
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(bench)
        assert caught.value.status_code == 503
        assert len(bench.failures) == 1


async def test_an_engine_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error(model):
    async with endpoint_bench(model, lambda _prompt: "some words" * 20) as bench:
        stream = await chat(bench, stream=True)
        await anext(stream)
        bench.engine.is_dead = True
        with pytest.raises(openai.APIError, match="engine failed"):
            await collect(stream)


async def test_a_draining_generator_takes_no_requests(model):
    async with endpoint_bench(model) as bench:
        bench.rollouts.stop_accepting()
        with pytest.raises(openai.InternalServerError, match="drains"):
            await chat(bench)
        assert bench.failures == []


async def test_more_requests_than_places_wait_their_turn(model):
    async with endpoint_bench(model, max_concurrent_samples=2) as bench:
        response = await chat(bench, n=8)
        assert len(response.choices) == 8
        assert bench.rollouts.num_free_slots() == 2


async def test_a_request_that_gets_no_slot_in_time_is_asked_to_retry(model):
    async with endpoint_bench(model, max_concurrent_samples=1, request_timeout_s=0.3) as bench:
        bench.engine.may_answer.clear()
        with pytest.raises(openai.RateLimitError) as caught:
            await chat(bench, n=2)
        assert caught.value.response.headers["retry-after"] == "2"
        assert bench.rollouts.num_free_slots() == 1


async def test_sessions_beyond_the_limit_are_asked_to_retry(model):
    async with endpoint_bench(model, max_sessions=1) as bench:
        await bench.client("one").chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.RateLimitError, match="at most 1"):
            await bench.client("two").chat.completions.create(model="tiny", messages=HELLO)
        await bench.client().delete("/sessions/one", cast_to=object)
        await bench.client("two").chat.completions.create(model="tiny", messages=HELLO)


async def test_a_reward_is_taken_once_and_may_be_repeated(model):
    async with endpoint_bench(model) as bench:
        for wrong in ("nobody", "x y"):
            with pytest.raises(openai.APIStatusError):
                await bench.reward(wrong, 1.0)
        await bench.client("s").chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="no reward server"):
            await bench.reward("s")
        assert (await bench.reward("s", 0.5, components={"half": 0.5}))["reward"] == 0.5
        assert (await bench.reward("s", 0.5))["reward"] == 0.5
        with pytest.raises(openai.BadRequestError, match="is over"):
            await bench.reward("s", 0.7)


async def test_sessions_wait_for_the_run_and_other_requests_do_not(model):
    async with endpoint_bench(model, is_run_open=False) as bench:
        await chat(bench)
        with pytest.raises(openai.InternalServerError, match="not known yet"):
            await bench.client("s").chat.completions.create(model="tiny", messages=HELLO)
        await bench.open_run(version=0)
        await bench.client("s").chat.completions.create(model="tiny", messages=HELLO)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": 3}', b"\xff", b'{"messages":' + b"[" * 100_000, b"x" * (9 * 1024 * 1024)]
)
async def test_nonsense_is_answered_in_openais_form(model, body):
    async with endpoint_bench(model) as bench, aiohttp.ClientSession() as session:
        for path in ("chat/completions", "completions", "sessions/s/reward"):
            async with session.post(f"{bench.base_url}/{path}", data=BytesIO(body)) as response:
                assert 400 <= response.status < 500
                assert (await response.json())["error"]["message"]
        async with session.get(f"{bench.base_url}/nowhere") as response:
            assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
