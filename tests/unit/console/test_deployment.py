import shutil
import subprocess

import pytest
import yaml

from console.config import load_run_config
from console.deployment import PLAIN_RUN, deployment, write_deployment
from console.serve import ServiceKind, load_service_config
from penstock.config import ConfigError
from services.scheduler.cost_model.rm1 import Rm1
from tests.helpers.planning import plan, problem

PLAN = plan([("l40s-0", 1, 3), ("l40s-0", 4, 1), ("l4-0", 2, 4)], [("a100-0", 4), ("l40s-0", 1)])


@pytest.fixture
def rm1():
    return Rm1(problem("tiny_04"))


def test_every_file_is_accepted_by_what_reads_it(rm1, tmp_path):
    written = write_deployment(tmp_path / "out", rm1, PLAN)

    for path in written:
        if path.name == "run.yaml":
            load_run_config(path)
        elif path.name.startswith("gen-"):
            load_service_config(ServiceKind.GENERATOR, path, [], listen=None)
        elif path.name != "docker-compose.yml":
            load_service_config(ServiceKind(path.stem), path, [], listen=None)
    assert {str(path.relative_to(tmp_path / "out")) for path in written} == {
        "run.yaml",
        *(f"r0/{name}.yaml" for name in ("run", "broker", "scheduler", "reward", "trainer")),
        "r0/docker-compose.yml",
        "r1/docker-compose.yml",
        *(f"r0/gen-l40s-0-{index}.yaml" for index in range(4)),
        *(f"r1/gen-l4-0-{index}.yaml" for index in range(4)),
    }


def test_every_gpu_of_the_plan_is_given_once_and_the_rest_to_nobody(rm1):
    files = deployment(rm1, PLAN, run=PLAIN_RUN, address=None)
    given: dict[str, list[str]] = {}
    for name in ("r0", "r1"):
        for service in files[f"{name}/docker-compose.yml"]["services"].values():
            devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
            for device in devices:
                given.setdefault(service["profiles"][0], []).extend(device["device_ids"])

    # The GPU of l40s-0 that is to train comes first; the trainer has the head's alone.
    assert given["a100-0"] == ["0", "1", "2", "3"]
    assert sorted(given["l40s-0"]) == [str(index) for index in range(1, 8)]
    assert sorted(given["l4-0"]) == [str(index) for index in range(8)]
    assert "l4-1" not in given


def test_generators_find_the_head_and_relay_only_where_the_trainer_is_far(rm1):
    files = deployment(rm1, PLAN, run=PLAIN_RUN, address=None)
    far, near = files["r1/gen-l4-0-0.yaml"], files["r0/gen-l40s-0-3.yaml"]

    assert (far["broker"], far["weights"]) == ("a100-0:7301", "a100-0:7304")
    assert far["relay_url"].startswith("http://l4-0:")
    assert "relay_url" not in near
    assert near["engine"]["tensor_parallel"] == 4
    ports = [int(address.rsplit(":", 1)[1]) for address in files["run.yaml"]["endpoints"]["generators"]]
    assert len(set(ports)) == 8
    assert files["run.yaml"]["algorithm"] == {"group_size": 8, "prompts_per_step": 128, "max_staleness": 1}


def test_batches_are_those_that_the_plan_counts_on(rm1):
    files = deployment(rm1, PLAN, run=PLAIN_RUN, address=None)
    for generation in rm1.score(PLAN).generation:
        each = generation.replicas
        stated = [
            document["engine"]
            for name, document in files.items()
            if name.split("/")[-1].startswith(f"gen-{each.node}-") and document["engine"]["tensor_parallel"] == each.tp
        ]
        assert [engine["max_concurrent_samples"] for engine in stated] == [generation.state.batch] * each.count


def test_pretend_generators_need_no_gpu_and_pretend_to_be_the_planned_one(rm1):
    run = {**PLAIN_RUN, "generator": {"engine": "emulated", "count": 3}}
    files = deployment(rm1, PLAN, run=run, address="127.0.0.1")

    assert "deploy" not in str(files["r1/docker-compose.yml"])
    assert files["r1/gen-l4-0-0.yaml"]["emulated"] == {"gpu": "L4"}
    assert all(address.startswith("127.0.0.1:") for address in files["run.yaml"]["endpoints"]["generators"])


def test_what_cannot_be_written_is_told(rm1, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        write_deployment(tmp_path, rm1, PLAN)
    spaced = Rm1(problem("tiny_02", "nodes=[{name: my box, gpu: H800, gpus: 8}]"))
    with pytest.raises(ConfigError, match=r"nodes.0.name: 'my box' cannot name a machine"):
        deployment(spaced, plan([("my box-0", 1, 4)], [("my box-0", 4)]), run=PLAIN_RUN, address=None)
    with pytest.raises(ConfigError, match="algorithm"):
        deployment(rm1, PLAN, run={**PLAIN_RUN, "algorithm": {"label": "grpo"}}, address=None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_accepts_each_sites_file(rm1, tmp_path):
    write_deployment(tmp_path / "out", rm1, PLAN)
    for site, machine, services in (("r0", "a100-0", 6), ("r0", "l40s-0", 4), ("r1", "l4-0", 4)):
        file = tmp_path / "out" / site / "docker-compose.yml"
        command = ["docker-compose", "-f", str(file), "--profile", machine, "config"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 0, told.stderr
        shown = yaml.safe_load(told.stdout)["services"]
        assert sum(each["profiles"] == [machine] for each in shown.values()) == services
