"""An agent with the real `openai` client against a whole run: its sessions are what the trainer steps on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import RUN_ID, running
from tests.helpers.generators.openai_endpoint import chat_tokenizer, save_chat_model
from tests.helpers.ports import free_port
from tests.helpers.traces import spans_in

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 3, 2, 4

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def document(folder, model, port):
    return {
        "run": {"dir": str(folder / "runs"), "id": RUN_ID, "num_steps": NUM_STEPS, "num_eval_prompts": 0},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": None, "max_prompt_tokens": 128},
        "sampling": {"max_new_tokens": 128},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": GROUPS_PER_STEP, "max_staleness": 1},
        "policy": {"stale": "continue"},
        "optimizer": {"learning_rate": 1e-4},
        "generator": {"engine": "transformers", "openai_listen": f"127.0.0.1:{port}"},
        "tracing": {"ratio": 1.0},
        "record": True,
    }


async def attempt(client, task, index):
    """Two turns with a tool's output between them; the reward is made up, but differs."""
    session = f"{task}-{index}"
    labelled = client.with_options(default_headers={"X-Penstock-Session": session, "X-Penstock-Group": task})
    messages = [{"role": "user", "content": f"try {task}"}]
    first = await labelled.chat.completions.create(model="model", messages=messages, max_tokens=8)
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": "c", "content": "the tool says 42"}]
    await labelled.chat.completions.create(model="model", messages=messages, max_tokens=8)
    await client.post(f"/sessions/{session}/reward", cast_to=object, body={"reward": float(index)})


async def agents(port, is_over):
    """Task after task, until the run is over."""
    number = 0
    base_url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=2, timeout=60) as client:
        while not is_over():
            number += 1
            try:
                async with asyncio.timeout(60):
                    await asyncio.gather(*(attempt(client, f"task{number}", index) for index in range(GROUP_SIZE)))
            except (openai.OpenAIError, TimeoutError):
                # Not there yet, or not any more.
                await asyncio.sleep(0.2)


def assert_sessions_are_traced(folder):
    """Each step has links to the samples that it was taken on, and each of those two turns, as its generator says."""
    spans = spans_in(folder)
    samples = {each.span["spanId"]: each for each in spans if each.name == "rl.sample"}
    turns = Counter(each.span["parentSpanId"] for each in spans if each.name == "rl.sample.turn")
    steps = [each for each in spans if each.name == "rl.train.step"]
    assert [len(each.links) for each in steps] == [GROUPS_PER_STEP * GROUP_SIZE] * NUM_STEPS
    for link in (link for step in steps for link in step.links):
        assert samples[link].service == "generator"
        assert turns[link] == 2


def recomputed_logprobs(model_path, row):
    """Of a completion, by the plain model."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    token_ids = [*row["prompt_token_ids"], *row["token_ids"]]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, len(row["prompt_token_ids"]) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0].numpy()


def test_an_agents_sessions_are_trained_on_token_by_token(tmp_path):
    model, port = save_chat_model(tmp_path / "model", has_weights=True), free_port()
    with running(document(tmp_path, model, port), tmp_path) as run:
        asyncio.run(agents(port, lambda: run.process.poll() is not None or run.num_steps >= NUM_STEPS))
        assert run.end() == 0, run.text
        assert_sessions_are_traced(run.folder.path)
        audit = run.summary()["audit"]
        metrics = run.metrics()
    assert audit["balanced"]
    assert audit["in_flight"] == 0
    assert audit["trained"] == NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    assert all(line["reward/mean"] == 1.5 and line["optimizer/grad_norm"] > 0 for line in metrics), metrics[0]
    rows = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) == audit["trained"]
    tool = chat_tokenizer().encode("tool\nthe tool says 42<|im_end|>\n<|im_start|>assistant\n")
    largest = 0.0
    for row in rows:
        mask = np.asarray(row["loss_mask"], bool)
        given = np.asarray(row["token_ids"])[~mask].tolist()
        assert given[-len(tool) :] == tool
        assert 2 <= mask.sum() <= 16
        if row["versions"] == [0]:
            gap = np.abs(recomputed_logprobs(model, row) - np.asarray(row["logprobs"]))[mask]
            largest = max(largest, float(gap.max()))
    assert 0 < largest < 1e-4
