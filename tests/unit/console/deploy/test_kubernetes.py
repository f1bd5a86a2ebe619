"""The Kubernetes objects of `plan --deploy`: valid by the published schemas, and what they promise."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import deployment, write_deployment
from console.node.assignment import placements
from console.node.config import read_machine
from console.node.gpus import visible
from console.run.run_plan import as_message
from penstock.config import ConfigError
from penstock.process.grace_periods import STOP_GRACE_S
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import Broker, CriticPlace
from services.scheduler.problem.problem import Problem
from services.scheduler.service_placement.service_places import with_center
from tests.helpers.plans.problems import plan, problem
from tests.helpers.plans.two_sites import PLAN, PROBLEM

HEAD = "head.example.org"


def written(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """All objects of both sites."""
    model = CostModel(Problem.model_validate(PROBLEM))
    settings = {"engine": "kubernetes", "head_address": HEAD, **changes}
    paths = write_deployment(folder / "out", model, PLAN, **settings)
    names = ("claims.yaml", "network.yaml", "fill.yaml", "pods-head-0.yaml", "pods-l4-0.yaml")
    return [each for path in paths if path.name in names for each in yaml.safe_load_all(path.read_text())]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] in ("Deployment", "Job")
    }


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["initContainers"], *pod["containers"]]


def test_every_object_is_valid_and_the_kustomization_joins_those_of_a_site(tmp_path: Path) -> None:
    objects = written(tmp_path)
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert {each["kind"] for each in objects} == {
        *("Deployment", "Job", "Service", "PersistentVolumeClaim", "Pod", "NetworkPolicy", "PodDisruptionBudget"),
    }
    for site in ("home", "far"):
        folder = tmp_path / "out" / site
        joined = yaml.safe_load((folder / "kustomization.yaml").read_text())
        named = {*joined["resources"], *joined["configMapGenerator"][0]["files"], "kustomization.yaml", "fill.yaml"}
        assert named == {path.name for path in folder.iterdir()}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_valid_objects(tmp_path: Path) -> None:
    written(tmp_path)
    for site in ("home", "far"):
        command = ["kubectl", "kustomize", str(tmp_path / "out" / site)]
        built = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        for each in built:
            kubernetes_validate.validate(each, "1.37", strict=True)
        name = next(each["metadata"]["name"] for each in built if each["kind"] == "ConfigMap")
        used = {pod["volumes"][0]["configMap"]["name"] for pod in pods(built).values()}
        assert used == {name}
        assert name != "configuration"


def test_pods_are_checked_first_run_without_root_and_keep_secrets_apart(tmp_path: Path) -> None:
    found = pods(written(tmp_path))
    assert found.keys() == {"head-0", "run", "node-l4-0"}
    for pod in found.values():
        assert pod["initContainers"][0]["args"][0] == "doctor"
        assert pod["securityContext"]["runAsNonRoot"]
        secrets = [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each]
        assert secrets == [f"certificate-{pod['nodeSelector']['kubernetes.io/hostname']}"]
        for container in containers(pod):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            if container["name"] != "redis":
                assert container["envFrom"] == [{"secretRef": {"name": "secrets", "optional": True}}]
    assert "BEGIN" not in str(found)


def test_sidecars_end_after_the_trainer_and_all_graces_fit(tmp_path: Path) -> None:
    head = pods(written(tmp_path))["head-0"]
    sidecars = [each["name"] for each in head["initContainers"] if each.get("restartPolicy") == "Always"]
    assert sidecars == ["redis", "broker", "scheduler", "reward"]
    assert [each["name"] for each in head["containers"]] == ["trainer"]
    assert head["terminationGracePeriodSeconds"] == sum(STOP_GRACE_S[name] for name in (*sidecars, "trainer"))
    for container in (*head["initContainers"][1:], *head["containers"]):
        assert container["readinessProbe"]["exec"]["command"][0] in ("python", "redis-cli")
        assert "livenessProbe" not in container


def test_volumes_are_one_machines_and_only_what_is_named_is_reached(tmp_path: Path) -> None:
    objects = written(tmp_path)
    modes = [each["spec"]["accessModes"] for each in objects if each["kind"] == "PersistentVolumeClaim"]
    assert modes == [["ReadWriteOnce"]] * 4
    policies = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "NetworkPolicy"}
    assert policies["nobody"]["ingress"] == []
    assert 7300 not in [port["port"] for rule in policies["head"]["ingress"] for port in rule["ports"]]
    budgets = {
        each["metadata"]["name"]: each["spec"]["maxUnavailable"]
        for each in objects
        if each["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"head": 0, "nodes": 1}
    external = [each["spec"].get("externalName") for each in objects if each["kind"] == "Service"]
    assert external.count(HEAD) == 1


STORED = {**PLAIN_RUN, "run": {"checkpoint_storage": "s3://team/runs"}}


def test_several_machines_train_and_one_does_both_without_a_volume_that_they_share(tmp_path: Path) -> None:
    model = CostModel(problem("tiny_04", "constraints.train_single_region=false"))
    of = plan([("l40s-0", 2, 2), ("l4-0", 1, 8)], [("a100-0", 8), ("l40s-0", 4)])
    paths = write_deployment(tmp_path / "out", model, of, engine="kubernetes", head_address=HEAD, run=STORED)
    names = [path for path in paths if path.name.startswith(("pods-", "network", "claims", "fill"))]
    objects = [each for path in names for each in yaml.safe_load_all(path.read_text())]
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)

    found = pods(objects)
    (head,), (other,), (node,) = (found[name]["containers"] for name in ("a100-0", "l40s-0", "node-l40s-0"))
    for rank, container in enumerate((head, other)):
        assert container["command"][0] == "torchrun"
        assert {f"--node-rank={rank}", "--master-addr=a100-0-ranks"} <= {*container["command"]}
        assert container["command"][-2:] == ["-m", "console"]
    gpus = [each["resources"]["limits"]["nvidia.com/gpu"] for each in (head, other, node)]
    assert gpus == [8, 4, 4], "each pod has GPUs of its own, of the eight of its machine"
    described = read_machine(tmp_path / "out" / "r0" / "node-l40s-0.yaml")
    assert (described.gpus, described.first_gpu) == (8, 4)
    followed = as_message(of)
    assert [placement.gpus for placement in placements(followed, described).values()] == [(4, 5), (6, 7)]
    assert visible((6, 7), (), first=described.first_gpu) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    claims = {volume["name"] for volume in found["l40s-0"]["volumes"] if "persistentVolumeClaim" in volume}
    assert claims == {"data"}, "its part of a checkpoint goes to the storage"
    kinds = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}
    assert kinds["Service", "a100-0-ranks"]["clusterIP"] == "None"
    allowed = kinds["NetworkPolicy", "ranks"]
    assert allowed["podSelector"] == allowed["ingress"][0]["from"][0]["podSelector"]
    assert kinds["PodDisruptionBudget", "trainers"]["maxUnavailable"] == 0
    moving: dict[str, Any] = {"engine": "kubernetes", "run": STORED, "head_address": HEAD, "moves_trainer": True}
    with pytest.raises(ConfigError, match=r"a100-0 and l40s-0 and l4-0 and l4-1 may train, in several clusters"):
        deployment(model, of, folder=Path("/out"), **moving)
    spread = plan([("l40s-0", 2, 2)], [("a100-0", 8), ("l4-0", 8)])
    with pytest.raises(ConfigError, match=r"a100-0 and l4-0 train, in several clusters"):
        deployment(model, spread, engine="kubernetes", run=STORED, folder=Path("/out"), head_address=HEAD)


@pytest.mark.parametrize("place", ["a100-0", "desk-0"])
def test_a_trainer_that_moves_is_started_in_the_pods_of_its_machines(place: str, tmp_path: Path) -> None:
    stated = problem("tiny_04", "hosts=[{name: desk, region: r0}]")
    nodes = tuple(node for node in stated.nodes if node.region == "r0")
    stated = stated.model_copy(update={"nodes": nodes, "links": ()})
    bare = plan([("l40s-0", 1, 8)], [("a100-0", 8)])
    of = bare.model_copy(update={"broker": Broker(node=place), "scheduler": place})
    settings: dict[str, Any] = {"engine": "kubernetes", "run": STORED, "moves_trainer": True}
    paths = write_deployment(tmp_path / "out", CostModel(stated), of, **settings)
    names = [path for path in paths if path.name.startswith(("pods-", "network", "claims", "fill"))]
    objects = [each for path in names for each in yaml.safe_load_all(path.read_text())]
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)

    found = pods(objects)
    assert found.keys() == {"a100-0", "run", "node-l40s-0", *({"desk-0"} if place == "desk-0" else ())}
    head, other = found["a100-0"], found["node-l40s-0"]
    (main,), (node,) = head["containers"], other["containers"]
    assert main["args"] == ["node", "/config/node-a100-0.yaml"]
    assert node["resources"]["limits"]["nvidia.com/gpu"] == main["resources"]["limits"]["nvidia.com/gpu"] == 8
    sidecars = [each["name"] for each in head["initContainers"] if each.get("restartPolicy") == "Always"]
    assert sidecars == ["reward"] if place == "desk-0" else ["redis", "broker", "scheduler", "reward"]
    longest_s = STOP_GRACE_S["trainer"] + STOP_GRACE_S["node"] - STOP_GRACE_S["generator"]
    assert other["terminationGracePeriodSeconds"] == longest_s
    assert head["terminationGracePeriodSeconds"] == longest_s + sum(STOP_GRACE_S[name] for name in sidecars)
    kinds = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}
    for name, component in (("a100-0", "head"), ("l40s-0", "node")):
        service, file = kinds["Service", name], read_machine(tmp_path / "out" / "r0" / f"node-{name}.yaml")
        # The names by which trainers are called are their pods'.
        assert (service["clusterIP"], service["selector"]["app.kubernetes.io/component"]) == ("None", component)
        pod = kinds["Deployment", name if component == "head" else f"node-{name}"]
        assert pod["template"]["metadata"]["labels"] == service["selector"]
        assert (file.trainer.weights_url, file.first_gpu) == (f"{name}:7305", 0)
    (rule,) = kinds["NetworkPolicy", "trainers"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [7304, 7305]
    head_ports = [port["port"] for port in kinds["NetworkPolicy", "head"]["ingress"][0]["ports"]]
    assert {7304, 7305} < set(head_ports)
    assert kinds["NetworkPolicy", "ranks"]["podSelector"]["matchExpressions"][0]["values"] == ["head", "node"]
    assert ("PodDisruptionBudget", "trainers") not in kinds
    run = yaml.safe_load((tmp_path / "out" / "r0" / "run.yaml").read_text())
    assert run["endpoints"]["trainer"] == "a100-0:7304,l40s-0:7304"


def test_what_the_run_has_once_stands_in_a_pod_on_the_machine_of_the_plan(tmp_path: Path) -> None:
    stated = problem("tiny_04", "hosts=[{name: desk, region: r0}]")
    model, bare = CostModel(stated), plan([("l4-0", 1, 8)], [("a100-0", 8)])
    of = with_center(stated, bare, None).model_copy(update={"broker": Broker(node="desk-0", count=2)})
    settings: dict[str, Any] = {"engine": "kubernetes", "run": PLAIN_RUN, "head_address": f"{HEAD},desk.example.org"}
    paths = write_deployment(tmp_path / "out", model, of, **settings)
    names = [path for path in paths if path.name.startswith(("pods-", "network", "claims", "fill"))]
    by_site = {
        site: [each for path in names if path.parent.name == site for each in yaml.safe_load_all(path.read_text())]
        for site in ("r0", "r1")
    }
    for each in (*by_site["r0"], *by_site["r1"]):
        kubernetes_validate.validate(each, "1.37", strict=True)

    found = pods(by_site["r0"])
    desk, head = found["desk-0"], found["a100-0"]
    assert desk["nodeSelector"] == {"kubernetes.io/hostname": "desk-0"}
    assert [each["name"] for each in containers(desk)] == ["check", "redis", "broker", "broker-1", "scheduler"]
    assert [each["name"] for each in containers(head)] == ["check", "reward", "trainer"]
    waits = {each["name"]: each["command"][-1] for each in found["run"]["initContainers"] if each["name"] != "check"}
    assert "healthcheck desk-0:7301;" in waits["wait-broker"]
    assert "healthcheck a100-0:7304;" in waits["wait-trainer"]
    kinds = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in by_site["r0"]}
    for name, ports in (("desk-0", [7301, 7306, 7320]), ("a100-0", [7304, 7305, 7303])):
        service, policy = kinds["Service", name], kinds["NetworkPolicy", "head" if name == "a100-0" else name]
        assert [port["port"] for port in service["ports"]] == ports
        assert [port["port"] for port in policy["ingress"][0]["ports"]] == ports
        assert service["selector"] == policy["podSelector"]["matchLabels"]
        template = kinds["Deployment", name]["template"]["metadata"]["labels"]
        assert service["selector"] == template
        assert kinds["PodDisruptionBudget", "head" if name == "a100-0" else name]["maxUnavailable"] == 0
    claims = {name for kind, name in kinds if kind == "PersistentVolumeClaim"}
    assert {"desk-0-redis", "desk-0-runs", "a100-0-runs"} <= claims
    assert "a100-0-redis" not in claims
    external = {
        each["metadata"]["name"]: each["spec"]["externalName"]
        for each in by_site["r1"]
        if each["kind"] == "Service" and "externalName" in each["spec"]
    }
    assert external == {"a100-0": HEAD, "desk-0": "desk.example.org"}
    for addresses, said in (
        (None, "cannot resolve a100-0 and desk-0 of r0; name the DNS name at which it reaches each, in this order"),
        (HEAD, "--head: head.example.org names 1 machines, and other sites reach a100-0 and desk-0; name 2"),
        (f"{HEAD},192.0.2.1", "--head: 192.0.2.1 is an address"),
    ):
        with pytest.raises(ConfigError, match=said):
            deployment(model, of, **{**settings, "head_address": addresses}, folder=Path("/out"))


@pytest.mark.parametrize(
    ("changed", "train", "said"),
    [
        (
            "nodes=[{name: My_Box, gpu: L4, gpus: 8, region: r0}, {name: far, gpu: L4, gpus: 8, region: r1}]",
            [("My_Box-0", 8)],
            "'My_Box-0' cannot name a Kubernetes object",
        ),
        (
            "id=x",
            [("a100-0", 8), ("l40s-0", 8)],
            "a100-0 and l40s-0 train, and without object storage their run folder would have to be one",
        ),
        ("id=x", [("a100-0", 8)], "--head: required, since the cluster of r1 cannot resolve a100-0 of r0"),
    ],
)
def test_what_kubernetes_cannot_carry_out_is_refused(changed: str, train: list, said: str) -> None:
    model, of = CostModel(problem("tiny_04", changed)), plan([], train)
    with pytest.raises(ConfigError, match=said):
        deployment(model, of, engine="kubernetes", run=PLAIN_RUN, folder=Path("/out"))


def test_a_critic_has_a_name_a_volume_and_one_caller() -> None:
    tasks = "[{name: actor, kind: train}, {name: critic, kind: train, is_service: true}]"
    model = CostModel(problem("tiny_04", f"workload.train_tasks={tasks}"))

    def files(node: str) -> dict[str, Any]:
        placed = plan([("l4-0", 2, 4)], [("a100-0", 4)]).model_copy(update={"critic": CriticPlace(node=node, gpus=4)})
        return deployment(model, placed, engine="kubernetes", head_address=HEAD, folder=Path("/out"))

    found = files("l40s-0")
    names = ("claims", "network", "pods-l40s-0", "pods-a100-0")
    objects = [each for name in names for each in found[f"r0/{name}.yaml"]]
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert found["r0/run.yaml"]["endpoints"]["critic"] == "l40s-0:7309"
    named = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}
    runs = next(volume for volume in pods(objects)["node-l40s-0"]["volumes"] if volume["name"] == "runs")
    assert ("PersistentVolumeClaim", runs["persistentVolumeClaim"]["claimName"]) in named
    labels = {name: spec["template"]["metadata"]["labels"] for (_, name), spec in named.items() if "template" in spec}
    assert named["Service", "l40s-0"]["selector"] == labels["node-l40s-0"]
    policy = named["NetworkPolicy", "critic"]
    assert policy["podSelector"]["matchLabels"] == labels["node-l40s-0"]
    caller = {"podSelector": {"matchLabels": labels["a100-0"]}}
    assert policy["ingress"] == [{"from": [caller], "ports": [{"port": 7309}]}]
    with pytest.raises(ConfigError, match=r"^--for kubernetes: the plan has a critic on a100-0, whose name does not"):
        files("a100-0")


@pytest.mark.parametrize("is_beside_trainer", [False, True])
def test_a_critic_moves_to_the_pod_of_any_machine_where_the_trainer_does(is_beside_trainer: bool) -> None:
    tasks = "[{name: actor, kind: train}, {name: critic, kind: train, is_service: true}]"
    stated = problem("tiny_04", f"workload.train_tasks={tasks}")
    nodes = tuple(node for node in stated.nodes if node.region == "r0")
    model = CostModel(stated.model_copy(update={"nodes": nodes, "links": ()}))
    node = "a100-0" if is_beside_trainer else "l40s-0"
    critic = CriticPlace(node=node, gpus=8 if is_beside_trainer else 4, is_beside_trainer=is_beside_trainer)
    of = plan([("l40s-0", 1, 4)], [("a100-0", 8)]).model_copy(update={"critic": critic})
    found = deployment(model, of, engine="kubernetes", run=STORED, folder=Path("/out"), moves_trainer=True)

    objects = [each for name in ("network", "pods-l40s-0", "pods-a100-0") for each in found[f"r0/{name}.yaml"]]
    for each in objects:
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert found["r0/run.yaml"]["endpoints"]["critic"] == "a100-0:7309,l40s-0:7309"
    named = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}
    for name, component in (("a100-0", "head"), ("l40s-0", "node")):
        section = found[f"r0/node-{name}.yaml"]["critic"]
        assert section["checkpoint_storage"] == STORED["run"]["checkpoint_storage"]
        assert section["listen"] == "0.0.0.0:7309"
        # Its name is its pod's, at any port; all pods that may have trainer or critic reach each other.
        service = named["Service", name]
        assert (service["clusterIP"], service["selector"]["app.kubernetes.io/component"]) == ("None", component)
    ranks = named["NetworkPolicy", "ranks"]
    assert ranks["ingress"] == [{"from": [{"podSelector": ranks["podSelector"]}]}]
    assert ranks["podSelector"]["matchExpressions"][0]["values"] == ["head", "node"]
    assert ("NetworkPolicy", "critic") not in named
