"""Plays a taskset of verifiers with a run's policy: its harness, its tools, its rewards; run by verifiers' interpreter.

    python play.py --url http://127.0.0.1:8000/v1 --model-dir MODEL --taskset gsm8k --group-size 8

Each episode is a session of the generator's token route, named by its trace; the sessions of a task make a group, and
each gets the reward that the taskset computed. An episode with an error is given up: it has no reward, not zero.
"""

import argparse
import asyncio
import itertools
import json
import os
import urllib.error
import urllib.request
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.types import SamplingConfig

KEY_VARIABLE = "PENSTOCK_OPENAI_KEY"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="http://HOST:PORT/v1 of a generator")
    parser.add_argument("--model", help="its model's name; what /models names otherwise")
    parser.add_argument("--model-dir", required=True, help="Hugging Face directory whose chat template renders prompts")
    parser.add_argument("--taskset", required=True, help="an installed taskset package")
    parser.add_argument("--taskset-config", default="{}", type=json.loads, help="its fields, as JSON")
    parser.add_argument("--harness", default="null", help="an installed harness")
    parser.add_argument("--agent", default="{}", type=json.loads, help="further fields of the agent, as JSON")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a task at once")
    parser.add_argument("--concurrent", type=int, default=4, help="tasks at once")
    parser.add_argument("--tasks", type=int, help="tasks in all; passes over the taskset without end otherwise")
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    asyncio.run(play(parser.parse_args()))


async def play(options: argparse.Namespace) -> None:
    # Programs of harnesses run beside this one, so that the endpoint which they call needs no tunnel.
    agent = {"harness": {"id": options.harness}, "runtime": {"type": "subprocess"}, **options.agent}
    config = vf.SingleAgentEnvConfig(taskset={**options.taskset_config, "id": options.taskset}, agent=agent)
    environment = vf.load_environment(config)
    model = options.model or (await call(options.url, "GET", "/models"))["data"][0]["id"]
    places = asyncio.Semaphore(options.concurrent)
    async with environment.serving(), asyncio.TaskGroup() as playing:
        for number, task in enumerate(itertools.islice(passes(environment.taskset), options.tasks)):
            await places.acquire()
            episodes = playing.create_task(play_task(environment, task, f"{options.taskset}-{number}", model, options))
            episodes.add_done_callback(lambda _: places.release())


def passes(taskset: Any) -> Any:
    while True:
        yield from taskset


async def play_task(environment: Any, task: Any, group: str, model: str, options: argparse.Namespace) -> None:
    client = TrainClientConfig(
        base_url=options.url,
        api_key_var=KEY_VARIABLE,
        headers={"X-Penstock-Group": group},
        renderer_model_name=options.model_dir,
    )
    context = ModelContext(model=model, client=client, sampling=SamplingConfig(max_tokens=options.max_tokens))
    played = (environment.run_episode(task, context) for _ in range(options.group_size))
    for episode in asyncio.as_completed(list(played)):
        done = await episode
        for trace in done.traces:
            if trace.ok and done.ok:
                parts = {name: each.value for name, each in trace.rewards.items() if each is not None}
                reward = {"reward": trace.reward, "components": parts}
                await call(options.url, "POST", f"/sessions/{trace.id}/reward", reward)
            else:
                error = (trace.errors or done.errors or ["no error was recorded"])[-1]
                print(f"{group}: given up: {error}", flush=True)
                await call(options.url, "DELETE", f"/sessions/{trace.id}")


async def call(url: str, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {os.environ.get(KEY_VARIABLE, 'none')}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers=headers, method=method)

    def answer() -> Any:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            print(f"{method} {path}: {error.code}: {error.read(500).decode(errors='replace')}", flush=True)
            return {}

    return await asyncio.to_thread(answer)


if __name__ == "__main__":
    main()
