"""An environment that a deployment serves on its head, in the words of every engine."""

from pathlib import Path

import kubernetes_validate
import pytest

from console.config.config import parse_run_config
from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import deployment
from console.node.config import NodeConfig
from penstock.config import validate
from services.scheduler.cost_model.reference import CostModel
from tests.helpers.plans.problems import plan, problem


def deployed(run, *, engine="compose"):
    of = plan([("l4-0", 2, 4)], [("a100-0", 4)])
    return deployment(
        CostModel(problem("tiny_04")), of, run=run, engine=engine, head_address="head.example.org", folder=Path("/out")
    )


@pytest.mark.parametrize("engine", ["compose", "kubernetes", "slurm", "skypilot"])
def test_the_head_serves_an_environment_that_every_machine_reaches(engine):
    at = "/data/model" if engine in ("compose", "kubernetes") else "/models/model"
    run = {"model": {"path": at}, "data": {"train": f"{at}.jsonl"}}
    run["environment"] = {"target": "games:Guess", "max_turns": 5}
    files = deployed(run, engine=engine)

    for site, name in (("r0", "l40s-0"), ("r1", "l4-0")):
        generator = validate(NodeConfig, files[f"{site}/node-{name}.yaml"], source="").generator
        assert (generator.environment.target, generator.environment.max_turns) == ("grpc://a100-0:7302", 5)
    parsed = parse_run_config(files["r0/run.yaml"], source="run.yaml")
    assert parsed.environment.max_turns == 5
    issued = "certs issue environment --run tiny_04_4n_2reg_8b --site '*' --name environment --host a100-0"
    assert issued in files["README.md"].replace("\\\n   ", "")
    if engine in ("compose", "kubernetes"):
        assert parsed.environment.target == "grpc://a100-0:7302"
    else:
        # `penstock run` serves it, beside the run's other services.
        assert (parsed.environment.target, parsed.listen.environment) == ("games:Guess", "0.0.0.0:7302")
    texts = str({name: content for name, content in files.items() if "README" not in name})
    assert "PENSTOCK_JUDGE_TLS_CERT" in texts
    if engine == "compose":
        assert_environment_in_compose(files)
    if engine == "kubernetes":
        assert_environment_in_kubernetes(files)
    if engine == "slurm":
        # On the head, whose own certificate opens everything, the environment's is shown to third parties.
        assert 'export PENSTOCK_JUDGE_TLS_CERT="$PENSTOCK_SECRETS/$name/cert.pem"' in files["machine.sh"]
        own = files["machine.sh"].partition("if [ $name = a100-0 ]")[2].partition("fi")[0]
        assert 'export PENSTOCK_JUDGE_TLS_CERT="$PENSTOCK_SECRETS/environment/cert.pem"' in own
    if engine == "skypilot":
        head, far = files["r0/site.yaml"][1], files["r1/site.yaml"][1]
        assert 7302 in head["resources"]["ports"]
        assert head["file_mounts"]["/etc/penstock/environment"] == "../certificates/environment"
        assert "/etc/penstock/environment" not in far["file_mounts"]


def assert_environment_in_compose(files):
    outside = parse_run_config(files["run.yaml"], source="run.yaml")
    assert (outside.environment.target, outside.listen.environment) == ("games:Guess", "0.0.0.0:7302")
    services = files["r0/docker-compose.yml"]["services"]
    service, far = services["environment"], files["r1/docker-compose.yml"]["services"]["node-l4-0"]
    assert service["command"] == ["env", "serve", "games:Guess", "--listen", "0.0.0.0:7302"]
    assert services["run"]["depends_on"]["environment"] == {"condition": "service_healthy"}
    # It sees no credentials of the run; others show it those of their machine.
    assert service["env_file"] == "environment.env"
    assert "${PENSTOCK_SECRETS" not in str(service)
    assert "${PENSTOCK_ENVIRONMENT_SECRETS:?" in str(service["volumes"])
    assert far["environment"]["PENSTOCK_JUDGE_TLS_KEY"] == "/run/secrets/key.pem"


def assert_environment_in_kubernetes(files):
    objects = files["r0/pods-a100-0.yaml"]
    pod = next(each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment")
    sidecar = next(each for each in pod["initContainers"] if each["name"] == "environment")
    assert sidecar["envFrom"] == [{"secretRef": {"name": "environment", "optional": True}}]
    assert [each["name"] for each in sidecar["volumeMounts"]] == ["data", "environment"]
    assert {"name": "environment", "port": 7302} in files["r0/network.yaml"][0]["spec"]["ports"]
    for each in (*objects, *files["r0/network.yaml"]):
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_an_environment_elsewhere_is_named_and_not_served():
    files = deployed({**PLAIN_RUN, "environment": "grpc://games:7320"})
    assert "environment" not in files["r0/docker-compose.yml"]["services"]
    assert "PENSTOCK_JUDGE_TLS" not in str(files)
    assert files["r1/node-l4-0.yaml"]["generator"]["environment"] == {"target": "grpc://games:7320"}
    assert parse_run_config(files["r0/run.yaml"], source="run.yaml").environment.target == "grpc://games:7320"
    insecure = deployed({**PLAIN_RUN, "environment": "games:Guess", "insecure": True})
    service = insecure["r0/docker-compose.yml"]["services"]["environment"]
    assert service["environment"]["PENSTOCK_INSECURE"] == "true"
