"""Runs a critic process: CriticService, its speed and health over gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.config import ConfigError
from penstock.model.weight_index import check_weights
from penstock.network.metrics_server import serve_metrics
from penstock.network.rpc import Server, run_until_stopped, service_of
from penstock.security import Security
from penstock.storage.fetched import beside_loop, fetched
from services.trainer.compute.speed import speed_service
from services.trainer.critic.config import CriticConfig
from services.trainer.critic.critic_run import CriticRun
from services.trainer.critic.service import CriticService

if TYPE_CHECKING:
    from services.trainer.critic.trained_critic import TrainedCritic

_log = structlog.get_logger()


async def serve(config: CriticConfig) -> None:
    """Serve until SIGTERM or SIGINT. The model is loaded when the trainer opens the critic.

    Raises:
        ConfigError: There is no model, or no folder for its state.
        PortUnavailableError: The address cannot be listened on.
    """
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    folder: Path = await beside_loop(fetched, "model_path", config.model_path, "model")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model_path: {config.model_path}: no config.json; give a Hugging Face directory")
    try:
        await beside_loop(check_weights, folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_path: {config.model_path}: no usable model: {error}") from error

    def make_model() -> TrainedCritic:
        # Imported here: torch takes seconds, and the configuration's errors should not wait for it.
        from services.trainer.critic.trained_critic import TrainedCritic

        return TrainedCritic(config, folder)

    try:
        critic = CriticRun(
            config.state_dir,
            make_model=make_model,
            checkpoint_every_steps=config.checkpoint_every_steps,
            stored=config.stored,
            run_id=config.run_id,
        )
    except OSError as error:
        raise ConfigError(f"state_dir: {config.state_dir}: {error}") from error
    service = CriticService(config.run_id, critic)
    server = Server(
        listen=config.listen, services=[service_of(service), speed_service(critic.speed)], security=security
    )

    def announce() -> None:
        _log.info("critic listens", listen=config.listen, model=str(config.model_path), run_id=config.run_id)

    await run_until_stopped(server, on_started=announce, before_stop=service.close)
