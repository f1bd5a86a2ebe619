"""Kills one of eight generator processes with SIGKILL amid long samples: which tokens are repeated, what time is lost.

In real time, with the lease that trainers request. Two kinds of step:

- time: a step of equally long samples, with a death and without; the difference is the cost of the death.
- books: more samples than the fleet can start, so that nothing moves to idle generators, and all generators are drained
  once the dead one's samples have ended elsewhere. Every token that a survivor decoded is then stored or wasted. The
  stored part of every sample is compared with the script that all engines follow.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.broker.processes import Child
from benchmarks.fleet.generation import REAL_PACE, STEP_TIMEOUT_S, Runs, Surroundings, start_generators
from benchmarks.fleet.machines import machines
from benchmarks.fleet.workload import VOCAB_SIZE, Workload, group_id
from penstock.clients.broker import BrokerClient
from penstock.network.rpc import call, open_channel
from penstock.v1 import broker_pb2, generator_pb2, generator_pb2_grpc, types_pb2
from penstock.wire.codec import int32_array
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state.other_records import is_group
from services.broker.storage.redis.redis_store import RedisStore
from services.generator.emulation.config import EmulatedConfig
from services.generator.engine.engine import GenerateRequest, SamplingSettings
from services.generator.engines.base_config import ServedModel
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import write_script
from services.generator.engines.emulated.from_config import build_spec

POLL_S = 0.05
BOOKS_FACTOR = 10
"""Enough to keep samples queued until those of the dead generator have ended."""
DRAIN_TIMEOUT_S, DRAIN_POLL_S = 30.0, 1.0
SETTLE_S = 0.5
"""Time after a death until what was in flight is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generator:
    """A process with one generator."""

    name: str
    process: Child
    address: str

    async def num_decoded(self) -> int:
        """Tokens so far, as it reports."""
        async with open_channel(self.address) as channel:
            stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            view = await call(stub.GetGenerator, generator_pb2.GetGeneratorRequest(), peer=self.name)
        return view.num_tokens_generated

    async def drain(self) -> None:
        """Make it return all its leases, with everything decoded."""
        request = generator_pb2.DrainGeneratorRequest()
        request.grace.FromSeconds(0)
        async with open_channel(self.address) as channel, asyncio.timeout(DRAIN_TIMEOUT_S):
            stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            while True:
                answer = await call(stub.DrainGenerator, request, peer=self.name)
                if answer.is_drained:
                    return
                await asyncio.sleep(DRAIN_POLL_S)

    async def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.process.kill()
        await self.process.process.wait()


@dataclass(slots=True, kw_only=True)
class _Death:
    """The generator's known state when it died."""

    num_decoded: int
    """Tokens it last reported."""
    num_stored: int = 0
    """Those of its tokens that the broker had accepted."""
    left: Mapping[int, SampleRecord]
    """The samples it left behind."""


async def compare(
    around: Surroundings,
    *,
    num_samples: int,
    num_tokens: int,
    kill_after_s: float,
    num_repetitions: int,
    progress: Callable[[str], None],
) -> dict[str, float]:
    """Medians of times, sums of what must be zero.

    Args:
        around: The services: broker, scheduler, weights.
        num_samples: Samples of a timed step; BOOKS_FACTOR times as many if tokens are counted.
        num_tokens: Tokens of a sample, 10 % more or less.
        kill_after_s: When the first generator dies.
        num_repetitions: Repetitions of each kind of step.
        progress: Receives status messages.
    """
    undisturbed_s: list[float] = []
    deaths: list[dict[str, float]] = []
    books: list[dict[str, float]] = []
    for repetition in range(num_repetitions):
        progress(f"kill -9: repetition {repetition + 1} of {num_repetitions}")
        step = _Step(around, f"kill-{repetition}", _alike(num_samples, num_tokens, seed=repetition))
        undisturbed_s.append((await step.time(kill_after_s=None))["took_s"])
        deaths.append(await step.time(kill_after_s=kill_after_s))
        deaths[-1]["lost_s"] = deaths[-1]["took_s"] - undisturbed_s[-1]
        queued = _alike(BOOKS_FACTOR * num_samples, num_tokens, seed=repetition)
        books.append(await _Step(around, f"kill-books-{repetition}", queued).books(kill_after_s=kill_after_s))
    sums = ("num_decoded_twice", "num_wrong_samples", "num_samples_lost", "num_moves")
    result: dict[str, float] = {name: sum(one[name] for one in books) for name in sums}
    result |= {name: statistics.median(one[name] for one in books) for name in books[0] if name not in sums}
    result["undisturbed_s"] = statistics.median(undisturbed_s)
    return result | {f"death_{name}": statistics.median(one[name] for one in deaths) for name in deaths[0]}


