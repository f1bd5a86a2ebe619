"""Writes how pods are reached, and by which peers: Services, NetworkPolicies and the PodDisruptionBudgets of a site."""

from __future__ import annotations

from typing import Any

from console.deploy.description import CRITIC_PORT, PORTS, Deployment, Host
from console.deploy.engines.kubernetes_names import (
    CENTER,
    COMPONENT_LABEL,
    NAME_LABEL,
    TRAINER,
    labels,
    metadata,
    ranks,
)
from console.deploy.nodes import FIRST_GENERATOR_PORT

Object = dict[str, Any]
_PUBLIC = ("broker", "trainer", "weights", "scheduler", "environment")
"""What generators call."""
_LOCAL = (*_PUBLIC, "reward")
_SERVED_BY = {"weights": "trainer"}
"""The service of a port, where that is not its name."""


def services(deployment: Deployment, site: str) -> list[Object]:
    """Each machine under its name: the run's services, and relays of machines at other sites."""
    head = deployment.head
    if site != head.site:
        centers = [
            _service(host, {"type": "ExternalName", "externalName": deployment.public[host.name]})
            for host in deployment.center_hosts
        ]
        return [*centers, *(_by_name(host) for host in deployment.at(site))]
    found = [_service(host, _center(deployment, host)) for host in deployment.center_hosts]
    if deployment.moving_by is not None:
        # Trainers are called by the names of their machines.
        return [*found, *(_by_name(host) for host in deployment.at(site) if host not in deployment.center_hosts)]
    found += [_by_name(host) for host in deployment.at(site) if host.name == deployment.critic_on]
    if len(deployment.training) > 1:
        headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(head, "head")}
        found.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata(ranks(head), head), "spec": headless})
    return found


def _center(deployment: Deployment, host: Host) -> Object:
    """How a machine with services of the run is reached."""
    return {
        "type": "LoadBalancer" if len(deployment.sites) > 1 else "ClusterIP",
        # The first of several trainers calls itself by this name.
        **({"clusterIP": "None"} if deployment.moving_by is not None else {}),
        "selector": _center_labels(deployment, host),
        # A trainer whose broker is away is not ready, and is still asked and stopped.
        "publishNotReadyAddresses": True,
        "ports": [{"name": name, "port": port} for name, port in _ports(host, _LOCAL).items()],
    }


def _center_labels(deployment: Deployment, host: Host) -> dict[str, str]:
    return labels(host, "head" if host.name == deployment.head.name else CENTER)


def _ports(host: Host, names: tuple[str, ...]) -> dict[str, int]:
    """Those of the names that are served on a machine, by services of their own or by its `penstock node`."""
    kinds = {service.kind for service in host.services}
    kinds |= {"trainer"} if any(service.may_train for service in host.services) else set()
    found = {name: PORTS[name] for name in names if _SERVED_BY.get(name, name) in kinds}
    return found | {each.name: each.port for each in host.services if each.kind == "broker" and each.port is not None}


def _service(host: Host, spec: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(host.name, host), "spec": spec}


def _by_name(host: Host) -> Object:
    """The machine's name stands for its pod: relays listen on ports by the GPUs of their generators, a critic too."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(host, "node")}
    return _service(host, spec)


def network_policies(deployment: Deployment, site: str) -> list[Object]:
    """Nothing reaches a pod but what is named here."""
    found = [_policy("nobody", dict(NAME_LABEL), [])]
    if site == deployment.head.site:
        found += [_center_policy(deployment, host) for host in deployment.center_hosts]
        if deployment.moving_by is not None:
            # Where a critic moves as well, it is among those that the trainer's processes reach.
            return [*found, _ranks_policy("node"), _trainers_policy()]
        found += [_critic_policy(deployment, host) for host in deployment.hosts if host.name == deployment.critic_on]
        return [*found, _ranks_policy(TRAINER)] if len(deployment.training) > 1 else found
    last = FIRST_GENERATOR_PORT + 2 * max(host.all_gpus for host in deployment.at(site)) - 1
    nodes = {**NAME_LABEL, COMPONENT_LABEL: "node"}
    relays = {
        "from": [{"podSelector": {"matchLabels": nodes}}],
        "ports": [{"port": FIRST_GENERATOR_PORT, "endPort": last}],
    }
    return [*found, _policy("relays", nodes, [relays])]


def _center_policy(deployment: Deployment, host: Host) -> Object:
    ours = [{"podSelector": {"matchLabels": NAME_LABEL}}]
    rules: list[Object] = [{"from": ours, "ports": [{"port": port} for port in _ports(host, _LOCAL).values()]}]
    if len(deployment.sites) > 1:
        # Other sites, by their certificates.
        rules.append({"ports": [{"port": port} for port in _ports(host, _PUBLIC).values()]})
    name = "head" if host.name == deployment.head.name else host.name
    return _policy(name, _center_labels(deployment, host), rules)


def _critic_policy(deployment: Deployment, host: Host) -> Object:
    """The trainer alone calls the critic, from the head."""
    caller = {"podSelector": {"matchLabels": labels(deployment.head, "head")}}
    return _policy("critic", labels(host, "node"), [{"from": [caller], "ports": [{"port": CRITIC_PORT}]}])


def _trainers_policy() -> Object:
    """The run and the generators call the trainer wherever it is."""
    ours = [{"podSelector": {"matchLabels": NAME_LABEL}}]
    ports = [{"port": PORTS[name]} for name in ("trainer", "weights")]
    return _policy("trainers", {**NAME_LABEL, COMPONENT_LABEL: "node"}, [{"from": ours, "ports": ports}])


def _ranks_policy(component_of_others: str) -> Object:
    """Training processes talk to each other, and only to each other, on ports that they choose."""
    component = {"key": COMPONENT_LABEL, "operator": "In", "values": ["head", component_of_others]}
    selector = {"matchLabels": NAME_LABEL, "matchExpressions": [component]}
    policy = _policy("ranks", {}, [{"from": [{"podSelector": selector}]}])
    policy["spec"]["podSelector"] = selector
    return policy


def _policy(name: str, selector: dict[str, str], ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(name),
        "spec": {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def budgets(deployment: Deployment, site: str) -> list[Object]:
    """What the run has once is moved by hand only, since it stops meanwhile; generators leave one at a time."""
    found = []
    if site == deployment.head.site:
        for host in deployment.center_hosts:
            name = "head" if host.name == deployment.head.name else host.name
            found.append(_budget(name, _center_labels(deployment, host), max_unavailable=0))
        if len(deployment.training) > 1 and deployment.moving_by is None:
            found.append(_budget("trainers", {**NAME_LABEL, COMPONENT_LABEL: TRAINER}, max_unavailable=0))
    if any(service.kind == "node" for host in deployment.at(site) for service in host.services):
        found.append(_budget("nodes", {**NAME_LABEL, COMPONENT_LABEL: "node"}, max_unavailable=1))
    return found


def _budget(name: str, selector: dict[str, str], *, max_unavailable: int) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(name),
        "spec": {"maxUnavailable": max_unavailable, "selector": {"matchLabels": selector}},
    }
