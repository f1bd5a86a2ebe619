"""Writes a SkyPilot job group for each site: a task for the head, one for the site's machines of each kind.

Machines are rented, so their addresses are known only when they run: each writes those of its site and of the head into
/etc/hosts, under the names of the plan, which are those of the certificates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from console.deploy.description import Deployment, Files, Host
from console.deploy.engines.machine_script import SECRETS_FOLDER, machine_script
from console.deploy.environments import NAME as ENVIRONMENT
from console.deploy.trainers import MAX_RESTARTS
from penstock.config import ConfigError

Task = dict[str, Any]

_PUBLIC = ("broker", "trainer", "weights", "scheduler")
"""What generators of other sites call."""
_NAMES = {"A100-40": "A100", "A100-80": "A100-80GB"}
"""SkyPilot's names of GPUs, where the planning problems' differ."""
_PLACE = "/etc/penstock"
_FOLDER = "~/sky_workdir"

_STEPS = """# Starting

SkyPilot finds machines for each site, the head's site first. In each `SITE/setup.sh` write how `penstock` is installed
on its machines; in `SITE/site.yaml` where they are (`infra: aws/eu-central-1`) and whether they may be spot machines.
`PENSTOCK_DATA` is what SkyPilot is to mount at /data: a folder of yours, or a bucket; RUN.yaml's paths are below it.

```
{commands}
```

The job group of {home} ends with the run; cancel the others then: `sky jobs cancel`. Tokens and other secrets:
`--secret PENSTOCK_TOKEN=...` with each launch (docs/operating.md), `--secret OTEL_EXPORTER_OTLP_HEADERS=...` if the
collector of traces asks for a key. SkyPilot starts a task again that fails, {restarts}
times at most, or whose machine is taken away. The run's folder and its Redis are on the head's disk: on a head that was
replaced the run begins again, so keep the head off spot machines.
"""
_COMMAND = "(cd {site} && PENSTOCK_DATA=... sky jobs launch site.yaml --env PENSTOCK_DATA{head})"
_ADDRESS = " --env {variable}=ADDRESS"
_OF_SKY = "   # of {names}: sky status"
_SETUP = """#!/bin/bash
# Installs the command `penstock` on a machine of this site; `settings.env` says where it then is.
echo "penstock: setup.sh: write here how penstock is installed on the machines of this site" >&2
exit 2
"""
_SETTINGS = """# Read by each machine of the site, with bash.
# export PATH="$HOME/penstock/.venv/bin:$PATH"
{secrets}"""
_RUN = r"""set -eu
machines=(@MACHINES@)
peers=(@PEERS@)
name() { echo "$1 $2" | sudo tee -a /etc/hosts >/dev/null; }
address() { until getent ahostsv4 "$1" | awk '{ print $1; exit }' | grep .; do sleep 2; done; }
rank=0
for ip in $SKYPILOT_NODE_IPS; do
    name "$ip" "${machines[rank]}"
    rank=$((rank + 1))
