"""The emulated engine keeps to its script and to its latency model."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from penstock.model.digests import manifest_digest, safetensors_digests
from services.generator.engine.engine import (
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
    SamplingSettings,
    TokenSpan,
    WeightUpdate,
)
from services.generator.engines.emulated.emulated_engine import EmulatedEngine, EmulatedSpec
from tests.helpers.generators.emulated_spec import emulated_spec
from tests.helpers.virtual_time import VirtualLoop
from tests.helpers.waiting import until
from tests.helpers.weights.scripted_weight_store import write_weights

EOS = 2


def make_request(
    number: int = 0, *, seed: int | None = None, prefix: tuple[int, ...] = (), limit: int = 1000
) -> GenerateRequest:
    sampling = SamplingSettings(max_new_tokens=limit, seed=seed, stop_token_ids=(EOS,))
    return GenerateRequest(
        request_id=f"r{number}", prompt_token_ids=(3, 1, 4), prefix_token_ids=prefix, sampling=sampling
    )


async def decode(spec: EmulatedSpec, *requests: GenerateRequest) -> list[list[TokenSpan]]:
    engine = EmulatedEngine(spec)
    await engine.start()
    try:
        return list(await asyncio.gather(*(collect(engine, request) for request in requests)))
    finally:
        await engine.stop()


async def collect(engine: EmulatedEngine, request: GenerateRequest) -> list[TokenSpan]:
    async with aclosing(engine.generate(request)) as spans:
        return [span async for span in spans]


def tokens_of(spans: list[TokenSpan]) -> list[int]:
    return np.concatenate([span.token_ids for span in spans]).tolist()


FAST = emulated_spec(token_s=1e-6, tick_s=0.001)


async def test_the_same_seed_tells_the_same_script_whatever_the_speed() -> None:
    slow = emulated_spec(token_s=1e-5, tick_s=0.004)
    ((first,), (again,), (other,)) = [
        await decode(FAST, make_request(seed=1)),
        await decode(slow, make_request(seed=1)),
        await decode(FAST, make_request(seed=2)),
    ]
    assert tokens_of(first) == tokens_of(again)
    assert tokens_of(first) != tokens_of(other)


async def test_another_engine_continues_the_script_after_any_prefix() -> None:
    (spans,) = await decode(FAST, make_request(seed=5))
    whole = tokens_of(spans)
    assert len(whole) > 3
    for cut in range(1, len(whole) - 1):
        (rest,) = await decode(FAST, make_request(seed=5, prefix=tuple(whole[:cut])))
        assert tokens_of(rest) == whole[cut:]


async def test_lengths_have_the_stated_mean_and_end_with_the_stop_token() -> None:
    spec = emulated_spec(token_s=1e-7, tick_s=0.001, mean_tokens=40, length_sigma=0.5, max_num_seqs=600)
    samples = await decode(spec, *(make_request(number) for number in range(600)))
    lengths = [len(tokens_of(spans)) for spans in samples]
    assert np.mean(lengths) == pytest.approx(40, rel=0.1)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.1)
    assert all(tokens_of(spans).index(EOS) == len(tokens_of(spans)) - 1 for spans in samples)
    assert all(spans[-1].finish_reason is FinishReason.STOP for spans in samples)


async def test_a_limit_cuts_the_script_short() -> None:
    (spans,) = await decode(FAST, make_request(seed=3, limit=2))
    assert len(tokens_of(spans)) == 2
    assert spans[-1].finish_reason is FinishReason.LENGTH


def test_time_may_pass_faster_than_it_does() -> None:
    spec = emulated_spec(base_step_s=0.1, token_s=0.0, time_scale=1000.0, mean_tokens=500, length_sigma=0.0)
    loop = VirtualLoop()
    loop.run_until_complete(decode(spec, make_request(0)))
    took_s = loop.time()
    loop.shut_down()
    # 50 emulated seconds.
    assert 0.05 <= took_s < 0.06
    profile = EmulatedEngine(spec).profile()
    assert profile.step_base_s == pytest.approx(1e-4)


async def test_what_waits_for_a_slot_is_said() -> None:
    engine = EmulatedEngine(emulated_spec(token_s=10.0, max_num_seqs=2))
    await engine.start()
    tasks = [asyncio.create_task(collect(engine, make_request(number))) for number in range(5)]
    await until(lambda: engine.stats().num_waiting == 3)
    assert engine.stats().num_running == 2
    await engine.stop()
    assert all(spans[-1].finish_reason is FinishReason.ABORTED for spans in await asyncio.gather(*tasks))


async def test_a_sample_that_is_aborted_keeps_what_it_has_and_frees_its_slot() -> None:
    engine = EmulatedEngine(emulated_spec(token_s=0.001, max_num_seqs=1, mean_tokens=5000, length_sigma=0.0))
    await engine.start()
    first = asyncio.create_task(collect(engine, make_request(0)))
    await until(lambda: engine.stats().tokens_generated > 5)
    await engine.abort("r0")
    spans = await first
    assert spans[-1].finish_reason is FinishReason.ABORTED
    seen = engine.stats().tokens_generated
    assert len(tokens_of(spans)) == seen
    second = asyncio.create_task(collect(engine, make_request(1)))
    await until(lambda: engine.stats().tokens_generated > seen)
    assert engine.stats().num_running == 1
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await engine.stop()


async def test_tokens_carry_the_version_that_decoded_them_even_when_they_come_out_after_an_update(tmp_path) -> None:
    path = write_weights(tmp_path / "new.safetensors", seed=1)
    tensors = safetensors_digests(path)
    update = WeightUpdate(policy_version=1, path=path, tensors=tensors, digest=manifest_digest(tensors))
    # Left to itself it would yield nothing for an hour.
    engine = EmulatedEngine(emulated_spec(token_s=0.001, tick_s=3600.0, mean_tokens=1_000_000, max_model_len=1 << 21))
    await engine.start()
    spans = engine.generate(make_request(limit=1_000_000))
    first = asyncio.create_task(anext(spans))
    await until(lambda: engine.stats().num_running == 1)
    await asyncio.sleep(0.02)
    await engine.update_weights(update)
    span = await first
    assert span.policy_version == 0
    assert len(span.token_ids) >= 20
    await engine.stop()
    assert (await anext(spans)).policy_version == 1
    await spans.aclose()


async def test_kv_room_is_used_preempts_and_never_changes_what_is_said() -> None:
    requests = [make_request(number, seed=number) for number in range(12)]
    lengths = {"mean_tokens": 200.0, "length_sigma": 0.0}
    roomy = emulated_spec(token_s=1e-5, **lengths)
    # Slow enough that all have come before the first is done, however late the event loop is.
    tight = emulated_spec(token_s=1e-3, kv_capacity_tokens=1000, max_model_len=1000, **lengths)
    engine = EmulatedEngine(tight)
    await engine.start()
    squeezed = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert engine.stats().num_preemptions > 0
    await engine.stop()
    free = await decode(roomy, *requests)
    assert [tokens_of(spans) for spans in squeezed] == [tokens_of(spans) for spans in free]


def test_room_for_less_than_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match="lower max_context_tokens"):
        emulated_spec(kv_capacity_tokens=1000, max_model_len=1001)


async def test_a_request_whose_every_token_stops_is_refused() -> None:
    sampling = SamplingSettings(max_new_tokens=5, stop_token_ids=tuple(range(FAST.vocab_size)))
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=sampling)
    with pytest.raises(RequestRefusedError):
        await decode(FAST, request)


@pytest.mark.parametrize(
    "fault",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"max_new_tokens": 0}, {"seed": -1}],
    ids=lambda fault: next(iter(fault)),
)
def test_sampling_out_of_range_is_refused(fault: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fault))):
        SamplingSettings(**{"max_new_tokens": 1, **fault})


def test_a_continuation_does_not_replay_the_first_draws() -> None:
    sampling = SamplingSettings(max_new_tokens=9, seed=4)
    assert sampling.seed_after(0) == 4
    assert len({sampling.seed_after(num_prefix_tokens) for num_prefix_tokens in range(50)}) == 50
    assert SamplingSettings(max_new_tokens=9).seed_after(3) is None
