"""The GPUs of a machine that follows a plan, whose indices count what the process is given."""

import pytest
import structlog

from console.node.config import NodeConfig
from console.node.gpus import own_gpus, visible
from penstock.config import ConfigError
from services.generator.engines.vllm.config import VllmEngineConfig
from tests.helpers.recorded_gpus import Card, install_nvidia_smi, uuid_of


def config(engine="vllm", gpus=2):
    generator = {"run_id": "r", "model_path": "/m", "cache_dir": "/c", "listen": "0.0.0.0:7400"}
    machine = {"node_id": "a", "gpu": "H100", "gpus": gpus, "scheduler": "s:1", "dir": "/d"}
    return NodeConfig.model_validate({**machine, "generator": {**generator, "engine": {"engine": engine}}})


@pytest.fixture(autouse=True)
def _machine_of_four_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(VllmEngineConfig, "decodes_on_gpus", classmethod(lambda kind: True))
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", [Card()] * 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")


def test_a_plan_counts_the_gpus_that_the_process_is_given():
    gpus = own_gpus(config())
    assert visible((1,), gpus)["CUDA_VISIBLE_DEVICES"] == uuid_of(3)
    assert visible((0, 1), gpus)["CUDA_VISIBLE_DEVICES"] == f"{uuid_of(2)},{uuid_of(3)}"


def test_more_gpus_than_it_is_given_are_refused():
    with pytest.raises(ConfigError, match="gpus: 3, but this process is given 2 by nvidia-smi; lower it"):
        own_gpus(config(gpus=3))


def test_gpus_of_another_kind_than_planned_for_are_reported():
    with structlog.testing.capture_logs() as said:
        own_gpus(config().model_copy(update={"gpu": "L4"}))
        own_gpus(config().model_copy(update={"gpu": "our-h100"}))
        own_gpus(config())
    told = [(entry["gpu"], entry["planned"]) for entry in said if "other GPUs than planned" in entry["event"]]
    assert told == [("H100", "L4")] * 2


def test_emulated_gpus_are_not_looked_for():
    assert own_gpus(config(engine="emulated", gpus=8)) == ()


def test_without_nvidia_smi_the_plans_indices_are_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert visible((0, 1), own_gpus(config())) == {"CUDA_VISIBLE_DEVICES": "0,1"}
