import pytest

from console.devices.gpu_types import type_of
from console.devices.nvidia_smi import read_devices
from console.probe.machine import LoadMeter, busy_reasons, this_machine
from penstock.config import ConfigError
from tests.helpers.recorded_gpus import A100, L4, Card, Process, install_nvidia_smi


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    def install(*cards):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", cards))

    return install


def test_equal_gpus_are_the_devices_by_the_names_that_cost_models_know(gpus, monkeypatch):
    gpus(Card(name=A100), Card(name=A100), Card(name=A100))
    found = this_machine(None)
    assert (found.accelerators.type, found.accelerators.kind, found.accelerators.count) == ("gpu", "A100-40", 3)
    assert found.accelerators.memory_GB == pytest.approx(42.9, rel=0.01)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in this_machine(None).gpus] == ["1"]


@pytest.mark.parametrize(
    ("product", "gigabytes", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "H100"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42, "H100 80GB HBM3 MIG 3g.40gb"),
        ("NVIDIA H20", 103, "H20"),
        ("NVIDIA A100-SXM4-80GB", 86, "A100-80"),
        ("NVIDIA L40S", 48, "L40S"),
        ("NVIDIA L40", 48, "L40"),
        ("NVIDIA GeForce RTX 4090", 25, "RTX4090"),
        ("Tesla V100-SXM2-16GB", 17, "Tesla V100-SXM2-16GB"),
    ],
)
def test_products_have_the_names_of_planning_problems_where_those_have_one(product, gigabytes, kind):
    assert type_of(product, gigabytes * 1e9) == kind


def test_unlike_gpus_are_refused_with_what_to_do(gpus):
    gpus(Card(name=A100), Card(name=L4))
    with pytest.raises(ConfigError, match=r"1 x NVIDIA A100-SXM4-40GB, 1 x NVIDIA L4.*CUDA_VISIBLE_DEVICES.*--name"):
        this_machine(None)


def test_without_gpus_the_cpus_are_as_many_devices_as_are_asked_for_or_the_machine_is_a_host(gpus):
    gpus()
    assert this_machine(None).accelerators is None
    whole, parts = this_machine(1).accelerators, this_machine(2).accelerators
    assert (whole.type, whole.count, parts.count) == ("cpu", 1, 2)
    assert parts.memory_GB == pytest.approx(whole.memory_GB / 2)
    with pytest.raises(ConfigError, match="--cpu-devices: 100000 for"):
        this_machine(100_000)


def stat(folder, *, user, idle, stolen=0):
    (folder / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n")


@pytest.mark.parametrize(
    ("user", "idle", "stolen", "said"),
    [(0, 1000, 0, []), (900, 100, 0, ["other processes used"]), (0, 800, 200, ["the machine's host gave 20%"])],
)
def test_a_machine_is_busy_by_what_others_use_of_its_cpus(tmp_path, user, idle, stolen, said):
    stat(tmp_path, user=100, idle=100)
    meter = LoadMeter(proc=tmp_path)
    stat(tmp_path, user=100 + 1000 * user, idle=100 + 1000 * idle, stolen=1000 * stolen)
    reasons = busy_reasons(meter.load(), [])
    assert [reason[: len(start)] for reason, start in zip(reasons, said, strict=True)] == said


def test_a_machine_is_busy_by_what_others_have_on_its_gpus(gpus, tmp_path):
    gpus(Card(processes=[Process(pid=7, mib=60000)], used_mib=60004), Card())
    reasons = busy_reasons(LoadMeter(proc=tmp_path).load(), read_devices())
    assert reasons == ["GPU 0 is used by python3 (process 7, 60000 MiB)"]
