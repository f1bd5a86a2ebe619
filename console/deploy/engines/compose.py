"""Writes a compose file for each site. Each service is in its machine's profile, so all machines share one file."""

from __future__ import annotations

from typing import Any

from console.deploy.description import Deployment, Files, Host, Service
from console.deploy.readme import PLACE

Container = dict[str, Any]

_STEPS = """# Starting

Copy a site's folder to each of its machines{certificates}. There, fill in `.env` (the folders with the model
and data, and for runs; user 10001 of the images reads the first and writes to the second) and, if you use tokens,
`secrets.env`; keep both out of version control. Then, on every machine:

```
docker-compose -f SITE/docker-compose.yml --profile MACHINE up -d
docker-compose -f SITE/docker-compose.yml logs check-MACHINE          # why nothing starts
```

Images are those of the repository's compose file, built beforehand (`penstock-generator-gpu`, ...). Without containers:
`penstock node SITE/node-MACHINE.yaml` on a machine that has that file, `penstock run run.yaml` in this folder on the
head, each after `. {place}/env`.
"""
_COPY = " and `certificates/MACHINE` to `{place}` there (user 10001 must be able to read it)"
_COPY_ENVIRONMENT = ", on the head `certificates/environment` to `{place}-environment` too"
_SETTINGS = """# Folders of this machine.
# Model and data, which containers see as /data; read only:
PENSTOCK_DATA=
# Run folders, caches and logs, /runs in containers; trainers of several machines need one shared file system here:
PENSTOCK_RUNS=
"""
_SECRETS_FOLDER = """# Its certificate: ca.pem, cert.pem and key.pem.
PENSTOCK_SECRETS={place}
"""
_ENVIRONMENT_FOLDER = """# The same of its environment server, from `certificates/environment`:
PENSTOCK_ENVIRONMENT_SECRETS={place}-environment
"""
_COLLECTOR = """# What the collector of traces is shown:
# OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20...
"""
_ENVIRONMENT_SECRETS = f"# What the environment's own code needs, such as keys of services that it calls.\n{_COLLECTOR}"
_SECRETS = f"""# Secrets of this site's services; what is empty or missing is off (docs/operating.md, Secrets).
# PENSTOCK_TOKEN_FILE=/run/secrets/token
# PENSTOCK_JUDGE_TOKEN_FILE=/run/secrets/judge
# PENSTOCK_JUDGE_API_KEY_FILE=/run/secrets/judge_key
{_COLLECTOR}"""
# Failures within `start_period` do not count: models are loading.
_PACE = {"interval": "15s", "timeout": "30s", "retries": 10, "start_period": "20m"}
_LIMITS: Container = {
    "network_mode": "host",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "pids_limit": 4096,
    "logging": {"driver": "json-file", "options": {"max-size": "64m", "max-file": "5"}},
}


def compose_files(deployment: Deployment) -> Files:
    """A compose file, its settings and an empty file of secrets for each site."""
    files: Files = {}
    copy = _COPY.format(place=PLACE) if deployment.has_certificates else ""
    if copy and deployment.serves_environment:
        copy += _COPY_ENVIRONMENT.format(place=PLACE)
    files["README.md"] = _STEPS.format(certificates=copy, place=PLACE)
    for site in deployment.sites:
        services: dict[str, Container] = {}
        for host in deployment.at(site):
            services[f"check-{host.name}"] = _check(deployment, host)
            services |= {each.name: _container(deployment, host, each) for each in host.services}
        document: Container = {"services": services}
        if any(host.has("redis") for host in deployment.at(site)):
            document["volumes"] = {"redis": {}}
        files[f"{site}/docker-compose.yml"] = document
        folder = _SECRETS_FOLDER.format(place=PLACE) if deployment.has_certificates else ""
        if site == deployment.head.site and deployment.serves_environment:
            folder += _ENVIRONMENT_FOLDER.format(place=PLACE) if deployment.has_certificates else ""
            files[f"{site}/environment.env"] = _ENVIRONMENT_SECRETS
        files[f"{site}/.env"] = _SETTINGS + folder
        files[f"{site}/secrets.env"] = _SECRETS
    return files


def _check(deployment: Deployment, host: Host) -> Container:
    """Ends with status 0 if the machine has what its services need: all of them wait for that."""
    widest = max(host.services, key=lambda service: service.gpus)
    command, file = host.check
    return {
        "image": widest.image,
        "command": [command, str(deployment.layout.config / file)],
        "profiles": [host.name],
        "restart": "no",
        **_LIMITS,
        "mem_limit": "2g",
        "healthcheck": {"disable": True},
        **_files(deployment),
        **_gpus(widest),
    }


def _container(deployment: Deployment, host: Host, service: Service) -> Container:
    found: Container = {
        "image": service.image,
        "command": list(service.arguments),
        "profiles": [host.name],
        # Restarts after a reboot too, but not after `docker-compose stop`. A run is resumed after a failure or a crash;
        # one that has ended stays ended.
        "restart": "on-failure" if service.ends else "unless-stopped",
        **_LIMITS,
        "mem_limit": f"{service.memory_gib}g",
        "stop_grace_period": f"{service.grace_s:.0f}s",
        "depends_on": {
            f"check-{host.name}": {"condition": "service_completed_successfully"},
            **{each.name: {"condition": "service_healthy"} for each in host.services if each.name in service.after},
        },
        "healthcheck": _health(service),
        **_gpus(service),
    }
    if service.kind == "redis":
        return found | {"user": "redis", "volumes": ["redis:/data"]}
    if service.torchrun:
        found["entrypoint"] = ["torchrun", *service.torchrun, "-m", "console"]
    if service.gpus:
        found["shm_size"] = "8gb"
    return found | _files(deployment, service)


def _health(service: Service) -> Container:
    if service.kind == "redis":
        port = service.arguments[service.arguments.index("--port") + 1]
        return {"test": ["CMD", "redis-cli", "-p", port, "ping"], **_PACE}
    if service.port is None:
        # A node serves nothing itself; its generators have their own health checks.
        return {"disable": True}
    return {"test": ["CMD", "python", "-m", "penstock.healthcheck", f"127.0.0.1:{service.port}"], **_PACE}


def _files(deployment: Deployment, service: Service | None = None) -> Container:
    """Configurations, certificates, data and runs; each variable is in `.env`, and compose refuses to go on without."""
    is_foreign = service is not None and service.is_foreign
    volumes = ["${PENSTOCK_DATA:?set it in .env to the folder with model and data}:/data:ro"]
    if not is_foreign:
        volumes += [
            f".:{deployment.layout.config}:ro",
            f"${{PENSTOCK_RUNS:?set it in .env to a folder for runs}}:{deployment.layout.runs}",
        ]
    variables = dict(deployment.tracing) | ({} if service is None else dict(service.variables))
    if deployment.has_certificates:
        holder = "PENSTOCK_ENVIRONMENT_SECRETS" if is_foreign else "PENSTOCK_SECRETS"
        volumes.append(f"${{{holder}:?set it in .env to the folder of its certificate}}:/run/secrets:ro")
        variables |= deployment.variables("/run/secrets")
    secrets = "environment.env" if is_foreign else "secrets.env"
    return {"environment": variables, "env_file": secrets, "volumes": volumes}


def _gpus(service: Service) -> Container:
    """The machine's first GPUs. A node sees all of them, since the plan names them by their index on the machine."""
    if not service.gpus:
        return {}
    ids = [str(index) for index in range(service.gpus)]
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
