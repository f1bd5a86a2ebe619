"""An engine whose every span is written by the test: for what no well-behaved engine would do."""

from __future__ import annotations

import asyncio

import numpy as np

from services.generator.engine.engine import EngineProfile, EngineStats, FinishReason, TokenSpan, UpdateReport


def span(*token_ids, version=0, finish=None, logprob=-0.5, routes=None):
    """Tokens sampled by one version."""
    return TokenSpan(
        token_ids=np.asarray(token_ids, np.int32),
        logprobs=np.full(len(token_ids), logprob, np.float32),
        policy_version=version,
        finish_reason=finish,
        routes=routes,
    )


class ScriptedEngine:
    """`say(request_id, span_or_exception)` makes a running sample yield it, or fail."""

    def __init__(self):
        self.requests = {}
        self.updates = []
        self.update_errors = []
        self.reported_digest = None
        self.num_running = 0
        self.most_running = 0
        self.policy_version = 0
        self.max_model_len = 64
        self.num_recomputed_tokens = 7
        self.tokens_sampled = 0
        self.install_signs = None
        self.may_install = asyncio.Event()
        self.may_install.set()
        self.is_stopped = False
        self.is_paused = False
        self._queues: dict[str, asyncio.Queue] = {}

    def say(self, request_id, item):
        self._queues[request_id].put_nowait(item)

    async def start(self):
        pass

    async def stop(self):
        self.is_stopped = True

    async def generate(self, request):
        self.requests[request.request_id] = request
        queue = self._queues.setdefault(request.request_id, asyncio.Queue())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    return
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.num_running -= 1

    async def abort(self, request_id):
        self.say(request_id, span(finish=FinishReason.ABORTED))

    async def update_weights(self, update):
        self.updates.append(update)
        if self.update_errors:
            raise self.update_errors.pop(0)
        await self.may_install.wait()
        self.policy_version = update.policy_version
        return UpdateReport(
            policy_version=update.policy_version,
            digest=self.reported_digest or update.digest,
            pause_s=0.01,
            num_recomputed_tokens=self.num_recomputed_tokens if update.is_recomputing else 0,
        )

    def profile(self):
        return EngineProfile(max_concurrent_samples=64)

    def stats(self):
        return EngineStats(
            num_running=self.num_running,
            num_waiting=0,
            kv_cache_usage=0.5,
            num_preemptions=0,
            tokens_generated=0,
            tokens_sampled=self.tokens_sampled,
            install_signs=self.install_signs,
        )


class PausableScriptedEngine(ScriptedEngine):
    """One that can stand still."""

    async def pause(self):
        self.is_paused = True

    async def resume(self):
        self.is_paused = False
