"""Writes a deployment's README: certificates for each machine, secrets, and the engine's own steps."""

from __future__ import annotations

import shlex

from console.deploy.description import Deployment, Host
from console.deploy.environments import NAME as ENVIRONMENT

PLACE = "/etc/penstock"
"""The folder of a machine's certificate on it."""
_CERTIFICATES = """# Certificates

All services use mutual TLS and start only with certificates. Make them once, on a machine that only you use:

```
penstock certs init authority
{commands}
```

Machines must be reached by the names in the certificates. The same command, with the same `--out`, renews a
certificate. The head's opens everything, the others only what generators of this run need.{trainers}

"""
_TRAINERS = """

Trainers of several machines talk by torch.distributed, which neither encrypts nor authenticates: they refuse to start
beside TLS until their trainer.yaml sets `trusts_network: true`. Set it if the network between them is yours. Run folder
and model must be on a file system that all of them see, or have addresses in object storage."""
_MOVING = """

The trainer moves with the plan. Where it has several machines, its processes talk by torch.distributed, which neither
encrypts nor authenticates: they refuse to start beside TLS until `trainer` in every node-MACHINE.yaml sets
`trusts_network: true`. Set it if the network between them is yours. Checkpoints go through {storage}; the model must be
at the same path on all machines, or have an address in object storage."""
_CHECK = """
Each machine is checked before anything starts on it (`penstock doctor machine-NAME.yaml`): certificates of this run and
this machine, the model and data, folders that can be written to, and the GPUs of the plan. What is missing is reported
in one line each, and nothing is started there.
"""


def readme(deployment: Deployment, steps: str) -> str:
    """What a person does, in order; `steps` are the engine's."""
    text = ""
    if deployment.has_certificates:
        commands = "\n".join(_command(deployment, host) for host in deployment.hosts)
        if deployment.serves_environment:
            commands += "\n" + _environment_command(deployment)
        trainers = _TRAINERS if len(deployment.training) > 1 else ""
        if deployment.moving_by is not None:
            trainers = _MOVING.format(storage=deployment.moving_by)
        text = _CERTIFICATES.format(commands=commands, trainers=trainers)
    return f"{text}{steps.strip()}\n{_CHECK}"


def _command(deployment: Deployment, host: Host) -> str:
    if host.role == "operator":
        run_id, site = "*", "*"
    else:
        # Generators at the trainer's site name no site: they relay nothing.
        run_id, site = deployment.run_id, "*" if host.site == deployment.head.site else host.site
    roles = " ".join((host.role, *host.more_roles))
    return _issue(roles, run_id=run_id, site=site, name=host.name, host=host.address, place=PLACE)


def _environment_command(deployment: Deployment) -> str:
    """For the server of the environment on the head, which others reach under the head's name."""
    host, place = deployment.head.address, f"{PLACE}-{ENVIRONMENT}"
    return _issue(ENVIRONMENT, run_id=deployment.run_id, site="*", name=ENVIRONMENT, host=host, place=place)


def _issue(roles: str, *, run_id: str, site: str, name: str, host: str, place: str) -> str:
    options = {"run": run_id, "site": site, "name": name, "host": host}
    text = " ".join(f"--{option} {shlex.quote(value)}" for option, value in options.items())
    return f"penstock certs issue {roles} {text} \\\n    --dir authority --out certificates/{name} --at {place}"
