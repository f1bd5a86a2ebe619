"""Teaches the scheduler's own forecaster part of a data set and measures its forecasts of the rest.

- `held_out`: fitted to four fifths of the prompts, tested on the last fifth, one sample a prompt; beside it the
  baseline by prompt length and, where it is known, the oracle that has the same information.
- `doubled`: the same forecasts when every length roughly doubles: the effect on order and error.
- `prequential`: step by step as in a run, each forecast made before its lengths are known, with fits in between.
- `speed`: seconds of a fit, milliseconds of a call for 1,024 prompts, and of calls for 32 during a fit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from benchmarks.dispatch.scenarios import WITHIN_GROUP_SIGMA
from benchmarks.ranker.made_set import make_set
from penstock.clock import SystemClock
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.forecaster import LengthForecaster
from services.scheduler.lengths.length_model import Learner
from services.scheduler.lengths.metrics import LengthMetrics
from services.scheduler.lengths.prompt_features import PromptView
from services.scheduler.lengths.quality import measure
from services.scheduler.lengths.ridge import PROMPT_LENGTH, RidgeLearner

_GROUP_SIZE, _PROMPTS_PER_STEP, _STEPS_PER_FIT = 8, 32, 4
_CALL_PROMPTS = 1024
_RUN = "bench"
_NUMBERS = (
    "recall_longest_20_percent",
    "recall_longest_10_percent",
    "recall_longest_5_percent",
    "spearman",
    "mean_absolute_error_tokens",
)

Floats = npt.NDArray[np.float64]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Prompts in order of arrival, and the lengths of their samples."""

    prompts: Sequence[PromptView]
    lengths: Floats
    """Tokens, [num_prompts, group_size]; the first of a group is its prompt's only sample in `held_out`."""
    oracle: Floats | None = None
    """A forecast with the best possible ranking for its information, in any unit, [num_prompts]."""


def made_data(*, seed: int, num_prompts: int) -> DataSet:
    """The synthetic long-tail set; siblings vary around their prompt's length."""
    made = make_set(seed=seed, num_prompts=num_prompts)
    own = np.array([float(each.length) for each in made])
    noise = np.random.default_rng(seed).lognormal(0.0, WITHIN_GROUP_SIGMA, (num_prompts, _GROUP_SIZE))
    noise[:, 0] = 1.0
    return DataSet(
        prompts=[each.prompt for each in made],
        lengths=np.maximum(1.0, np.round(own[:, None] * noise)),
        oracle=np.array([each.shown for each in made]),
    )


async def run(datasets: dict[str, DataSet], *, learners: Sequence[Learner], progress: Callable[[str], None]) -> Result:
    """Results for all data sets."""
    result: Result = {}
    for name, data in datasets.items():
        progress(f"{name}: held out")
        forecaster, held_out, doubled, speed = await _held_out(data, learners)
        progress(f"{name}: speed")
        speed |= await _speed(forecaster, data)
        progress(f"{name}: prequential")
        prequential = await _prequential(data, learners)
        result[name] = {"held_out": held_out, "doubled": doubled, "prequential": prequential, "speed": speed}
    return result


def _make_forecaster(learners: Sequence[Learner]) -> LengthForecaster:
    return LengthForecaster(learners=learners, clock=SystemClock(), metrics=LengthMetrics(CollectorRegistry()))


def _query(prompt: PromptView, name: str) -> pb.LengthQuery:
    ids = prompt.words.astype("<u4").tobytes()
    return pb.LengthQuery(
        group_id=name, prompt_token_ids=ids, prompt_text=prompt.text, num_prompt_tokens=prompt.num_tokens
    )


async def _forecast(forecaster: LengthForecaster, prompts: Sequence[PromptView], names: str) -> list[pb.LengthForecast]:
    found: list[pb.LengthForecast] = []
    for start in range(0, len(prompts), _CALL_PROMPTS):
        part = prompts[start : start + _CALL_PROMPTS]
        queries = [_query(prompt, f"{names}{start + index}") for index, prompt in enumerate(part)]
        found += (await forecaster.forecast(_RUN, queries))[0]
    return found


