"""Yields scripted tokens at a stated speed, for tests and for fleets of emulated GPUs.

- A sample's tokens depend only on the seed, the prompt and the sample's own seed (its request id if it has none),
  so another emulated engine continues the same script.
- Its speed depends only on the step times and KV capacity of its emulated GPU (`services.generator.emulation`), and
  on `time_scale`: emulated seconds per real second.
- Weight files are checked as in any engine; none is loaded, so attestation covers the file.

Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.batching.step_times import StepTimes, line_through
from penstock.model.digests import verify_safetensors
from services.generator.emulation.continuous_batch import BatchSample, ContinuousBatch
from services.generator.emulation.length_law import LengthLaw
from services.generator.engine.engine import (
    EngineProfile,
    EngineStats,
    EngineStoppedError,
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
    TokenSpan,
    UpdateReport,
    WeightUpdate,
    check_request,
    finished_by_prefix,
    max_tokens_left,
)

MIN_SLEEP_S = 0.001
"""The event loop must run other tasks between two batch updates."""

MAX_MODEL_LEN, VOCAB_SIZE = 4096, 64
"""Those of a model whose folder states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSpec:
    """An emulated accelerator and its workload."""

    steps: StepTimes
    """Step times."""
    lengths: LengthLaw
    """Source of script lengths, stop token included."""
    max_num_seqs: int = 128
    """Maximum number of samples decoded at once."""
    kv_capacity_tokens: int | None = None
    """KV capacity; None if unbounded."""
    max_model_len: int = MAX_MODEL_LEN
    """Longest prompt + completion, in tokens."""
    vocab_size: int = VOCAB_SIZE
    """Tokens are drawn from [0, vocab_size), except stop tokens."""
    tick_s: float = 0.01
    """Real time between yields of tokens; the end of a sample is yielded at once."""
    time_scale: float = 1.0
    """Emulated seconds per real second."""
    seed: int = 0
    """Seed of every script."""

    def __post_init__(self) -> None:
        """Refuses KV capacity in which a long sample would never fit."""
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < self.max_model_len:
            raise ValueError(
                f"KV room of {self.kv_capacity_tokens} tokens is less than the context of {self.max_model_len}; "
                "lower max_context_tokens, or emulate more or larger GPUs"
            )


@dataclass(slots=True, kw_only=True, eq=False)
class _Sample:
    """A sample in the engine."""

    token_ids: npt.NDArray[np.int32]
    """The whole script."""
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    in_batch: BatchSample
    num_yielded: int
    """Tokens of the script yielded so far, the prefix included."""
    spans: asyncio.Queue[TokenSpan] = field(default_factory=asyncio.Queue)


