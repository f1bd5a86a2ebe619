"""Writes Kubernetes objects for each site's cluster, joined by a kustomization.

The head is one pod, so that its services share volumes of one machine: Redis, broker, scheduler and reward worker are
sidecars of the trainer, which start in that order, one after the other is ready, and end after it. Those that the plan
has on a machine without GPUs are a pod there. Where several machines train, each other one has a pod of its own, and
torchrun's processes meet through a headless Service. Where the trainer moves, `penstock node` of each machine starts
it, and stands in the trainer's place in the head's pod.
"""

from __future__ import annotations

import re
from typing import Any

from console.deploy.description import PORTS, USER_ID, Deployment, Files, Host, Service, without_empty
from console.deploy.engines.kubernetes_access import budgets, network_policies, services
from console.deploy.engines.kubernetes_names import (
    CENTER,
    CONFIGURATION,
    ENVIRONMENT_CERTIFICATE,
    NAMESPACE,
    TRAINER,
    certificate,
    claim,
    labels,
    metadata,
    ranks,
)
from console.deploy.environments import NAME as ENVIRONMENT
from penstock.config import ConfigError

Object = dict[str, Any]

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,44}[a-z0-9])?")
_STARTS_FOR_S = 1200
_PERIOD_S = 15
_GIB = 2**30
_RUN_ATTEMPTS = 100

_STEPS = """# Starting

Machines are nodes of their site's cluster, by their names (`kubernetes.io/hostname`); Kubernetes 1.29 or newer starts
the head's sidecars in order. Images are those of the repository's compose file, in a registry of yours: name it under
`images` in each `SITE/kustomization.yaml`. For each site, in its cluster:

```
kubectl create namespace {namespace}
{secrets}kubectl apply -f SITE/claims.yaml -f SITE/fill.yaml      # volumes, and pods to fill them
kubectl cp MODEL {namespace}/fill-MACHINE:/data/model       # each machine; {data} the data too
kubectl delete -f SITE/fill.yaml
kubectl apply -k SITE
kubectl -n {namespace} logs POD -c check                # why a pod does not start
```

Tokens and other secrets: a Secret `secrets` in that namespace, whose keys are the variables of docs/operating.md, and
OTEL_EXPORTER_OTLP_HEADERS if the collector of traces asks for a key.
Deleting a pod drains it: SIGTERM is every service's request to give back its work or to write its last checkpoint,
within the pod's grace period. A node with the head on it is drained after `kubectl -n {namespace} delete pdb head`.
Volumes are ReadWriteOnce, each machine's own.{far}
"""
_SECRET = "kubectl -n {namespace} create secret generic {name} --from-file=certificates/{host}   # site {site}\n"
_FAR = """

Other sites reach {host} at {address}: point that name at the LoadBalancer of the Service `{host}` of site {site}."""


def kubernetes_files(deployment: Deployment) -> Files:
    """Objects and a kustomization for each site. Raises ConfigError for a plan that Kubernetes cannot carry out."""
    _check(deployment)
    files: Files = {"README.md": _steps(deployment)}
    for site in deployment.sites:
        hosts = deployment.at(site)
        objects: dict[str, list[Object]] = {
            "claims.yaml": [each for host in hosts for each in _claims(deployment, host)],
            **{f"pods-{host.name}.yaml": _workloads(deployment, host) for host in hosts},
            "network.yaml": _network(deployment, site),
        }
        files |= {f"{site}/{name}": documents for name, documents in objects.items()}
        files[f"{site}/fill.yaml"] = [_filler(deployment, host) for host in hosts]
        files[f"{site}/kustomization.yaml"] = _kustomization(deployment, site, list(objects))
    return files


def _check(deployment: Deployment) -> None:
    centers = {host.name for host in deployment.center_hosts}
    critic = next((host for host in deployment.hosts if host.name == deployment.critic_on), None)
    if critic is not None and (critic.name in centers or critic.site != deployment.head.site):
        raise ConfigError(
            f"--for kubernetes: the plan has a critic on {critic.name}, whose name does not lead the trainer's "
            "pod to it; place it on another machine of the head's site, or deploy --for compose or slurm"
        )
    names = " and ".join(host.name for host in deployment.training)
    if len(deployment.training) > 1 and not deployment.has_storage:
        raise ConfigError(
            f"--for kubernetes: {names} train, and without object storage their run folder would have to be one that "
            "all of them write to (ReadWriteMany); set run.checkpoint_storage, or deploy --for slurm"
        )
    if len({host.site for host in deployment.training}) > 1:
        raise ConfigError(
            f"--for kubernetes: {names} {'may ' if deployment.moving_by else ''}train, in several clusters, between "
            "which pods do not reach each other; plan for machines of one site that train, or deploy --for compose"
        )
    for host in deployment.hosts:
        for name in (host.name, host.site):
            if not _LABEL.fullmatch(name):
                raise ConfigError(
                    f"nodes: {name!r} cannot name a Kubernetes object; use at most 46 lowercase letters, digits and "
                    "dashes, a letter first"
                )
    _check_addresses(deployment)


