"""One contract for all engines. An engine is shared by the tests of this module: starting vLLM takes many seconds."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from penstock.model.digests import WeightsMismatchError
from services.generator.engine.engine import (
    Engine,
    EngineStoppedError,
    FinishReason,
    PausableEngine,
    RequestRefusedError,
    TokenSpan,
)
from services.generator.engines.emulated.emulated_engine import EmulatedEngine
from services.generator.engines.vllm import process_setup, vllm_engine
from services.generator.engines.vllm.vllm_engine import VllmEngine
from tests.helpers.generators.engines import (
    PROMPT,
    build_engine,
    collect,
    logprobs_of,
    make_request,
    recompute,
    recompute_over_old_cache,
    take_initial,
    take_perturbed,
    tokens_of,
    versions_of,
    vllm_workers,
)
from tests.helpers.models.tiny_model import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    make_tiny_model,
    make_update,
    write_perturbed,
)
from tests.helpers.waiting import until

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240), pytest.mark.slow]

ENGINES = ["emulated", "transformers", *vllm_workers(in_grids={"vllm, two pipeline stages"})]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[Engine]:
    built = build_engine(request.param, model_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            process_setup, "_WORKER_EXTENSION", "tests.helpers.generators.layerwise_worker.LayerwiseWorkerExtension"
        )
        await built.start()
    yield built
    await built.stop()


@pytest.fixture(scope="module")
def is_real(engine: Engine) -> bool:
    return not isinstance(engine, EmulatedEngine)


async def test_a_sample_is_yielded_once_in_order_up_to_its_limit(engine: Engine) -> None:
    spans = await collect(engine, make_request(max_new_tokens=30))
    assert len(tokens_of(spans)) == len(logprobs_of(spans)) == 30
    assert all(0 <= token_id < VOCAB_SIZE for token_id in tokens_of(spans))
    assert (logprobs_of(spans) <= 0).all()
    assert [span.finish_reason for span in spans[:-1]] == [None] * (len(spans) - 1)
    assert spans[-1].finish_reason is FinishReason.LENGTH
    assert set(versions_of(spans)) == {engine.policy_version}


async def test_a_sample_ends_with_its_stop_token(engine: Engine) -> None:
    stops = tuple(range(0, VOCAB_SIZE, 2))
    spans = await collect(engine, make_request(max_new_tokens=200, stop_token_ids=stops, seed=3))
    *before, last = tokens_of(spans)
    assert spans[-1].finish_reason is FinishReason.STOP
    assert last in stops
    assert not set(before) & set(stops)


async def test_a_full_context_ends_a_sample(engine: Engine) -> None:
    spans = await collect(engine, make_request(max_new_tokens=10_000))
    assert len(tokens_of(spans)) == engine.max_model_len - len(PROMPT)
    assert spans[-1].finish_reason is FinishReason.LENGTH


async def test_a_seed_repeats_a_sample_and_another_changes_it(engine: Engine) -> None:
    requests = [make_request(seed=seed) for seed in (11, 11, 12)]
    first, again, other = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert tokens_of(first) == tokens_of(again)
    assert tokens_of(first) != tokens_of(other)


async def test_a_continuation_yields_only_what_follows_the_prefix(engine: Engine) -> None:
    whole = tokens_of(await collect(engine, make_request(temperature=0.0, seed=5)))
    request = dataclasses.replace(make_request(temperature=0.0, seed=5), prefix_token_ids=tuple(whole[:10]))
    spans = await collect(engine, request)
    assert tokens_of(spans) == whole[10:]
    assert spans[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prefix", "finish"), [((9, 4), FinishReason.STOP), ((9, 9, 9), FinishReason.LENGTH)], ids=["stopped", "full"]
)
async def test_a_prefix_that_ends_the_sample_yields_one_empty_span(
    engine: Engine, prefix: tuple[int, ...], finish: FinishReason
) -> None:
    request = make_request(max_new_tokens=3, stop_token_ids=(4,))
    (span,) = await collect(engine, dataclasses.replace(request, prefix_token_ids=prefix))
    assert (len(span.token_ids), span.finish_reason) == (0, finish)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": (VOCAB_SIZE,)},
        {"prefix_token_ids": (-1,)},
        {"prompt_token_ids": (1,) * MAX_CONTEXT},
    ],
    ids=["unknown token", "negative token", "too long"],
)
async def test_what_can_never_be_decoded_is_refused(engine: Engine, changes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(RequestRefusedError):
        await collect(engine, dataclasses.replace(make_request(), **changes))


async def test_an_id_in_use_is_refused_and_the_first_sample_goes_on(engine: Engine) -> None:
    request = make_request(max_new_tokens=300)
    async with aclosing(engine.generate(request)) as spans:
        first = await anext(spans)
        with pytest.raises(RequestRefusedError):
            await collect(engine, request)
        rest = [span async for span in spans]
    assert len(tokens_of([first, *rest])) == 300


async def test_an_aborted_sample_gets_a_last_span(engine: Engine) -> None:
    request = make_request(max_new_tokens=400)
    async with aclosing(engine.generate(request)) as spans:
        first = await anext(spans)
        await engine.abort(request.request_id)
        rest = [span async for span in spans]
    assert first.finish_reason is None
    assert rest[-1].finish_reason is FinishReason.ABORTED
    await engine.abort(request.request_id)


async def test_a_sample_aborted_before_its_first_token_gets_a_last_span(engine: Engine) -> None:
    requests = [make_request(max_new_tokens=50) for _ in range(20)]
    samples = [asyncio.create_task(collect(engine, request)) for request in requests]
    await asyncio.sleep(0)
    await asyncio.gather(*(engine.abort(request.request_id) for request in requests))
    results = await asyncio.gather(*samples)
    assert [spans[-1].finish_reason for spans in results] == [FinishReason.ABORTED] * 20
    assert await collect(engine, make_request())


async def test_closing_the_iteration_frees_the_engine(engine: Engine) -> None:
    async with aclosing(engine.generate(make_request(max_new_tokens=400))) as spans:
        await anext(spans)
        assert engine.stats().num_running == 1
    await until(lambda: engine.stats().num_running == 0)
    assert len(tokens_of(await collect(engine, make_request()))) == 24


async def test_stats_count_yielded_tokens(engine: Engine) -> None:
    before = engine.stats().tokens_generated
    await asyncio.gather(*(collect(engine, make_request(max_new_tokens=10)) for _ in range(5)))
    stats = engine.stats()
    assert stats.tokens_generated - before == 50
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)


async def test_the_profile_states_room_and_no_speed_that_is_not_known(engine: Engine) -> None:
    profile = engine.profile()
    assert profile.max_concurrent_samples >= 1
    assert profile.kv_capacity_tokens is None or profile.kv_capacity_tokens >= engine.max_model_len
    assert profile.step_base_s is None or profile.step_base_s >= 0


async def test_long_seeded_prompts_that_come_all_at_once_are_all_finished(engine: Engine) -> None:
    # More prompt tokens than one step of vLLM takes by default: on a CPU, a seeded sample's split prefill would end it.
    short = [make_request(max_new_tokens=4, seed=seed) for seed in range(60)]
    requests = [dataclasses.replace(request, prompt_token_ids=PROMPT * 20) for request in short]
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert [len(tokens_of(spans)) for spans in results] == [4] * 60


async def test_samples_live_through_an_update_and_every_token_says_its_version(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    old = engine.policy_version
    samples = [asyncio.create_task(collect(engine, make_request(max_new_tokens=400))) for _ in range(8)]
    seen = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated - seen > 100)
    await take_perturbed(engine, model_path, tmp_path)
    results = await asyncio.gather(*samples)
    for spans in results:
        assert len(tokens_of(spans)) == 400
        assert versions_of(spans) == sorted(versions_of(spans))
        assert set(versions_of(spans)) == {old, old + 1}
    fresh = await collect(engine, make_request())
    assert set(versions_of(fresh)) == {old + 1}
    await take_initial(engine, model_path)


async def test_a_file_that_is_not_what_the_manifest_lists_changes_nothing(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    before = engine.policy_version
    path = write_perturbed(model_path, tmp_path / "new.safetensors", seed=1)
    true_update = make_update(path, policy_version=before + 1)
    write_perturbed(model_path, path, seed=2)
    with pytest.raises(WeightsMismatchError):
        await engine.update_weights(true_update)
    with pytest.raises(WeightsMismatchError):
        await engine.update_weights(dataclasses.replace(make_update(path, policy_version=9), digest="0" * 64))
    assert engine.policy_version == before
    spans = await collect(engine, make_request())
    assert set(versions_of(spans)) == {before}


@pytest.mark.parametrize("fault", ["missing tensor", "unknown tensor", "another shape"])
async def test_another_models_tensors_change_nothing(
    engine: Engine, is_real: bool, model_path: Path, tmp_path: Path, fault: str
) -> None:
    if not is_real:
        pytest.skip("the emulated engine holds no weights")
    weights = load_file(model_path / "model.safetensors")
    if fault == "missing tensor":
        del weights["model.norm.weight"]
    elif fault == "unknown tensor":
        weights["model.layers.0.self_attn.q_proj.extra"] = torch.ones(3)
    else:
        weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "other.safetensors")
    before = engine.policy_version
    with pytest.raises(WeightsMismatchError, match="by name or shape"):
        await engine.update_weights(make_update(tmp_path / "other.safetensors", policy_version=before + 1))
    spans = await collect(engine, make_request(max_new_tokens=60))
    assert set(versions_of(spans)) == {before} == {engine.policy_version}
    np.testing.assert_allclose(logprobs_of(spans), recompute(model_path, tokens_of(spans)), atol=1e-4)


async def test_a_tied_head_may_be_written_out(engine: Engine, is_real: bool, model_path: Path, tmp_path: Path) -> None:
    if not is_real:
        pytest.skip("the emulated engine holds no weights")
    path = write_perturbed(model_path, tmp_path / "tied.safetensors", seed=8)
    weights = load_file(path)
    save_file(
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "both.safetensors"
    )
    update = make_update(tmp_path / "both.safetensors", policy_version=engine.policy_version + 1)
    assert (await engine.update_weights(update)).digest == update.digest
    spans = await collect(engine, make_request(max_new_tokens=60))
    np.testing.assert_allclose(logprobs_of(spans), recompute(model_path, tokens_of(spans), weights=path), atol=1e-4)
    await take_initial(engine, model_path)


async def test_nothing_is_sampled_by_weights_the_engine_does_not_hold(
    engine: Engine, is_real: bool, model_path: Path, tmp_path: Path
) -> None:
    if not is_real:
        pytest.skip("the emulated engine holds no weights")
    weights = load_file(model_path / "model.safetensors")
    # Not a number equals nothing, not even itself: no engine can prove that it holds this.
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, tmp_path / "bad.safetensors")
    bad = make_update(tmp_path / "bad.safetensors", policy_version=engine.policy_version + 1)
    living = asyncio.create_task(collect(engine, make_request(max_new_tokens=300)))
    await until(lambda: engine.stats().num_running == 1)
    before = engine.policy_version
    with pytest.raises(WeightsMismatchError, match="up_proj"):
        await engine.update_weights(bad)
    waiting = asyncio.create_task(collect(engine, make_request()))
    _, pending = await asyncio.wait([waiting], timeout=0.3)
    assert pending, "a sample was decoded by weights that were not attested"
    await take_initial(engine, model_path)
    spans = await waiting
    assert set(versions_of(spans)) == {before + 1} == {engine.policy_version}
    assert len(tokens_of(await living)) == 300


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_logprobs_are_those_of_the_model_before_and_after_an_update(
    engine: Engine, is_real: bool, model_path: Path, tmp_path: Path, temperature: float
) -> None:
    if not is_real:
        pytest.skip("the emulated engine has no model")
    before = await collect(engine, make_request(max_new_tokens=150, temperature=temperature))
    expected = recompute(model_path, tokens_of(before), temperature=temperature)
    np.testing.assert_allclose(logprobs_of(before), expected, atol=1e-4)
    weights = await take_perturbed(engine, model_path, tmp_path)
    after = await collect(engine, make_request(max_new_tokens=150, temperature=temperature))
    expected = recompute(model_path, tokens_of(after), weights=weights, temperature=temperature)
    np.testing.assert_allclose(logprobs_of(after), expected, atol=1e-4)
    stale = recompute(model_path, tokens_of(after), temperature=temperature)
    assert np.abs(stale - expected).max() > 0.1, "the update must be one that shows"
    await take_initial(engine, model_path)


async def test_a_sample_in_flight_goes_on_with_new_weights_over_the_old_cache(
    engine: Engine, is_real: bool, model_path: Path, tmp_path: Path
) -> None:
    if not is_real:
        pytest.skip("the emulated engine has no model")
    old = engine.policy_version
    sample = asyncio.create_task(collect(engine, make_request(max_new_tokens=400)))
    seen = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated - seen > 20)
    weights = await take_perturbed(engine, model_path, tmp_path)
    spans = await sample
    num_old = versions_of(spans).count(old)
    expected = recompute_over_old_cache(model_path, tokens_of(spans), num_old, weights=weights)
    np.testing.assert_allclose(logprobs_of(spans), expected, atol=1e-4)
    # A fresh context differs, but little: what off-policy correction has to bear.
    fresh = recompute(model_path, tokens_of(spans), weights=weights)[num_old:]
    assert 1e-3 < np.abs(fresh - logprobs_of(spans)[num_old:]).mean() < 1.0
    await take_initial(engine, model_path)


@pytest.mark.parametrize("seed", [None, 4], ids=["unseeded", "seeded"])
async def test_samples_in_flight_may_compute_their_cache_again_under_new_weights(
    engine: Engine, model_path: Path, tmp_path: Path, is_real: bool, seed: int | None
) -> None:
    old = engine.policy_version
    requests = [make_request(max_new_tokens=300, seed=seed and seed + index) for index in range(6)]
    samples = [asyncio.create_task(collect(engine, request)) for request in requests]
    seen = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated - seen > 200)
    weights = write_perturbed(model_path, tmp_path / "new.safetensors", seed=1)
    update = make_update(weights, policy_version=old + 1)
    report = await engine.update_weights(dataclasses.replace(update, is_recomputing=True))
    results = await asyncio.gather(*samples)
    assert [versions_of(spans) for spans in results] == [sorted(versions_of(spans)) for spans in results]
    assert [len(tokens_of(spans)) for spans in results] == [300] * 6
    num_old = [versions_of(spans).count(old) for spans in results]
    assert all(0 < count < 300 for count in num_old)
    # The engine had decoded more than it had yielded, and the last token of each is not in its cache yet.
    assert report.num_recomputed_tokens == pytest.approx(sum(num_old) + 6 * (len(PROMPT) - 1), abs=6)
    assert report.pause_s >= 0
    assert engine.stats().num_preemptions == 0
    for spans, count in zip(results, num_old, strict=True):
        if is_real:
            fresh = recompute(model_path, tokens_of(spans), weights=weights)
            np.testing.assert_allclose(logprobs_of(spans)[count:], fresh[count:], atol=1e-4)
    await take_initial(engine, model_path)


async def test_a_paused_engine_stands_still_over_an_update_and_goes_on(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    assert isinstance(engine, PausableEngine)
    old = engine.policy_version
    sample = asyncio.create_task(collect(engine, make_request(max_new_tokens=400)))
    seen = engine.stats().tokens_generated
    await until(lambda: engine.stats().tokens_generated - seen > 20)
    await engine.pause()
    await engine.pause()
    await asyncio.sleep(0.1)
    stood_at = engine.stats().tokens_generated
    await take_perturbed(engine, model_path, tmp_path)
    waiting = asyncio.create_task(collect(engine, make_request()))
    _, pending = await asyncio.wait([sample, waiting], timeout=0.2)
    assert len(pending) == 2
    # What an update has the transformers engine flush was decoded before.
    assert engine.stats().tokens_generated - stood_at < 8
    await engine.resume()
    assert set(versions_of(await waiting)) == {old + 1}
    spans = await sample
    assert len(tokens_of(spans)) == 400
    assert set(versions_of(spans)) == {old, old + 1}
    await take_initial(engine, model_path)


async def test_vllm_attestation_names_each_tensor_that_differs(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    if not isinstance(engine, VllmEngine):
        pytest.skip("vLLM's own attestation")
    weights = load_file(model_path / "model.safetensors")
    assert len(weights) == 26
    path = tmp_path / "one_off.safetensors"
    for name, tensor in weights.items():
        one_off = tensor.clone()
        one_off.view(-1)[-1] += 1e-6
        save_file({**weights, name: one_off}, path)
        differing = await engine._attest([path], weights)
        tied = {"lm_head.weight"} if name == "model.embed_tokens.weight" else set()
        assert set(differing) == {name} | tied


async def test_vllm_attestation_notices_one_bit_in_the_part_of_each_worker(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    if not isinstance(engine, VllmEngine):
        pytest.skip("vLLM's own attestation")
    # The bit lies in the rows of the first tensor-parallel worker, and in the columns of the second.
    names = ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight")
    num_workers = engine._config.tensor_parallel * engine._config.pipeline_parallel
    for rank, name in enumerate(names[:num_workers]):
        await engine._llm.collective_rpc("penstock_flip_next", args=(name, rank))
        with pytest.raises(WeightsMismatchError, match=name):
            await take_perturbed(engine, model_path, tmp_path)
        await take_initial(engine, model_path)


async def test_vllm_attestation_notices_that_its_own_reload_leaves_a_tied_head_behind(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    if not isinstance(engine, VllmEngine):
        pytest.skip("vLLM's own attestation")
    make_tiny_model(tmp_path, seed=77)
    await engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
    names = load_file(tmp_path / "model.safetensors")
    assert await engine._attest([tmp_path / "model.safetensors"], names) == ["lm_head.weight"]
    await take_initial(engine, model_path)
    assert not await engine._attest([model_path / "model.safetensors"], names)


async def test_vllm_computes_a_groups_prompt_once_and_again_under_new_weights(
    engine: Engine, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(engine, VllmEngine):
        pytest.skip("vLLM's prefix cache")
    num_cached: dict[str, int] = {}
    to_spans = vllm_engine.to_spans

    def noting(output: RequestOutput, *args: object, **settings: object) -> Iterator[TokenSpan]:
        num_cached[output.request_id] = output.num_cached_tokens
        return to_spans(output, *args, **settings)

    monkeypatch.setattr(vllm_engine, "to_spans", noting)
    num_whole = 2 * engine.profile().kv_block_tokens
    prompt = (PROMPT * MAX_CONTEXT)[: num_whole + 10]

    async def decode_group() -> list[int]:
        requests = [dataclasses.replace(make_request(max_new_tokens=4), prompt_token_ids=prompt) for _ in range(8)]
        await asyncio.gather(*(collect(engine, request) for request in requests))
        return sorted(num_cached[request.request_id] for request in requests)

    assert await decode_group() == [0] + [num_whole] * 7
    assert await decode_group() == [num_whole] * 8
    await take_perturbed(engine, model_path, tmp_path)
    assert await decode_group() == [0] + [num_whole] * 7
    await take_initial(engine, model_path)


async def test_vllm_takes_versions_layer_by_layer_where_it_cannot_refill(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    if not isinstance(engine, VllmEngine):
        pytest.skip("vLLM's own reload")
    await engine._llm.collective_rpc("penstock_reload_layerwise", args=(True,))
    for _ in range(2):
        path = await take_perturbed(engine, model_path, tmp_path)
        spans = await collect(engine, make_request())
        np.testing.assert_allclose(
            logprobs_of(spans), recompute(model_path, tokens_of(spans), weights=path), rtol=0, atol=1e-4
        )
        # Neither the start nor a reload leaves a copy of the embedding that nothing multiplies.
        await assert_only_heads_are_packed(engine)
    await engine._llm.collective_rpc("penstock_reload_layerwise", args=(False,))
    await take_initial(engine, model_path)
    await assert_only_heads_are_packed(engine)


async def assert_only_heads_are_packed(engine: VllmEngine) -> None:
    heads, embeddings = zip(*await engine._llm.collective_rpc("penstock_packed"), strict=True)
    assert set(itertools.chain(*heads)) == {True}
    assert True not in itertools.chain(*embeddings)


async def test_truncated_and_greedy_logprobs_are_those_of_what_was_sampled_from(
    engine: Engine, is_real: bool, model_path: Path
) -> None:
    if not is_real:
        pytest.skip("the emulated engine has no model")
    greedy, top_1, top_p, top_3 = await asyncio.gather(
        collect(engine, make_request(temperature=0.0)),
        collect(engine, make_request(top_k=1)),
        collect(engine, make_request(top_p=1e-6)),
        collect(engine, make_request(top_k=3, max_new_tokens=60)),
    )
    assert tokens_of(greedy) == tokens_of(top_1) == tokens_of(top_p)
    np.testing.assert_allclose(logprobs_of(greedy), recompute(model_path, tokens_of(greedy)), atol=1e-4)
    np.testing.assert_allclose(logprobs_of(top_1), 0.0, atol=1e-6)
    np.testing.assert_allclose(logprobs_of(top_p), 0.0, atol=1e-6)
    assert (logprobs_of(top_3) > recompute(model_path, tokens_of(top_3)) + 1e-3).all()


async def test_a_stopped_engine_ends_its_samples_and_refuses_more(engine: Engine) -> None:
    # Last on purpose: it uses up the shared engine.
    sample = asyncio.create_task(collect(engine, make_request(max_new_tokens=400)))
    await until(lambda: engine.stats().num_running == 1)
    await engine.stop()
    spans = await sample
    assert spans[-1].finish_reason is FinishReason.ABORTED
    with pytest.raises(EngineStoppedError):
        await collect(engine, make_request())
    await engine.stop()
