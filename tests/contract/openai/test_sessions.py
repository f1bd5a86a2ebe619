"""Agents that speak OpenAI, with the real client: their turns become trajectories, token by token."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest

from penstock import tracing
from penstock.v1.weights_pb2 import WeightsManifest
from penstock.wire.codec import decode_versions, float32_array, int32_array
from penstock.wire.routes import RoutingShape
from tests.helpers.brokers.broker import RUN, Trainer
from tests.helpers.generators.openai_endpoint import END, endpoint_bench, save_chat_model
from tests.helpers.traces import spans_in, tracing_to
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
# Not UTF-8: as text it is not what it was, so whoever tokenised it again would be found out.
BROKEN = "\u00ff\u00ff"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def user(text):
    return {"role": "user", "content": text}


async def ask(client, messages, **more):
    response = await client.chat.completions.create(model="tiny", messages=messages, **more)
    return response.choices[0]


def view(group, index=0):
    """A trajectory's tokens, mask, log-probs and versions, with its prompt."""
    trajectory = group.trajectories[index]
    ids = int32_array(trajectory.token_ids, "t")
    return (
        int32_array(group.prompt.token_ids, "p").tolist(),
        ids.tolist(),
        list(trajectory.loss_mask),
        float32_array(trajectory.behavior_logprobs, "l"),
        decode_versions(trajectory.policy_versions, num_tokens=ids.size, field="v").tolist(),
    )


async def two_turns(bench, session, reward, *, group=None, **more):
    """A tool-using agent as anybody writes it."""
    client = bench.client(session, group)
    messages = [user("2+3?")]
    choice = await ask(client, messages, tools=TOOLS, **more)
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    last = await ask(client, messages, tools=TOOLS, **more)
    await bench.reward(session, reward)
    return last


def use_a_tool(prompt):
    return "it is 5" if "tool\n5" in prompt else CALL


