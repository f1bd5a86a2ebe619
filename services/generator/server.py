"""A generator process: builds the engine, serves GeneratorService, leases and decodes until it is stopped.

It may hold several emulated generators; they share only the process and its metrics, and the failure of one ends all.

The service reports healthy once the engine is built, and not while the broker is away for long. SIGTERM and SIGINT
give unfinished samples back to the broker and end the process within seconds; an engine failure does the same and ends
it with an error.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from penstock.config import ConfigError
from penstock.model.model_folder import TOKENIZER_FILE
from penstock.model.weight_index import check_weights
from penstock.network.metrics_server import serve_metrics
from penstock.network.readiness import follow_outage
from penstock.network.rpc import Server, run_until_stopped, service_of
from penstock.secret import read_secret
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.security.session_keys import SECRET_VARIABLE
from penstock.storage.storage import StorageError
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import UnusableModelError
from services.generator.engine.model_files import load_text_decoder
from services.generator.environments.rendering import ChatTokenizer
from services.generator.generator import Generator
from services.generator.instances import expand
from services.generator.metrics import GeneratorMetrics
from services.generator.service import GeneratorServicer

if TYPE_CHECKING:
    from services.generator.openai.server import OpenAIEndpoint

_log = structlog.get_logger()


async def serve(config: GeneratorConfig) -> None:
    """Run a generator, or several emulated ones, until SIGTERM or SIGINT.

    Raises:
        ConfigError: The engine, or the OpenAI-compatible endpoint, cannot be what the configuration says.
        PortUnavailableError: The address cannot be listened on.
        EngineError, DigestMismatchError: The engine did not start.
        GeneratorFailedError: The engine failed while it decoded.
    """
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    await _fetch_model(config)
    metrics = GeneratorMetrics()
    members = [_assemble(one, metrics, security) for one in expand(security.named(config, "generator_id"))]

    async def stop() -> None:
        await asyncio.gather(*(member.stop() for member in members))

    async with AsyncExitStack() as stack:
        for member in members:
            await stack.enter_async_context(member.generator)
            if member.endpoint is not None:
                await stack.enter_async_context(member.endpoint.serving())
        for member in members[1:]:
            stack.push_async_callback(member.server.stop, grace_s=1.0)
            await member.server.start()
        loops = [loop for member in members for loop in member.loops()]
        await run_until_stopped(members[0].server, loops=loops, before_stop=stop)


async def _fetch_model(config: GeneratorConfig) -> None:
    """Have the model on this machine's disk before anything reads it."""
    try:
        await asyncio.to_thread(lambda: config.model_folder)
    except StorageError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One generator of the process and its server."""

    generator: Generator
    server: Server
    endpoint: OpenAIEndpoint | None

    async def stop(self) -> None:
        """Give back what it holds."""
        if self.endpoint is not None:
            await asyncio.gather(self.generator.stop(), self.endpoint.stop())
        else:
            await self.generator.stop()

    def loops(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """The loops that must run for it to work."""
        generator = self.generator
        return [
            self._run_engine,
            generator.watch_engine,
            generator.send_tokens,
            generator.watch_weights,
            generator.pull_weights,
            generator.take_leases,
            partial(follow_outage, self.server.set_serving, lambda: generator.broker_outage),
            *([] if self.endpoint is None else [self.endpoint.run]),
        ]

    async def _run_engine(self) -> None:
        await self.server.set_serving(False)
        try:
            await self.generator.run_engine(on_ready=lambda: self.server.set_serving(True))
        except UnusableModelError as error:
            # No restart helps.
            raise ConfigError(f"model_path: {error}") from error


def _assemble(config: GeneratorConfig, metrics: GeneratorMetrics, security: Security) -> _Member:
    try:
        text = load_text_decoder(config.model_folder, is_tokenizer_needed=not config.engine.is_emulated)
        if not config.engine.is_emulated:
            check_weights(config.model_folder)
        engine = config.engine.build(config)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _log.info(
        "generator in its place",
        generator_id=config.generator_id,
        engine=config.engine.engine,
        tensor_parallel=config.engine.tensor_parallel,
        pipeline_parallel=config.engine.pipeline_parallel,
        max_concurrent_samples=config.engine.max_concurrent_samples,
        site=config.site,
        relay_patience_s=config.relay_patience_s,
    )
    generator = Generator(
        config,
        engine=engine,
        text=text,
        metrics=metrics,
        security=security,
        tokenizer=_tokenizer(config),
        judges=Security.from_environment(JUDGES, insecure=config.insecure),
    )
    service = service_of(GeneratorServicer(generator))
    server = Server(listen=config.listen, services=[service], security=security, public_hosts=_relay_hosts(config))
    generator.warn_of(lambda: "; ".join(server.certificate_problems))
    return _Member(
        generator=generator,
        server=server,
        endpoint=_endpoint(config, generator, security),
    )


def _tokenizer(config: GeneratorConfig) -> ChatTokenizer | None:
    """What renders an environment's messages; None where none is needed, or an emulated model has none."""
    if config.environment is None or (
        config.engine.is_emulated and not (config.model_folder / TOKENIZER_FILE).is_file()
    ):
        return None
    # Imported here: it needs transformers, which other generators do not.
    from services.generator.openai.formats.chat_template import ConversationTokenizer

    try:
        return ConversationTokenizer(config.model_folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _relay_hosts(config: GeneratorConfig) -> list[str]:
    """Hosts under which others of the site fetch weights here."""
    if config.relay_url is None:
        is_named_by_machine = config.site and config.listen.startswith(("0.0.0.0:", "[::]:"))
        return [socket.gethostname()] if is_named_by_machine and config.relay_listen is None else []
    return [urlsplit(f"//{config.relay_url.rpartition('://')[2]}").hostname or ""]


def _endpoint(config: GeneratorConfig, generator: Generator, security: Security) -> OpenAIEndpoint | None:
    if config.openai.listen is None:
        return None
    # Imported here: it needs transformers, which other generators do not.
    from services.generator.openai.server import OpenAIEndpoint
    from services.generator.openai.sessions.metrics import OpenAIMetrics

    try:
        return OpenAIEndpoint(
            config,
            unleased=generator.unleased(),
            security=security,
            judges=Security.from_environment(JUDGES, insecure=config.insecure),
            metrics=OpenAIMetrics(),
            secret=read_secret(SECRET_VARIABLE),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
