"""Every command refuses half of its credentials in one line for each thing that is missing, with exit status 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.console import ROOT, document, penstock, penstock_in_process, write_document, write_model

AWAY = "127.0.0.1:1"
MISSING = ("PENSTOCK_TLS_KEY: missing beside PENSTOCK_TLS_CERT", "PENSTOCK_TLS_CA: missing beside PENSTOCK_TLS_CERT")


def arguments_of(command: str, folder: Path) -> list[str]:
    generator = {"run_id": "r", "model_path": str(write_model(folder / "m")), "cache_dir": str(folder)}
    generator["engine"] = {"engine": "emulated"}  # type: ignore[assignment]
    if command == "run":
        return ["run", str(write_document(folder, document(folder)))]
    if command == "node":
        node = {"node_id": "n", "gpu": "L4", "scheduler": AWAY, "dir": str(folder / "n"), "generator": generator}
        path = folder / "node.yaml"
        path.write_text(yaml.safe_dump(node))
        return ["node", str(path)]
    overrides = {
        "broker": ["redis_url=memory://"],
        "scheduler": [],
        "trainer": ["state_dir=null"],
        "generator": [
            f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in generator.items()
        ],
    }
    if command in overrides:
        return ["serve", command, *overrides[command], "--listen", "127.0.0.1:0"]
    return [*command.split(), "--broker", AWAY]


def assert_named(stderr: str) -> None:
    """Each thing that is missing has a line of its own, and nothing came with a traceback."""
    lines = [line for line in stderr.splitlines() if line.startswith("penstock: ")]
    assert [line.removeprefix("penstock: ").split(";")[0] for line in lines] == list(MISSING)
    assert "Traceback" not in stderr


@pytest.mark.parametrize("command", ["node", "generator"])
def test_half_a_configuration_ends_a_process_in_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PENSTOCK_TLS_CERT", str(tmp_path / "cert.pem"))
    told = penstock(*arguments_of(command, tmp_path), cwd=tmp_path)
    assert told.returncode == 2, told.stderr
    assert_named(told.stderr)


@pytest.mark.parametrize(
    "command", ["broker", "scheduler", "trainer", "run", "status r", "audit r", "runs list", "runs show r"]
)
def test_half_a_configuration_ends_a_command_in_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PENSTOCK_TLS_CERT", str(tmp_path / "cert.pem"))
    told = penstock_in_process(*arguments_of(command, tmp_path), cwd=tmp_path)
    assert told.exit_code == 2, told.output
    assert isinstance(told.exception, SystemExit)
    assert_named(told.stderr)


def test_a_health_check_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TLS_CERT", str(tmp_path / "cert.pem"))
    command = (sys.executable, "-m", "penstock.healthcheck", AWAY)
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (told.returncode, [line.split(";")[0] for line in told.stderr.splitlines()]) == (2, list(MISSING))


@pytest.mark.parametrize("arguments", [["--listen", "0.0.0.0:0"], ["metrics_listen=0.0.0.0:9"]])
def test_a_service_that_others_would_reach_in_plain_text_does_not_start(tmp_path: Path, arguments: list[str]) -> None:
    told = penstock("serve", "scheduler", *arguments, cwd=tmp_path)
    assert told.returncode == 2
    assert [line.split("reached")[0] for line in told.stderr.splitlines()] == [
        f"penstock: {'listen' if arguments[0] == '--listen' else 'metrics_listen'}: {arguments[-1].split('=')[-1]} is "
    ]


def test_a_run_whose_services_others_would_reach_in_plain_text_is_refused_before_it_starts(tmp_path: Path) -> None:
    path = write_document(tmp_path, document(tmp_path))
    told = penstock_in_process("run", str(path), "listen.trainer=0.0.0.0:7304", cwd=tmp_path)
    assert told.exit_code == 2
    assert "listen.trainer: 0.0.0.0:7304 is reached from other machines, and would be in plain text" in told.stderr
    assert not (tmp_path / "runs").exists()
    insecure = ("listen.trainer=0.0.0.0:7304", "insecure=true")
    allowed = penstock_in_process("run", str(path), *insecure, "--dry-run", cwd=tmp_path)
    assert "listen.trainer: 0.0.0.0:7304 is in plain text (insecure: true)" in allowed.output