def _check_addresses(deployment: Deployment) -> None:
    far = [site for site in deployment.sites if site != deployment.head.site]
    if far and not deployment.public:
        centers = [host.name for host in deployment.center_hosts]
        raise ConfigError(
            f"--head: required, since the cluster of {far[0]} cannot resolve {' and '.join(centers)} of "
            f"{deployment.head.site}; name the DNS name at which it reaches "
            f"{'the head' if len(centers) == 1 else 'each, in this order, with commas'}"
        )
    for address in deployment.public.values():
        if address.replace(".", "").isdecimal():
            raise ConfigError(f"--head: {address} is an address; Kubernetes takes a DNS name here")


def _steps(deployment: Deployment) -> str:
    secrets = far = ""
    if deployment.has_certificates:
        secrets = "".join(
            _SECRET.format(namespace=NAMESPACE, name=certificate(host), host=host.name, site=host.site)
            for host in deployment.hosts
        )
    if deployment.has_certificates and deployment.serves_environment:
        names = {"namespace": NAMESPACE, "name": ENVIRONMENT_CERTIFICATE, "host": ENVIRONMENT}
        secrets += _SECRET.format(site=deployment.head.site, **names)
    if len(deployment.sites) > 1:
        far = "".join(
            _FAR.format(address=deployment.public[host.name], host=host.name, site=host.site)
            for host in deployment.center_hosts
        )
    data = "on the head" if deployment.moving_by is None else "there"
    return _STEPS.format(namespace=NAMESPACE, secrets=secrets, far=far, data=data)


def _kustomization(deployment: Deployment, site: str, resources: list[str]) -> Object:
    images = {service.image for host in deployment.at(site) for service in host.services}
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": resources,
        # A change of a configuration gives it another name, so that its pods start again.
        "configMapGenerator": [{"name": CONFIGURATION, "files": sorted(deployment.files_at(site))}],
        "images": [{"name": name.partition(":")[0], "newName": name.partition(":")[0]} for name in sorted(images)],
    }


def _network(deployment: Deployment, site: str) -> list[Object]:
    return [*services(deployment, site), *network_policies(deployment, site), *budgets(deployment, site)]


def _claims(deployment: Deployment, host: Host) -> list[Object]:
    """Volumes that outlive pods: model and data of every machine, Redis, runs, the critic, forecasts of lengths."""
    weights_gib = deployment.weight_bytes / _GIB
    sizes = {"data": 10 + 2 * weights_gib} if host.all_gpus else {"data": 10.0}
    if host.is_center:
        sizes["runs"] = 10.0
    if host.has("redis"):
        sizes["redis"] = 20
    if host.name in (deployment.head.name, deployment.critic_on):
        sizes["runs"] = 50 + 24 * weights_gib
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(claim(host, what), host),
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": f"{size_gib:.0f}Gi"}},
            },
        }
        for what, size_gib in sizes.items()
    ]


def _workloads(deployment: Deployment, host: Host) -> list[Object]:
    """The machine's pods: the head's services in one, the run's console and generators in others."""
    found: list[Object] = []
    is_moving_head = host.name == deployment.head.name and deployment.moving_by is not None
    apart = ("run",) if is_moving_head else ("run", "node")
    center = [each for each in host.services if each.kind not in apart]
    if center:
        pod = _pod(deployment, host, center[:-1], center[-1])
        component = CENTER if not host.all_gpus else "head" if host.name == deployment.head.name else TRAINER
        found.append(_deployment(host, host.name, component, pod))
    for service in host.services:
        if service.kind == "node" and service not in center:
            found.append(_deployment(host, service.name, "node", _pod(deployment, host, [], service)))
        elif service.kind == "run":
            found.append(_job(host, service, _pod(deployment, host, [], service)))
    return found


def _deployment(host: Host, name: str, component: str, pod: Object) -> Object:
    selector = labels(host, component)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, host),
        "spec": {
            "replicas": 1,
            # Its volumes and GPUs are free only when the previous pod has ended.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": selector}, "spec": pod},
        },
    }


