"""Measures scores a second through the whole path with a trivial reward.

penstock bench reward.scores [--samples N] [--tokens N] [--repetitions N] [--json]

Finished samples wait in a broker on a real Redis; then a reward worker with `exact_match` starts, as `penstock serve
reward` does. It leases them, decodes their token ids, scores, and the broker stores the scores. The time from its first
score to its last, and the CPU time of broker, Redis and worker in that time, are read from its metrics and from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.broker.processes import CpuMeter, Stage, free_port
from benchmarks.command import Progress, Result, measure, print_table, short
from benchmarks.scratch import scratch_folder
from console.launch.embedded_redis import redis_executable
from penstock.clients.broker import BrokerClient
from penstock.clients.leases import LeaseSession
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes

GROUP_SIZE = 8
NUM_WORDS = 1_000
CHUNKS_A_REQUEST = 64
POLL_S = 0.02
TIMEOUT_S = 300.0
_SCORES = "penstock_reward_scores_total"


class _Generator:
    """A generator that decodes nothing: it takes every lease, for samples that are made up."""

    def __init__(self, broker: str, run_id: str, num_samples: int) -> None:
        self._connection = Connection(broker)
        names: dict[str, Any] = {"run_id": run_id, "generator_id": "gen-0"}
        hello = broker_pb2.GeneratorHello(**names, engine="benchmark", max_context_tokens=1 << 20)
        self._session = LeaseSession(self._connection, hello=hello, handler=self)
        self._first = broker_pb2.StreamTokensRequest(**names)
        self._num_samples = num_samples
        self._held: list[broker_pb2.Lease] = []

    def num_free_slots(self) -> int:
        return self._num_samples - len(self._held)

    def beat(self) -> broker_pb2.GeneratorBeat:
        ids = [lease.lease_id for lease in self._held]
        return broker_pb2.GeneratorBeat(active_lease_ids=ids, num_running=len(ids))

    def lease(self, lease: broker_pb2.Lease) -> None:
        self._held.append(lease)

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        raise RuntimeError(f"the broker revoked {revocation.lease_id}")

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """There is no trainer."""

    def run_closed(self) -> None:
        """The benchmark ends."""

    async def finish_all(self, num_tokens: int) -> None:
        """Lease every sample, and send its tokens."""
        leasing = asyncio.create_task(self._session.run())
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_free_slots():  # noqa: ASYNC110 -- no event says so
                await asyncio.sleep(0.05)
            await self._send(num_tokens)
        await end(leasing)

    async def _send(self, num_tokens: int) -> None:
        call = broker_pb2_grpc.BrokerServiceStub(self._connection.channel).StreamTokens()
        for sequence, start in enumerate(range(0, self._num_samples, CHUNKS_A_REQUEST), start=1):
            leases = self._held[start : start + CHUNKS_A_REQUEST]
            chunks = [_chunk(lease, num_tokens) for lease in leases]
            request = broker_pb2.StreamTokensRequest(sequence=sequence, chunks=chunks)
            request.MergeFrom(self._first)
            await call.write(request)
            response: Any = await call.read()
            if response.errors:
                raise RuntimeError(f"the broker refused tokens: {response.errors[0]}")
        await call.done_writing()


def _chunk(lease: broker_pb2.Lease, num_tokens: int) -> types_pb2.TokenChunk:
    """A completion of words that ends with "#### 4", or 5 for every second sample."""
    answer = 4 + lease.key.sample_index % 2
    words = np.arange(num_tokens) % (NUM_WORDS - 10) + 10
    words[-2:] = (0, answer)
    return types_pb2.TokenChunk(
        key=lease.key,
        lease_id=lease.lease_id,
        token_ids=int32_bytes(words),
        logprobs=float32_bytes(np.full(num_tokens, -0.5)),
        policy_versions=encode_versions(np.zeros(num_tokens, dtype=np.int64)),
        finish_reason=types_pb2.FINISH_REASON_STOP,
    )


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["####", *map(str, range(1, 10)), *(f"word{number}" for number in range(10, NUM_WORDS))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="####"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": NUM_WORDS}), encoding="utf-8")


def _prompt(number: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        group_id=f"group-{number:06}",
        token_ids=int32_bytes(np.arange(64)),
        text="2+2=",
        answer="4",
        group_size=GROUP_SIZE,
        sampling=types_pb2.SamplingParams(max_new_tokens=1 << 16, temperature=1.0),
        purpose=types_pb2.PURPOSE_TRAIN,
    )


async def _num_scored(port: int) -> int:
    """Scores so far, of every status; 0 while the worker is not there."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text: str = response.read().decode()
            return text

    try:
        families = text_string_to_metric_families(await asyncio.to_thread(read))
    except OSError:
        return 0
    return int(sum(sample.value for each in families for sample in each.samples if sample.name == _SCORES))


