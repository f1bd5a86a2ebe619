"""Whole runs over what other packages offer: each trains, by turns and rewards that came from there."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import urllib.request
from contextlib import ExitStack

import pytest

from penstock.environments import Action, Task, load_environment
from tests.contract.environments.test_imports import nemo_gym_server, openenv_server, wait_until_it_answers
from tests.e2e.runs import RUN_ID, assert_balanced, running
from tests.helpers.console import ROOT
from tests.helpers.generators.openai_endpoint import END, chat_tokenizer, save_chat_model
from tests.helpers.imports import path_with_uv, python_of
from tests.helpers.models.chat_model import save_speaker
from tests.helpers.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 2, 2, 4
HELPERS = ROOT / "tests" / "helpers" / "imports"
MCP_SERVER = HELPERS / "mcp_server.py"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def said(*turns):
    """Messages of the user, the assistant and so on by turns; a pair names another role."""
    roles = ("user", "assistant")
    pairs = [(roles[index % 2], turn) if isinstance(turn, str) else turn for index, turn in enumerate(turns)]
    return [{"role": role, "content": content} for role, content in pairs]


def trained(folder, model, rows, environment, **sections):
    """The samples of a run of two steps over that environment, once all were trained on."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "run": {"dir": str(folder / "runs"), "id": RUN_ID, "num_steps": NUM_STEPS, "num_eval_prompts": 0},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(path), "max_prompt_tokens": 600},
        "sampling": {"max_new_tokens": 1400},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": GROUPS_PER_STEP, "max_staleness": 1},
        "optimizer": {"learning_rate": 1e-5},
        "generator": {"engine": "transformers", "max_concurrent_samples": 16},
        "environment": {"target": environment, "max_turns": 12},
        "record": True,
        **sections,
    }
    with running(document, folder) as run:
        assert run.end() == 0, run.text
        summary, steps = run.summary(), run.metrics()
        lines = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2]
    assert summary["audit"]["dropped"] == {}
    assert_balanced(summary, num_samples=NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE)
    assert len(lines) == NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    return lines


def values(lines):
    assert all(line["score"]["status"] == "ok" for line in lines), lines[0]["score"]
    return [line["score"]["value"] for line in lines]


def text(line):
    """The sample with its marks."""
    return chat_tokenizer().decode(line["token_ids"])


@pytest.mark.grid
def test_tools_of_an_mcp_server_are_called_in_training_and_the_reward_model_scores(tmp_path):
    environment = f"mcp:{shlex.join([sys.executable, str(MCP_SERVER)])}?tools=add&shared=true"
    tools = load_environment(environment).tools
    conversation = said("1+2?", CALL, ("tool", "3"), ("assistant", "3"))
    model = save_speaker(tmp_path / "model", lambda _: conversation, tools=tools, num_steps=40, batch_size=1)
    rows = [{"messages": said("1+2?"), "answer": "3"} for _ in range(8)]
    lines = trained(tmp_path, model, rows, environment, reward={"model": "numeric"})
    assert sum(values(lines)) >= len(lines) / 2
    called = [line for line in lines if text(line).startswith(f"{CALL}{END}\n<|im_start|>tool\n3{END}")]
    assert len(called) >= len(lines) / 2
    assert {line["score"]["model"] for line in lines} == {"numeric"}
    assert all(0 in line["loss_mask"] for line in called)


def guesses(rng, opening, last, brackets):
    """A guess, and another one after a hint."""
    first, second = (brackets.format(rng.randint(1, 9)) for _ in range(2))
    return said("Guess.", ("user", opening), ("assistant", first), ("user", last), ("assistant", second))


@pytest.mark.grid
async def test_an_openenv_server_gives_the_rewards_of_training(tmp_path):
    with openenv_server() as (url, _):
        await wait_until_it_answers(url)

        def draw(rng):
            return guesses(rng, "between 1 and 9", rng.choice(("higher", "lower")), "{}")

        model = save_speaker(tmp_path / "model", draw, num_steps=60, batch_size=4)
        rows = [{"messages": said("Guess."), "reset": {"highest": 9}} for _ in range(8)]
        lines = await asyncio.to_thread(trained, tmp_path, model, rows, f"openenv:{url}?timeout_s=20")
    assert any("higher" in text(line) or "lower" in text(line) for line in lines)
    assert len(set(values(lines))) > 1
    assert {line["score"]["model"] for line in lines} == {f"openenv {url}"}


