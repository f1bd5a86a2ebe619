"""Finds services of a run that other machines can reach in plain text, by their own reports."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from console.inspect.find_run import Target
from console.launch.supervisor import ProcessState
from penstock.network.rpc import PLAIN_TEXT, open_channel
from penstock.security import Security
from penstock.v1 import broker_pb2

_TIMEOUT_S = 2.0


async def exposure_lines(target: Target, run: broker_pb2.GetRunResponse | None, security: Security) -> list[str]:
    """One line per exposed service; services that do not answer are left out."""
    addresses = _addresses(target)
    answers = await asyncio.gather(*(_is_exposed(address, security) for address in addresses.values()))
    exposed = {name: address for (name, address), is_so in zip(addresses.items(), answers, strict=True) if is_so}
    for view in run.generators if run is not None else ():
        hello = view.hello
        if hello.listens_in_plain_text and hello.endpoint not in addresses.values():
            exposed[hello.generator_id] = hello.endpoint
    return [
        f"{name} at {address} is reached in plain text from other machines (insecure: true)"
        for name, address in exposed.items()
    ]


def _addresses(target: Target) -> dict[str, str]:
    """Addresses of services, by name: those in the target, and those started here."""
    found: dict[str, str] = {}
    for name, address in target.addresses():
        found[name if name not in found else f"{name} {address}"] = address
    for record in target.folder.records() if target.folder is not None else ():
        if record.address and record.state == ProcessState.READY and record.is_alive:
            found.setdefault(record.name, record.address)
    return found


async def _is_exposed(address: str, security: Security) -> bool:
    try:
        async with open_channel(address, security) as channel:
            # The health package's types lack its stub's methods.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=PLAIN_TEXT), timeout=_TIMEOUT_S)
    except (grpc.aio.AioRpcError, ValueError):
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
