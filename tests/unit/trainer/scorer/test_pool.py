"""What a scorer answers: log-probs of what it can compute, and why not of what it cannot."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from penstock import tracing
from penstock.v1 import broker_pb2, reward_pb2, types_pb2
from penstock.wire.codec import float32_array, int32_bytes
from services.trainer.compute.speed import Speed
from services.trainer.scorer.frozen_model import FrozenModel
from services.trainer.scorer.pool import HungPassError, LogprobPool
from tests.helpers.traces import spans_in, tracing_to
from tests.unit.trainer.builders import VOCAB_SIZE, save_tiny_qwen2

POISON = 13


class Model:
    """The log-prob of a token is minus a tenth of it; POISON fails a pass, and token 0 has none."""

    vocab_size = VOCAB_SIZE
    max_sequence_length = 16

    def __init__(self):
        self.packs = []

    def logprobs(self, pack):
        self.packs.append(pack)
        if POISON in pack.token_ids:
            raise RuntimeError("out of memory")
        tokens = pack.target_ids.astype(np.float32)
        return np.where(tokens == 0, -np.inf, -tokens / 10).astype(np.float32)


class Source:
    """Hands out what it is given, then waits; `lost` leases count no more."""

    def __init__(self, leases, lost=()):
        self._leases, self._lost = list(leases), set(lost)
        self.results = {}
        self._is_done = asyncio.Event()

    @property
    def num_held(self):
        return len(self._leases)

    async def take(self, *, max_items):
        if not self._leases:
            self._is_done.set()
            await asyncio.Event().wait()
        taken, self._leases = self._leases[:max_items], self._leases[max_items:]
        return taken

    def is_held(self, lease_id):
        return lease_id not in self._lost

    def answer(self, results):
        self.results |= {result.lease_id: result for result in results}

    async def answered(self, model, *, speed=None):
        answering = pool_of(self, model)
        answering.speed = speed or answering.speed
        pool = asyncio.create_task(answering.run())
        try:
            async with asyncio.timeout(20):
                await self._is_done.wait()
        finally:
            pool.cancel()
        return self.results


def pool_of(source, model, *, max_pass_s=60.0):
    return LogprobPool(source, model, tokens_per_pack=16, max_batch_size=8, max_pass_s=max_pass_s)


def lease_of(name, completion, *, prompt=(1, 2), temperature=1.0):
    return broker_pb2.ScoringLease(
        lease_id=name,
        item=reward_pb2.ScoreItem(key=types_pb2.SampleKey(group_id=name), token_ids=int32_bytes(completion)),
        prompt_token_ids=int32_bytes(prompt),
        temperature=temperature,
    )


def logprobs_of(result):
    return float32_array(result.reference_logprobs, "reference_logprobs").tolist()


async def test_each_sample_gets_the_log_probs_of_its_own_tokens():
    model = Model()
    source = Source([lease_of("a", [5, 6]), lease_of("b", [7]), lease_of("c", [8, 9, 10])])
    results = await source.answered(model)
    assert {name: logprobs_of(result) for name, result in results.items()} == {
        "a": pytest.approx([-0.5, -0.6]),
        "b": pytest.approx([-0.7]),
        "c": pytest.approx([-0.8, -0.9, -1.0]),
    }
    assert len(model.packs) == 1


async def test_what_cannot_be_computed_costs_its_neighbours_nothing():
    leases = {
        "good": lease_of("good", [5]),
        "poison": lease_of("poison", [POISON]),
        "infinite": lease_of("infinite", [0]),
        "long": lease_of("long", [5] * 15),
        "unknown": lease_of("unknown", [VOCAB_SIZE]),
        "empty": lease_of("empty", []),
    }
    results = await Source(leases.values()).answered(Model())
    failed = {name: result.score.message for name, result in results.items() if result.HasField("score")}
    assert logprobs_of(results["good"]) == pytest.approx([-0.5])
    assert failed.keys() == leases.keys() - {"good"}
    assert all(results[name].score.status == types_pb2.SCORE_STATUS_FAILED for name in failed)
    assert "out of memory" in failed["poison"]
    assert "at most 16" in failed["long"]
    assert f"below {VOCAB_SIZE}" in failed["unknown"]


async def test_each_pass_is_a_span_with_links_to_what_is_sampled_and_what_fails(tmp_path):
    root = tracing.group_context("r", "good")
    leases = [lease_of("good", [5]), lease_of("fine", [6]), lease_of("poison", [POISON])]
    leases[0].traceparent = root.traceparent
    for lease in leases:
        lease.item.run_id = "r"
    with tracing_to(tmp_path, ratio=1.0):
        await Source(leases).answered(Model())
    [span] = spans_in(tmp_path)
    linked = [tracing.sample_context(tracing.group_context("r", name), 0, 0) for name in ("good", "poison")]
    assert (span.name, span.links) == ("rl.reference.score", [f"{each.span_id:016x}" for each in linked])
    assert (span.attributes["rl.reference.samples"], span.attributes["rl.tokens"]) == ("3", "9")
    assert "out of memory" in span.span["status"]["message"]


async def test_its_speed_is_that_of_passes_that_succeed_with_the_time_of_all():
    now_s = [0.0]

    class Slow(Model):
        def logprobs(self, pack):
            now_s[0] += 6.0
            return super().logprobs(pack)

    speed = Speed(monotonic_s=lambda: now_s[0])
    source = Source([lease_of("poison", [POISON] * 10), lease_of("a", [5] * 10)])
    await source.answered(Slow(), speed=speed)
    assert speed.tokens_per_second == 12 / 12


async def test_a_pack_of_which_nothing_counts_any_more_is_not_computed():
    model = Model()
    assert await Source([lease_of("a", [5]), lease_of("b", [6])], lost=["a", "b"]).answered(model) == {}
    assert model.packs == []


async def test_a_hung_pass_ends_the_pool_without_an_answer():
    released = threading.Event()

    class Hung(Model):
        def logprobs(self, pack):
            released.wait(20)
            return super().logprobs(pack)

    source = Source([lease_of("a", [5])])
    with pytest.raises(HungPassError, match=r"3 tokens took longer than 0\.05 s"):
        await pool_of(source, Hung(), max_pass_s=0.05).run()
    released.set()
    assert source.results == {}


async def test_log_probs_are_those_at_the_temperature_of_sampling(tmp_path):
    """And do not depend on what shares the pack."""
    model = FrozenModel(save_tiny_qwen2(tmp_path), device="cpu")
    warm = lease_of("warm", [5, 6, 7], temperature=2.0)
    alone = await Source([warm]).answered(model)
    together = await Source([lease_of("cold", [5, 6, 7]), warm]).answered(model)
    assert logprobs_of(together["warm"]) == pytest.approx(logprobs_of(alone["warm"]), abs=1e-6)
    assert logprobs_of(together["cold"]) != pytest.approx(logprobs_of(alone["warm"]), abs=1e-2)