@pytest.mark.grid
def test_a_game_of_textarena_gives_the_rewards_of_training(tmp_path):
    game = f"textarena:GuessTheNumber-v0?python={python_of('openenv')}&min_number=1&max_number=9"
    first = load_environment(game)()
    opening = first.reset(Task(seed=0)).messages[0].content
    hint = first.step(Action(text="[1]")).messages[0].content

    def draw(rng):
        return guesses(rng, opening, hint, "[{}]")

    model = save_speaker(tmp_path / "model", draw, num_steps=60, batch_size=1)
    lines = trained(tmp_path, model, [{"messages": said("Guess.")} for _ in range(8)], game)
    assert all("You are playing Guess The Number" in text(line) for line in lines)
    assert len(set(values(lines))) > 1


@pytest.mark.grid
async def test_a_server_of_nemo_gym_gives_the_rewards_of_training(tmp_path):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    row = {"responses_create_params": {"input": "1+2?", "tools": tools}, "expected": "3"}
    conversation = said("1+2?", CALL, ("tool", '{"sum": 3}'), ("assistant", "3"))
    # As the chat template shows them.
    shown = [{"type": "function", "function": {name: tools[0][name] for name in ("name", "parameters")}}]
    model = save_speaker(tmp_path / "model", lambda _: conversation, tools=shown, num_steps=40, batch_size=1)
    exchanges = []
    async with nemo_gym_server(exchanges) as url:
        lines = await asyncio.to_thread(trained, tmp_path, model, [row] * 8, f"nemo_gym:{url}")
    assert {name for name, _, _ in exchanges} == {"seed_session", "add", "verify"}
    assert sum(values(lines)) >= len(lines) / 2


def open_run(folder, port):
    """A run whose groups come from beside it."""
    return {
        "run": {"dir": str(folder / "runs"), "id": RUN_ID, "num_steps": NUM_STEPS, "num_eval_prompts": 0},
        "model": {"path": str(save_chat_model(folder / "model", has_weights=True)), "dtype": "float32"},
        "data": {"train": None, "max_prompt_tokens": 128},
        "sampling": {"max_new_tokens": 128},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": GROUPS_PER_STEP, "max_staleness": 1},
        "policy": {"stale": "continue"},
        "optimizer": {"learning_rate": 1e-4},
        "generator": {"engine": "transformers", "openai_listen": f"127.0.0.1:{port}"},
        "record": True,
    }


def fed(folder, port, commands, **env):
    """The samples of such a run, whose groups are brought by what these commands of its broker start in turn.

    A command begins once the URL before it is answered.
    """
    with running(open_run(folder, port), folder) as run, ExitStack() as beside:
        for url, command in commands:
            run.wait_for(url, lambda url=url: answers(url))
            (broker,) = [record.address for record in run.folder.records() if record.name == "broker"]
            process = subprocess.Popen(command(broker), env={**os.environ, **env}, cwd=folder)
            beside.callback(process.wait, timeout=20)
            beside.callback(process.kill)
        assert run.end() == 0, run.text
        assert run.summary()["audit"]["balanced"] is True
        assert len(run.metrics()) == NUM_STEPS
        return [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.mark.grid
def test_a_taskset_of_verifiers_brings_the_groups_of_training(tmp_path):
    python, port = python_of("verifiers"), free_port()
    url = f"http://127.0.0.1:{port}/v1"
    command = [python, ROOT / "examples" / "verifiers" / "play.py", "--url", url]
    command += ["--model-dir", tmp_path / "model", "--taskset", "toy_taskset", "--group-size", str(GROUP_SIZE)]
    path = path_with_uv()
    command = [*map(str, command), "--max-tokens", "16"]
    commands = [(f"{url}/models", lambda _: command)]
    lines = fed(tmp_path, port, commands, PYTHONPATH=str(HELPERS), PATH=path)
    assert len(lines) >= NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    assert all(set(line["score"]["components"]) == {"right"} for line in lines)


@pytest.mark.grid
def test_an_environment_in_the_form_of_atropos_brings_the_groups_of_training(tmp_path):
    generator, receiver = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in (generator, receiver)]
    receive = [sys.executable, str(ROOT / "examples" / "atropos" / "receive.py")]
    prompt = json.dumps(chat_tokenizer().encode("1+2?"))
    environment = [sys.executable, str(HELPERS / "atropos_environment.py"), *urls, prompt]
    commands = [
        (f"{urls[0]}/v1/models", lambda broker: [*receive, broker, RUN_ID, "--listen", f"127.0.0.1:{receiver}"]),
        (f"{urls[1]}/status", lambda _: environment),
    ]
    lines = fed(tmp_path, generator, commands)
    assert all(line["group_id"].startswith("atropos-") for line in lines)
    assert len(lines) >= NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    assert set(values(lines)) == {0.0, 1.0, 2.0, 3.0}
