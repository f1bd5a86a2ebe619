"""Writes a site's compose file. Each service is in its machine's profile, so all machines share one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from console.deploy.nodes import Machine
from console.deploy.trainers import TrainingMachine
from penstock.process.grace_periods import STOP_GRACE_S

Service = dict[str, Any]


def compose_file(
    machines: Sequence[Machine],
    trainers: Sequence[TrainingMachine],
    *,
    head: str | None,
    ports: Mapping[str, int],
    is_emulated: bool,
    has_certificates: bool,
) -> dict[str, Any]:
    """One site's document: its machines that generate and train; `head` is the run's, if it is at this site.

    With `has_certificates` each service uses the files that `penstock certs issue` wrote for its machine.
    """
    services: dict[str, Service] = {}
    if head is not None:
        services |= _center(head, ports)
    for trainer in trainers:
        services |= _trainer(trainer, is_head=trainer.name == head, port=ports["trainer"], is_emulated=is_emulated)
    for each in machines:
        image = "penstock-generator" if is_emulated else "penstock-generator-gpu"
        service = _service(image, ["node", f"/config/node-{each.name}.yaml"], each.name)
        # A node serves nothing itself; its generators have their own health checks.
        service |= {"shm_size": "8gb", **_grace("node"), "healthcheck": {"disable": True}}
        services[f"node-{each.name}"] = service | ({} if is_emulated else _gpus(each.kind.gpus))
    for name, service in services.items():
        if name != "redis":
            service |= {
                "environment": _CERTIFICATES if has_certificates else _CREDENTIALS,
                "volumes": [
                    ".:/config:ro",
                    f"${{PENSTOCK_SECRETS:-{'/etc/penstock' if has_certificates else '.'}}}:/run/secrets:ro",
                    "data:/data",
                    "runs:/runs",
                ],
            }
    return {"services": services, "volumes": {"data": {}, "redis": {}, "runs": {}}}


def _center(machine: str, ports: Mapping[str, int]) -> dict[str, Service]:
    redis = ["redis-server", "--port", str(ports["redis"]), "--appendonly", "yes", "--appendfsync", "everysec"]
    services: dict[str, Service] = {
        "redis": {
            "image": "redis:7",
            "command": [*redis, "--maxmemory-policy", "noeviction", "--bind", "127.0.0.1"],
            "profiles": [machine],
            "user": "redis",
            **_LIMITS,
            **_grace("redis"),
            "volumes": ["redis:/data"],
            "healthcheck": {"test": ["CMD", "redis-cli", "-p", str(ports["redis"]), "ping"], **_PACE},
        }
    }
    for name, waits_for in (("broker", ("redis",)), ("scheduler", ()), ("reward", ("broker",))):
        service = _service(f"penstock-{name}", ["serve", name, "--config", f"/config/{name}.yaml"], machine)
        services[name] = service | _grace(name) | _health(ports[name]) | _after(waits_for)
    services["run"] = {
        **_service("penstock-console", ["run", "/config/run.yaml", "--resume-or-start"], machine),
        # The run is resumed after a failure or a crash; a run that has ended stays ended.
        "restart": "on-failure",
        **_grace("run"),
        **_after(("broker", "scheduler", "reward", "trainer")),
    }
    return services


def _trainer(trainer: TrainingMachine, *, is_head: bool, port: int, is_emulated: bool) -> dict[str, Service]:
    """The trainer on the head; on other machines of the pool, the processes that it sends packs to."""
    image = "penstock-trainer" if is_emulated else "penstock-trainer-gpu"
    serve = ["serve", "trainer", "--config", "/config/trainer.yaml"]
    service = _service(image, serve, trainer.name) | _grace("trainer")
    if trainer.torchrun:
        service |= {"entrypoint": ["torchrun", *trainer.torchrun, "-m", "console"], "shm_size": "8gb"}
    if is_head:
        service |= _health(port) | _after(("broker", "scheduler"))
    else:
        service |= {"healthcheck": {"disable": True}}
    return {"trainer" if is_head else f"trainer-{trainer.name}": service | ({} if is_emulated else _gpus(trainer.gpus))}


# Failures within `start_period` do not count: models are loading.
_PACE = {"interval": "15s", "timeout": "30s", "retries": 10, "start_period": "20m"}
_LIMITS: Service = {
    "network_mode": "host",
    # Restarts after a reboot too, but not after `docker-compose stop`.
    "restart": "unless-stopped",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "pids_limit": 4096,
    "logging": {"driver": "json-file", "options": {"max-size": "64m", "max-file": "5"}},
}
# Taken from the environment of `docker-compose up` on each machine; empty means off.
_TOKENS = {f"PENSTOCK_{name}": f"${{PENSTOCK_{name}:-}}" for name in ("TOKEN", "TOKEN_FILE")}
_CREDENTIALS = _TOKENS | {f"PENSTOCK_TLS_{name}": f"${{PENSTOCK_TLS_{name}:-}}" for name in ("CA", "CERT", "KEY")}
_CERTIFICATES = _TOKENS | {f"PENSTOCK_TLS_{name.upper()}": f"/run/secrets/{name}.pem" for name in ("ca", "cert", "key")}


def _service(image: str, command: list[str], machine: str) -> Service:
    return {
        "image": image,
        "command": command,
        "profiles": [machine],
        **_LIMITS,
    }


def _grace(service: str) -> Service:
    return {"stop_grace_period": f"{STOP_GRACE_S[service]:.0f}s"}


def _health(port: int) -> Service:
    return {"healthcheck": {"test": ["CMD", "python", "-m", "penstock.healthcheck", f"127.0.0.1:{port}"], **_PACE}}


def _after(names: Sequence[str]) -> Service:
    return {"depends_on": {name: {"condition": "service_healthy"} for name in names}} if names else {}


def _gpus(count: int) -> Service:
    """The machine's first GPUs. A node sees all of them, since the plan names them by their index on the machine."""
    device = {"driver": "nvidia", "device_ids": [str(index) for index in range(count)], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
