"""Serves a reward model as a RewardService."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import Any

import grpc
import uvloop

from penstock.config import ConfigError
from penstock.errors import InvalidFieldError
from penstock.network.rpc import Server, Service, run_until_stopped, service_of
from penstock.process.log_setup import configure_logging
from penstock.process.logger import get_logger
from penstock.rewards.function import RewardFunction
from penstock.rewards.loading import as_reward, load_reward
from penstock.rewards.local import LocalModel
from penstock.rewards.model import DEFAULT_MAX_BATCH_SIZE, BatchReward, RewardModel
from penstock.security import Security
from penstock.security.bearer_tokens import check_token
from penstock.security.credentials import JUDGES
from penstock.v1 import reward_pb2, reward_pb2_grpc

DEFAULT_LISTEN = "127.0.0.1:7310"
DEFAULT_TIMEOUT_S = 60.0
MAX_CONCURRENT_CALLS = 64
OF_THE_CLUSTER = ("PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE", "PENSTOCK_TLS_CERT")
"""Variables with credentials that servers of third parties are never shown."""
# Part of the caller's deadline that is kept for sending the answer: items that time out still reach the caller as such.
_ANSWER_SHARE = 0.1

_log = get_logger()


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """RewardService over a RewardModel; at most MAX_CONCURRENT_CALLS score at once, more wait inside their deadline."""

    def __init__(self, model: RewardModel, *, samples_per_second: Callable[[], float]) -> None:
        self._model = model
        self._samples_per_second = samples_per_second
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        """Score a batch."""
        description = await self._model.describe()
        limit = description.max_batch_size or DEFAULT_MAX_BATCH_SIZE
        if not 1 <= len(request.items) <= limit:
            raise InvalidFieldError(f"items: {len(request.items)} items, must be 1 to {limit}", field="items")
        async with self._slots:
            scores = await self._model.score(request.items, timeout_s=_timeout_s(context))
        return reward_pb2.ScoreResponse(scores=scores)

    async def GetRewardModel(
        self, request: reward_pb2.GetRewardModelRequest, context: Any
    ) -> reward_pb2.GetRewardModelResponse:
        """Describe the model."""
        del request, context
        found = reward_pb2.GetRewardModelResponse()
        found.CopyFrom(await self._model.describe())
        found.samples_per_second = self._samples_per_second()
        return found


def reward_service(model: RewardModel, *, samples_per_second: Callable[[], float] = lambda: 0.0) -> Service:
    """RewardService over `model`, to be given to a Server; a run's worker says how fast it scores."""
    return service_of(RewardServicer(model, samples_per_second=samples_per_second))


async def serve_async(target: RewardFunction | BatchReward | str, *, listen: str = DEFAULT_LISTEN) -> None:
    """Serve a reward until SIGTERM or SIGINT. Raises RewardLoadError, PortUnavailableError and ConfigError.

    Args:
        target: A function, a BatchReward, or the name of one as `module:function`.
        listen: Address to listen on, host:port; port 0 takes a free one, which is logged.
    """
    reward = load_reward(target) if isinstance(target, str) else as_reward(target)
    model = LocalModel(reward)
    server = Server(listen=listen, services=[reward_service(model)], security=third_party_security())

    def announce() -> None:
        address = f"{listen.rpartition(':')[0]}:{server.port}"
        _log.info("reward model is served", model=model.name, address=address, use_as=f"grpc://{address}")

    try:
        await run_until_stopped(server, on_started=announce)
    finally:
        await model.close()


def serve(target: RewardFunction | BatchReward | str, *, listen: str = DEFAULT_LISTEN) -> None:
    """`serve_async` for a program of its own: sets up logging, blocks until SIGTERM or SIGINT."""
    configure_logging("reward-model")
    try:
        uvloop.run(serve_async(target, listen=listen))
    except ConfigError as error:
        sys.exit(str(error))


def third_party_security() -> Security:
    """A server's own credentials, in the variables that its callers have them in. Raises ConfigError."""
    security = Security.from_environment(JUDGES)
    if not security.has_credentials and any(map(os.environ.get, OF_THE_CLUSTER)):
        raise ConfigError(
            f"{JUDGES}_TOKEN: not set, while the cluster's credentials are, which such servers are never "
            f"shown; set {JUDGES}_TOKEN and {JUDGES}_TLS_CA, _CERT and _KEY here and where it is called from, or unset "
            "PENSTOCK_TOKEN and PENSTOCK_TLS_CERT here"
        )
    if security.token is not None:
        check_token(security.token, where=f"{JUDGES}_TOKEN")
    return security


def _timeout_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return DEFAULT_TIMEOUT_S
    return max(0.01, min(DEFAULT_TIMEOUT_S * 10, remaining_s * (1 - _ANSWER_SHARE)))
