"""Decodes with vLLM's asynchronous API, on GPUs and CPUs by one code path.

Owns the vLLM engine process and the order of a weight update:

    verify the file -> pause, keeping samples -> install and attest -> drop KV, or keep it -> set the version -> resume

- vLLM stamps every step's tokens with the version set while paused, so spans are split where the version changed, not
  where this process noticed.
- After an update in mode "keep", a running sample has the KV cache of the old weights; its later log-probs are those of
  the actual sampling distribution, which differs from the new policy's on a fresh context. Samples that start after the
  update never see old KV: the prefix cache is salted with the number of the installation.
- In mode "recompute", vLLM preempts every running sample and drops its cache (`reset_prefix_cache`), so the first step
  afterwards prefills them all under the new weights, decoded tokens included.
- An adapter goes into vLLM's one LoRA slot, beside the base, under one name for all versions: samples under way
  switch to it as they do to whole weights (`lora_slot`). The base was attested at start, and does not change.
- If attestation fails, the engine stays paused. An engine paused by `pause` stays paused across an update.

vLLM is imported only once the engine starts: see `process_setup`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from penstock.model.adapter_layout import model_digest, scaling
from penstock.model.digests import (
    WeightsMismatchError,
    check_layout,
    mismatch_error,
    safetensors_shapes,
    verify_safetensors,
)
from penstock.model.routers import Routers, read_routers
from penstock.v1.weights_pb2 import TensorInfo
from penstock.wire.routes import Routes
from services.generator.engine.engine import (
    TIED_HEAD,
    EngineError,
    EngineProfile,
    EngineStats,
    EngineStoppedError,
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
from services.generator.engine.install_progress import InstallSigns
from services.generator.engine.lora_checks import AdapterBase, check_update, write_peft_folder
from services.generator.engine.model_fit import check_fit
from services.generator.engine.stacked_experts import split_shapes
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.comparison import Comparison, mismatched_tensors
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.engine_requests import sampling_params, to_spans, version_starts
from services.generator.engines.vllm.process_setup import build_engine, can_seed_samples

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState


START_TIMEOUT_S = 600.0
UPDATE_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
"""Longest wait for the engine process to end before it is killed."""
STREAM_INTERVAL = 16
"""Steps for which the engine buffers tokens; at 1 each step costs a message and wakes every sample."""


class VllmEngine:
    """An `Engine` that decodes with vLLM."""

    def __init__(self, config: VllmEngineConfig, model: ServedModel, *, stream_interval: int = STREAM_INTERVAL) -> None:
        self._config = config
        self._model = model
        self._stream_interval = stream_interval
        self.policy_version = 0
        """The version that new tokens are sampled with."""
        self._llm: Any = None
        self._recorder: Any = None
        self._layout: dict[str, tuple[int, ...]] = {}
        self._base: AdapterBase | None = None
        self._adapters: TemporaryDirectory[str] | None = None
        self._adapter_request: LoRARequest | None = None
        self._optional: tuple[str, ...] = ()
        self._live: set[str] = set()
        self._aborted: set[str] = set()
        self._update_lock = asyncio.Lock()
        self._routers: Routers | None = None
        self._can_seed = True
        self._is_trusted = True
        self._is_paused = False
        self._num_installs = 0
        self._tokens_generated = 0
        self._install_signs = InstallSigns()

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion, in tokens; known once started."""
        return int(self._running().model_config.max_model_len)

    async def start(self) -> None:
        """Starts the engine process, loads the initial model and attests it. Raises EngineError."""
        weights = sorted(self._model.model_folder.glob("*.safetensors"))
        if not weights:
            raise EngineError(f"{self._model.model_path}: no safetensors weights")
        await asyncio.to_thread(check_fit, self._model.model_folder)
        try:
            # In a thread: building the engine blocks for seconds, and vLLM starts its tasks on the loop at first use.
            # Through a list: a traceback that vLLM keeps references the thread's result beyond interpreter exit.
            built: list[AsyncLLM] = []
            await asyncio.to_thread(
                lambda: built.append(build_engine(self._config, self._model, stream_interval=self._stream_interval))
            )
            llm = self._llm = built.pop()
            # The engine process buffers tokens; what arrives from it is yielded at once.
            llm.output_processor.stream_interval = 1
            self._can_seed = can_seed_samples(self._config, self._model)
            self._recorder = llm.logger_manager.stat_loggers[0] if llm.logger_manager else None
            for path in weights:
                self._layout.update(safetensors_shapes(path))
            self._optional = (TIED_HEAD,) if llm.model_config.hf_config.tie_word_embeddings else ()
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._begin_transfers(llm)
                await llm.update_weight_version(str(self.policy_version))
                mismatched = await self._attest(weights, self._layout)
                if mismatched:
                    what = "vLLM does not hold the model's own weights, or not in a known layout"
                    raise mismatch_error(what, mismatched)
                if self._config.pipeline_parallel > 1:
                    await llm.collective_rpc("penstock_make_stage_buffers")
                if self._model.records_routes:
                    self._routers = read_routers(self._model.model_folder, field="records_routes")
                    await llm.collective_rpc("penstock_record_routes")
                await self._decode_one_token(llm)
            await self._make_ready_for_adapters()
        except (RuntimeError, ValueError, OSError, TimeoutError, EngineError, WeightsMismatchError) as error:
            await self.stop()
            raise EngineError(f"vLLM did not start with {self._model.model_path}: {error}") from error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """See `Engine.generate`."""
        llm = self._running()
        check_request(request, max_model_len=self.max_model_len, vocab_size=llm.model_config.get_vocab_size())
        if request.request_id in self._live:
            raise RequestRefusedError(f"request {request.request_id} is already being decoded")
        finish = finished_by_prefix(request)
        if finish is not None:
            yield TokenSpan.empty(policy_version=self.policy_version, finish_reason=finish)
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
            if not self._live and self._recorder is not None:
                # No sample is left to wait for.
                self._recorder.sampled.set()

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        if self._llm is not None and request_id in self._live:
            # Recorded as well: vLLM may not know the request yet, and then ignores the abort.
            self._aborted.add(request_id)
            await self._llm.abort(request_id)

    async def pause(self) -> None:
        """See `PausableEngine.pause`. Raises EngineError if the step under way does not end."""
        async with self._update_lock:
            async with self._deadline("pausing"):
                await self._hold(self._running())
            self._is_paused = True

    async def resume(self) -> None:
        """See `PausableEngine.resume`; the engine stays paused if its weights are in doubt."""
        async with self._update_lock:
            self._is_paused = False
            if self._is_trusted:
                await self._running().resume_generation()

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """See `Engine.update_weights`."""
        async with self._update_lock:
            llm = self._running()
            await asyncio.to_thread(verify_safetensors, update.path, tensors=update.tensors, digest=update.digest)
            # Before vLLM is involved: a load that fails halfway leaves it beyond repair.
            check_update(update, self._base)
            if update.adapter is None:
                self._check_layout(update)
            started_s = time.monotonic()
            async with self._deadline(f"installing version {update.policy_version}"):
                with self._install_signs.installing(update.path):
                    num_recomputed_tokens = await self._install(llm, update)
            return UpdateReport(
                policy_version=update.policy_version,
                digest=update.digest,
                pause_s=time.monotonic() - started_s,
                num_recomputed_tokens=num_recomputed_tokens,
            )

    def profile(self) -> EngineProfile:
        """See `Engine.profile`; speed is measured by its rates."""
        cache = self._running().vllm_config.cache_config
        return EngineProfile(
            max_concurrent_samples=self._config.max_concurrent_samples,
            kv_capacity_tokens=cache.kv_cache_size_tokens or None,
            kv_block_tokens=cache.block_size,
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
            tokens_sampled=recorder.num_sampled_tokens if recorder else 0,
            install_signs=self._install_signs.current,
            prompt_tokens=recorder.num_prompt_tokens if recorder else 0,
            cached_tokens=recorder.num_cached_tokens if recorder else 0,
        )

    async def stop(self) -> None:
        """See `Engine.stop`."""
        llm, self._llm = self._llm, None
        if self._adapters is not None:
            self._adapters.cleanup()
        if llm is None:
            return
        self._aborted |= self._live
        if not llm.errored:
            await llm.abort(list(self._live))
        if llm.output_handler is not None:
            # Before the process ends, which it would report as a failure.
            llm.output_handler.cancel()
        async with asyncio.timeout(2 * STOP_TIMEOUT_S):
            await asyncio.to_thread(llm.shutdown, timeout=STOP_TIMEOUT_S)
            # vLLM has asked this loop to close its sockets, but leaves their context open.
            await asyncio.sleep(0)
            await asyncio.to_thread(llm.engine_core.resources.ctx.destroy, linger=0)

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineStoppedError("the vLLM engine is not running")
        llm: AsyncLLM = self._llm
        return llm

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT_S):
                yield
        except TimeoutError as error:
            raise EngineError(f"{what} took longer than {UPDATE_TIMEOUT_S} s") from error

    async def _hold(self, llm: AsyncLLM) -> None:
        # Not llm.pause_generation: it sleeps 20 ms so that outputs arrive before it returns, but spans do not
        # need that order because every output names its version.
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def _install(self, llm: AsyncLLM, update: WeightUpdate) -> int:
        """Loads the weights and continues with them; returns the number of tokens whose KV is recomputed."""
        await self._hold(llm)
        self._num_installs += 1
        self._is_trusted = False
        mismatched = await self._load(update)
        if mismatched:
            raise mismatch_error(f"vLLM does not hold version {update.policy_version} after loading it", mismatched)
        num_dropped_tokens = await self._drop_kv(llm) if update.is_recomputing else 0
        await llm.update_weight_version(str(update.policy_version))
        self.policy_version = update.policy_version
        self._is_trusted = True
        if self._is_paused:
            return num_dropped_tokens
        self._recorder.sampled.clear()
        await llm.resume_generation()
        if num_dropped_tokens and self._live:
            await self._recorder.sampled.wait()
        return num_dropped_tokens

    async def _load(self, update: WeightUpdate) -> list[str]:
        """Loads the file into the workers; returns the names of tensors that do not match afterwards."""
        if update.adapter is None or self._adapters is None:
            await self._transfer(self._running(), update.path)
            return await self._attest([update.path], [tensor.name for tensor in update.tensors])
        from services.generator.engines.vllm.worker.lora_slot import adapter_request

        folder = Path(self._adapters.name) / f"install-{self._num_installs}"
        write_peft_folder(folder, path=update.path, adapter=update.adapter)
        try:
            with _worker_errors("take an adapter"):
                found: list[Comparison] = await self._running().collective_rpc(
                    "penstock_install_adapter", args=(str(folder), scaling(update.adapter))
                )
        finally:
            shutil.rmtree(folder)
        # The same name for all versions: the adapter is in the slot, and vLLM never looks for it in a folder again.
        self._adapter_request = adapter_request(self._adapters.name)
        return mismatched_tensors(found, [tensor.name for tensor in update.tensors])

    def _check_layout(self, update: WeightUpdate) -> None:
        """Raises WeightsMismatchError unless the tensors are the model's; either side may stack experts."""
        offered = split_shapes({tensor.name: tuple(tensor.shape) for tensor in update.tensors})
        tensors = [TensorInfo(name=name, shape=shape) for name, shape in offered.items()]
        check_layout(split_shapes(self._layout), tensors, optional=self._optional)

    async def _make_ready_for_adapters(self) -> None:
        if self._model.max_lora_rank is None:
            return
        digest = await asyncio.to_thread(model_digest, self._model.model_folder)
        self._base = AdapterBase(digest=digest, layout=self._layout, max_rank=self._model.max_lora_rank)
        self._adapters = TemporaryDirectory(prefix="penstock-adapters-")

    async def _drop_kv(self, llm: AsyncLLM) -> int:
        """Makes running samples recompute their KV; returns the number of tokens."""
        states = [state for state in llm.output_processor.request_states.values() if _num_decoded(state)]
        self._recorder.expect_preemptions(len(states))
        await llm.reset_prefix_cache(reset_running_requests=True)
        # The last token of each is not in the cache yet.
        return sum(state.prompt_len + _num_decoded(state) - 1 for state in states)

    async def _begin_transfers(self, llm: AsyncLLM) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await llm.init_weight_transfer_engine(WeightTransferInitRequest())

    async def _transfer(self, llm: AsyncLLM, path: Path) -> None:
        """Makes vLLM load a file's weights through our transfer engine (`weight_transfer`), in every worker."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with _worker_errors(f"take {path}"):
            await llm.start_weight_update()
            self._install_signs.give()
            await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
            self._install_signs.give()
            # The version is set once it is attested.
            await llm.finish_weight_update()

    async def _attest(self, paths: Sequence[Path], names: Iterable[str]) -> list[str]:
        """The names of tensors in which the model and the checkpoint differ; empty if they match."""
        with _worker_errors("prove what they hold"):
            found: list[Comparison] = await self._running().collective_rpc(
                "penstock_attest", args=([str(path) for path in paths],)
            )
        return mismatched_tensors(found, names)

    async def _decode_one_token(self, llm: AsyncLLM) -> None:
        """Detects now what would otherwise crash vLLM at the first sample, such as a head size its kernels lack."""
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
        params = sampling_params(request, max_tokens=max_tokens, is_seeded=self._can_seed)
        is_finished = False
        try:
            queue = await llm.add_request(request.request_id, prompt, params, lora_request=self._adapter_request)
            state = llm.output_processor.request_states.get(queue.request_id)
            if request.request_id in self._aborted:
                await llm.abort(request.request_id)
            num_yielded = num_parts = 0
            while not is_finished:
                output = queue.get_nowait() or await queue.get()
                is_finished = output.finished
                starts = version_starts(output, state.weight_version_starts if state is not None else ())
                routes: Routes | None = None
                if request.has_routes and self._routers is not None and state is not None:
                    parts = state.routed_experts_chunks[num_parts:]
                    num_parts += len(parts)
                    routes = self._routers.joined(parts)
                for span in to_spans(
                    output, starts, offset=num_yielded, default_version=self.policy_version, routes=routes
                ):
                    num_yielded += len(span.token_ids)
                    yield span
        except EngineDeadError as error:
            is_finished = True
            raise EngineStoppedError("the vLLM engine process died") from error
        finally:
            if not is_finished:
                await llm.abort(request.request_id)


@contextmanager
def _worker_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # vLLM reports any error of a worker as a bare Exception.
        raise EngineError(f"vLLM's workers could not {what}: {error}") from error


def _num_decoded(state: RequestState) -> int:
    return int(state.detokenizer.num_output_tokens())
