"""Names and labels of a deployment's Kubernetes objects."""

from __future__ import annotations

from typing import Any

from console.deploy.description import Host

NAMESPACE = "penstock"
CONFIGURATION = "configuration"
"""The ConfigMap of a site's configurations."""
MACHINE_LABEL = "penstock/machine"
COMPONENT_LABEL = "app.kubernetes.io/component"
CENTER = "center"
"""Component of a pod with what the run has on a machine without GPUs."""
TRAINER = "trainer"
"""Component of a pod that trains beside the head's."""
ENVIRONMENT_CERTIFICATE = "certificate-environment"
"""The Secret with the certificate of the environment that the head serves."""
NAME_LABEL = {"app.kubernetes.io/name": "penstock"}
"""On every pod."""


def labels(host: Host, component: str) -> dict[str, str]:
    """Of a machine's pods: component `head`, `center`, `trainer`, `run` or `node`."""
    return {**NAME_LABEL, COMPONENT_LABEL: component, MACHINE_LABEL: host.name}


def metadata(name: str, host: Host | None = None) -> dict[str, Any]:
    """Of an object; `host` if it is of one machine."""
    return {"name": name, "labels": {**NAME_LABEL, **({MACHINE_LABEL: host.name} if host is not None else {})}}


def claim(host: Host, what: str) -> str:
    """The claim of a machine's volume: `data`, `redis` or `runs`."""
    return f"{host.name}-{what}"


def ranks(head: Host) -> str:
    """The headless Service by which processes of several machines that train find the first one."""
    return f"{head.name}-ranks"


def certificate(host: Host) -> str:
    """The Secret with a machine's certificate."""
    return f"certificate-{host.name}"