async def test_two_turns_with_a_tool_become_one_trajectory_whose_tool_output_is_masked(model):
    async with endpoint_bench(model, use_a_tool) as bench:
        first = await two_turns(bench, "s1", 1.0)
        await two_turns(bench, "s2", 0.0)
        (group,) = await bench.groups(1)
        tokenizer = bench.tokenizer
    assert first.message.content == "it is 5"
    assert [t.score.value for t in group.trajectories] == [1.0, 0.0]
    prompt, ids, mask, logprobs, versions = view(group)
    turns = [[*tokenizer.encode(CALL), tokenizer.eos_token_id], [*tokenizer.encode("it is 5"), tokenizer.eos_token_id]]
    tool = tokenizer.encode("\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    assert ids == [*turns[0], *tool, *turns[1]]
    assert mask == [1] * len(turns[0]) + [0] * len(tool) + [1] * len(turns[1])
    expected = [-0.01 * (i + 1) for i in range(len(turns[0]))], [-0.01 * (i + 1) for i in range(len(turns[1]))]
    np.testing.assert_allclose(logprobs, [*expected[0], *[0.0] * len(tool), *expected[1]], rtol=1e-6)
    assert set(versions) == {0}
    assert tokenizer.decode(prompt).endswith("<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n")
    # The second turn's prompt was the first one's tokens, exactly, and the tool's.
    assert list(bench.engine.requests[1].prompt_token_ids) == [*prompt, *turns[0], *tool]


async def test_a_group_is_one_trace_with_a_span_for_each_turn_and_links_to_its_agent(model, tmp_path):
    agent = tracing.group_context("an agent", "its span")
    headers = {"extra_headers": {"traceparent": agent.traceparent}}
    async with endpoint_bench(model, use_a_tool) as bench:
        with tracing_to(tmp_path, ratio=1.0):
            await two_turns(bench, "s1", 1.0, **headers)
            await two_turns(bench, "s2", 0.0, extra_headers={"traceparent": "00-not one"})
            (group,) = await bench.groups(1)
            # It is recorded once the broker has answered.
            await until(lambda: bench.outcomes["put"] == 2)
        few = tmp_path / "few"
        few.mkdir()
        with tracing_to(few, ratio=0.0):
            await two_turns(bench, "s3", 1.0, **headers)
            await two_turns(bench, "s4", 0.0, **headers)
            other = next(each for each in await bench.groups(2) if each != group)
            await until(lambda: bench.outcomes["put"] == 4)
            client = bench.client("s5")
            await ask(client, [user("2+3?")], tools=TOOLS)
            await client.delete("/sessions/s5", cast_to=object)
    root = tracing.group_context(RUN, group.prompt.group_id)
    assert group.prompt.traceparent == root.traceparent
    first, *samples = spans_in(tmp_path)
    assert (first.name, first.span["spanId"]) == ("rl.group", f"{root.span_id:016x}")
    assert {each.span["traceId"] for each in samples} == {f"{root.trace_id:032x}"}
    for index, (session, links) in enumerate((("s1", [f"{agent.span_id:016x}"]), ("s2", []))):
        own = f"{tracing.sample_context(root, index, 0).span_id:016x}"
        sample, *turns = (each for each in samples if each.attributes["rl.session"] == session)
        assert (sample.name, sample.span["spanId"]) == ("rl.sample", own)
        assert sample.span["parentSpanId"] == first.span["spanId"]
        assert [each.name for each in turns] == ["rl.sample.turn"] * 2
        assert [each.attributes["rl.turn"] for each in turns] == ["0", "1"]
        assert {each.span["parentSpanId"] for each in turns} == {own}
        assert [each.links for each in turns] == [links] * 2
        times = [int(each.span[f"{end}TimeUnixNano"]) for each in turns for end in ("start", "end")]
        assert times == sorted(times)
        assert int(sample.span["startTimeUnixNano"]) <= times[0] <= times[-1] <= int(sample.span["endTimeUnixNano"])
    # Of what is not sampled, only what failed.
    assert other.prompt.traceparent == ""
    dropped, turn = spans_in(few)
    assert (dropped.attributes["rl.session"], dropped.span["status"]["message"]) == ("s5", "abandoned")
    assert turn.span["parentSpanId"] == dropped.span["spanId"]


async def test_turns_and_what_is_given_between_them_come_with_routes(model):
    shape = RoutingShape(num_layers=1, num_experts=256, experts_per_token=2)
    async with endpoint_bench(model, use_a_tool, limits={"routing": shape.to_proto()}) as bench:
        await two_turns(bench, "s1", 1.0)
        await two_turns(bench, "s2", 0.0)
        (group,) = await bench.groups(1)
        await bench.client().chat.completions.create(model="tiny", messages=[user("2+3?")])
    prompt, ids, mask, *_ = view(group)
    routes = shape.array(group.trajectories[0].routes, num_rows=len(prompt) + len(ids) - 1, field="r")[:, 0]
    assert routes[:, 0].tolist() == [token_id % 256 for token_id in [*prompt, *ids][:-1]]
    # The first turn's positions as they were first computed, and from its last token on the second turn's.
    num_first = len(prompt) + mask.index(0) - 1
    assert routes[:, 1].tolist() == [1] * num_first + [2] * (len(routes) - num_first)
    # What nobody trains on comes without.
    assert [request.has_routes for request in bench.engine.requests] == [True] * 4 + [False]


async def test_a_group_says_at_which_temperature_it_was_sampled(model):
    async with endpoint_bench(model, use_a_tool, temperature=0.6) as bench:
        for session in ("s1", "s2"):
            await two_turns(bench, session, 1.0)
        (group,) = await bench.groups(1)
        assert {request.sampling.temperature for request in bench.engine.requests} == {0.6}
    assert group.prompt.sampling.temperature == pytest.approx(0.6)
    assert not group.prompt.sampling.HasField("top_p")


async def test_sampled_tokens_are_never_tokenised_again(model):
    async with endpoint_bench(model) as bench:
        tokenizer = bench.tokenizer
        broken = [*tokenizer.convert_tokens_to_ids(list(BROKEN)), tokenizer.eos_token_id]
        bench.engine.plan = lambda _prompt: broken
        for session in ("s1", "s2"):
            client, messages = bench.client(session), [user("hi")]
            for _ in range(3):
                choice = await ask(client, messages)
                messages += [{"role": "assistant", "content": choice.message.content}, user("again")]
            await bench.reward(session, 1.0)
        (group,) = await bench.groups(1)
    assert tokenizer.encode(choice.message.content) != broken[:-1]
    _, ids, mask, *_ = view(group)
    sampled = [token_id for token_id, is_sampled in zip(ids, mask, strict=True) if is_sampled]
    assert sampled == broken * 3
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m]).count("user\nagain") == 2