done
for peer in "${peers[@]}"; do name "$(address "${peer#*=}")" "${peer%%=*}"; done
export PENSTOCK_MACHINE=${machines[SKYPILOT_NODE_RANK]}
bash machine.sh check
exec bash machine.sh start
"""


def skypilot_files(deployment: Deployment) -> Files:
    """A job group for each site. Raises ConfigError for a plan that takes a shared file system, or a far critic."""
    far = {host.name: host.site for host in deployment.hosts if host.site != deployment.head.site}
    if deployment.critic_on in far:
        raise ConfigError(
            f"--for skypilot: the plan has a critic on {deployment.critic_on} of {far[deployment.critic_on]}, which "
            f"the trainer in {deployment.head.site} does not reach; place it there, or deploy --for compose or slurm"
        )
    if len(deployment.training) > 1:
        raise ConfigError(
            f"--for skypilot: {' and '.join(host.name for host in deployment.training)} train, which takes a file "
            "system that all of them write to; plan for one machine that trains, or deploy --for slurm"
        )
    files: Files = {"README.md": _steps(deployment)}
    secrets = f"export {SECRETS_FOLDER}={_PLACE}\n" if deployment.has_certificates else ""
    for site in deployment.sites:
        hosts = deployment.at(site)
        files |= {
            f"{site}/site.yaml": _group(deployment, site),
            f"{site}/setup.sh": _SETUP,
            f"{site}/settings.env": _SETTINGS.format(secrets=secrets),
            f"{site}/machine.sh": machine_script(deployment, hosts, name_variable="PENSTOCK_MACHINE", is_at_site=True),
        }
    return files


def _steps(deployment: Deployment) -> str:
    home = deployment.head.site
    asked = "".join(_ADDRESS.format(variable=variable) for variable in _variables(deployment))
    asked += _OF_SKY.format(names=" and ".join(host.name for host in deployment.center_hosts))
    commands = [_COMMAND.format(site=site, head="" if site == home else asked) for site in deployment.sites]
    return _STEPS.format(commands="\n".join(commands), home=home, restarts=MAX_RESTARTS)


def _group(deployment: Deployment, site: str) -> list[Task]:
    kinds: dict[str, list[Host]] = {}
    for host in deployment.at(site):
        # The head alone: the group ends when it does.
        kinds.setdefault("head" if host.name == deployment.head.name else f"{host.kind.name}-nodes", []).append(host)
    header: Task = {"name": site, "execution": "parallel"}
    if site == deployment.head.site:
        header["primary_tasks"] = ["head"]
    return [header, *(_task(deployment, site, kinds, name) for name in kinds)]


def _task(deployment: Deployment, site: str, kinds: dict[str, list[Host]], name: str) -> Task:
    hosts, head = kinds[name], deployment.head
    peers = [
        f"{host.name}={kind}-{index}.{site}"
        for kind, others in kinds.items()
        for index, host in enumerate(others)
        if kind != name
    ]
    variables: Task = {"PENSTOCK_DATA": None}
    if site != head.site:
        # Without a value SkyPilot asks for it.
        for variable, host in _variables(deployment).items():
            variables[variable] = deployment.public.get(host.name)
            peers.append(f"{host.name}=${variable}")
    mounts = {"/data": "${PENSTOCK_DATA}"}
    if deployment.has_certificates:
        holders = [host.name for host in hosts]
        holders += [ENVIRONMENT] if deployment.serves_environment and name == "head" else []
        mounts |= {f"{_PLACE}/{holder}": f"../certificates/{holder}" for holder in holders}
    script = _RUN.replace("@MACHINES@", " ".join(host.name for host in hosts))
    return {
        "name": name,
        "num_nodes": len(hosts),
        "resources": _resources(deployment, hosts),
        "envs": variables,
        "workdir": ".",
        "file_mounts": mounts,
        "setup": "bash setup.sh\n",
        "run": script.replace("@PEERS@", " ".join(f'"{peer}"' for peer in peers)),
    }


def _variables(deployment: Deployment) -> dict[str, Host]:
    """What tells other sites the addresses of the machines with the run's services."""
    head, *others = deployment.center_hosts
    return {"PENSTOCK_HEAD": head} | {_variable(host): host for host in others}


def _variable(host: Host) -> str:
    return "PENSTOCK_" + re.sub(r"[^A-Za-z0-9]", "_", host.name).upper()


def _resources(deployment: Deployment, hosts: Sequence[Host]) -> Task:
    gpus = max(host.all_gpus for host in hosts) if any(host.gpus for host in hosts) else 0
    memory_gib = max(sum(service.memory_gib for service in host.services) for host in hosts)
    found: Task = {"memory": f"{memory_gib}+", "job_recovery": {"max_restarts_on_errors": MAX_RESTARTS}}
    if gpus:
        gpu = hosts[0].gpu
        found["accelerators"] = {_NAMES.get(gpu, gpu): gpus}
    names = {host.address for host in hosts if host in deployment.center_hosts}
    public = (*_PUBLIC, *([ENVIRONMENT] if deployment.serves_environment else []))
    targets = [target.rpartition(":") for name in public for target in deployment.center[name].split(",")]
    ports = [int(port) for host, _, port in targets if host in names]
    if ports and len(deployment.sites) > 1:
        found["ports"] = ports
    return found
