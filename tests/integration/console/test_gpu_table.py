"""GPUs as a person sees them: a dry run, a refused run and `penstock doctor`, on machines with recorded GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from console.config.config import parse_run_config
from console.inspect import doctor
from tests.helpers.console import document, penstock_in_process, write_document
from tests.helpers.recorded_gpus import Card, Process, install_broken_nvidia_smi, install_nvidia_smi, uuid_of


@pytest.fixture(autouse=True)
def _alone_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No outer pool, and no claims of other runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def configuration(folder: Path, *, processes: int) -> str:
    value = document(folder)
    value["trainer"] = {"device": "cuda", "processes": processes}
    return str(write_document(folder, value))


def test_a_dry_run_shows_who_gets_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Card(used_mib=61300, processes=[Process(pid=4711, mib=61234)])
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", [Card(), busy, Card(), Card()]))
    result = penstock_in_process("run", configuration(tmp_path, processes=2), "--dry-run", cwd=tmp_path)

    assert result.exit_code == 0, result.output
    table = [" ".join(line.split()) for line in result.stdout.splitlines() if line.startswith("# ")]
    assert "# 0 NVIDIA H100 80GB HBM3 80 trainer, rank 0" in table
    assert "# 1 NVIDIA H100 80GB HBM3 80 in use: python3 (process 4711, 61234 MiB)" in table
    assert "# 3 NVIDIA H100 80GB HBM3 80 free" in table
    # The output stays a configuration.
    assert parse_run_config(yaml.safe_load(result.stdout), source="dry run").run.id == "r1"


def test_a_run_that_does_not_fit_is_refused_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", [Card(), Card(used_mib=40000)]))
    path = configuration(tmp_path, processes=2)
    result = penstock_in_process("run", path, cwd=tmp_path)

    assert result.exit_code == 2
    first, *table = result.stderr.splitlines()
    assert first == (
        f"penstock: {path}: devices: trainer needs 2 GPUs (trainer.processes: 2), 1 of 2 left (1 in use by others); "
        "lower trainer.processes, or name GPUs to be shared: devices.trainer=[...]"
    )
    assert any("in use: 40000 MiB by processes that cannot be seen from here" in line for line in table)
    assert table[-1].split()[1:] == ["none", "trainer", "needs", "2"]
    assert not (tmp_path / "runs").exists(), "something was started"


def test_a_driver_that_does_not_answer_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", install_broken_nvidia_smi(tmp_path / "bin"))
    result = penstock_in_process("run", configuration(tmp_path, processes=1), "--dry-run", cwd=tmp_path)
    assert result.exit_code == 0
    assert "# note: GPUs are not assigned to processes: nvidia-smi: Failed to initialize NVML" in result.stdout


def test_the_doctor_shows_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Card(used_mib=61300, processes=[Process(pid=4711, mib=61234)])
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", [Card(), busy]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid_of(1))
    texts = {finding.text: finding.is_ok for finding in doctor.examine()}
    (found,) = (text for text in texts if text.startswith("GPU: "))
    assert found.startswith("GPU: 2 found, 1 free\n")
    assert "python3 (process 4711, 61234 MiB)" in found
    assert texts["CUDA_VISIBLE_DEVICES gives a run these GPUs: 1"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    texts = {finding.text: finding.is_ok for finding in doctor.examine()}
    assert texts["CUDA_VISIBLE_DEVICES: there is no GPU 5; nvidia-smi shows 0, 1"] is False


def test_the_doctor_says_why_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", install_broken_nvidia_smi(tmp_path / "bin"))
    texts = [finding.text for finding in doctor.examine()]
    assert "GPU: nvidia-smi: Failed to initialize NVML: Driver/library version mismatch" in texts