async def test_history_that_was_written_again_begins_a_trajectory_of_its_own(model):
    async with endpoint_bench(model, limits={"group_size": 3}, group_size=2) as bench:
        client = bench.client("s1", "task")
        await ask(client, [user("one")])
        await ask(client, [user("one"), {"role": "assistant", "content": "what it never said"}, user("two")])
        await bench.reward("s1", 1.0)
        await ask(bench.client("s2", "task"), [user("one")])
        await bench.reward("s2", 0.0)
        (group,) = await bench.groups(1)
    # What was put into the model's mouth is given, not sampled: it is masked.
    views = {tuple(view(group, index)[2]): view(group, index) for index in range(3)}
    assert sorted(t.score.value for t in group.trajectories) == [0.0, 1.0, 1.0]
    _, ids, mask, *_ = views[max(views, key=len)]
    given = bench.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m])
    assert "what it never said" in given
    assert sum(mask) == 3


async def test_branches_share_turns_and_train_on_them_once(model):
    answers = iter(["first", "left", "right", "other"])
    async with endpoint_bench(model, lambda _prompt: next(answers), limits={"group_size": 4}, group_size=2) as bench:
        client, messages = bench.client("s1", "task"), [user("go")]
        choice = await ask(client, messages)
        messages.append({"role": "assistant", "content": choice.message.content})
        for way in ("left?", "right?"):
            await ask(client, [*messages, user(way)])
        await bench.reward("s1", 1.0)
        await ask(bench.client("s2", "task"), [user("go")])
        await bench.reward("s2", 0.0)
        (group,) = await bench.groups(1)
    tokenizer, texts = bench.tokenizer, []
    for index in range(3):
        _, ids, mask, *_ = view(group, index)
        texts.append(tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]))
    assert sorted(texts) == sorted([f"first{END}left{END}", f"right{END}", f"other{END}"])


