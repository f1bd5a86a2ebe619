"""Compares concurrency by measured KV pressure with fixed settings, on an emulated GPU in virtual time.

One generator with more work than it can fit decodes the same samples under each setting: a fixed number of concurrent
samples, or as many as `services.generator.decoding.kv_headroom` asks for. The emulated GPU
(`services.generator.emulation`) preempts and prefills as vLLM does, so too many samples at once cost recomputation
and too few leave the GPU idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.generator.decoding.kv_headroom import KvHeadroom, RunningSample
from services.generator.emulation.continuous_batch import BatchSample, ContinuousBatch
from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.emulation.length_law import HistogramLengths, LengthLaw, LogNormalLengths
from services.generator.emulation.roofline import Roofline

BEAT_S = 0.05
"""A generator requests leases this often while samples end."""
FIXED_SETTINGS = (8, 16, 20, 24, 32, 40, 44, 48, 64, 72, 80, 96, 104, 128, 256)
WARM_UP_SHARE = 0.25
"""Share of the samples before counting starts; it ends when the last one has started."""
MAX_SAMPLES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Samples and the memory for them."""

    name: str
    lengths: LengthLaw
    prompt_tokens: int
    max_new_tokens: int
    kv_capacity_tokens: int
    num_samples: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run of one setting."""

    tokens_per_second: float
    preempted_share: float
    """Preemptions per sample."""
    mean_samples: float
    """Concurrent samples, averaged over time."""


WORKLOADS = (
    Workload(
        name="short, little spread",
        lengths=LogNormalLengths(mean_tokens=600, sigma=0.3),
        prompt_tokens=200,
        max_new_tokens=2048,
        kv_capacity_tokens=60_000,
    ),
    Workload(
        name="wide spread",
        lengths=LogNormalLengths(mean_tokens=1500, sigma=1.0),
        prompt_tokens=300,
        max_new_tokens=16_384,
        kv_capacity_tokens=150_000,
    ),
    Workload(
        name="StreamRL's histogram",
        lengths=HistogramLengths(),
        prompt_tokens=500,
        max_new_tokens=20_480,
        kv_capacity_tokens=400_000,
    ),
    Workload(
        name="long prompts",
        lengths=LogNormalLengths(mean_tokens=400, sigma=0.7),
        prompt_tokens=3000,
        max_new_tokens=4096,
        kv_capacity_tokens=200_000,
    ),
    Workload(
        name="room for 40 samples",
        lengths=LogNormalLengths(mean_tokens=300, sigma=0.6),
        prompt_tokens=100,
        max_new_tokens=2048,
        kv_capacity_tokens=16_000,
    ),
    Workload(
        name="room for 40 samples, wide spread",
        lengths=LogNormalLengths(mean_tokens=300, sigma=1.0),
        prompt_tokens=100,
        max_new_tokens=4096,
        kv_capacity_tokens=16_000,
    ),
)


SMALL_WORKLOAD = Workload(
    name="small",
    lengths=LogNormalLengths(mean_tokens=300, sigma=0.6),
    prompt_tokens=100,
    max_new_tokens=2048,
    kv_capacity_tokens=24_000,
    num_samples=1200,
)


def simulate(workload: Workload, *, fixed: int | None, seed: int = 0) -> Outcome:
    """Decode the whole workload with this many concurrent samples; None uses the measured KV headroom."""
    steps = Roofline(gpu=GPUS["H800"], model=MODELS["qwen2.5-7b"])
    batch = ContinuousBatch(steps, max_samples=MAX_SAMPLES, kv_capacity_tokens=workload.kv_capacity_tokens)
    queue, room = _samples(workload, seed), KvHeadroom(workload.kv_capacity_tokens)
    held: list[BatchSample] = []
    num_begun, num_ended, ended_tokens, sum_held = 0, 0, 0, 0
    marks: list[tuple[int, int]] = []
    while num_begun < workload.num_samples:
        more = _num_more(workload, room, batch, held) if fixed is None else max(0, fixed - len(held))
        for sample in itertools.islice(queue, more):
            held.append(sample)
            batch.add(sample)
            num_begun += 1
        batch.elapse(BEAT_S)
        for sample in batch.pop_ended():
            held.remove(sample)
            room.note_finished(sample.length)
            num_ended, ended_tokens = num_ended + 1, ended_tokens + sample.length
        if num_ended >= WARM_UP_SHARE * workload.num_samples:
            sum_held += len(held)
            marks.append((ended_tokens + sum(sample.position for sample in held), batch.num_preemptions))
    num_beats = len(marks) - 1
    return Outcome(
        tokens_per_second=(marks[-1][0] - marks[0][0]) / (num_beats * BEAT_S),
        preempted_share=(marks[-1][1] - marks[0][1]) / ((1 - WARM_UP_SHARE) * workload.num_samples),
        mean_samples=sum_held / len(marks),
    )


def _samples(workload: Workload, seed: int) -> Iterator[BatchSample]:
    generator = np.random.default_rng(seed)
    for index in range(workload.num_samples):
        length = min(workload.lengths.draw(generator, index), workload.max_new_tokens)
        yield BatchSample(context_tokens=workload.prompt_tokens, length=length, position=0)


def _num_more(workload: Workload, room: KvHeadroom, batch: ContinuousBatch, held: Sequence[BatchSample]) -> int:
    views = [
        RunningSample(
            num_prompt_tokens=workload.prompt_tokens,
            num_new_tokens=sample.position,
            max_new_tokens=workload.max_new_tokens,
        )
        for sample in held
    ]
    room.note_preemptions(batch.num_preemptions)
    if not batch.num_waiting:
        room.note_usage(views, batch.kv_tokens / workload.kv_capacity_tokens)
    return room.num_more(views, most=MAX_SAMPLES - len(held))
