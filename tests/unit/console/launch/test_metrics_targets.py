"""What Prometheus is told of the services of a run: where their metrics are, for as long as they are to be up."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest

from console.config.run_folder import RunFolder
from console.launch.metrics_targets import TARGETS_VARIABLE, MetricsTargets, run_targets
from penstock.network.metrics_server import serve_metrics
from penstock.security import NO_SECURITY


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "math-7b")
    folder.create()
    return folder


def test_the_file_names_what_is_to_be_up_and_is_gone_afterwards(folder: RunFolder) -> None:
    targets = MetricsTargets(folder, run_targets(folder))
    assert targets.path == folder.path.parent / "math-7b.prometheus.json"
    targets.add("generator-0", "generator", "0.0.0.0:9464", serves_tls=False)
    targets.add("environment", "environment", "127.0.0.1:7001", serves_tls=True)
    generator = {"job": "penstock-generator", "instance": "math-7b/generator-0"}
    environment = {"job": "penstock-environment", "instance": "math-7b/environment", "__scheme__": "https"}
    assert json.loads(targets.path.read_text()) == [
        {"targets": ["127.0.0.1:9464"], "labels": generator},
        {"targets": ["127.0.0.1:7001"], "labels": environment},
    ]
    targets.remove(["generator-0", "never started"])
    assert [group["labels"] for group in json.loads(targets.path.read_text())] == [environment]
    targets.clear()
    assert not targets.path.exists()


def test_a_machine_of_a_plan_has_its_own_file_or_the_one_that_its_run_says(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = MetricsTargets(folder)
    alone.add("generator-0", "generator", "127.0.0.1:7001", serves_tls=False)
    [group] = json.loads((folder.path / "prometheus.json").read_text())
    assert group["labels"]["instance"] == "math-7b/generator-0"

    told = run_targets(RunFolder(folder.path.with_name("run")), "node-a")
    monkeypatch.setenv(TARGETS_VARIABLE, str(told))
    MetricsTargets(folder).add("generator-0", "generator", "127.0.0.1:7001", serves_tls=False)
    [group] = json.loads((folder.path.parent / "run.node-a.prometheus.json").read_text())
    assert group["labels"]["instance"] == "run.node-a/generator-0"


def test_a_port_stays_the_services_own_and_nobody_else_gets_it(folder: RunFolder) -> None:
    targets = MetricsTargets(folder)
    addresses = {name: targets.address_of(name) for name in ("broker", "trainer")}
    assert len(set(addresses.values())) == 2
    assert targets.address_of("broker") == addresses["broker"]
    port = int(addresses["broker"].rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    targets.add("broker", "broker", addresses["broker"], serves_tls=False)
    targets.add("trainer", "trainer", addresses["trainer"], serves_tls=False)
    serve_metrics(addresses["broker"], NO_SECURITY)
    with urllib.request.urlopen(f"http://{addresses['broker']}/metrics", timeout=10) as answer:
        assert b"# TYPE" in answer.read()
    targets.clear()
