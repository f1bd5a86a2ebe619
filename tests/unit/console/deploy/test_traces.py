"""Every service of a deployment is told where spans go and how logs look; no file has what the collector is shown."""

from __future__ import annotations

import re

import pytest
import yaml

from console.deploy.configurations import PLAIN_RUN
from penstock.config import ConfigError
from tests.helpers.plans.problems import plan
from tests.unit.console.deploy.deployed import deployed, spread_model

ENDPOINT = "https://traces.example:4317"
TRACING = {"ratio": 0.25, "otlp_endpoint": ENDPOINT, "otlp_certificate": "/run/secrets/traces.pem"}
TOLD = {
    "OTEL_TRACES_SAMPLER_ARG": "0.25",
    "PENSTOCK_TRACE_RUN": "r7",
    "OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT,
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "/run/secrets/traces.pem",
}
ONE = plan([("l4-0", 2, 4)], [("a100-0", 4)])


def files_for(engine, **tracing):
    run = PLAIN_RUN | {"run": {"id": "r7"}, "tracing": TRACING | tracing, "environment": "guess:Guess"}
    run |= {"log": {"format": "json"}}
    more = {"head_address": "head.example"} if engine == "kubernetes" else {}
    return deployed(spread_model(), of=ONE, run=run, engine=engine, **more)


def test_containers_have_it_in_their_environment_and_a_place_for_the_secret():
    files = files_for("compose")
    services = {
        name: each
        for path, content in files.items()
        if path.endswith("docker-compose.yml")
        for name, each in content["services"].items()
    }
    assert {"broker", "scheduler", "reward", "trainer", "environment", "run"} < services.keys()
    for name, service in services.items():
        if name != "redis":
            assert service["environment"].items() >= TOLD.items(), name
        if "serve" in service["command"][:2]:
            assert service["command"][-4:] == ["--log-level", "info", "--log-format", "json"], name
    for path, content in files.items():
        if path.endswith(("secrets.env", "environment.env")):
            assert "\n# OTEL_EXPORTER_OTLP_HEADERS=" in content, path


def test_pods_have_it_too_and_the_secret_by_a_secret():
    files = files_for("kubernetes")
    pods = [
        each["spec"]["template"]["spec"]
        for path, content in files.items()
        if "/pods-" in path
        for each in content
        if each["kind"] in ("Deployment", "Job")
    ]
    containers = [each for pod in pods for each in (*pod["initContainers"], *pod["containers"])]
    told = [each for each in containers if each["name"] != "redis" and "envFrom" in each]
    assert {"check", "broker", "trainer", "environment", "node", "run"} <= {each["name"] for each in told}
    for each in told:
        assert {pair["name"]: pair["value"] for pair in each["env"]}.items() >= TOLD.items(), each["name"]
        [source] = each["envFrom"]
        assert source["secretRef"]["name"] in ("secrets", "environment")
    assert "OTEL_EXPORTER_OTLP_HEADERS" in files["README.md"]


@pytest.mark.parametrize("engine", ["slurm", "skypilot"])
def test_machines_without_containers_export_it(engine):
    files = files_for(engine)
    for path, content in files.items():
        if path.endswith("machine.sh"):
            exports = dict(re.findall(r"^export (OTEL_\w+|PENSTOCK_TRACE_RUN)=(.*)$", content, flags=re.M))
            assert exports == TOLD, path
    settings = "settings.env" if engine == "slurm" else "README.md"
    assert "OTEL_EXPORTER_OTLP_HEADERS=" in files[settings]
    home = yaml.safe_load(yaml.safe_dump(next(each for path, each in files.items() if path.endswith("/run.yaml"))))
    assert home["tracing"] == TRACING


def test_one_that_records_nothing_says_so_and_what_names_a_secret_is_refused():
    scripts = [content for path, content in files_for("slurm", enabled=False).items() if path.endswith("machine.sh")]
    assert all("export OTEL_SDK_DISABLED=true\n" in each and "ENDPOINT" not in each for each in scripts)
    with pytest.raises(ConfigError, match=r"no place for a secret: set OTEL_EXPORTER_OTLP_HEADERS"):
        files_for("compose", otlp_endpoint="https://me:sesame@traces.example:4317")
    for wrong in ("traces.example:4317", "https://traces.example", "http://traces.example:4318/v1/traces"):
        with pytest.raises(ConfigError, match="write http://HOST:PORT, or https://HOST:PORT"):
            files_for("compose", otlp_endpoint=wrong)
    over_http = files_for("slurm", otlp_endpoint="https://traces.example/otlp", otlp_protocol="http/protobuf")
    scripts = [content for path, content in over_http.items() if path.endswith("machine.sh")]
    assert scripts
    assert all("export OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf\n" in each for each in scripts)
