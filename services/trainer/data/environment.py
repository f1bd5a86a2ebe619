"""Asks a run's environment what prompts must show: its tools, and whether it writes the first messages itself."""

from __future__ import annotations

from penstock.config import ConfigError
from penstock.environments.environment_messages import read_tools
from penstock.errors import InvalidFieldError, NotOfferedError, PenstockError
from penstock.network.connection import Connection
from penstock.network.rpc import call_with_retry
from penstock.security import Security
from penstock.security.credentials import JUDGES
from penstock.v1 import environment_pb2, environment_pb2_grpc
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_order import Tokenizer

PATIENCE_S = 300.0
"""For an environment that starts beside the trainer, and may load much."""


async def follow_environment(config: TrainingConfig, tokenizer: Tokenizer) -> None:
    """Have chats rendered as the run's environment wants them, if it has one. Raises ConfigError."""
    if config.environment is None:
        return
    security = Security.from_environment(JUDGES)
    async with Connection(config.environment, security=security, service="environment") as connection:
        stub = environment_pb2_grpc.EnvironmentServiceStub(connection.channel)
        request = environment_pb2.GetEnvironmentRequest()
        try:
            said = await call_with_retry(stub.GetEnvironment, request, peer=connection.peer, give_up_after_s=PATIENCE_S)
            tokenizer.note_environment(tools=read_tools(said.tools_json), opens=said.opens)
        except NotOfferedError:
            return
        except (InvalidFieldError, PenstockError) as error:
            raise ConfigError(f"environment: {error}") from error
