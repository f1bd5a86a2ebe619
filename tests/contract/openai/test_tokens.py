"""/inference/v1/generate: token ids in, token ids and log-probs out, as verifiers' and SkyRL's clients use it."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import aiohttp
import pytest

from penstock.wire.codec import int32_array
from tests.helpers.console import ROOT
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.imports import path_with_uv, python_of

HELPERS = Path(__file__).resolve().parents[2] / "helpers" / "imports"
CLIENT = HELPERS / "verifiers_client.py"
PLAY = ROOT / "examples" / "verifiers" / "play.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


async def generate(bench, body, **headers):
    url = bench.base_url.removesuffix("/v1") + "/inference/v1/generate"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_turns_of_a_session_are_tokens_that_are_trained_on_as_they_are(model):
    async with endpoint_bench(model, lambda _prompt: "ok", limits={"group_size": 1}) as bench:
        first, end = bench.tokenizer.encode("ask"), bench.tokenizer.eos_token_id
        skyrl = {"max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
        body = {"model": "tiny", "token_ids": first, "sampling_params": skyrl, "request_id": "r1"}
        status, one = await generate(bench, body, **{"X-Session-ID": "s1"})
        assert status == 200, one
        (choice,) = one["choices"]
        sampled = [*bench.tokenizer.encode("ok"), end]
        assert (one["request_id"], choice["token_ids"], choice["finish_reason"]) == ("r1", sampled, "stop")
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token_id}" for token_id in sampled]
        assert [entry["token_id"] for entry in entries] == sampled
        assert [entry["logprob"] for entry in entries] == pytest.approx([-0.01, -0.02, -0.03])
        assert one["usage"]["prompt_tokens"] == len(first)

        given = bench.tokenizer.encode("more")
        mark = bench.tokenizer.encode("k")
        second = {"token_ids": [*first, *sampled, *given], "sampling_params": {"stop_token_ids": mark}}
        _, two = await generate(bench, second, **{"X-Session-ID": "s1", "Idempotency-Key": "a"})
        _, again = await generate(bench, second, **{"X-Session-ID": "s1", "Idempotency-Key": "a"})
        assert again == two
        assert two["prompt_token_ids"] == second["token_ids"]
        assert mark[0] in bench.engine.requests[-1].sampling.stop_token_ids
        assert len(bench.engine.requests) == 2
        await bench.reward("s1", 1.0)
        (group,) = await bench.groups(1)
    (trained,) = group.trajectories
    assert int32_array(group.prompt.token_ids, "prompt").tolist() == first
    assert int32_array(trained.token_ids, "ids").tolist() == [*sampled, *given, *two["choices"][0]["token_ids"]]
    assert list(trained.loss_mask) == [1] * len(sampled) + [0] * len(given) + [1] * len(sampled)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token ids must be in"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [5] * 5000}, "5000 prompt tokens leave no room"),
        ({"model": "other"}, "not served here"),
        ({"stream": True}, "stream"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"sampling_params": {"temperature": 0.5}}, "temperature"),
        ({"sampling_params": {"stop_token_ids": [1] * 65}}, "stop_token_ids"),
        ({"sampling_params": 5}, "sampling_params"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(model, changed, named):
    async with endpoint_bench(model) as bench:
        body = {"token_ids": [5, 6], **changed}
        status, said = await generate(bench, body, **{"X-Session-ID": "s"})
        assert status in (400, 404)
        assert named in said["error"]["message"]
        assert bench.engine.requests == []


async def test_the_two_headers_of_a_session_must_agree_and_models_state_their_context(model):
    async with endpoint_bench(model) as bench:
        headers = {"X-Session-ID": "a", "X-Penstock-Session": "b"}
        status, said = await generate(bench, {"token_ids": [5]}, **headers)
        assert (status, "X-Session-ID" in said["error"]["message"]) == (400, True)
        card = (await bench.client().get("/models", cast_to=object))["data"][0]
        assert (card["id"], card["max_model_len"]) == ("tiny", 4096)


async def test_the_train_client_of_verifiers_samples_two_turns(model):
    python = python_of("verifiers")
    async with endpoint_bench(model, lambda _prompt: "four", limits={"group_size": 1}) as bench:
        command = [python, str(CLIENT), bench.base_url, str(model)]
        made = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
        assert made.returncode == 0, made.stderr[-2000:]
        said = json.loads(made.stdout.splitlines()[-1])
        one, two = said["turns"]
        assert one["sampled"] == [*bench.tokenizer.encode("four"), bench.tokenizer.eos_token_id]
        assert one["logprobs"] == pytest.approx([-0.01 * (index + 1) for index in range(5)])
        assert one["content"] == "four"
        assert one["finish_reason"] == "stop"
        assert two["prompt"][: len(one["prompt"])] == one["prompt"]
        assert "4096" in said["refused"], said["refused"]
        await bench.reward("session-1", 1.0)
        (group,) = await bench.groups(1)
    assert int32_array(group.prompt.token_ids, "prompt").tolist() == one["prompt"]


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_taskset_of_verifiers_is_played_by_its_harness_and_its_rewards_are_put(model):
    python = python_of("verifiers")
    async with endpoint_bench(model, lambda _prompt: "2", limits={"group_size": 2}) as bench:
        options = {"--url": bench.base_url, "--model-dir": str(model), "--taskset": "toy_taskset", "--group-size": "2"}
        options |= {"--tasks": "2", "--max-tokens": "20", "--concurrent": "1"}
        command = [python, str(PLAY), *(word for pair in options.items() for word in pair)]
        env = {**os.environ, "PYTHONPATH": str(HELPERS), "PATH": path_with_uv()}
        made = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=180, env=env)
        assert made.returncode == 0, made.stderr[-2000:]
        # An episode that could not be played would make its group wait for another.
        assert "given up" not in made.stdout, made.stdout[-2000:]
        groups = await bench.groups(2)
    rewards = [[each.score.value for each in group.trajectories] for group in groups]
    # Task 0 asks for 0+1 and task 1 for 1+1; the answer is 2.
    assert rewards == [[0.0, 0.0], [1.0, 1.0]]
    assert all(dict(each.score.components) == {"right": each.score.value} for each in groups[1].trajectories)