class EmulatedEngine:
    """An `Engine` that follows a script."""

    def __init__(self, spec: EmulatedSpec) -> None:
        self._spec = spec
        self.max_model_len = spec.max_model_len
        """Longest prompt + completion, in tokens."""
        self.policy_version = 0
        """The version that new tokens are labelled with."""
        self._batch = ContinuousBatch(
            spec.steps, max_samples=spec.max_num_seqs, kv_capacity_tokens=spec.kv_capacity_tokens
        )
        self._samples: dict[str, _Sample] = {}
        self._has_work = asyncio.Event()
        self._update_lock = asyncio.Lock()
        self._is_paused = False
        self._decoding: asyncio.Task[None] | None = None
        self._clock_s = 0.0
        self._yield_s = 0.0
        self._tokens_generated = 0
        self._tokens_sampled = 0

    async def start(self) -> None:
        """Starts decoding."""
        self._clock_s = asyncio.get_running_loop().time()
        self._decoding = asyncio.create_task(self._decode(), name="emulated-engine")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """See `Engine.generate`."""
        self._check_running()
        check_request(request, max_model_len=self._spec.max_model_len, vocab_size=self._spec.vocab_size)
        if request.request_id in self._samples:
            raise RequestRefusedError(f"request {request.request_id} is already being decoded")
        finish = finished_by_prefix(request)
        if finish is not None:
            yield TokenSpan.empty(policy_version=self.policy_version, finish_reason=finish)
            return
        sample = self._accept(request)
        try:
            is_finished = False
            while not is_finished:
                span = await sample.spans.get()
                is_finished = span.finish_reason is not None
                self._tokens_generated += len(span.token_ids)
                yield span
        finally:
            self._forget(request.request_id, sample)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._catch_up()
        sample = self._samples.get(request_id)
        if sample is not None:
            self._put_tokens(sample)
            self._forget(request_id, sample)
            sample.spans.put_nowait(
                TokenSpan.empty(policy_version=self.policy_version, finish_reason=FinishReason.ABORTED)
            )

    async def pause(self) -> None:
        """See `PausableEngine.pause`."""
        self._catch_up()
        self._is_paused = True

    async def resume(self) -> None:
        """See `PausableEngine.resume`."""
        self._catch_up()
        self._is_paused = False

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """See `Engine.update_weights`."""
        async with self._update_lock:
            self._check_running()
            await asyncio.to_thread(verify_safetensors, update.path, tensors=update.tensors, digest=update.digest)
            self._catch_up()
            for sample in self._samples.values():
                self._put_tokens(sample)
            self.policy_version = update.policy_version
            num_recomputed_tokens, prefill_s = self._batch.recompute() if update.is_recomputing else (0, 0.0)
            return UpdateReport(
                policy_version=update.policy_version,
                digest=update.digest,
                pause_s=prefill_s / self._spec.time_scale,
                num_recomputed_tokens=num_recomputed_tokens,
            )

    def profile(self) -> EngineProfile:
        """See `Engine.profile`: the step times as a line, in real time."""
        spec = self._spec
        line = line_through(spec.steps, max_samples=spec.max_num_seqs)
        rate = line.prefill_tokens_per_second
        return EngineProfile(
            max_concurrent_samples=spec.max_num_seqs,
            kv_capacity_tokens=spec.kv_capacity_tokens,
            step_base_s=line.base_s / spec.time_scale,
            step_per_sample_s=line.per_sample_s / spec.time_scale,
            step_per_kv_token_s=line.per_kv_token_s / spec.time_scale,
            prefill_tokens_per_second=rate * spec.time_scale if rate is not None else None,
        )

    def stats(self) -> EngineStats:
        """See `Engine.stats`; with unbounded KV capacity, cache usage equals slot usage."""
        spec, batch = self._spec, self._batch
        usage = batch.num_running / spec.max_num_seqs
        if spec.kv_capacity_tokens is not None:
            usage = batch.kv_tokens / spec.kv_capacity_tokens
        return EngineStats(
            num_running=batch.num_running,
            num_waiting=batch.num_waiting,
            kv_cache_usage=min(1.0, usage),
            num_preemptions=batch.num_preemptions,
            tokens_generated=self._tokens_generated,
            tokens_sampled=self._tokens_sampled,
        )

    async def stop(self) -> None:
        """See `Engine.stop`."""
        decoding, self._decoding = self._decoding, None
        if decoding is None:
            return
        decoding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await decoding
        for request_id in list(self._samples):
            await self.abort(request_id)

    def _check_running(self) -> None:
        if self._decoding is None:
            raise EngineStoppedError("the emulated engine is not running")

    def _accept(self, request: GenerateRequest) -> _Sample:
        self._catch_up()
        sample = self._samples[request.request_id] = write_script(self._spec, request)
        self._batch.add(sample.in_batch)
        self._has_work.set()
        return sample

    async def _decode(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self._sleep_s())
            self._catch_up()
            if self._clock_s - self._yield_s >= self._spec.tick_s:
                self._yield_s = self._clock_s
                for sample in self._samples.values():
                    self._put_tokens(sample)
            if not self._samples:
                self._has_work.clear()

    def _sleep_s(self) -> float:
        """Until the next sample ends, a tick at most."""
        return max(MIN_SLEEP_S, min(self._spec.tick_s, self._batch.time_to_end_s / self._spec.time_scale))

    def _catch_up(self) -> None:
        """Advances the batch to the present."""
        now_s = asyncio.get_running_loop().time()
        elapsed_s, self._clock_s = now_s - self._clock_s, now_s
        if not self._is_paused:
            self._advance(elapsed_s * self._spec.time_scale)

    def _advance(self, elapsed_s: float) -> None:
        """Decodes for this much emulated time, and yields the ends of samples."""
        self._batch.elapse(elapsed_s)
        ended = {id(in_batch) for in_batch in self._batch.pop_ended()}
        if not ended:
            return
        for request_id, sample in list(self._samples.items()):
            if id(sample.in_batch) in ended:
                self._put_tokens(sample)
                self._forget(request_id, sample)

    def _put_tokens(self, sample: _Sample) -> None:
        """Yields the tokens decoded since the last call."""
        begin, end = sample.num_yielded, sample.in_batch.position
        if end == begin:
            return
        sample.num_yielded = end
        self._tokens_sampled += end - begin
        is_last = end == len(sample.token_ids)
        sample.spans.put_nowait(
            TokenSpan(
                token_ids=sample.token_ids[begin:end],
                logprobs=sample.logprobs[begin:end],
                policy_version=self.policy_version,
                finish_reason=sample.finish_reason if is_last else None,
            )
        )

    def _forget(self, request_id: str, sample: _Sample) -> None:
        if self._samples.get(request_id) is sample:
            del self._samples[request_id]
            self._batch.discard(sample.in_batch)


def write_script(spec: EmulatedSpec, request: GenerateRequest) -> _Sample:
    """All tokens of a sample from the first, the same on any emulated engine of this seed and these lengths."""
    sampling = request.sampling
    own = request.request_id if sampling.seed is None else str(sampling.seed)
    key = hashlib.sha256(f"{spec.seed}:{own}:".encode() + np.asarray(request.prompt_token_ids, "<i4").tobytes())
    generator = np.random.default_rng(int.from_bytes(key.digest()[:16], "little"))
    length = spec.lengths.draw(generator, sampling.seed)
    limit = len(request.prefix_token_ids) + max_tokens_left(request, max_model_len=spec.max_model_len)
    choices = np.setdiff1d(np.arange(spec.vocab_size, dtype=np.int32), np.asarray(sampling.stop_token_ids, np.int32))
    if not len(choices):
        raise RequestRefusedError("every token is a stop token")
    position = len(request.prefix_token_ids)
    finish_reason = FinishReason.LENGTH
    if sampling.stop_token_ids and length <= limit:
        # A prefix longer than the script comes from another engine; the sample then ends with its next token.
        limit = max(length, position + 1)
        finish_reason = FinishReason.STOP
    token_ids = generator.choice(choices, size=limit).astype(np.int32)
    logprobs = -generator.exponential(0.5, size=limit).astype(np.float32)
    if finish_reason is FinishReason.STOP:
        token_ids[-1] = sampling.stop_token_ids[0]
    return _Sample(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        in_batch=BatchSample(context_tokens=len(request.prompt_token_ids), length=limit, position=position),
        num_yielded=position,
    )
