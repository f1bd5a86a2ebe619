"""The emulated engine: scripted tokens at a stated speed, for tests and for fleets of pretend GPUs.

- What a sample says depends only on the seed, the prompt and the sample's own seed (its request id where it has none),
  so a continuation on another emulated engine goes on with the same script.
- How fast depends only on the latency model: one decoding step of `n` samples takes `base_step_s + n * token_s`.
- Weight files are checked as any engine checks them; nothing is held, so what is attested is the file.

Imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.weights import verify_safetensors
from services.generator.engine import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSpec:
    """A pretend accelerator and the samples it pretends to decode."""

    base_step_s: float = 0.0
    """Time of a decoding step that does not depend on how many samples share it."""
    token_s: float = 1.0 / 2000.0
    """Time each sample adds to a step; with `base_step_s` 0 the speed is 1 / token_s, all samples together."""
    mean_tokens: float = 45.0
    """Mean length of a script, its stop token included; lengths are log-normal."""
    length_sigma: float = 0.8
    """Standard deviation of the logarithm of the length; 0 makes all scripts equally long."""
    max_num_seqs: int = 128
    """Most samples decoded at once."""
    max_model_len: int = 4096
    """Longest prompt + completion, in tokens."""
    vocab_size: int = 64
    """Tokens are drawn from [0, vocab_size), stop tokens excepted."""
    update_pause_s: float = 0.0
    """How long an update keeps samples waiting."""
    tick_s: float = 0.01
    """How often tokens are yielded."""
    policy_version: int = 0
    """The version it starts with."""
    seed: int = 0
    """Seed of every script."""

    def __post_init__(self) -> None:
        """Refuses a spec that would stand still or never speak."""
        if self.base_step_s < 0 or self.token_s < 0 or self.base_step_s + self.token_s <= 0:
            raise ValueError("a decoding step must take some time")
        if self.mean_tokens < 1 or self.length_sigma < 0 or self.tick_s <= 0 or self.max_num_seqs < 1:
            raise ValueError("mean_tokens, max_num_seqs at least 1; tick_s positive; length_sigma not negative")

    def step_s(self, num_samples: int) -> float:
        """Time one decoding step of this many samples takes."""
        return self.base_step_s + num_samples * self.token_s


@dataclass(slots=True, kw_only=True)
class _Sample:
    """A sample in the engine; `position` counts the script's tokens that are decoded, the prefix's included."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    position: int
    spans: asyncio.Queue[TokenSpan] = field(default_factory=asyncio.Queue)


