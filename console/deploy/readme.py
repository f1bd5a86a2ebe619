"""Writes a deployment's README: the commands that make a certificate for each machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from console.deploy.nodes import Machine
from console.deploy.trainers import TrainingMachine

_PLACE = "/etc/penstock"
_TEXT = """# Certificates

All services use mutual TLS and start only with certificates. Make them once, on a machine that only you use:

```
penstock certs init authority
{commands}
```

Copy `certificates/MACHINE` to `{place}` on that machine (another folder: `PENSTOCK_SECRETS` for `docker-compose`). In
containers services run as user 10001, who must be able to read the files. Without containers:

```
. {place}/env
penstock node SITE/node-MACHINE.yaml          # on the head: penstock run run.yaml
```

Machines must be reached by the names in the certificates. The same command, with the same `--out`, renews a
certificate. The head's opens everything, the others only what generators of this run need.{trainers}
"""
_TRAINERS = """

Trainers of several machines talk by torch.distributed, which neither encrypts nor authenticates: they refuse to start
beside TLS until their trainer.yaml sets `trusts_network: true`. Set it if the network between them is yours.
"""


def readme(run_id: str, machines: Sequence[Machine], trainers: Sequence[TrainingMachine]) -> str:
    """How to make a certificate for each machine, and where it goes."""
    training = {each.name for each in trainers}
    commands = [_command("operator", each.name, run_id="*", site="*") for each in trainers]
    home = trainers[0].site
    commands += [
        # Generators at the trainer's site name no site: they relay nothing.
        _command("generator", each.name, run_id=run_id, site="*" if each.site == home else each.site)
        for each in machines
        if each.name not in training
    ]
    return _TEXT.format(
        commands="\n".join(commands), place=_PLACE, trainers=_TRAINERS.rstrip() if len(trainers) > 1 else ""
    )


def _command(role: str, name: str, *, run_id: str, site: str) -> str:
    options = {"run": run_id, "site": site, "name": name, "host": name}
    text = " ".join(f"--{option} {shlex.quote(value)}" for option, value in options.items())
    return f"penstock certs issue {role} {text} \\\n    --dir authority --out certificates/{name} --at {_PLACE}"
