"""What `penstock doctor machine-NAME.yaml` finds before anything starts on a machine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from console.certs.authority import make_authority
from console.certs.issuing import issue
from console.certs.request import checked_request
from console.deploy.description import environment
from console.deploy.machine_check import check_machine, machine_command
from console.inspect.doctor import examine
from tests.helpers.otlp import collecting
from tests.helpers.ports import free_port
from tests.helpers.recorded_gpus import L4, Card, install_nvidia_smi

NAMES = {"run": "r1", "site": "far", "name": "l4-0", "hosts": ("l4-0",)}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an L4 machine that has all it needs."""
    for name in ("model", "certificate"):
        (tmp_path / name).mkdir()
    for variable, path in environment(str(tmp_path / "certificate")).items():
        monkeypatch.setenv(variable, path)
    authority = make_authority(tmp_path / "authority", name="Penstock", days=10, now=datetime.now(UTC))
    give_certificate(authority, tmp_path / "certificate", **NAMES)
    give_gpus(tmp_path, monkeypatch)
    return write(tmp_path)


def give_certificate(authority, out: Path, *, role: str = "generator", **names) -> None:
    for old in out.glob("*.pem"):
        old.unlink()
    request = checked_request([role], **names)
    issue(authority, request, validity=timedelta(hours=1), now=datetime.now(UTC), out=out)


def give_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = L4, count: int = 2) -> None:
    monkeypatch.setenv("PATH", install_nvidia_smi(folder / "bin", [Card(name=name)] * count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def write(folder: Path, **changes) -> Path:
    document = {
        "name": "l4-0",
        "run_id": "r1",
        "site": "far",
        "role": "generator",
        "host": "l4-0",
        "readable": {"model.path": str(folder / "model")},
        "writable": {"dir": str(folder / "runs")},
        "gpu": "L4",
        "gpus": 2,
        "gpu_memory_gb": 24.0,
        **changes,
    }
    path = folder / "machine-l4-0.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_machine_that_has_all_it_needs_passes(machine: Path) -> None:
    assert check_machine(machine) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"run": "other"}, "not of run r1; issue the one for l4-0 of run r1"),
        ({"site": "home"}, "not of site far"),
        ({"role": "reward"}, "not of the role generator"),
        ({"name": "l4-1"}, "is the certificate of 'l4-1'"),
        ({"hosts": ("elsewhere",)}, "does not name l4-0, where other machines ask"),
    ],
)
def test_a_certificate_of_another_run_or_machine_is_refused(machine: Path, changed: dict, said: str) -> None:
    authority = make_authority(machine.parent / "second", name="Penstock", days=10, now=datetime.now(UTC))
    give_certificate(authority, machine.parent / "certificate", **{**NAMES, **changed})
    problems = check_machine(machine)
    assert len(problems) == 1
    assert problems[0].startswith("l4-0: PENSTOCK_TLS_CERT: ")
    assert said in problems[0]


def test_a_machine_that_scores_needs_that_role_beside_the_generators(machine: Path) -> None:
    authority = make_authority(machine.parent / "second", name="Penstock", days=10, now=datetime.now(UTC))
    scores = write(machine.parent, more_roles=["trainer", "reward"])
    give_certificate(authority, machine.parent / "certificate", **NAMES)
    assert "not of the role trainer and reward as well; issue the one for l4-0" in check_machine(scores)[0]
    request = checked_request(["generator", "trainer", "reward"], **NAMES)
    for old in (machine.parent / "certificate").glob("*.pem"):
        old.unlink()
    issue(authority, request, validity=timedelta(hours=1), now=datetime.now(UTC), out=machine.parent / "certificate")
    assert check_machine(scores) == []


def test_each_thing_that_is_missing_is_one_line(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = machine.parent
    (folder / "certificate" / "cert.pem").unlink()
    (folder / "model").rmdir()
    (folder / "file").touch()
    give_gpus(folder, monkeypatch, count=1)
    problems = check_machine(write(folder, writable={"dir": str(folder / "file" / "runs")}))
    assert [line.split(": ")[1] for line in problems] == ["PENSTOCK_TLS_CERT", "model.path", "dir", "gpus"]
    assert problems[-1].endswith(
        "the plan uses 2 L4, and nvidia-smi shows 1; correct `nodes` in the problem and plan again"
    )


def test_object_storage_is_tried_and_nothing_stays_there(machine: Path) -> None:
    folder = machine.parent
    (folder / "model" / "config.json").write_text("{}")
    (folder / "file").touch()
    stored = {"model.path": f"file://{folder}/model"}
    kept = {"run.checkpoint_storage": f"file://{folder}/checkpoints"}
    assert check_machine(write(folder, readable=stored, writable=kept)) == []
    assert [*(folder / "checkpoints").iterdir()] == []
    refused = {"run.checkpoint_storage": f"file://{folder}/file/checkpoints"}
    problems = check_machine(write(folder, readable={"model.path": f"file://{folder}/none"}, writable=refused))
    assert [line.split(": ")[1] for line in problems] == ["model.path", "run.checkpoint_storage"]


def test_smaller_gpus_than_planned_are_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(machine.parent, monkeypatch)
    problems = check_machine(write(machine.parent, gpu="L40S", gpu_memory_gb=48.0))
    assert len(problems) == 2
    assert "the plan counts on L40S of 48 GB, and GPU 0 is a NVIDIA L4 of 24 GB" in problems[0]


def test_without_tls_and_gpus_neither_is_asked_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TLS_CERT")
    assert check_machine(write(machine.parent, has_certificates=False, gpus=0)) == []
    monkeypatch.delenv("PENSTOCK_TLS_KEY")
    monkeypatch.delenv("PENSTOCK_TLS_CA")
    assert "PENSTOCK_TLS_CERT: not set" in check_machine(write(machine.parent, gpus=0))[0]


def test_a_collector_of_traces_that_is_away_is_a_warning(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine_command(machine) == 0
    assert capsys.readouterr().err == ""
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    assert machine_command(machine) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: warning: collector of traces {address}: takes no spans: UNAVAILABLE: ")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.target}")
        assert machine_command(machine) == 0
        assert capsys.readouterr().err == ""
        # As on a machine of any other kind.
        [finding] = [each for each in examine() if "collector" in each.text]
        assert (finding.text, finding.is_ok) == (f"collector of traces http://{collector.target}: takes spans", True)