class EmulatedEngine:
    """An `Engine` that follows a script."""

    def __init__(self, spec: EmulatedSpec) -> None:
        self._spec = spec
        self._policy_version = spec.policy_version
        self._samples: dict[str, _Sample] = {}
        self._has_work = asyncio.Event()
        self._update_lock = asyncio.Lock()
        self._is_paused = False
        self._decoding: asyncio.Task[None] | None = None
        self._unspent_s = 0.0
        self._tokens_generated = 0

    @property
    def policy_version(self) -> int:
        """The version new tokens are said to be sampled with."""
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion, in tokens."""
        return self._spec.max_model_len

    async def start(self) -> None:
        """Starts decoding whatever comes."""
        self._decoding = asyncio.create_task(self._decode(), name="emulated-engine")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """See `Engine.generate`."""
        self._check_running()
        check_request(request, max_model_len=self._spec.max_model_len, vocab_size=self._spec.vocab_size)
        if request.request_id in self._samples:
            raise RequestRefusedError(f"request {request.request_id} is already being decoded")
        finish = finished_by_prefix(request)
        if finish is not None:
            yield TokenSpan.empty(policy_version=self._policy_version, finish_reason=finish)
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
        sample = self._samples.pop(request_id, None)
        if sample is not None:
            self._put_aborted(sample)

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """See `Engine.update_weights`."""
        async with self._update_lock:
            self._check_running()
            await asyncio.to_thread(verify_safetensors, update.path, tensors=update.tensors, digest=update.digest)
            self._is_paused = True
            try:
                await asyncio.sleep(self._spec.update_pause_s)
            finally:
                self._is_paused = False
            self._policy_version = update.policy_version
            return UpdateReport(
                policy_version=update.policy_version, digest=update.digest, pause_s=self._spec.update_pause_s
            )

    def profile(self) -> EngineProfile:
        """See `Engine.profile`: the latency model."""
        return EngineProfile(
            max_concurrent_samples=self._spec.max_num_seqs,
            step_base_s=self._spec.base_step_s,
            step_per_sample_s=self._spec.token_s,
        )

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        num_running = min(len(self._samples), self._spec.max_num_seqs)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._samples) - num_running,
            kv_cache_usage=num_running / self._spec.max_num_seqs,
            num_preemptions=0,
            tokens_generated=self._tokens_generated,
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
        sample = self._samples[request.request_id] = _write_script(self._spec, request)
        self._has_work.set()
        return sample

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_work.wait()
            before_s = loop.time()
            await asyncio.sleep(self._spec.tick_s)
            if not self._is_paused:
                self._advance(loop.time() - before_s)
            if not self._samples:
                self._unspent_s = 0.0
                self._has_work.clear()

    def _advance(self, elapsed_s: float) -> None:
        """Decodes as many whole steps as the time allows; the rest of the time is kept for the next call."""
        self._unspent_s += elapsed_s
        while self._samples:
            running = list(self._samples.items())[: self._spec.max_num_seqs]
            step_s = self._spec.step_s(len(running))
            shortest = min(len(sample.token_ids) - sample.position for _, sample in running)
            # As many steps as no sample ends before: the load, and with it the step's time, is the same for all.
            num_steps = min(int(self._unspent_s / step_s), shortest)
            if num_steps == 0:
                return
            self._unspent_s -= num_steps * step_s
            for request_id, sample in running:
                self._put_tokens(request_id, sample, num_steps)

    def _put_tokens(self, request_id: str, sample: _Sample, num_tokens: int) -> None:
        begin, sample.position = sample.position, sample.position + num_tokens
        is_last = sample.position == len(sample.token_ids)
        span = TokenSpan(
            token_ids=sample.token_ids[begin : sample.position],
            logprobs=sample.logprobs[begin : sample.position],
            policy_version=self._policy_version,
            finish_reason=sample.finish_reason if is_last else None,
        )
        sample.spans.put_nowait(span)
        if is_last:
            self._forget(request_id, sample)

    def _put_aborted(self, sample: _Sample) -> None:
        sample.spans.put_nowait(
            TokenSpan.empty(policy_version=self._policy_version, finish_reason=FinishReason.ABORTED)
        )

    def _forget(self, request_id: str, sample: _Sample) -> None:
        if self._samples.get(request_id) is sample:
            del self._samples[request_id]


def _write_script(spec: EmulatedSpec, request: GenerateRequest) -> _Sample:
    """The whole completion of a sample, from its first token on, whatever its prefix holds."""
    sampling = request.sampling
    own = request.request_id if sampling.seed is None else str(sampling.seed)
    key = hashlib.sha256(f"{spec.seed}:{own}:".encode() + np.asarray(request.prompt_token_ids, "<i4").tobytes())
    generator = np.random.default_rng(int.from_bytes(key.digest()[:16], "little"))
    location = math.log(spec.mean_tokens) - spec.length_sigma**2 / 2
    length = max(1, round(float(generator.lognormal(location, spec.length_sigma))))
    limit = len(request.prefix_token_ids) + max_tokens_left(request, max_model_len=spec.max_model_len)
    choices = np.setdiff1d(np.arange(spec.vocab_size, dtype=np.int32), np.asarray(sampling.stop_token_ids, np.int32))
    if not len(choices):
        raise RequestRefusedError("every token is a stop token")
    position = len(request.prefix_token_ids)
    finish_reason = FinishReason.LENGTH
    if sampling.stop_token_ids and length <= limit:
        # A prefix longer than the script came from elsewhere; the sample then ends with its next token.
        limit = max(length, position + 1)
        finish_reason = FinishReason.STOP
    token_ids = generator.choice(choices, size=limit).astype(np.int32)
    logprobs = -generator.exponential(0.5, size=limit).astype(np.float32)
    if finish_reason is FinishReason.STOP:
        token_ids[-1] = sampling.stop_token_ids[0]
    return _Sample(token_ids=token_ids, logprobs=logprobs, finish_reason=finish_reason, position=position)
