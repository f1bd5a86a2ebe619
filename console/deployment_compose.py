"""A site's compose file. Each service is in the profile of its machine, which so starts its own of one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from console.deployment import PlacedGenerator

Service = dict[str, Any]


def compose_file(
    generators: Sequence[PlacedGenerator],
    head: tuple[str, int] | None,
    ports: Mapping[str, int],
    *,
    is_emulated: bool,
) -> dict[str, Any]:
    """One site's document; `head` is the machine of broker and trainer, and how many GPUs train, where it is here."""
    services: dict[str, Service] = {}
    if head is not None:
        services |= _center(head, ports, is_emulated=is_emulated)
    for each in generators:
        image = "penstock-generator" if is_emulated else "penstock-generator-gpu"
        service = _service(image, ["serve", "generator", "--config", f"/config/{each.name}.yaml"], each.machine)
        service |= {"shm_size": "8gb", **_health(each.port)}
        services[each.name] = service | ({} if is_emulated else _gpus(each.gpus))
    return {"services": services, "volumes": {"data": {}, "redis": {}, "runs": {}}}


def _center(head: tuple[str, int], ports: Mapping[str, int], *, is_emulated: bool) -> dict[str, Service]:
    machine, gpus = head
    redis = ["redis-server", "--port", str(ports["redis"]), "--appendonly", "yes", "--appendfsync", "everysec"]
    services: dict[str, Service] = {
        "redis": {
            "image": "redis:7",
            "command": [*redis, "--maxmemory-policy", "noeviction", "--bind", "127.0.0.1"],
            "profiles": [machine],
            "network_mode": "host",
            "restart": "on-failure",
            "volumes": ["redis:/data"],
            "healthcheck": {"test": ["CMD", "redis-cli", "-p", str(ports["redis"]), "ping"], **_PACE},
        }
    }
    for name, waits_for in (
        ("broker", ("redis",)),
        ("scheduler", ()),
        ("reward", ("broker",)),
        ("trainer", ("broker", "scheduler")),
    ):
        image = "penstock-trainer-gpu" if name == "trainer" and not is_emulated else f"penstock-{name}"
        service = _service(image, ["serve", name, "--config", f"/config/{name}.yaml"], machine)
        services[name] = service | _health(ports[name]) | _after(waits_for)
    if not is_emulated:
        services["trainer"] |= _gpus(tuple(range(gpus)))
    services["run"] = {
        **_service("penstock-console", ["run", "/config/run.yaml"], machine),
        "restart": "no",
        **_after(("broker", "scheduler", "reward", "trainer")),
    }
    return services


_PACE = {"interval": "15s", "timeout": "5s", "retries": 40, "start_period": "5s"}


def _service(image: str, command: list[str], machine: str) -> Service:
    return {
        "image": image,
        "command": command,
        "profiles": [machine],
        "network_mode": "host",
        "restart": "on-failure",
        "stop_grace_period": "20s",
        "volumes": [".:/config:ro", "data:/data", "runs:/runs"],
    }


def _health(port: int) -> Service:
    return {"healthcheck": {"test": ["CMD", "python", "-m", "penstock.healthcheck", f"127.0.0.1:{port}"], **_PACE}}


def _after(names: Sequence[str]) -> Service:
    return {"depends_on": {name: {"condition": "service_healthy"} for name in names}} if names else {}


def _gpus(indices: Sequence[int]) -> Service:
    device = {"driver": "nvidia", "device_ids": [str(index) for index in indices], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
