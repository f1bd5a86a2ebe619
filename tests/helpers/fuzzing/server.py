"""All services behind one port, with a token for each role, in a process of its own whose memory can be looked at.

python -m tests.helpers.fuzzing.server: writes its port, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys

from prometheus_client import CollectorRegistry

from penstock.clock import SystemClock
from penstock.network.rpc import Server, open_channel, service_of
from penstock.process.log_setup import configure_logging
from penstock.security import NO_SECURITY, Security
from penstock.security.roles import Role, role_name
from penstock.v1 import broker_pb2_grpc
from services.broker.server import make_run_registry
from services.broker.service import BrokerService
from services.broker.session_service import SessionService
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RunningBroker, prompt
from tests.helpers.fuzzing.services import make_services
from tests.helpers.fuzzing.watched_server import PORTS

ROLES = [role for role in Role.values() if role]
TOKENS = {role_name(role): f"{role_name(role)}:0123456789abcdef" for role in ROLES}
SECURITY = Security(token="the-operators-own", accepted_tokens=tuple(TOKENS.values()), allows_plain=True)


async def main() -> None:
    """Serve."""
    configure_logging("fuzz")
    run_registry = make_run_registry(
        MemoryStore(), registry=CollectorRegistry(), clock=SystemClock(), scheduler=None, security=NO_SECURITY
    )
    broker = [service_of(BrokerService(run_registry)), service_of(SessionService(run_registry))]
    server = Server(listen="127.0.0.1:0", services=[*broker, *make_services()], security=SECURITY)
    port = await server.start()
    care = asyncio.create_task(run_registry.care(server.set_serving))
    async with open_channel(f"127.0.0.1:{port}", SECURITY) as channel:
        running = RunningBroker(run_registry, None, server, channel, broker_pb2_grpc.BrokerServiceStub(channel))
        await running.open()
        await running.submit(prompt("a"))
    print(PORTS, port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    care.cancel()
    await run_registry.stop()
    await server.stop(grace_s=1.0)


if __name__ == "__main__":
    asyncio.run(main())
