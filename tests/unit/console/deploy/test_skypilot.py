"""SkyPilot's job groups of `plan --deploy`, parsed by SkyPilot itself where that is installed, apart from this."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import deployment, write_deployment
from penstock.config import ConfigError
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.service_placement.service_places import with_center
from tests.helpers.plans.problems import plan, problem

PYTHON = os.environ.get("PENSTOCK_SKYPILOT_PYTHON")
PARSE = """
import json, os
from sky.utils import dag_utils
found = {}
given = [("PENSTOCK_DATA", "/tmp"), ("PENSTOCK_HEAD", "192.0.2.7")]
for site, settings in (("r0", given[:1]), ("r1", given), ("r1", given[:1])):
    os.chdir(f"../{site}")
    try:
        tasks = dag_utils.load_job_group_from_yaml("site.yaml", settings).tasks
        found[f"{site} {len(settings)}"] = {each.name: [each.num_nodes, *map(str, each.resources)] for each in tasks}
    except ValueError as error:
        found[f"{site} {len(settings)}"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    of = plan([("l40s-0", 1, 4), ("l4-0", 2, 4)], [("a100-0", 4)])
    write_deployment(tmp_path / "out", CostModel(problem("tiny_04")), of, engine="skypilot")
    return tmp_path / "out"


def tasks(folder: Path, site: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((folder / site / "site.yaml").read_text()))


def test_a_site_is_a_group_that_asks_for_what_only_its_user_knows(folder: Path) -> None:
    header, head, others = tasks(folder, "r0")
    assert header == {"name": "r0", "execution": "parallel", "primary_tasks": ["head"]}
    assert head["resources"]["accelerators"] == {"A100-80GB": 8}
    assert head["resources"]["ports"] == [7301, 7304, 7305, 7306]
    assert head["envs"] == {"PENSTOCK_DATA": None}
    assert others["name"] == "l40s-nodes"
    header, far = tasks(folder, "r1")
    assert (far["num_nodes"], far["envs"]) == (2, {"PENSTOCK_DATA": None, "PENSTOCK_HEAD": None})
    assert far["file_mounts"]["/etc/penstock/l4-1"] == "../certificates/l4-1"
    assert 'peers=("a100-0=$PENSTOCK_HEAD")' in far["run"]
    told = subprocess.run(["bash", str(folder / "r1" / "setup.sh")], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr.split(":")[:2]) == (2, ["penstock", " setup.sh"])


def test_machines_write_the_names_of_the_plan_before_they_start(folder: Path, tmp_path: Path) -> None:
    (_, far) = tasks(folder, "r1")
    hosts = tmp_path / "hosts"
    stubs = f"""
    sudo() {{ shift 2; cat >>{hosts}; }}
    getent() {{ echo "192.0.2.9 STREAM $2"; }}
    bash() {{ echo "$PENSTOCK_MACHINE $*"; }}
    """
    script = stubs + far["run"].replace("exec bash", "bash")
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "PENSTOCK_HEAD": "head.example"}
    command = ["bash", "-c", script]
    told = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=30, check=True
    )
    assert hosts.read_text().splitlines() == ["10.0.0.1 l4-0", "10.0.0.2 l4-1", "192.0.2.9 a100-0"]
    assert told.stdout.splitlines() == ["l4-1 machine.sh check", "l4-1 machine.sh start"]


def test_several_machines_that_train_are_refused() -> None:
    of = plan([("l4-0", 2, 4)], [("a100-0", 8), ("l40s-0", 8)])
    with pytest.raises(ConfigError, match="a100-0 and l40s-0 train, which takes a file system"):
        deployment(CostModel(problem("tiny_04")), of, engine="skypilot", run=PLAIN_RUN, folder=Path("/out"))


def test_a_machine_without_gpus_is_rented_for_broker_and_scheduler(tmp_path: Path) -> None:
    stated = problem("tiny_04", "hosts=[{name: my-desk, region: r0}]")
    of = with_center(stated, plan([("l4-0", 2, 4)], [("a100-0", 4)]), None)
    write_deployment(tmp_path / "out", CostModel(stated), of, engine="skypilot")
    (_, head, *others), (_, far) = (tasks(tmp_path / "out", site) for site in ("r0", "r1"))
    (desk,) = [task for task in others if task["name"] == "my-desk-nodes"]
    assert "accelerators" not in desk["resources"]
    assert (desk["resources"]["ports"], head["resources"]["ports"]) == ([7301, 7306], [7304, 7305])
    assert 'peers=("a100-0=$PENSTOCK_HEAD" "my-desk-0=$PENSTOCK_MY_DESK_0")' in far["run"]
    assert far["envs"] == dict.fromkeys(("PENSTOCK_DATA", "PENSTOCK_HEAD", "PENSTOCK_MY_DESK_0"))
    assert '"my-desk-0=my-desk-nodes-0.r0"' in head["run"]
    script = (tmp_path / "out" / "r0" / "machine.sh").read_text()
    assert "start/my-desk-0) cd . && commands=('penstock node node-my-desk-0.yaml')" in script
    assert "--env PENSTOCK_HEAD=ADDRESS --env PENSTOCK_MY_DESK_0=ADDRESS" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    PYTHON is None, reason="PENSTOCK_SKYPILOT_PYTHON names no Python with SkyPilot (pip install skypilot==0.14.1)"
)
def test_skypilot_reads_each_site_and_asks_for_the_address_of_the_head(folder: Path, tmp_path: Path) -> None:
    for name in ("a100-0", "l40s-0", "l4-0", "l4-1"):
        (folder / "certificates" / name).mkdir(parents=True)
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(PYTHON), "-c", PARSE]
    told = subprocess.run(
        command, cwd=folder / "r0", env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert {name: task[0] for name, task in found["r0 1"].items()} == {"head": 1, "l40s-nodes": 1}
    assert "{'A100-80GB': 8}" in found["r0 1"]["head"][1]
    assert found["r1 2"]["l4-nodes"][0] == 2
    assert "PENSTOCK_HEAD" in found["r1 1"]