def _job(host: Host, service: Service, pod: Object) -> Object:
    """Ends when the run is complete; after a failure it resumes the run."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(service.name, host),
        "spec": {
            "backoffLimit": _RUN_ATTEMPTS,
            "template": {
                "metadata": {"labels": labels(host, "run")},
                "spec": {**pod, "restartPolicy": "OnFailure"},
            },
        },
    }


def _pod(deployment: Deployment, host: Host, sidecars: list[Service], main: Service) -> Object:
    together = [*sidecars, main]
    check = _container(deployment, host, main)
    command, file = host.check
    check |= {"name": "check", "args": [command, str(deployment.layout.config / file)]}
    for key in ("readinessProbe", "startupProbe", "command"):
        check.pop(key, None)
    waits = [_wait(deployment, host, name) for name in main.after] if not sidecars else []
    return {
        "nodeSelector": {"kubernetes.io/hostname": host.name},
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(sum(service.grace_s for service in together)),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [
            check,
            *waits,
            *({**_container(deployment, host, each), "restartPolicy": "Always"} for each in sidecars),
        ],
        "containers": [_container(deployment, host, main)],
        "volumes": _volumes(deployment, host, together),
    }


def _wait(deployment: Deployment, host: Host, name: str) -> Object:
    """Until a service of the run is healthy."""
    target = deployment.center[name].partition(",")[0]
    loop = f"until python -m penstock.healthcheck {target}; do sleep 5; done"
    service = next(each for each in host.services if each.kind == "run")
    return {**_container(deployment, host, service), "name": f"wait-{name}", "command": ["sh", "-c", loop], "args": []}


def _container(deployment: Deployment, host: Host, service: Service) -> Object:
    limits = {"memory": f"{service.memory_gib}Gi", "nvidia.com/gpu": service.gpus}
    found: Object = {
        "name": service.name if service.kind == "broker" else service.kind,
        "image": service.image,
        "args": list(service.arguments),
        "resources": {
            "limits": {key: value for key, value in limits.items() if value},
            "requests": {"cpu": str(max(1, 4 * service.gpus))},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if service.torchrun:
        found["command"] = ["torchrun", *_meeting(deployment, service), "-m", "console"]
    if service.kind == "redis":
        health = ["redis-cli", "-p", str(PORTS["redis"]), "ping"]
        return found | _probes(health) | {"volumeMounts": [{"name": "redis", "mountPath": "/data"}]}
    if service.port is not None:
        # Not Kubernetes' own gRPC probe, which speaks no TLS.
        found |= _probes(["python", "-m", "penstock.healthcheck", f"127.0.0.1:{service.port}"])
    mounts = [("configuration", "/config"), ("data", "/data"), ("runs", str(deployment.layout.runs))]
    if service.is_foreign:
        mounts = [("data", "/data")]
    variables = dict(deployment.tracing) | dict(service.variables)
    if deployment.has_certificates:
        variables |= deployment.variables("/run/secrets/penstock")
        mounts.append(("environment" if service.is_foreign else "certificate", "/run/secrets/penstock"))
    found["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    if service.gpus:
        mounts.append(("memory", "/dev/shm"))
    read_only = ("configuration", "data", "certificate", "environment")
    found["envFrom"] = [{"secretRef": {"name": "environment" if service.is_foreign else "secrets", "optional": True}}]
    found["volumeMounts"] = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name in read_only else {})} for name, path in mounts
    ]
    return found


def _meeting(deployment: Deployment, service: Service) -> list[str]:
    """Options of torchrun, whose processes meet at the head's pod itself."""
    head = deployment.head
    stated, headless = f"--master-addr={head.address}", f"--master-addr={ranks(head)}"
    return [headless if option == stated else option for option in service.torchrun]


def _probes(command: list[str]) -> Object:
    """Readiness, and restarts of what never comes up; no liveness: what waits for another service is well."""
    probe = {"exec": {"command": command}, "periodSeconds": _PERIOD_S, "timeoutSeconds": 30}
    starts = {**probe, "failureThreshold": _STARTS_FOR_S // _PERIOD_S}
    return {"startupProbe": starts, "readinessProbe": {**probe, "failureThreshold": 4}}


def _volumes(deployment: Deployment, host: Host, together: list[Service]) -> list[Object]:
    keeps_runs = host.name in {deployment.critic_on, *(each.name for each in deployment.center_hosts)}

    def claimed(what: str) -> Object:
        return {"name": what, "persistentVolumeClaim": {"claimName": claim(host, what)}}

    found: list[Object] = [{"name": "configuration", "configMap": {"name": CONFIGURATION}}, claimed("data")]
    found.append(claimed("runs") if keeps_runs else {"name": "runs", "emptyDir": {}})
    if any(service.kind == "redis" for service in together):
        found.append(claimed("redis"))
    if deployment.has_certificates:
        secret = {"secretName": certificate(host), "defaultMode": 0o440}
        found.append({"name": "certificate", "secret": secret})
    if deployment.has_certificates and any(service.is_foreign for service in together):
        secret = {"secretName": ENVIRONMENT_CERTIFICATE, "defaultMode": 0o440}
        found.append({"name": "environment", "secret": secret})
    if together[-1].gpus:
        found.append({"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}})
    return found


def _filler(deployment: Deployment, host: Host) -> Object:
    """A pod that does nothing but hold the machine's data volume, to copy model and data into."""
    main = host.services[-1]
    pod = _pod(deployment, host, [], main)
    kept = ("name", "image", "securityContext")
    container = {key: value for key, value in pod["containers"][0].items() if key in kept}
    container |= {"command": ["sleep", "infinity"], "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    shared = {key: pod[key] for key in ("nodeSelector", "automountServiceAccountToken", "securityContext")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata(f"fill-{host.name}", host), "namespace": NAMESPACE},
        "spec": without_empty({**shared, "containers": [container], "volumes": [pod["volumes"][1]]}),
    }