def _alike(num_samples: int, num_tokens: int, *, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(round(0.9 * num_tokens), round(1.1 * num_tokens), num_samples).tolist()
    return Workload(lengths=lengths, forecasts={"oracle": [float(length) for length in lengths]})


class _Step:
    """One step of eight H800s in real time under `auto`, forecasts exact."""

    def __init__(self, around: Surroundings, name: str, workload: Workload) -> None:
        self._around, self._name, self._workload = around, name, workload
        self._lengths = around.folder / f"{name}.lengths"
        workload.write_lengths(self._lengths)

    async def time(self, *, kill_after_s: float | None) -> dict[str, float]:
        """Seconds until all is decoded; the first generator dies after this many, if given."""
        name = f"{self._name}-{'undisturbed' if kill_after_s is None else 'disturbed'}"
        async with AsyncExitStack() as stack:
            client, store, runs, generators = await self._begin(stack, name)
            started_s = time.monotonic()
            await runs.submit(client)
            death = None
            if kill_after_s is not None:
                await asyncio.sleep(kill_after_s)
                death = await _kill(store, runs.ids[0], generators[0])
            await runs.wait_until_decoded(client)
            numbers: dict[str, float] = {"took_s": time.monotonic() - started_s}
            if death is not None:
                numbers["num_samples_continued"] = len(death.left)
                numbers["longest_wait_s"] = _longest_wait_s(death, await _records(store, runs.ids[0]))
            await runs.close(client)
        return numbers

    async def books(self, *, kill_after_s: float) -> dict[str, float]:
        """Accounts for the tokens when the first generator dies."""
        async with AsyncExitStack() as stack:
            client, store, runs, (victim, *survivors) = await self._begin(stack, self._name)
            (run_id,) = runs.ids
            await runs.submit(client)
            await asyncio.sleep(kill_after_s)
            death = await _kill(store, run_id, victim)
            await _wait_until_ended(store, run_id, death.left)
            await asyncio.gather(*(survivor.drain() for survivor in survivors))
            decoded = sum([await survivor.num_decoded() for survivor in survivors])
            numbers = _numbers(death, await _records(store, run_id), decoded)
            numbers["num_wrong_samples"] = await self._count_wrong(store, run_id)
            audit = await client.audit(run_id)
            numbers["num_samples_lost"] = len(self._workload.lengths) - audit.in_flight + (not audit.balanced)
            await runs.close(client)
        return numbers

    async def _begin(self, stack: AsyncExitStack, name: str) -> tuple[BrokerClient, RedisStore, Runs, list[_Generator]]:
        around = self._around
        store = RedisStore.from_url(around.stage.redis_url)
        stack.push_async_callback(store.close)
        runs = Runs(name, self._workload, shares=[1.0], seed=0)
        (run_id,) = runs.ids
        await around.foresee(run_id, self._workload.forecasts["oracle"])
        client = await stack.enter_async_context(BrokerClient(around.broker))
        await runs.open(client, dispatch="auto")
        generators = await _start_fleet(around, stack, name=name, run_id=run_id, lengths=self._lengths)
        await runs.wait_for_generators(client, num_generators=len(generators))
        return client, store, runs, generators

    async def _count_wrong(self, store: RedisStore, run_id: str) -> int:
        """Samples whose stored tokens differ from an uninterrupted engine's first ones."""
        model = ServedModel(model_path=self._lengths.parent, emulated=EmulatedConfig(lengths=self._lengths))
        spec = replace(build_spec(EmulatedEngineConfig(max_context_tokens=1 << 16), model), vocab_size=VOCAB_SIZE)
        count = len(self._workload.lengths)
        stored = await store.chunks(run_id, [(group_id(index), 0) for index in range(count)])
        num_wrong = 0
        for index, (prompt, chunks) in enumerate(zip(self._workload.prompts(range(count)), stored, strict=True)):
            parts = [int32_array(types_pb2.TokenChunk.FromString(chunk).token_ids, "token_ids") for chunk in chunks]
            tokens = np.concatenate([np.empty(0, np.int32), *parts])
            num_wrong += not np.array_equal(
                tokens, write_script(spec, _request(index, prompt)).token_ids[: len(tokens)]
            )
        return num_wrong


def _request(index: int, prompt: types_pb2.Prompt) -> GenerateRequest:
    sampling = SamplingSettings(
        max_new_tokens=prompt.sampling.max_new_tokens,
        seed=index,
        stop_token_ids=tuple(prompt.sampling.stop_token_ids),
    )
    prompt_token_ids = tuple(int32_array(prompt.token_ids, "token_ids").tolist())
    return GenerateRequest(request_id=str(index), prompt_token_ids=prompt_token_ids, sampling=sampling)


async def _start_fleet(
    around: Surroundings, stack: AsyncExitStack, *, name: str, run_id: str, lengths: Path
) -> list[_Generator]:
    generators: list[_Generator] = []
    pace = REAL_PACE
    for index, machine in enumerate(machines("alike", "kv_limited")):
        own = f"{name}-g{index}"
        instance = machine.instance(run_id=run_id, lengths=lengths, time_scale=pace.time_scale, tick_s=pace.tick_s)
        process = await start_generators(around, name=own, instances=[instance], pace=pace)
        stack.push_async_callback(process.stop)
        config = json.loads((around.folder / f"{own}.yaml").read_text(encoding="utf-8"))
        generators.append(_Generator(name=own, process=process, address=config["listen"]))
    return generators


async def _kill(store: RedisStore, run_id: str, victim: _Generator) -> _Death:
    num_decoded = await victim.num_decoded()
    await victim.kill()
    await asyncio.sleep(SETTLE_S)
    records = await _records(store, run_id)
    mine = {index: record for index, record in records.items() if record.generator_id.startswith(victim.name)}
    left = {index: record for index, record in mine.items() if record.state == broker_pb2.SAMPLE_STATE_LEASED}
    return _Death(num_decoded=num_decoded, num_stored=sum(record.num_tokens for record in mine.values()), left=left)


async def _wait_until_ended(store: RedisStore, run_id: str, samples: Collection[int]) -> None:
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while True:
            records = await _records(store, run_id)
            if all(records[index].state == broker_pb2.SAMPLE_STATE_FINISHED for index in samples):
                return
            await asyncio.sleep(POLL_S)


def _numbers(death: _Death, drained: Mapping[int, SampleRecord], num_decoded_by_survivors: int) -> dict[str, float]:
    num_stored = sum(record.num_tokens for record in drained.values())
    return {
        "num_samples_continued": len(death.left),
        "num_tokens_kept": sum(record.num_tokens for record in death.left.values()),
        "num_decoded_twice": num_decoded_by_survivors + death.num_stored - num_stored,
        "num_tokens_unsent": max(0, death.num_decoded - death.num_stored),
        "num_moves": sum(record.num_moves for record in drained.values()),
    }


def _longest_wait_s(death: _Death, records: Mapping[int, SampleRecord]) -> float:
    """Time from a left-behind sample's last stored token until another generator had it."""
    return max((records[index].lease_s - left.last_chunk_s for index, left in death.left.items()), default=0.0)


async def _records(store: RedisStore, run_id: str) -> dict[int, SampleRecord]:
    snapshot = await store.load(run_id, None)
    if snapshot is None:
        raise RuntimeError(f"run {run_id} is gone")
    records = {name: record for name, record in snapshot.groups.items() if record is not None and is_group(name)}
    groups = map(GroupRecord.FromString, records.values())
    return {int(group.group_id.removeprefix("s")): group.samples[0] for group in groups}
