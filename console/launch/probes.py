"""Probes servers on the network, each with a deadline: whether they answer, and if not, what to report to the user."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.errors import ServiceUnavailableError
from penstock.network.rpc import open_channel
from penstock.security import Security
from penstock.security.checks.troubles import TROUBLES
from penstock.targets import split_targets
from services.broker.storage.redis.address import parse_redis_url
from services.broker.storage.redis.authentication import NO_CREDENTIALS, RedisCredentials

PROBE_TIMEOUT_S = 3.0
TLS_FAILS = "TLS with"
"""Prefix of problems that waiting does not solve."""


async def service_problem(
    target: str, kind: str, *, security: Security, must_serve: bool = True, timeout_s: float = PROBE_TIMEOUT_S
) -> str | None:
    """Why the server at `target` cannot be used as a broker, trainer ...; None if it, or one of several, can.

    A server without health checks, or whose health does not name the service, counts as up: foreign servers may lack
    them. Without `must_serve`, a server that answers but does not serve yet, as it waits for the run, counts as well.
    """
    targets = split_targets(target)
    if len(targets) > 1:
        problems = await asyncio.gather(
            *(
                service_problem(one, kind, security=security, must_serve=must_serve, timeout_s=timeout_s)
                for one in targets
            )
        )
        return None if None in problems else "; ".join(problem for problem in problems if problem)
    service = f"penstock.v1.{kind.title()}Service"
    async with open_channel(target, security) as channel:
        # The health package's types lack its stub's methods.
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return None
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                trouble = await TROUBLES.trouble_with(target)
                nothing = f"nothing answers at {target} within {timeout_s:g} s"
                return f"{TLS_FAILS} {target} fails: {trouble}" if trouble else nothing
            return f"{target} refuses the health check: {error.code().name}: {error.details()}"
    if response.status == health_pb2.HealthCheckResponse.SERVING or not must_serve:
        return None
    return f"{target} answers, but {service} is not serving"


def redis_problem(url: str, *, credentials: RedisCredentials = NO_CREDENTIALS) -> str | None:
    """Why the Redis at `url` cannot be used; None if it can. A password in the URL is never shown."""
    import redis

    shown = masked(url)
    try:
        if parse_redis_url(url).kind != "single":
            return asyncio.run(_group_problem(url, credentials))
        settings: dict[str, Any] = dict.fromkeys(("socket_connect_timeout", "socket_timeout"), PROBE_TIMEOUT_S)
        settings |= credentials.tls_settings if url.startswith("rediss://") else {}
        with redis.Redis.from_url(url, **settings) as client:
            client.ping()
            version = str(client.info("server").get("redis_version", "0"))
    except (redis.RedisError, OSError, ValueError) as error:
        detail = masked(" ".join(str(error).split()))
        return f"Redis at {shown} cannot be reached: {detail}"
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        return f"Redis at {shown} is version {version}; 6.2 or newer is needed"
    return None


async def _group_problem(url: str, credentials: RedisCredentials) -> str | None:
    from services.broker.storage.redis.redis_store import RedisStore

    store = RedisStore.from_url(url, credentials=credentials)
    try:
        await store.ping()
    except ServiceUnavailableError as error:
        return masked(str(error))
    finally:
        await store.close()
    return None


def masked(text: str) -> str:
    """`text` with the password of any URL in it replaced by asterisks."""
    return re.sub(r"(://[^:@/\s]*):[^@/\s]*@", r"\1:***@", text)
