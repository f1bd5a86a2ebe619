"""Wires up the OpenAI-compatible endpoint of a generator process; imported only if it is enabled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
from aiohttp import web

from penstock.clients.sessions import SessionClient
from penstock.clock import Clock, SystemClock
from penstock.errors import PenstockError
from penstock.network.http_server import listen_http
from penstock.security import Security
from penstock.security.session_keys import SECRET_VARIABLE, SessionKeys
from penstock.security.tls import server_context
from penstock.storage.addresses import last_name
from services.generator.config import GeneratorConfig
from services.generator.decoding.unleased import UnleasedSamples
from services.generator.openai.app import OpenAIRoutes
from services.generator.openai.endpoint import Agents
from services.generator.openai.formats.api_errors import ApiError
from services.generator.openai.formats.chat_template import ConversationTokenizer
from services.generator.openai.placement import Placement
from services.generator.openai.session_reward import SessionRewards
from services.generator.openai.sessions.group_sender import PATIENCE_S, RETRY_S, GroupPutter
from services.generator.openai.sessions.kept_sessions import KeptSessions
from services.generator.openai.sessions.metrics import OpenAIMetrics
from services.generator.openai.sessions.session_traces import SessionTraces

HTTP_SHUTDOWN_S = 2.0
PUT_AT_STOP_S = 3.0
"""Time allowed for complete groups to reach the broker when the process stops."""

_log = structlog.get_logger()


class OpenAIEndpoint:
    """Use `serving` as a context manager and `run` as a loop beside it.

    Args:
        config: Configuration of the generator.
        unleased: Decodes samples without a lease.
        security: Credentials of the process.
        judges: Credentials shown to third parties' reward servers.
        metrics: Its Prometheus metrics.
        clock: The machine's clock; tests pass their own.
        secret: Signs agents' keys; without one they expire with the process.

    Raises:
        ConfigError: The secret is too short.
        ValueError: The model has no usable tokenizer.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        unleased: UnleasedSamples,
        security: Security,
        judges: Security,
        metrics: OpenAIMetrics,
        clock: Clock | None = None,
        secret: str | None = None,
    ) -> None:
        self._keys = SessionKeys(config.run_id, secret)
        self._listen = config.openai.listen or ""
        self._unleased = unleased
        self._security = security
        self._clock = clock or SystemClock()
        self._tokenizer = ConversationTokenizer(config.model_folder)
        self._putter = GroupPutter(
            config.broker,
            run_id=config.run_id,
            generator_id=unleased.generator_id,
            temperature=config.openai.temperature,
            security=security,
            metrics=metrics,
            traces=SessionTraces(config.run_id, self._clock),
        )
        limits = config.openai
        self._kept = KeptSessions(
            SessionClient(
                config.broker,
                run_id=config.run_id,
                generator_id=unleased.generator_id,
                security=security,
                patience_s=PATIENCE_S,
            ),
            metrics=metrics,
            clock=self._clock,
            adopt_after_s=limits.group_timeout_s,
            forget_after_s=limits.request_timeout_s + limits.group_timeout_s + limits.session_idle_s,
        )
        self._agents = Agents(
            unleased,
            tokenizer=self._tokenizer,
            putter=self._putter,
            kept=self._kept,
            config=config.openai,
            metrics=metrics,
            clock=self._clock,
        )
        self._rewards = SessionRewards(
            self._agents, run_id=config.run_id, target=config.openai.reward, security=security, judges=judges
        )
        self._placement = Placement(
            config.openai.address or self._listen,
            config.openai.peers,
            security=security,
            timeout_s=config.openai.request_timeout_s,
        )
        self._routes = OpenAIRoutes(
            self._agents,
            rewards=self._rewards,
            metrics=metrics,
            model_name=config.openai.model_name or last_name(config.model_path),
            security=security,
            keys=self._keys,
            request_timeout_s=config.openai.request_timeout_s,
            placement=self._placement,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve; yields the base address for clients.

        Raises:
            PortUnavailableError: The address cannot be listened on.
        """
        self._security.admit_listener(self._listen, setting="openai.listen")
        async with AsyncExitStack() as stack:
            stack.callback(self._tokenizer.close)
            stack.push_async_callback(self._putter.close)
            stack.push_async_callback(self._rewards.close)
            stack.push_async_callback(self._placement.close)
            stack.push_async_callback(self._kept.close)
            # A client that disconnects must not occupy an engine slot, nor leave a turn that it never saw.
            runner = web.AppRunner(
                self._routes.application(), access_log=None, shutdown_timeout=HTTP_SHUTDOWN_S, handler_cancellation=True
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            # Agents use keys instead of certificates; requests with neither are refused by the routes.
            ssl_context = server_context(self._security.tls_files, requires_certificates=False)
            base = await listen_http(runner, self._listen, setting="openai.listen", ssl_context=ssl_context)
            address = f"{base}/v1"
            keys = "last" if self._keys.is_lasting else f"end with this process; set {SECRET_VARIABLE} to keep them"
            _log.info("OpenAI-compatible endpoint", address=address, session_keys=keys)
            yield address

    async def run(self) -> None:
        """Put finished groups until cancelled."""
        while True:
            try:
                groups = await self._agents.groups()
                break
            except (ApiError, PenstockError):
                # The trainer may open the run later.
                await asyncio.sleep(RETRY_S)
        putting = self._putter.run(
            groups,
            text_of=self._tokenizer.text_of,
            run_history=lambda: self._unleased.run_history,
            kept=self._kept,
            clock=self._clock,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(putting)
            tasks.create_task(self._kept.run(self._agents.adopt))

    async def stop(self) -> None:
        """Put complete groups; other sessions go on at other generators. Takes seconds at most."""
        self._kept.stop()
        try:
            async with asyncio.timeout(PUT_AT_STOP_S):
                groups = await self._agents.groups()
        except (ApiError, TimeoutError):
            return
        num_open = groups.num_open
        groups.close_all()
        is_put = await self._putter.wait_until_idle(timeout_s=PUT_AT_STOP_S)
        _log.info("sessions ended", num_open_dropped=num_open, are_complete_groups_put=is_put)
