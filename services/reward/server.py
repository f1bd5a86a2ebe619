"""Runs a reward process: a worker of one run, and a RewardService of its own over the same reward model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from penstock.clients.scoring import ScoringSession
from penstock.config import ConfigError
from penstock.network.connection import Connection
from penstock.network.metrics_server import serve_metrics
from penstock.network.readiness import follow_outage
from penstock.network.rpc import Server, run_until_stopped
from penstock.process.grace_periods import DRAIN_S
from penstock.rewards import ModelAwayError, RewardLoadError, RewardModel
from penstock.rewards.serving import reward_service
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.storage.fetched import fetched
from services.reward.config import RewardConfig, RewardModelConfig
from services.reward.models.build import build_model
from services.reward.models.by_source import ModelsBySource, distinct_rewards
from services.reward.pool import ScoringPool
from services.reward.source_pools import SourcePools
from services.reward.texts import TokenTexts

# Enough that every call under way finds the next batch waiting when it ends.
_BATCHES_HELD_A_CALL = 2

_log = structlog.get_logger()


async def serve(config: RewardConfig) -> None:
    """Score until SIGTERM or SIGINT; waits for broker, run and reward model as long as they are away.

    Raises:
        ConfigError: There is no usable tokenizer, no such reward model, or it refuses this worker for good.
        PortUnavailableError: The address cannot be listened on.
        PenstockError: The broker refuses this process for good.
    """
    texts = _texts(config)
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    judges = Security.from_environment(JUDGES, insecure=config.insecure)
    rewards, by_source = distinct_rewards(config.reward, config.sources)
    models = [await _model(reward, judges, security) for reward in rewards]
    max_leases = sum(_BATCHES_HELD_A_CALL * reward.max_concurrent_batches * reward.max_batch_size for reward in rewards)
    session = ScoringSession(
        Connection(config.broker, security=security),
        run_id=config.run_id,
        worker_id=security.named(config, "worker_id").worker_id,
        max_leases=max_leases,
    )
    pool: ScoringPool | SourcePools
    if len(models) == 1:
        pool = ScoringPool(source=session, model=models[0], config=config.reward, texts=texts)
    else:
        pool = pools = SourcePools(session, list(zip(rewards, models, strict=True)), by_source, texts=texts)
        session.num_held_back = lambda: pools.num_held_back
    session.holding_reason = lambda: pool.holding_reason
    session.warning = lambda: "" if texts is None else texts.warning
    service = reward_service(ModelsBySource(models, by_source), samples_per_second=lambda: pool.samples_per_second)
    server = Server(listen=config.listen, services=[service], security=security)

    async def drain() -> None:
        num_left = await session.drain(timeout_s=DRAIN_S)
        if num_left:
            _log.warning("stopped with samples unscored; their leases expire and go to another worker", num=num_left)

    async def set_ready(is_ready: bool) -> None:
        # The process's health only: RewardService answers others even while this worker's broker is away.
        await server.set_serving(is_ready, "")

    def announce() -> None:
        names = ", ".join(each.name for each in models)
        _log.info("reward listens", listen=config.listen, model=names, broker=config.broker, run_id=config.run_id)

    try:
        loops: list[Callable[[], Coroutine[Any, Any, None]]] = [
            session.run,
            pool.run,
            partial(follow_outage, set_ready, lambda: session.outage),
        ]
        await run_until_stopped(server, loops=loops, on_started=announce, before_stop=drain)
    finally:
        for each in models:
            await each.close()


async def _model(config: RewardModelConfig, judges: Security, security: Security) -> RewardModel:
    try:
        model = build_model(config, judges=judges, security=security)
        await _check(model)
        return model
    except RewardLoadError as error:
        raise ConfigError(f"reward.model: {error}") from error


async def _check(model: RewardModel) -> None:
    try:
        if found := await model.check():
            _log.info(f"reward model {model.name}: {found}")
    except ModelAwayError as error:
        _log.warning(f"reward model {model.name} is unreachable; samples will wait for it", reason=str(error))
    except RewardLoadError:
        await model.close()
        raise


def _texts(config: RewardConfig) -> TokenTexts | None:
    if config.reward.trusts_generator_text or config.tokenizer_path is None:
        _log.warning("text of generators is scored unchecked", setting="reward.trusts_generator_text")
        return None
    try:
        return TokenTexts.of_model(fetched("tokenizer_path", config.tokenizer_path, "tokenizer"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer_path: {error}; give the directory of the run's model with its tokenizer.json "
            "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one), or score what generators send, "
            "unchecked, with reward.trusts_generator_text=true"
        ) from error