async def _held_out(data: DataSet, learners: Sequence[Learner]) -> tuple[LengthForecaster, Result, Result, Result]:
    num_fitted = len(data.prompts) * 4 // 5
    forecaster = _make_forecaster(learners)
    await forecaster.observe(
        _RUN,
        [
            pb.LengthObservation(query=_query(prompt, f"f{index}"), num_completion_tokens=int(data.lengths[index, 0]))
            for index, prompt in enumerate(data.prompts[:num_fitted])
        ],
    )
    started_s = time.perf_counter()
    await forecaster.refresh()
    fit_s = time.perf_counter() - started_s
    answers = await _forecast(forecaster, data.prompts[num_fitted:], "t")
    lengths = data.lengths[num_fitted:, 0]
    described = forecaster.describe(_RUN)
    baseline = np.array([float(prompt.num_tokens) for prompt in data.prompts[num_fitted:]])
    held_out: Result = {
        "num_fitted": num_fitted,
        "num_tested": len(lengths),
        described.model: _numbers(lengths, answers),
        PROMPT_LENGTH: _ranks(lengths, baseline),
    }
    if data.oracle is not None:
        held_out["oracle"] = _ranks(lengths, data.oracle[num_fitted:])
    return forecaster, held_out, _doubled(lengths, answers), {"fit_s": fit_s}


def _doubled(lengths: Floats, forecasts: Sequence[pb.LengthForecast]) -> Result:
    after = lengths * 2.0 * np.random.default_rng(0).lognormal(0.0, 0.2, len(lengths))
    first, second = _numbers(lengths, forecasts), _numbers(after, forecasts)
    recall, error = "recall_longest_20_percent", "mean_absolute_error_tokens"
    return {
        recall: second[recall],
        error: second[error],
        "recall_lost_ratio": 1.0 - second[recall] / first[recall],
        "error_risen_ratio": second[error] / first[error] - 1.0,
    }


async def _speed(forecaster: LengthForecaster, data: DataSet) -> Result:
    calls_ms = []
    for _ in range(5):
        started_s = time.perf_counter()
        await _forecast(forecaster, data.prompts[:_CALL_PROMPTS], "s")
        calls_ms.append(1000 * (time.perf_counter() - started_s))
    await forecaster.observe(
        _RUN,
        [
            pb.LengthObservation(query=_query(prompt, ""), num_completion_tokens=int(data.lengths[index, 0]))
            for index, prompt in enumerate(data.prompts)
        ],
    )
    fitting = asyncio.create_task(forecaster.refresh())
    beside_ms = []
    while not fitting.done():
        started_s = time.perf_counter()
        await _forecast(forecaster, data.prompts[:_PROMPTS_PER_STEP], "b")
        beside_ms.append(1000 * (time.perf_counter() - started_s))
        await asyncio.sleep(0.01)
    await fitting
    return {
        "call_1024_prompts_ms": median(calls_ms),
        "call_32_prompts_during_fit_p50_ms": median(beside_ms),
        "call_32_prompts_during_fit_max_ms": max(beside_ms),
    }


async def _prequential(data: DataSet, learners: Sequence[Learner]) -> Result:
    forecaster = _make_forecaster(learners)
    num_steps = len(data.prompts) // _PROMPTS_PER_STEP
    for step in range(num_steps):
        indices = range(step * _PROMPTS_PER_STEP, (step + 1) * _PROMPTS_PER_STEP)
        names = f"step{step}-"
        await _forecast(forecaster, [data.prompts[index] for index in indices], names)
        groups = [pb.LengthQuery(group_id=f"{names}{place}") for place in range(_PROMPTS_PER_STEP)]
        await forecaster.observe(
            _RUN,
            [
                pb.LengthObservation(query=group, num_completion_tokens=int(length))
                for group, index in zip(groups, indices, strict=True)
                for length in data.lengths[index]
            ],
        )
        if step % _STEPS_PER_FIT == _STEPS_PER_FIT - 1:
            await forecaster.refresh()
    described = forecaster.describe(_RUN)
    qualities = {each.forecaster: each for each in described.qualities if each.test == pb.LENGTH_TEST_PREQUENTIAL}
    result: Result = {"num_steps": num_steps, "num_fits": described.model_version}
    for name, quality in qualities.items():
        result[name] = {"num_samples": quality.num_samples} | _as_dict(quality)
    return result


def _numbers(lengths: Floats, forecasts: Sequence[pb.LengthForecast]) -> Result:
    return _as_dict(measure(lengths, forecasts, forecaster="", test=pb.LENGTH_TEST_HELD_OUT))


def _ranks(lengths: Floats, forecasts: Floats) -> Result:
    """Quality of a forecast that is not in tokens."""
    numbers = _numbers(lengths, [pb.LengthForecast(expected_tokens=each) for each in forecasts])
    return {name: value for name, value in numbers.items() if name.startswith("recall") or name == "spearman"}


def _as_dict(quality: pb.LengthQuality) -> Result:
    numbers: Result = {name: getattr(quality, name) for name in _NUMBERS}
    if quality.HasField("interval_coverage"):
        numbers["interval_coverage"] = quality.interval_coverage
        numbers["bias_by_fifth"] = [bucket.expected_tokens / bucket.mean_tokens for bucket in quality.buckets]
    return numbers


LIGHT: tuple[Learner, ...] = (RidgeLearner(),)
