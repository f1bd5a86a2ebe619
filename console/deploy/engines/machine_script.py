"""Writes the script by which a machine without containers checks itself and starts its services."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from console.deploy.description import Deployment, Host, Service, environment
from console.deploy.environments import NAME as ENVIRONMENT
from penstock.security.credentials import JUDGES

SECRETS_FOLDER = "PENSTOCK_SECRETS"
"""Names the folder with a folder of certificate files for each machine."""
_MACHINE = r"""#!/bin/bash
# machine.sh check|start: what this deployment has on the machine that this runs on.
name=${@NAME@:?names this machine}
cd "$(dirname "$0")" || exit 2
. ./settings.env || exit 2
"""
_START = r"""
services=()
asked=
trap 'asked=yes; kill -TERM "${services[@]}" 2>/dev/null' TERM
for service in "${!commands[@]}"; do
    ${commands[service]} &
    services+=($!)
done
# The first to end decides; what is left is ended, as it is by SIGTERM.
wait -n "${services[@]}"
status=$?
for service in "${!services[@]}"; do kill -0 "${services[service]}" 2>/dev/null || break; done
# Status 0 is a run that is complete: nothing else ends by itself.
[[ $status/$asked == 0/ && ${commands[service]} != *--resume-or-start ]] && status=1
kill -TERM "${services[@]}" 2>/dev/null
for service in "${services[@]}"; do while kill -0 "$service" 2>/dev/null; do wait "$service"; done; done
exit "$status"
"""


def machine_script(deployment: Deployment, hosts: Sequence[Host], *, name_variable: str, is_at_site: bool) -> str:
    """A bash script, `machine.sh check|start`, which reads `settings.env` beside it.

    Args:
        deployment: Of the machines.
        hosts: Those that it knows.
        name_variable: Holds the machine's name.
        is_at_site: Whether it is in the folder of a site; otherwise in the deployment's.
    """
    certificates = ""
    if deployment.has_certificates:
        needed = (
            f': "${{{SECRETS_FOLDER}:?set it in settings.env to the folder with the certificates of all machines}}"\n'
        )
        exports = deployment.variables(f"${SECRETS_FOLDER}/$name")
        certificates = needed + _exports(exports)
        if deployment.serves_environment:
            # What is started there shows third parties the certificate that their like has.
            shown = environment(f"${SECRETS_FOLDER}/{ENVIRONMENT}", JUDGES)
            certificates += f"if [ $name = {shlex.quote(deployment.head.name)} ]; then\n{_exports(shown)}fi\n"
    cases = "".join(_case(host, "." if is_at_site else host.site) for host in hosts)
    other = '*) echo "penstock: $name: is in no plan here" >&2; exit 2 ;;'
    start = _MACHINE.replace("@NAME@", name_variable)
    tracing = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in deployment.tracing.items())
    return f"{start}{tracing}{certificates}case $1/$name in\n{cases}{other}\nesac\n{_START}"


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f'export {name}="{path}"\n' for name, path in variables.items())


def _case(host: Host, folder: str) -> str:
    check = shlex.join(("penstock", *host.check))
    commands = " ".join(shlex.quote(_command(service)) for service in host.services)
    return (
        f"check/{host.name}) cd {folder} && exec {check} ;;\n"
        f"start/{host.name}) cd {folder} && commands=({commands}) ;;\n"
    )


def _command(service: Service) -> str:
    program = ("torchrun", *service.torchrun, "-m", "console") if service.torchrun else ("penstock",)
    return shlex.join((*program, *service.arguments))
