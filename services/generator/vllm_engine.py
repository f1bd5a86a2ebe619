"""The vLLM engine: continuous batching with vLLM's asynchronous API, on GPUs and on CPUs by one code path.

Owns the vLLM engine process and the order of a weight update:

    verify the file -> pause, keeping samples and their KV cache -> install and attest -> set the version -> resume

- vLLM stamps every step's tokens with the version set while paused, so spans are cut where the version changed and not
  where this process noticed.
- A sample that lives through an update keeps the KV cache of the old weights; its later log-probs are those of the
  distribution really sampled from, which differs a little from the new policy's on a fresh context. Samples that begin
  after the update never see old KV: the prefix cache is salted with the number of the installation.
- If attestation fails, the engine stays paused.

vLLM is imported only once the engine starts: see `vllm_setup`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.weights import (
    WeightsMismatchError,
    check_layout,
    mismatch_error,
    safetensors_shapes,
    verify_safetensors,
)
from services.generator.engine import (
    TIED_HEAD,
    EngineError,
    EngineProfile,
    EngineStats,
    EngineStoppedError,
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
    SamplingSettings,
    TokenSpan,
    UpdateReport,
    WeightUpdate,
    check_request,
    finished_by_prefix,
    max_tokens_left,
)
from services.generator.vllm_setup import VllmSettings, build_engine, can_seed_samples

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


class VllmEngine:
    """An `Engine` that decodes with vLLM."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._policy_version = settings.policy_version
        self._llm: Any = None
        self._recorder: Any = None
        self._layout: dict[str, tuple[int, ...]] = {}
        self._optional: tuple[str, ...] = ()
        self._live: set[str] = set()
        self._aborted: set[str] = set()
        self._update_lock = asyncio.Lock()
        self._can_seed = True
        self._num_installs = 0
        self._tokens_generated = 0

    @property
    def policy_version(self) -> int:
        """The version new tokens are sampled with."""
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion, in tokens; known once started."""
        return int(self._running().model_config.max_model_len)

    async def start(self) -> None:
        """Starts the engine process, loads the initial model and attests it. Raises EngineError."""
        weights = sorted(self._settings.model_path.glob("*.safetensors"))
        if not weights:
            raise EngineError(f"{self._settings.model_path}: no safetensors weights")
        try:
            # In a thread: building the engine blocks for seconds, and vLLM starts its tasks on the loop at first use.
            # Through a list: a traceback vLLM keeps holds on to what the thread returns, beyond the interpreter's end.
            built: list[AsyncLLM] = []
            await asyncio.to_thread(lambda: built.append(build_engine(self._settings)))
            llm = self._llm = built.pop()
            self._can_seed = can_seed_samples(self._settings)
            self._recorder = llm.logger_manager.stat_loggers[0] if llm.logger_manager else None
            for path in weights:
                self._layout.update(safetensors_shapes(path))
            self._optional = (TIED_HEAD,) if llm.model_config.hf_config.tie_word_embeddings else ()
            async with asyncio.timeout(self._settings.start_timeout_s):
                await llm.update_weight_version(str(self._policy_version))
                mismatched = await self._call_workers("penstock_attest", [str(path) for path in weights])
                if mismatched:
                    what = "vLLM does not hold the model's own weights, or not in a known layout"
                    raise mismatch_error(what, mismatched)
                await self._decode_one_token(llm)
        except (RuntimeError, ValueError, OSError, TimeoutError, EngineError, WeightsMismatchError) as error:
            await self.stop()
            raise EngineError(f"vLLM did not start with {self._settings.model_path}: {error}") from error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """See `Engine.generate`."""
        llm = self._running()
        check_request(request, max_model_len=self.max_model_len, vocab_size=llm.model_config.get_vocab_size())
        if request.request_id in self._live:
            raise RequestRefusedError(f"request {request.request_id} is already being decoded")
        finish = finished_by_prefix(request)
        if finish is not None:
            yield TokenSpan.empty(policy_version=self._policy_version, finish_reason=finish)
            return
        self._live.add(request.request_id)
        try:
            async with aclosing(self._decode(llm, request)) as spans:
                async for span in spans:
                    self._tokens_generated += len(span.token_ids)
                    yield span
        finally:
            self._live.discard(request.request_id)
            self._aborted.discard(request.request_id)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        if self._llm is not None and request_id in self._live:
            # Noted as well: vLLM may not know the request yet, and then forgets the abort.
            self._aborted.add(request_id)
            await self._llm.abort(request_id)

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """See `Engine.update_weights`."""
        async with self._update_lock:
            llm = self._running()
            await asyncio.to_thread(verify_safetensors, update.path, tensors=update.tensors, digest=update.digest)
            # Before vLLM is touched: a load that breaks off half-way leaves it beyond repair.
            check_layout(self._layout, update.tensors, optional=self._optional)
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(self._settings.update_timeout_s):
                    await self._install(llm, update)
            except TimeoutError as error:
                raise EngineError(f"installing version {update.policy_version} took too long") from error
            pause_s = time.monotonic() - started_s
            return UpdateReport(policy_version=update.policy_version, digest=update.digest, pause_s=pause_s)

    def profile(self) -> EngineProfile:
        """See `Engine.profile`; how fast it is shows in its rates."""
        kv_capacity_tokens = self._running().vllm_config.cache_config.kv_cache_size_tokens
        return EngineProfile(
            max_concurrent_samples=self._settings.max_num_seqs, kv_capacity_tokens=kv_capacity_tokens or None
        )

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        recorder = self._recorder
        num_live = len(self._live)
        num_waiting = min(num_live, recorder.num_waiting) if recorder else 0
        return EngineStats(
            num_running=num_live - num_waiting,
            num_waiting=num_waiting,
            kv_cache_usage=recorder.kv_cache_usage if recorder and num_live else 0.0,
            num_preemptions=recorder.num_preemptions if recorder else 0,
            tokens_generated=self._tokens_generated,
        )

    async def stop(self) -> None:
        """See `Engine.stop`."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._aborted |= self._live
        if not llm.errored:
            await llm.abort(list(self._live))
        if llm.output_handler is not None:
            # Before the process ends, whose end it would report as a failure.
            llm.output_handler.cancel()
        async with asyncio.timeout(2 * self._settings.stop_timeout_s):
            await asyncio.to_thread(llm.shutdown, timeout=self._settings.stop_timeout_s)
            # vLLM has asked this loop to close its sockets, and leaves their context open.
            await asyncio.sleep(0)
            await asyncio.to_thread(llm.engine_core.resources.ctx.destroy, linger=0)

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineStoppedError("the vLLM engine is not running")
        llm: AsyncLLM = self._llm
        return llm

    async def _install(self, llm: AsyncLLM, update: WeightUpdate) -> None:
        # Not llm.pause_generation: it sleeps 20 ms so that outputs arrive before it returns, and spans need no such
        # order because every output names its version.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        self._num_installs += 1
        mismatched = await self._call_workers("penstock_install", str(update.path))
        if mismatched:
            raise mismatch_error(f"vLLM does not hold version {update.policy_version} after loading it", mismatched)
        await llm.update_weight_version(str(update.policy_version))
        self._policy_version = update.policy_version
        await llm.resume_generation()

    async def _call_workers(self, method: str, argument: object) -> list[str]:
        """Calls every worker; the tensor names they answer with, together."""
        try:
            answers: list[list[str]] = await self._running().collective_rpc(method, args=(argument,))
        except Exception as error:
            # vLLM answers whatever went wrong in a worker with a bare Exception.
            raise EngineError(f"vLLM's workers could not do {method}: {error}") from error
        return sorted({name for answer in answers for name in answer})

    async def _decode_one_token(self, llm: AsyncLLM) -> None:
        """Meets now what vLLM would otherwise die of at the first sample, such as a head size its kernels lack."""
        sampling = SamplingSettings(max_new_tokens=1)
        request = GenerateRequest(request_id="start", prompt_token_ids=(0,), sampling=sampling)
        async with aclosing(self._decode(llm, request)) as spans:
            async for _ in spans:
                pass

    async def _decode(self, llm: AsyncLLM, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = tokens_input(
            [*request.prompt_token_ids, *request.prefix_token_ids], cache_salt=f"install-{self._num_installs}"
        )
        max_tokens = max_tokens_left(request, max_model_len=self.max_model_len)
        params = _sampling_params(request, max_tokens=max_tokens, is_seeded=self._can_seed)
        is_finished = False
        try:
            queue = await llm.add_request(request.request_id, prompt, params)
            state = llm.output_processor.request_states.get(queue.request_id)
            if request.request_id in self._aborted:
                await llm.abort(request.request_id)
            num_yielded = 0
            while not is_finished:
                output = queue.get_nowait() or await queue.get()
                is_finished = output.finished
                starts = _version_starts(output, state.weight_version_starts if state is not None else ())
                for span in _spans(output, starts, offset=num_yielded, default_version=self._policy_version):
                    num_yielded += len(span.token_ids)
                    yield span
        except EngineDeadError as error:
            is_finished = True
            raise EngineStoppedError("the vLLM engine process died") from error
        finally:
            if not is_finished:
                await llm.abort(request.request_id)


def _version_starts(output: RequestOutput, live: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Pairs of version and index of its first completion token, in order.

    While a sample is decoded only vLLM's bookkeeping has them; the last output carries them itself.
    """
    final = output.outputs[0].weight_versions
    return live if final is None else [(span.version, span.start) for span in final]


def _spans(
    output: RequestOutput, starts: Sequence[tuple[str, int]], *, offset: int, default_version: int
) -> Iterator[TokenSpan]:
    """The output's new tokens, cut where the version changes; `offset` completion tokens came before them."""
    completion = output.outputs[0]
    finish = _finish_reason(completion.finish_reason)
    token_ids = np.asarray(completion.token_ids, np.int32)
    logprobs = np.asarray(completion.logprobs.logprobs if completion.logprobs else (), np.float32)
    if len(token_ids) != len(logprobs):
        raise EngineError(f"vLLM answered {len(token_ids)} tokens with {len(logprobs)} log-probs")
    if not starts and len(token_ids):
        raise EngineError("vLLM answered tokens of no known version")
    ends = [start - offset for _, start in starts[1:]] + [len(token_ids)] * bool(starts)
    begin = 0
    pieces: list[tuple[int, int, int]] = []
    for (version, _), end in zip(starts, ends, strict=True):
        if end > begin:
            pieces.append((int(version), begin, end))
            begin = end
    if not pieces and finish is not None:
        yield TokenSpan.empty(policy_version=int(starts[-1][0]) if starts else default_version, finish_reason=finish)
    for version_number, first, last in pieces:
        yield TokenSpan(
            token_ids=token_ids[first:last],
            logprobs=logprobs[first:last],
            policy_version=version_number,
            finish_reason=finish if last == len(token_ids) else None,
        )


def _finish_reason(name: str | None) -> FinishReason | None:
    if name is None:
        return None
    if name not in _FINISH_REASONS:
        raise EngineError(f"vLLM ended a sample with {name!r}")
    return _FINISH_REASONS[name]


def _sampling_params(request: GenerateRequest, *, max_tokens: int, is_seeded: bool) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: SamplingSettings = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        seed=sampling.seed_after(len(request.prefix_token_ids)) if is_seeded else None,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        # The request says what ends a sample, not the model's generation config.
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