async def test_a_turn_whose_client_went_away_is_not_recorded_and_frees_its_place(model):
    async with endpoint_bench(model, max_concurrent_samples=1) as bench:
        bench.engine.may_answer.clear()
        client = bench.client("s1", "task", timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            await ask(client, [user("go")])
        await until(lambda: bench.engine.num_running == 0 and bench.rollouts.num_free_slots() == 1)
        bench.engine.may_answer.set()
        await ask(bench.client("s1", "task"), [user("go")])
        assert (await bench.client().get("/sessions/s1", cast_to=object))["turns"] == 1
        await bench.reward("s1", 1.0)
        with pytest.raises(openai.BadRequestError, match="is over"):
            await ask(bench.client("s1"), [user("go")])


async def test_the_first_prompts_of_siblings_may_differ(model):
    async with endpoint_bench(model) as bench:
        for session, name in (("s1", "Ada"), ("s2", "Bo")):
            await ask(bench.client(session, "task"), [user(f"hello {name}")])
            await bench.reward(session, float(name == "Bo"))
        (group,) = await bench.groups(1)
    prompt, ids, mask, *_ = view(group)
    tokenizer = bench.tokenizer
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhello "
    assert tokenizer.decode(ids[: mask.index(1)]) == "Ada<|im_end|>\n<|im_start|>assistant\n"


async def test_a_group_whose_time_is_up_is_put_without_those_that_still_go_on(model):
    async with endpoint_bench(model, limits={"group_size": 3}, group_timeout_s=2) as bench:
        for session in ("s1", "s2", "late"):
            await ask(bench.client(session, "task"), [user("go")])
        await asyncio.gather(bench.reward("s1", 1.0), bench.reward("s2", 0.0))
        (group,) = await bench.groups(1)
        assert len(group.trajectories) == 2
        await bench.reward("late", 1.0)
        await until(lambda: bench.outcomes["group_incomplete"] == 1)
    assert bench.outcomes["put"] == 2


async def test_idle_and_abandoned_sessions_are_dropped_and_counted(model):
    async with endpoint_bench(model, session_idle_s=2.5) as bench:
        await ask(bench.client("left"), [user("go")])
        assert (await bench.client().delete("/sessions/left", cast_to=object))["deleted"]
        await ask(bench.client("idle"), [user("go")])
        await until(lambda: bench.outcomes == {"idle": 1, "abandoned": 1})


async def test_weights_that_change_between_turns_show_in_the_versions(model):
    async with endpoint_bench(model, limits={"group_size": 2}, policy=None) as bench:
        for session in ("s1", "s2"):
            client, messages = bench.client(session, "task"), [user("go")]
            bench.engine.policy_version = 0
            choice = await ask(client, messages)
            bench.engine.policy_version = 1
            await bench.open_run(version=1)
            await ask(client, [*messages, choice.message, user("on")])
            await bench.reward(session, 1.0)
        (group,) = await bench.groups(1)
    *_, mask, _, versions = view(group)
    sampled = [version for version, is_sampled in zip(versions, mask, strict=True) if is_sampled]
    assert sampled == [0, 0, 0, 1, 1, 1]
    assert group.min_policy_version == 0


async def test_sessions_of_weights_that_a_rewind_took_back_are_dropped(model):
    async with endpoint_bench(model) as bench:
        await ask(bench.client("s1", "task"), [user("go")])
        await bench.held.attest(WeightsManifest(policy_version=0, history=1, digest="d"))
        await ask(bench.client("s2", "task"), [user("go")])
        for session in ("s1", "s2"):
            await bench.reward(session, 1.0)
        await until(lambda: bench.outcomes["rewound"] == 1)


async def test_what_the_broker_finds_too_old_is_dropped_by_its_reason(model):
    async with endpoint_bench(model, limits={"max_staleness": 0}) as bench:
        for session in ("s1", "s2"):
            await ask(bench.client(session, "task"), [user("go")])
        await bench.open_run(version=1, max_staleness=0)
        for session in ("s1", "s2"):
            await bench.reward(session, 1.0)
        await until(lambda: bench.outcomes["stale"] == 2)


async def test_complete_groups_are_put_when_the_process_stops(model):
    async with endpoint_bench(model, limits={"group_size": 3}) as bench:
        for session in ("s1", "s2", "open"):
            await ask(bench.client(session, "task"), [user("go")])
        for session in ("s1", "s2"):
            await bench.reward(session, 1.0)
        await bench.endpoint.stop()
        assert bench.outcomes == {"shutdown": 1, "put": 2}
        assert (await bench.broker.audit()).submitted == 2
        for session in ("open", "new"):
            with pytest.raises(openai.InternalServerError, match="shuts down"):
                await ask(bench.client(session, "task"), [user("and?")])


async def test_agents_that_are_ahead_of_the_trainer_wait_and_siblings_of_a_begun_group_do_not(model):
    async with endpoint_bench(model, limits={"groups_per_step": 1, "max_staleness": 0}) as bench:
        await ask(bench.client("a1", "a"), [user("go")])
        ahead = asyncio.create_task(ask(bench.client("b1", "b"), [user("go")]))
        await ask(bench.client("a2", "a"), [user("go")])
        for session in ("a1", "a2"):
            await bench.reward(session, 1.0)
        (group,) = await bench.groups(1)
        assert not ahead.done()
        group_id = group.prompt.group_id
        await Trainer.connect(bench.broker.channel, held=[group_id]).ack([group_id], 1)
        await bench.held.attest(WeightsManifest(policy_version=1, history=0, digest="d"))
        await ahead
