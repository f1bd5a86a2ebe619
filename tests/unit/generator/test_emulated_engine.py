"""The emulated engine keeps to its script and to its latency model."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from services.generator.emulated_engine import EmulatedEngine, EmulatedSpec
from services.generator.engine import (
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
    SamplingSettings,
    TokenSpan,
)

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


FAST = EmulatedSpec(token_s=1e-6, tick_s=0.001)


async def test_the_same_seed_tells_the_same_script_whatever_the_speed() -> None:
    slow = EmulatedSpec(token_s=1e-5, tick_s=0.004)
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
    spec = EmulatedSpec(token_s=1e-7, tick_s=0.001, mean_tokens=40, length_sigma=0.5, max_num_seqs=600)
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


def test_more_samples_share_a_step_at_its_stated_cost() -> None:
    spec = EmulatedSpec(base_step_s=0.01, token_s=0.001, length_sigma=0.0, mean_tokens=100)
    engine = EmulatedEngine(spec)
    for number in range(10):
        engine._accept(make_request(number))
    engine._advance(0.02 * 30 + 0.019)
    assert {sample.position for sample in engine._samples.values()} == {30}
    # What was left of the time is not lost.
    engine._advance(0.001)
    assert {sample.position for sample in engine._samples.values()} == {31}


def test_a_finished_sample_makes_the_others_faster_at_once() -> None:
    spec = EmulatedSpec(base_step_s=0.0, token_s=0.001)
    engine = EmulatedEngine(spec)
    short, long = engine._accept(make_request(0, limit=1)), engine._accept(make_request(1, limit=1000))
    long.token_ids = np.ones(100, np.int32)
    long.logprobs = np.zeros(100, np.float32)
    engine._advance(0.002 + 0.010)
    assert (short.position, long.position) == (1, 11)


async def test_no_more_than_the_stated_number_is_decoded_at_once() -> None:
    engine = EmulatedEngine(EmulatedSpec(token_s=0.001, max_num_seqs=2))
    for number in range(5):
        engine._accept(make_request(number))
    engine._advance(0.0021)
    assert [sample.position for sample in engine._samples.values()] == [1, 1, 0, 0, 0]
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 3)


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
