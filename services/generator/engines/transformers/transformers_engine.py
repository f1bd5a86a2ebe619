"""Runs plain Hugging Face decoding where vLLM cannot be installed.

The event loop runs one step after the other in a thread that only computes. Samples join and end, and updates are
installed, between two steps, so every token of a step belongs to one version. Waiting samples join when the batch is
empty or a quarter of it is free, because joining prefills the whole batch again.

Because a join prefills, an update in mode "keep" keeps old KV only until the next sample joins.

Slower than vLLM by an order of magnitude; the contract is the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import torch

from penstock.model.adapter_layout import model_digest
from penstock.model.digests import check_layout, mismatch_error, verify_safetensors
from penstock.model.routers import read_routers
from penstock.process.tasks import end
from penstock.rewards.threads import DaemonThreads
from services.generator.engine.engine import (
    TIED_HEAD,
    EngineError,
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
from services.generator.engine.install_progress import InstallSigns
from services.generator.engine.lora_checks import AdapterBase, check_update
from services.generator.engine.model_fit import unfit
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.batch_decoder import BatchDecoder, Row
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.loaded_weights import install_adapter, install_weights, mismatched_base
from services.generator.engines.transformers.route_recorder import RouteRecorder

STREAM_INTERVAL = 16
"""Maximum number of a sample's tokens buffered before they are yielded."""
UPDATE_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
"""Longest wait for the step under way when stopping."""


