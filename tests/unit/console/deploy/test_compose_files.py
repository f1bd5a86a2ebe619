"""What the repository's compose file and those of `plan --deploy` promise, read without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.config.config import RunConfig
from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import deployment
from console.serve.serve import ServiceKind, _config_model
from penstock.process.grace_periods import LAST_ACT_S, STOP_GRACE_S
from services.scheduler.cost_model.reference import CostModel
from tests.helpers.console import ROOT
from tests.helpers.plans.problems import plan, problem

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
KINDS = ("broker", "scheduler", "reward", "trainer", "generator", "redis", "run")


def deployed() -> dict[str, dict[str, Any]]:
    files = deployment(
        CostModel(problem("tiny_04")),
        plan([("l4-0", 2, 4)], [("a100-0", 4)]),
        run=PLAIN_RUN,
        address=None,
        folder=Path("/out"),
    )
    found: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        if name.endswith("docker-compose.yml"):
            assert isinstance(content, dict)
            found |= content["services"]
    return found


def grace_s(service: dict[str, Any]) -> float:
    match = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    assert match is not None
    return float(match[1])


def kind_of(name: str) -> str:
    return next((kind for kind in ("node", "trainer") if name.startswith(kind)), name)


@pytest.mark.parametrize("kind", KINDS)
def test_grace_exceeds_what_a_service_asks_for_its_last_act(kind: str) -> None:
    assert grace_s(SERVICES[kind]) == STOP_GRACE_S[kind]
    assert STOP_GRACE_S[kind] > LAST_ACT_S.get(kind, 0.0) + 10


def test_grace_in_a_deployment_comes_from_the_same_place() -> None:
    services = deployed()
    services = {name: service for name, service in services.items() if not name.startswith("check-")}
    apart = {"critic", "environment", "generator", "scorer"}
    assert {kind_of(name) for name in services} == {*STOP_GRACE_S} - apart | {"node"}
    for name, service in services.items():
        assert grace_s(service) == STOP_GRACE_S[kind_of(name)], name


@pytest.mark.parametrize("services", [SERVICES, deployed()], ids=["compose", "deployment"])
def test_services_come_back_and_have_limits(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        kept = "no" if name.startswith("check-") else "on-failure" if name in ("run", "prepare") else "unless-stopped"
        assert service["restart"] == kept, name
        assert service["mem_limit"], name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pids_limit"] <= 4096
        assert service["logging"]["options"] == {"max-size": "64m", "max-file": "5"}
    assert "--resume-or-start" in services["run"]["command"]


def test_every_image_takes_options_for_pip_and_every_service_its_credentials() -> None:
    for name, service in SERVICES.items():
        if name != "redis":
            assert service["build"]["args"]["PIP_ARGS"] == "${PIP_ARGS:-}", name
    for name in set(KINDS) - {"redis"}:
        assert {"PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE", "PENSTOCK_TLS_CA"} <= set(SERVICES[name]["environment"]), name
    for name in ("redis", "broker"):
        assert "PENSTOCK_REDIS_PASSWORD_FILE" in SERVICES[name]["environment"]
    for name, service in deployed().items():
        if name != "redis":
            assert service["env_file"] == "secrets.env"


def test_the_reward_worker_has_the_generators_tokenizer_once_it_is_made() -> None:
    reward, generator = (
        yaml.safe_load((ROOT / "deploy" / "compose" / f"{kind}.yaml").read_text()) for kind in ("reward", "generator")
    )
    assert reward["tokenizer_path"] == generator["model_path"]
    assert SERVICES["reward"]["depends_on"]["prepare"] == {"condition": "service_completed_successfully"}


@pytest.mark.parametrize("kind", ["broker", "scheduler", "reward", "trainer", "generator"])
def test_metrics_can_be_scraped_from_other_containers(kind: str) -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "compose" / f"{kind}.yaml").read_text())
    assert settings["metrics_listen"] == "0.0.0.0:9464"


@pytest.mark.parametrize("kind", ["broker", "scheduler", "reward", "trainer", "generator", "run"])
def test_plain_text_is_allowed_inside_the_network_of_compose(kind: str) -> None:
    path = ROOT / "deploy" / "compose" / f"{kind}.yaml"
    model = RunConfig if kind == "run" else _config_model(ServiceKind(kind))
    assert model.model_validate(yaml.safe_load(path.read_text())).insecure  # type: ignore[attr-defined]
