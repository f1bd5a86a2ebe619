"""Runs a sandbox process: SandboxService and health over gRPC."""

from __future__ import annotations

import structlog

from penstock.config import ConfigError
from penstock.network.metrics_server import serve_metrics
from penstock.network.rpc import Server, run_until_stopped, service_of
from penstock.rewards import RewardLoadError
from penstock.security import Security
from services.reward.code.cells import LocalCells
from services.reward.code.sandboxes.finding import find_sandbox
from services.reward.code.sandboxes.sandbox import SandboxError
from services.reward.reasoning_gym.scorers import LocalScorers
from services.reward.sandbox.config import SandboxConfig
from services.reward.sandbox.service import SandboxServicer

_log = structlog.get_logger()


async def serve(config: SandboxConfig) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: No sandbox works here.
        PortUnavailableError: The address cannot be listened on.
    """
    security = Security.from_environment(insecure=config.insecure)
    serve_metrics(config.metrics_address, security)
    try:
        sandbox, _ = find_sandbox(config.sandbox)
    except SandboxError as error:
        raise ConfigError(f"sandbox: none works here: {error}") from error
    cells, scorers = LocalCells(sandbox, config.programs.num_cells), _scorers(sandbox)
    servicer = SandboxServicer(cells, sandbox=sandbox, programs=config.programs, scorers=scorers)
    server = Server(listen=config.listen, services=[service_of(servicer)], security=security)

    def announce() -> None:
        _log.info("sandbox listens", listen=config.listen, sandbox=sandbox, num_cells=config.programs.num_cells)

    try:
        await run_until_stopped(server, on_started=announce)
    finally:
        await cells.close()
        if scorers is not None:
            await scorers.close()


def _scorers(sandbox: str) -> LocalScorers | None:
    try:
        return LocalScorers(sandbox)
    except RewardLoadError:
        # It serves programs alone.
        return None