async def _measure(stage: Stage, run_id: str, *, num_samples: int, num_tokens: int) -> dict[str, float]:
    broker, address = stage.brokers[0]
    num_groups = num_samples // GROUP_SIZE
    limits = broker_pb2.RunLimits(
        groups_per_step=num_groups, group_size=GROUP_SIZE, max_staleness=0, max_completion_tokens=1 << 16
    )
    async with BrokerClient(address) as client:
        await client.open_run(run_id, limits=limits, policy_version=0)
        for first in range(0, num_groups, 1_000):
            numbers = range(first, min(num_groups, first + 1_000))
            await client.submit_prompts(run_id, [_prompt(number) for number in numbers])
        await _Generator(address, run_id, num_samples).finish_all(num_tokens)
        port = free_port()
        tokenizer, listen = stage.folder / "tokenizer", f"127.0.0.1:{free_port()}"
        worker = await stage.start(
            *(sys.executable, "-m", "console", "serve", "reward", f"run_id={run_id}", f"broker={address}"),
            *(f"tokenizer_path={tokenizer}", f"metrics_port={port}", f"listen={listen}"),
        )
        assert stage.redis is not None
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(TIMEOUT_S):
            while not (before := await _num_scored(port)):  # noqa: ASYNC110 -- no event says so
                await asyncio.sleep(POLL_S)
            meter, start_s = CpuMeter(broker=broker, redis=stage.redis, worker=worker), clock()
            while await _num_scored(port) < num_samples:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            # The last ones are on their way to the store.
            while (audit := await client.audit(run_id)).in_flight_by_state["scored"] < num_samples:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            took_s, used_s = clock() - start_s, meter.used_s()
        await worker.stop()
        if not audit.balanced:
            raise RuntimeError(f"the audit does not balance: {audit}")
        await client.close_run(run_id, drop_reason="run_complete")
        await client.delete_run(run_id, force=True)
    count = num_samples - before
    if not count:
        raise RuntimeError("all samples were scored before the first reading; raise --samples")
    return {
        "scores_per_second": count / took_s,
        "cpu_ms_per_score": 1_000 * sum(used_s.values()) / count,
        **{f"{name}_cpu_ms": 1_000 * seconds / count for name, seconds in used_s.items()},
    }


async def run(num_samples: int, num_tokens: int, num_repetitions: int, progress: Progress) -> Result:
    """Measure; medians and ranges of the repetitions."""
    rows = []
    with scratch_folder() as folder:
        _write_tokenizer(folder / "tokenizer")
        async with Stage(folder, redis_executable()) as stage:
            for number in range(1, num_repetitions + 1):
                progress(f"repetition {number} of {num_repetitions}")
                rows.append(await _measure(stage, f"scores-{number}", num_samples=num_samples, num_tokens=num_tokens))
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    spread = {name: [min(row[name] for row in rows), max(row[name] for row in rows)] for name in rows[0]}
    return {"num_samples": num_samples, "num_tokens": num_tokens, **medians, "spread": spread}


def _show(result: Result) -> None:
    spread = result.pop("spread")
    rows = [(name, short(value), " to ".join(map(short, spread.get(name, ())))) for name, value in result.items()]
    print_table("Scores through broker, Redis and reward worker", ("number", "median", "spread"), [rows])


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8_192, help="multiple of 8")
    parser.add_argument("--tokens", type=int, default=256, help="of each completion")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return measure(
        lambda progress: run(options.samples, options.tokens, options.repetitions, progress),
        _show,
        is_json=options.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
