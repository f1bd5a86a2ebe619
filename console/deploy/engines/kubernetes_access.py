"""Writes how pods are reached, and by whom: Services, NetworkPolicies and the PodDisruptionBudgets of a site."""

from __future__ import annotations

from typing import Any

from console.deploy.description import PORTS, Deployment, Host
from console.deploy.engines.kubernetes_names import COMPONENT_LABEL, NAME_LABEL, TRAINER, labels, metadata, ranks
from console.deploy.nodes import FIRST_GENERATOR_PORT

Object = dict[str, Any]
_PUBLIC = ("broker", "trainer", "weights", "scheduler")
"""What generators call, beside an environment."""


def _ports(deployment: Deployment) -> list[str]:
    """The head's services that generators call."""
    return [*_PUBLIC, *(["environment"] if deployment.serves_environment else [])]


def services(deployment: Deployment, site: str) -> list[Object]:
    """Each machine under its name: the head's services, and relays of machines at other sites."""
    head = deployment.head
    if site != head.site:
        address = {"type": "ExternalName", "externalName": deployment.head_address}
        return [_service(head, address), *(_relay(host) for host in deployment.at(site))]
    is_public = len(deployment.sites) > 1
    spec = {
        "type": "LoadBalancer" if is_public else "ClusterIP",
        "selector": labels(head, "head"),
        # A trainer whose broker is away is not ready, and is still asked and stopped.
        "publishNotReadyAddresses": True,
        "ports": [{"name": name, "port": PORTS[name]} for name in (*_ports(deployment), "reward")],
    }
    found = [_service(head, spec)]
    if len(deployment.training) > 1:
        headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(head, "head")}
        found.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata(ranks(head), head), "spec": headless})
    return found


def _service(host: Host, spec: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(host.name, host), "spec": spec}


def _relay(host: Host) -> Object:
    """The machine's name stands for its pod: relays listen on ports by the GPUs of their generators."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(host, "node")}
    return _service(host, spec)


def network_policies(deployment: Deployment, site: str) -> list[Object]:
    """Nothing reaches a pod but what is named here."""
    found = [_policy("nobody", dict(NAME_LABEL), [])]
    if site == deployment.head.site:
        ours = [{"podSelector": {"matchLabels": NAME_LABEL}}]
        rules: list[Object] = [
            {"from": ours, "ports": [{"port": PORTS[name]} for name in (*_ports(deployment), "reward")]}
        ]
        if len(deployment.sites) > 1:
            # Other sites, by their certificates.
            rules.append({"ports": [{"port": PORTS[name]} for name in _ports(deployment)]})
        found.append(_policy("head", labels(deployment.head, "head"), rules))
        return [*found, _ranks_policy()] if len(deployment.training) > 1 else found
    last = FIRST_GENERATOR_PORT + 2 * max(host.all_gpus for host in deployment.at(site)) - 1
    nodes = {**NAME_LABEL, COMPONENT_LABEL: "node"}
    relays = {
        "from": [{"podSelector": {"matchLabels": nodes}}],
        "ports": [{"port": FIRST_GENERATOR_PORT, "endPort": last}],
    }
    return [*found, _policy("relays", nodes, [relays])]


def _ranks_policy() -> Object:
    """Processes that train talk to each other on ports that they choose, and to nobody else so."""
    component = {"key": COMPONENT_LABEL, "operator": "In", "values": ["head", TRAINER]}
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
    """The head is moved by hand only, since the run stops meanwhile; machines that generate leave one at a time."""
    found = []
    if site == deployment.head.site:
        found.append(_budget("head", labels(deployment.head, "head"), max_unavailable=0))
        if len(deployment.training) > 1:
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