class TransformersEngine:
    """An `Engine` that decodes with transformers."""

    def __init__(
        self, config: TransformersEngineConfig, model: ServedModel, *, stream_interval: int = STREAM_INTERVAL
    ) -> None:
        self._config = config
        self._served = model
        self._stream_interval = stream_interval
        self.policy_version = 0
        """The version that new tokens are sampled with."""
        self.max_model_len = 0
        """Longest prompt + completion, in tokens; known once started."""
        self._vocab_size = 0
        self._model: Any = None
        self._base: AdapterBase | None = None
        self._recorder: RouteRecorder | None = None
        self._decoder: BatchDecoder | None = None
        self._thread = DaemonThreads(max_threads=1, name="transformers-engine")
        self._decoding: asyncio.Task[None] | None = None
        self._between_steps = asyncio.Lock()
        self._has_work = asyncio.Event()
        self._waiting: deque[Row] = deque()
        self._aborts: deque[str] = deque()
        self._is_untrusted = False
        self._is_paused = False
        self._queues: dict[str, asyncio.Queue[TokenSpan | EngineStoppedError]] = {}
        self._tokens_generated = 0
        self._tokens_sampled = 0
        self._install_signs = InstallSigns()

    async def start(self) -> None:
        """Loads the model and starts decoding. Raises EngineError."""
        try:
            self._model = await asyncio.to_thread(_load_model, self._served, num_threads=self._config.num_threads)
            self._base = await asyncio.to_thread(_adapter_base, self._model, self._served)
            if self._served.records_routes:
                routers = read_routers(self._served.model_folder, field="records_routes")
                self._recorder = RouteRecorder(self._model, routers)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"transformers cannot load {self._served.model_path}: {error}") from error
        self.max_model_len = self._config.max_context_tokens or self._model.config.max_position_embeddings
        self._vocab_size = self._model.config.vocab_size
        self._decoder = BatchDecoder(self._model, seed=self._served.seed, recorder=self._recorder)
        self._decoding = asyncio.create_task(self._decode(self._decoder), name="transformers-engine")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """See `Engine.generate`."""
        self._check_running()
        check_request(request, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        if request.request_id in self._queues:
            raise RequestRefusedError(f"request {request.request_id} is already being decoded")
        finish = finished_by_prefix(request)
        if finish is not None:
            yield TokenSpan.empty(policy_version=self.policy_version, finish_reason=finish)
            return
        queue: asyncio.Queue[TokenSpan | EngineStoppedError] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._waiting.append(Row.of(request, num_left=max_tokens_left(request, max_model_len=self.max_model_len)))
        self._has_work.set()
        is_finished = False
        try:
            while not is_finished:
                span = await queue.get()
                if isinstance(span, EngineStoppedError):
                    raise span
                is_finished = span.finish_reason is not None
                self._tokens_generated += len(span.token_ids)
                yield span
        finally:
            del self._queues[request.request_id]
            if not is_finished:
                await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`; done after the step under way."""
        self._aborts.append(request_id)
        self._has_work.set()

    async def pause(self) -> None:
        """See `PausableEngine.pause`; the step under way still completes."""
        self._is_paused = True

    async def resume(self) -> None:
        """See `PausableEngine.resume`."""
        self._is_paused = False
        self._has_work.set()

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """See `Engine.update_weights`."""
        self._check_running()
        await asyncio.to_thread(verify_safetensors, update.path, tensors=update.tensors, digest=update.digest)
        check_update(update, self._base)
        if update.adapter is None:
            optional = (TIED_HEAD,) if self._model.config.tie_word_embeddings else ()
            check_layout(_layout(self._model), update.tensors, optional=optional)
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                await self._between_steps.acquire()
                # The thread works on even if the caller gives up; until it is done, nothing may touch the batch.
                return await asyncio.shield(self._update(update))
        except TimeoutError as error:
            raise EngineError(f"installing version {update.policy_version} took too long") from error

    def profile(self) -> EngineProfile:
        """See `Engine.profile`; speed is measured by its rates."""
        return EngineProfile(max_concurrent_samples=self._config.max_concurrent_samples)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        num_running = len(self._decoder.rows) if self._decoder is not None else 0
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._waiting),
            kv_cache_usage=num_running / self._config.max_concurrent_samples,
            num_preemptions=0,
            tokens_generated=self._tokens_generated,
            tokens_sampled=self._tokens_sampled,
            install_signs=self._install_signs.current,
        )

    async def stop(self) -> None:
        """See `Engine.stop`."""
        decoding, self._decoding = self._decoding, None
        if decoding is None or self._decoder is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S), self._between_steps:
                await end(decoding)
        except TimeoutError as error:
            raise EngineError(f"the step under way did not end within {STOP_TIMEOUT_S} s") from error
        for row in (*self._decoder.rows, *self._waiting):
            self._yield_end(row)
        self._thread.close()
        self._model = self._decoder = None

    def _check_running(self) -> BatchDecoder:
        if self._decoding is None or self._decoding.done() or self._decoder is None:
            raise EngineStoppedError("the transformers engine is not running")
        return self._decoder

    async def _decode(self, decoder: BatchDecoder) -> None:
        try:
            while True:
                await self._has_work.wait()
                async with self._between_steps:
                    while self._aborts:
                        await self._end(decoder, self._aborts.popleft())
                    may_sample = not self._is_untrusted and not self._is_paused
                    if may_sample and (decoder.rows or self._waiting):
                        self._join(decoder)
                        await self._step(decoder)
                    else:
                        self._has_work.clear()
        except Exception as error:
            # Samples must not wait for tokens that will never come.
            for queue in self._queues.values():
                died = EngineStoppedError(f"the transformers engine died: {type(error).__name__}: {error}")
                died.__cause__ = error
                queue.put_nowait(died)
            raise

    def _join(self, decoder: BatchDecoder) -> None:
        """Begins waiting samples, if the batch is empty or a quarter of it is free."""
        num_free = self._config.max_concurrent_samples - len(decoder.rows)
        if self._waiting and (not decoder.rows or 4 * num_free >= self._config.max_concurrent_samples):
            decoder.join([self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))])

    async def _step(self, decoder: BatchDecoder) -> None:
        rows = await self._thread.run(decoder.step)
        self._tokens_sampled += len(rows)
        for row in rows:
            if row.finish_reason is not None or len(row.new_token_ids) >= self._stream_interval:
                self._yield_span(row)

    async def _end(self, decoder: BatchDecoder, request_id: str) -> None:
        """Ends a sample as aborted; an unknown one is ignored."""
        # In the thread: it copies the KV cache of all other rows.
        row = await self._thread.run(lambda: decoder.remove(request_id))
        if row is None:
            row = next((row for row in self._waiting if row.request_id == request_id), None)
            if row is None:
                return
            self._waiting.remove(row)
        self._yield_end(row)

    async def _update(self, update: WeightUpdate) -> UpdateReport:
        """Installs a version; begins with `_between_steps` held, and releases it."""
        try:
            return await self._install_version(self._check_running(), update)
        finally:
            self._between_steps.release()

    async def _install_version(self, decoder: BatchDecoder, update: WeightUpdate) -> UpdateReport:
        started_s = time.monotonic()
        # Tokens decoded so far belong to the old version and must be labelled with it.
        for row in decoder.rows:
            if row.new_token_ids:
                self._yield_span(row)
        self._is_untrusted = True
        try:
            with self._install_signs.installing():
                mismatched = await self._thread.run(
                    lambda: _install(self._model, update, on_tensor=self._install_signs.give)
                )
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise EngineError(f"version {update.policy_version} cannot be loaded: {error}") from error
        if mismatched:
            raise mismatch_error(
                f"the model does not hold version {update.policy_version} after loading it", mismatched
            )
        self.policy_version = update.policy_version
        self._is_untrusted = False
        self._has_work.set()
        num_recomputed_tokens = decoder.drop_cache() if update.is_recomputing else 0
        if num_recomputed_tokens and not self._is_paused:
            await self._step(decoder)
        return UpdateReport(
            policy_version=update.policy_version,
            digest=update.digest,
            pause_s=time.monotonic() - started_s,
            num_recomputed_tokens=num_recomputed_tokens,
        )

    def _yield_end(self, row: Row) -> None:
        row.finish_reason = FinishReason.ABORTED
        self._yield_span(row)

    def _yield_span(self, row: Row) -> None:
        span = TokenSpan(
            token_ids=np.asarray(row.new_token_ids, np.int32),
            logprobs=np.asarray(row.new_logprobs, np.float32),
            policy_version=self.policy_version,
            finish_reason=row.finish_reason,
            routes=self._recorder.joined(row.new_routes) if self._recorder is not None and row.has_routes else None,
        )
        row.new_token_ids, row.new_logprobs, row.new_routes = [], [], []
        if row.request_id in self._queues:
            self._queues[row.request_id].put_nowait(span)


def _load_model(served: ServedModel, *, num_threads: int) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # Bars that redraw themselves are no lines of a log.
    disable_progress_bar()
    torch.set_num_threads(num_threads)
    dtype = served.dtype if served.dtype == "auto" else getattr(torch, served.dtype)
    # Other shapes are reported with their names, and what is missing is drawn at random.
    model, report = AutoModelForCausalLM.from_pretrained(
        served.model_folder, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    missing, mismatched = report["missing_keys"], [name for name, *_ in report["mismatched_keys"]]
    if missing or mismatched:
        raise unfit(served.model_folder, missing=missing, mismatched=mismatched)
    return model.eval()


def _adapter_base(model: Any, served: ServedModel) -> AdapterBase | None:
    """The base that adapters apply to, attested against the folder; None without adapters."""
    if served.max_lora_rank is None:
        return None
    mismatched = mismatched_base(model, served.model_folder)
    if mismatched:
        raise ValueError(str(mismatch_error("the model does not hold its own folder's weights", mismatched)))
    return AdapterBase(digest=model_digest(served.model_folder), layout=_layout(model), max_rank=served.max_lora_rank)


def _layout(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _install(model: Any, update: WeightUpdate, *, on_tensor: Callable[[], None]) -> list[str]:
    if update.adapter is None:
        return install_weights(model, update.path, on_tensor=on_tensor)
    return install_adapter(model, update.path, update.adapter, on_tensor=on_tensor)
