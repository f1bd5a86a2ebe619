"""The GPUs of a whole run: what its configuration asks for, what its processes are shown, and what other runs see."""

import os
import subprocess
import sys

import pytest

from console.config.config import parse_run_config
from console.config.run_folder import RunFolder
from console.devices.device_table import machine_table, run_table, summary_line
from console.devices.gpu_claims import GpuClaims
from console.devices.run_devices import is_torch_built_for_cuda, survey
from console.launch.launcher import Launcher
from console.launch.supervisor import ServiceFailedError
from penstock.config import ConfigError
from penstock.security import Security
from services.generator.engines.vllm.config import VllmEngineConfig
from tests.helpers.recorded_gpus import A100, Card, Process, install_nvidia_smi, uuid_of


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this a machine with these GPUs, a GPU build of vLLM and claims of its own."""
    monkeypatch.setattr(VllmEngineConfig, "decodes_on_gpus", classmethod(lambda kind: True))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*cards):
        monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", cards))

    return install


def config(*, trains_on="cuda", processes=1, **sections):
    document = {
        "run": {"id": "r1"},
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "generator": {"engine": "vllm"},
        "trainer": {"device": trains_on, "processes": processes},
    }
    return parse_run_config(document | sections, source="test")


def shown(run, process):
    return run.environment(process)["CUDA_VISIBLE_DEVICES"]


def test_each_process_is_shown_its_own_gpus_and_the_others_none(machine):
    machine(*[Card()] * 8)
    generator = {"engine": "vllm", "count": 2, "tensor_parallel": 2}
    run = survey(config(processes=4, generator=generator))

    assert run.allocation.problems == []
    assert shown(run, "trainer") == ",".join(uuid_of(index) for index in range(4))
    assert shown(run, "generator-0") == f"{uuid_of(4)},{uuid_of(5)}"
    assert shown(run, "generator-1") == f"{uuid_of(6)},{uuid_of(7)}"
    assert shown(run, "scheduler") == shown(run, "reward") == ""
    assert summary_line(run) == "GPUs: generator-0 4, 5; generator-1 6, 7; trainer 0, 1, 2, 3"
    assert list(run.types.values()) == [8]


def test_scorers_have_gpus_of_their_own(machine):
    machine(*[Card()] * 4)
    apart = {"algorithm": {"kl_coefficient": 0.1, "reference": "service"}, "scorers": 2}
    run = survey(config(**apart))
    assert run.allocation.problems == []
    owners = ("generator-0", "trainer", "scorer-0", "scorer-1")
    assert len({shown(run, process) for process in owners}) == 4
    assert shown(survey(config(**apart, devices={"scorers": [3, 0]})), "scorer-0") == uuid_of(3)
    with pytest.raises(ConfigError, match=r"devices\.scorers: names 1 GPUs; scorers is 2"):
        survey(config(**apart, devices={"scorers": [3]}))


def test_a_critic_has_a_gpu_of_its_own(machine):
    machine(*[Card()] * 3)
    apart = {"algorithm": {"name": "ppo", "critic": "service"}}
    run = survey(config(**apart))
    assert run.allocation.problems == []
    assert len({shown(run, process) for process in ("generator-0", "trainer", "critic")}) == 3
    sharded = survey(config(**apart, generator={"engine": "emulated"}, devices={"critic": [2, 0]}))
    assert shown(sharded, "critic") == f"{uuid_of(2)},{uuid_of(0)}"


def test_pipeline_stages_have_gpus_of_their_own(machine):
    machine(*[Card()] * 8)
    run = survey(config(generator={"engine": "vllm", "tensor_parallel": 2, "pipeline_parallel": 3}))
    assert [device.index for device in run.allocation.devices["generator-0"]] == ["0", "1", "2", "3", "4", "5"]
    assert [device.index for device in run.allocation.devices["trainer"]] == ["6"]


def test_a_run_on_cpus_is_left_alone(machine):
    machine(Card())
    assert survey(config(trains_on="cpu", generator={"engine": "emulated"})) is None
    assert not is_torch_built_for_cuda()
    assert survey(config(trains_on="auto", generator={"engine": "transformers"})) is None


def test_a_machine_without_nvidia_smi_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert survey(config(generator={"engine": "emulated"})) is None


def test_processes_elsewhere_need_nothing_here(machine):
    machine(Card())
    endpoints = {"trainer": "far:1", "generators": ["far:2"]}
    assert survey(config(endpoints=endpoints)) is None


def test_a_trainer_that_may_use_cpus_does_where_no_gpu_is_given(machine, monkeypatch):
    machine(Card())
    monkeypatch.setattr("console.devices.run_devices.is_torch_built_for_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert survey(config(trains_on="auto", generator={"engine": "emulated"})).allocation.problems == []
    assert survey(config(trains_on="cuda", generator={"engine": "emulated"})).allocation.problems != []


def test_the_table_shows_who_has_what_and_who_has_nothing(machine):
    busy = Card(processes=[Process(pid=4711, mib=61234)], used_mib=61300)
    machine(Card(), busy, Card(), Card())
    run = survey(config(processes=2, generator={"engine": "vllm", "count": 2}))
    head, line, *rows = run_table(run)

    assert head.split() == ["GPU", "device", "GiB", "process"]
    assert set(line.strip()) == {"─"}
    assert [" ".join(row.split()) for row in rows] == [
        "0 NVIDIA H100 80GB HBM3 80 trainer, rank 0",
        "1 NVIDIA H100 80GB HBM3 80 in use: python3 (process 4711, 61234 MiB)",
        "2 NVIDIA H100 80GB HBM3 80 trainer, rank 1",
        "3 NVIDIA H100 80GB HBM3 80 generator-0",
        "none generator-1 needs 1",
    ]


def test_the_table_says_what_was_not_given(machine, monkeypatch):
    machine(Card(), Card())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run = survey(config(generator={"engine": "emulated"}))
    assert "not given: outside CUDA_VISIBLE_DEVICES" in run_table(run)[2]
    assert shown(run, "trainer") == uuid_of(1)


def test_what_cuda_visible_devices_gets_wrong_is_one_line(machine, monkeypatch):
    machine(Card())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES: there is no GPU 9"):
        survey(config())


def test_mig_instances_do_for_single_processes_and_not_for_nccl(machine):
    machine(Card(name=A100, instances=[("3g.20gb", 19968), ("3g.20gb", 19968)]))
    run = survey(config())
    assert (shown(run, "trainer"), shown(run, "generator-0")) == (uuid_of(0, 0), uuid_of(0, 1))
    assert "0/1" in machine_table(run.devices)[3]

    (first, second) = survey(config(weights={"transport": "nccl"})).allocation.problems
    assert first.startswith("devices: trainer needs 1 GPU (trainer.processes: 1), 0 of 2 left")
    assert "generator-0" in second


def test_named_gpus_are_given_in_their_order(machine):
    machine(*[Card()] * 4)
    named = {"trainer": [3, 2], "generators": [uuid_of(0)], "reward": [1]}
    run = survey(config(processes=2, devices=named))
    assert shown(run, "trainer") == f"{uuid_of(3)},{uuid_of(2)}"
    assert (shown(run, "generator-0"), shown(run, "reward")) == (uuid_of(0), uuid_of(1))

    with pytest.raises(ConfigError, match=r"devices\.generators: names 1 GPUs; generator.count 2 x"):
        survey(config(devices={"generators": [0]}, generator={"engine": "vllm", "count": 2}))


def test_a_second_run_sees_the_first_ones_gpus_as_taken(machine):
    machine(Card(), Card(), Card())
    first, second = survey(config()), survey(config())
    assert first.claim() == ""

    # Both looked before either claimed.
    assert second.claim().startswith("devices: taken by others since the checks: GPU 0: run r1 (process ")
    third = survey(config())
    assert [device.index for device in third.allocation.devices["trainer"]] == ["2"]
    assert "generator-0 needs 1 GPU" in third.allocation.problems[0]
    assert f"in use: run r1 (process {os.getpid()})" in run_table(third)[2]

    first.claims.release()
    assert survey(config()).allocation.problems == []


def test_a_claim_ends_with_its_process(tmp_path):
    program = (
        "import sys; from pathlib import Path; from console.devices.gpu_claims import GpuClaims\n"
        "claims = GpuClaims('run other', folder=Path(sys.argv[1])); claims.claim(['GPU-1'])\n"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "claims")]
    mine = GpuClaims("run mine", folder=tmp_path / "claims")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "claimed\n"
        assert mine.claim(["GPU-1", "GPU-2"]) == {"GPU-1": "run other"}
        assert mine.others(["GPU-1", "GPU-2"]) == {"GPU-1": "run other"}
        other.kill()
        other.wait()
        assert mine.others(["GPU-1"]) == {}
        assert mine.claim(["GPU-1"]) == {}


def test_a_named_gpu_that_others_use_is_noted(machine):
    machine(Card(used_mib=50000), Card(used_mib=50000))
    assert len(survey(config()).allocation.problems) == 2
    run = survey(config(devices={"trainer": [0], "generators": [1]}))
    assert run.allocation.problems == []
    assert run.notes == [
        "GPU 0 of trainer is not free: 50000 MiB by processes that cannot be seen from here",
        "GPU 1 of generator-0 is not free: 50000 MiB by processes that cannot be seen from here",
    ]


def test_a_component_without_devices_of_its_own_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"devices"):
        config(devices={"broker": [0]})


async def test_a_process_keeps_its_gpus_when_it_is_restarted(machine, tmp_path, monkeypatch):
    """Its whole environment is fixed before its first start."""
    machine(Card(), Card())
    folder = RunFolder(tmp_path / "run")
    folder.create()
    run, late = survey(config()), survey(config())
    launcher = Launcher(config(), folder, security=Security(), devices=run)
    specs = {}
    monkeypatch.setattr(launcher.services, "launch", lambda spec: specs.update({spec.name: spec}))

    async def never_ready(name, *, timeout_s):
        return None

    monkeypatch.setattr(launcher.services, "wait_ready", never_ready)
    await launcher.start()

    assert specs["trainer"].env["CUDA_VISIBLE_DEVICES"] == uuid_of(0)
    assert specs["generator-0"].env["CUDA_VISIBLE_DEVICES"] == uuid_of(1)
    assert specs["scheduler"].env["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(ServiceFailedError, match="GPU 0: run r1"):
        await Launcher(config(), folder, security=Security(), devices=late).start()
    await launcher.stop()
