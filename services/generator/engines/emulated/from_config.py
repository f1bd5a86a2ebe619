"""Builds an emulated engine's spec from a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from penstock.batching.step_times import STREAMRL_TABLE, LinearSteps, StepTimes, TableSteps
from penstock.model.model_folder import model_size
from services.generator.emulation.config import EmulatedConfig
from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.emulation.length_law import HistogramLengths, LengthLaw, LogNormalLengths, read_lengths
from services.generator.emulation.roofline import Roofline
from services.generator.engines.base_config import ServedModel
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.emulated.emulated_engine import MAX_MODEL_LEN, VOCAB_SIZE, EmulatedSpec

_LENGTH_SIGMA = 0.8
_FIT_TOKENS = 4096
_Item = TypeVar("_Item")


def build_spec(engine: EmulatedEngineConfig, model: ServedModel) -> EmulatedSpec:
    """The emulated engine's spec. Raises ValueError naming the problem, or OSError if the lengths are unreadable."""
    emulated = model.emulated
    roofline = _roofline(emulated, engine.tensor_parallel, engine.pipeline_parallel)
    kv_capacity_tokens = emulated.kv_capacity_tokens
    if kv_capacity_tokens is None and roofline is not None:
        kv_capacity_tokens = roofline.kv_capacity_tokens
    return EmulatedSpec(
        steps=_steps(engine, emulated, roofline),
        lengths=_lengths(engine, emulated),
        max_num_seqs=engine.max_concurrent_samples,
        kv_capacity_tokens=kv_capacity_tokens,
        max_model_len=engine.max_context_tokens
        or model_size(model.model_folder, "max_position_embeddings")
        or MAX_MODEL_LEN,
        vocab_size=model_size(model.model_folder, "vocab_size") or VOCAB_SIZE,
        tick_s=emulated.tick_s,
        time_scale=emulated.time_scale,
        seed=model.seed,
    )


def _roofline(emulated: EmulatedConfig, num_workers: int, num_stages: int) -> Roofline | None:
    if emulated.gpu is None:
        return None
    gpu = _known(GPUS, emulated.gpu, "emulated.gpu")
    model = _known(MODELS, emulated.model, "emulated.model")
    num_gpus = num_workers * num_stages
    try:
        return Roofline(gpu=gpu, model=model, num_gpus=num_gpus, num_stages=num_stages, slowdown=emulated.slowdown)
    except ValueError as error:
        raise ValueError(f"emulated: {emulated.model} on {num_gpus} x {emulated.gpu}: {error}") from error


def _steps(engine: EmulatedEngineConfig, emulated: EmulatedConfig, roofline: Roofline | None) -> StepTimes:
    if emulated.steps == "streamrl":
        prefill_s = roofline.prefill_s(_FIT_TOKENS) if roofline is not None else None
        return TableSteps(
            table=STREAMRL_TABLE,
            slowdown=emulated.slowdown,
            prefill_tokens_per_second=_FIT_TOKENS / prefill_s if prefill_s is not None else None,
        )
    return roofline or LinearSteps(per_sample_s=emulated.slowdown / engine.emulated_tokens_per_second)


def _lengths(engine: EmulatedEngineConfig, emulated: EmulatedConfig) -> LengthLaw:
    lengths = emulated.lengths
    if lengths == "lognormal":
        return LogNormalLengths(mean_tokens=engine.emulated_mean_tokens, sigma=_LENGTH_SIGMA)
    if lengths == "streamrl":
        return HistogramLengths(scale=emulated.length_scale)
    return read_lengths(lengths)


def _known(items: Mapping[str, _Item], name: str, key: str) -> _Item:
    if name not in items:
        near = difflib.get_close_matches(name, items, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(items)}"
        raise ValueError(f"{key}: {name!r} is not known; {hint}")
    return items[name]
