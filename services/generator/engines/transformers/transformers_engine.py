"""Runs plain Hugging Face decoding where vLLM cannot be installed.

A thread owns the model and decodes; the event loop owns the samples' queues. The thread takes commands (join, abort,
update) between steps, so every token of a step belongs to one version. Waiting samples join when the batch is empty or
a quarter of it is free, because joining prefills the whole batch again.

Because a join prefills, an update in mode "keep" keeps old KV only until the next sample joins.

Slower than vLLM by an order of magnitude; the contract is the same.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from penstock.model.adapter_layout import model_digest
from penstock.model.digests import check_layout, mismatch_error, verify_safetensors
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
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.batch_decoder import BatchDecoder, Row
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.loaded_weights import install_adapter, install_weights, mismatched_base

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
        self._policy_version = 0
        self._max_model_len = 0
        self._vocab_size = 0
        self._model: Any = None
        self._base: AdapterBase | None = None
        self._decoder: BatchDecoder | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._aborts: deque[str] = deque()
        self._updates: deque[tuple[WeightUpdate, Future[UpdateReport]]] = deque()
        self._is_stopping = False
        self._is_untrusted = False
        self._is_paused = False
        self._queues: dict[str, asyncio.Queue[TokenSpan | None]] = {}
        self._tokens_generated = 0
        self._tokens_sampled = 0
        self._install_signs = InstallSigns()

    @property
    def policy_version(self) -> int:
        """The version that new tokens are sampled with."""
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion, in tokens; known once started."""
        return self._max_model_len

    async def start(self) -> None:
        """Loads the model and starts decoding. Raises EngineError."""
        self._loop = asyncio.get_running_loop()
        try:
            self._model = await asyncio.to_thread(_load_model, self._served, num_threads=self._config.num_threads)
            self._base = await asyncio.to_thread(_adapter_base, self._model, self._served)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"transformers cannot load {self._served.model_path}: {error}") from error
        self._max_model_len = self._config.max_context_tokens or self._model.config.max_position_embeddings
        self._vocab_size = self._model.config.vocab_size
        self._decoder = BatchDecoder(self._model, seed=self._served.seed)
        self._thread = threading.Thread(target=self._decode, name="transformers-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """See `Engine.generate`."""
        self._check_running()
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        if request.request_id in self._queues:
            raise RequestRefusedError(f"request {request.request_id} is already being decoded")
        finish = finished_by_prefix(request)
        if finish is not None:
            yield TokenSpan.empty(policy_version=self._policy_version, finish_reason=finish)
            return
        queue: asyncio.Queue[TokenSpan | None] = asyncio.Queue()
        self._queues[request.request_id] = queue
        row = Row.of(request, num_left=max_tokens_left(request, max_model_len=self._max_model_len))
        self._tell(self._waiting, row)
        is_finished = False
        try:
            while not is_finished:
                span = await queue.get()
                if span is None:
                    raise EngineStoppedError("the transformers engine died")
                is_finished = span.finish_reason is not None
                self._tokens_generated += len(span.token_ids)
                yield span
        finally:
            del self._queues[request.request_id]
            if not is_finished:
                self._tell(self._aborts, request.request_id)

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._tell(self._aborts, request_id)

    async def pause(self) -> None:
        """See `PausableEngine.pause`; the step under way still completes."""
        with self._wake:
            self._is_paused = True

    async def resume(self) -> None:
        """See `PausableEngine.resume`."""
        with self._wake:
            self._is_paused = False
            self._wake.notify()

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """See `Engine.update_weights`."""
        self._check_running()
        await asyncio.to_thread(verify_safetensors, update.path, tensors=update.tensors, digest=update.digest)
        check_update(update, self._base)
        if update.adapter is None:
            optional = (TIED_HEAD,) if self._model.config.tie_word_embeddings else ()
            check_layout(_layout(self._model), update.tensors, optional=optional)
        done: Future[UpdateReport] = Future()
        self._tell(self._updates, (update, done))
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                return await asyncio.wrap_future(done)
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
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join, STOP_TIMEOUT_S)
        if thread.is_alive():
            raise EngineError(f"the decoding thread did not end within {STOP_TIMEOUT_S} s")
        self._model = self._decoder = None

    def _check_running(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise EngineStoppedError("the transformers engine is not running")

    def _tell(self, commands: deque[Any], command: object) -> None:
        with self._wake:
            commands.append(command)
            self._wake.notify()

    # Everything below runs in the decoding thread.

    def _decode(self) -> None:
        decoder = self._decoder
        assert decoder is not None
        try:
            while self._take_commands(decoder):
                if decoder.rows and self._may_sample():
                    self._yield_spans(decoder.step())
            self._end_all(decoder)
        except Exception:
            # The thread's boundary: samples must not wait for tokens that will never come. threading reports the error.
            self._post([(request_id, None) for request_id in list(self._queues)])
            raise

    def _take_commands(self, decoder: BatchDecoder) -> bool:
        """Executes pending commands; waits while idle. Returns False when the engine stops."""
        with self._wake:
            self._wake.wait_for(lambda: self._has_work(decoder))
            aborts, updates = list(self._aborts), list(self._updates)
            self._aborts.clear()
            self._updates.clear()
        for request_id in aborts:
            self._abort(decoder, request_id)
        for update, done in updates:
            self._update(decoder, update, done)
        num_free = self._config.max_concurrent_samples - len(decoder.rows)
        if self._waiting and (not decoder.rows or 4 * num_free >= self._config.max_concurrent_samples):
            with self._wake:
                joining = [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
            decoder.join(joining)
        return not self._is_stopping

    def _has_work(self, decoder: BatchDecoder) -> bool:
        can_decode = self._may_sample() and bool(decoder.rows or self._waiting)
        return bool(can_decode or self._aborts or self._updates or self._is_stopping)

    def _may_sample(self) -> bool:
        return not self._is_untrusted and not self._is_paused

    def _abort(self, decoder: BatchDecoder, request_id: str) -> None:
        row = decoder.remove(request_id)
        if row is None:
            with self._wake:
                row = next((row for row in self._waiting if row.request_id == request_id), None)
                if row is None:
                    return
                self._waiting.remove(row)
        row.finish_reason = FinishReason.ABORTED
        self._post([(request_id, self._take_span(row))])

    def _update(self, decoder: BatchDecoder, update: WeightUpdate, done: Future[UpdateReport]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        started_s = time.monotonic()
        # Tokens decoded so far belong to the old version and must be labelled with it.
        self._post([(row.request_id, self._take_span(row)) for row in decoder.rows if row.new_token_ids])
        self._is_untrusted = True
        try:
            with self._install_signs.installing():
                mismatched = _install(self._model, update, on_tensor=self._install_signs.give)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            done.set_exception(EngineError(f"version {update.policy_version} cannot be loaded: {error}"))
            return
        if mismatched:
            what = f"the model does not hold version {update.policy_version} after loading it"
            done.set_exception(mismatch_error(what, mismatched))
            return
        self._policy_version = update.policy_version
        self._is_untrusted = False
        num_recomputed_tokens = decoder.drop_cache() if update.is_recomputing else 0
        if num_recomputed_tokens and not self._is_paused:
            self._yield_spans(decoder.step())
        done.set_result(
            UpdateReport(
                policy_version=update.policy_version,
                digest=update.digest,
                pause_s=time.monotonic() - started_s,
                num_recomputed_tokens=num_recomputed_tokens,
            )
        )

    def _yield_spans(self, rows: list[Row]) -> None:
        self._tokens_sampled += len(rows)
        due = [
            (row.request_id, self._take_span(row))
            for row in rows
            if row.finish_reason is not None or len(row.new_token_ids) >= self._stream_interval
        ]
        if due:
            self._post(due)

    def _take_span(self, row: Row) -> TokenSpan:
        span = TokenSpan(
            token_ids=np.asarray(row.new_token_ids, np.int32),
            logprobs=np.asarray(row.new_logprobs, np.float32),
            policy_version=self._policy_version,
            finish_reason=row.finish_reason,
        )
        row.new_token_ids, row.new_logprobs = [], []
        return span

    def _end_all(self, decoder: BatchDecoder) -> None:
        with self._wake:
            rows, updates = [*decoder.rows, *self._waiting], list(self._updates)
        for row in rows:
            self._abort(decoder, row.request_id)
        for _, done in updates:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineStoppedError("the transformers engine was stopped"))

    def _post(self, spans: Sequence[tuple[str, TokenSpan | None]]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, spans)

    def _deliver(self, spans: Sequence[tuple[str, TokenSpan | None]]) -> None:
        """Runs in the event loop."""
        for request_id, span in spans:
            if request_id in self._queues:
                self._queues[request_id].put_nowait(span)


def _load_model(served: ServedModel, *, num_threads: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    dtype = served.dtype if served.dtype == "auto" else getattr(torch, served.dtype)
    model = AutoModelForCausalLM.from_pretrained(served.model_path, dtype=dtype, local_files_only=True)
    return model.eval()


def _adapter_base(model: Any, served: ServedModel) -> AdapterBase | None:
    """The base that adapters apply to, attested against the folder; None without adapters."""
    if served.max_lora_rank is None:
        return None
    mismatched = mismatched_base(model, served.model_path)
    if mismatched:
        raise ValueError(str(mismatch_error("the model does not hold its own folder's weights", mismatched)))
    return AdapterBase(digest=model_digest(served.model_path), layout=_layout(model), max_rank=served.max_lora_rank)


def _layout(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _install(model: Any, update: WeightUpdate, *, on_tensor: Callable[[], None]) -> list[str]:
    if update.adapter is None:
        return install_weights(model, update.path, on_tensor=on_tensor)
    return install_adapter(model, update.path, update.adapter)
