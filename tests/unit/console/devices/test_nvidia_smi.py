"""What is read of `nvidia-smi`, from its outputs on machines of several kinds."""

import pytest

from console.devices.device_names import find_device, given_devices, visible_devices
from console.devices.nvidia_smi import NvidiaSmiError, read_devices
from tests.helpers.recorded_gpus import (
    A100,
    L4,
    Card,
    Process,
    install_broken_nvidia_smi,
    install_nvidia_smi,
    uuid_of,
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def install(*cards):
        monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", cards))
        return read_devices()

    return install


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_gpu_is_a_device_in_the_drivers_order(machine, count):
    devices = machine(*[Card()] * count)

    assert [device.index for device in devices] == [str(index) for index in range(count)]
    assert [device.uuid for device in devices] == [uuid_of(index) for index in range(count)]
    assert {(device.name, device.memory_mib, device.use) for device in devices} == {
        ("NVIDIA H100 80GB HBM3", 81559, "")
    }


def test_a_gpu_on_which_a_process_computes_is_in_use(machine):
    process = Process(pid=4711, name="/opt/conda/bin/python", mib=61234)
    free, busy = machine(Card(), Card(processes=[process], used_mib=61300))

    assert (free.use, busy.use) == ("", "python (process 4711, 61234 MiB)")


def test_small_helpers_of_the_driver_are_not_in_the_way(machine):
    mps = Process(pid=3, name="nvidia-cuda-mps-server", mib=30)
    unknown = Process(pid=4, mib=None)
    assert [device.use for device in machine(Card(processes=[mps]), Card(processes=[mps, unknown]))] == [
        "",
        "python3 (process 4)",
    ]


def test_memory_in_use_shows_what_a_container_cannot_see(machine):
    """From within a container the table of processes is empty."""
    nearly_free, busy = machine(Card(used_mib=600), Card(used_mib=40000))

    assert (nearly_free.use, busy.use) == ("", "40000 MiB by processes that cannot be seen from here")


def test_a_desktop_is_not_in_the_way(machine):
    (device,) = machine(
        Card(
            name=L4,
            used_mib=310,
            processes=[Process(pid=1, kind="G", mib=200), Process(pid=2, kind="C+G", mib=90)],
        )
    )
    assert device.use == ""


def test_each_mig_instance_is_a_device_with_its_own_memory_and_users(machine):
    trains = Process(pid=99, mib=None, instance="8")
    devices = machine(Card(name=A100, instances=[("3g.20gb", 19968), ("1g.5gb", 4864)], processes=[trains]), Card())

    assert [device.index for device in devices] == ["0/0", "0/1", "1"]
    assert [device.is_mig for device in devices] == [True, True, False]
    assert [device.memory_mib for device in devices] == [19968, 4864, 81559]
    assert [device.use for device in devices] == ["", "python3 (process 99)", ""]
    assert devices[0].name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"


def test_a_gpu_in_mig_mode_without_instances_is_no_device(machine):
    assert [device.index for device in machine(Card(is_mig=True), Card())] == ["1"]


def test_a_machine_without_a_driver_has_nothing_to_assign(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_devices() is None


def test_a_machine_whose_driver_sees_no_gpu_has_no_devices(machine):
    assert machine() == ()


def test_a_broken_driver_is_reported_in_its_own_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", install_broken_nvidia_smi(tmp_path / "bin"))
    with pytest.raises(NvidiaSmiError) as caught:
        read_devices()
    assert str(caught.value) == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"


def test_an_output_that_is_cut_short_is_reported(machine, tmp_path):
    machine(Card())
    (tmp_path / "bin" / "query.xml").write_text("<nvidia_smi_log><gpu>")
    with pytest.raises(NvidiaSmiError, match="-q -x"):
        read_devices()


def test_cuda_visible_devices_is_the_pool(machine):
    devices = machine(*[Card()] * 4)

    def given(text):
        return [device.index for device in given_devices(devices, text)]

    assert given(None) == ["0", "1", "2", "3"]
    assert given("") == []
    assert given("3,1") == ["3", "1"]
    assert given("2,-1,0") == ["2"]
    assert given(f"1, {uuid_of(2)}, {uuid_of(3)[:20]}") == ["1", "2", "3"]
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES: there is no GPU 4; nvidia-smi shows 0, 1, 2, 3"):
        given("0,4")


def test_the_index_of_a_divided_gpu_names_its_instances(machine):
    devices = machine(Card(name=A100, instances=[("3g.20gb", 19968), ("3g.20gb", 19968)]), Card())

    assert [device.index for device in given_devices(devices, "0")] == ["0/0", "0/1"]
    assert [device.index for device in find_device("0/1", devices)] == ["0/1"]
    assert [device.index for device in find_device(uuid_of(0, 1), devices)] == ["0/1"]
    # The beginning of two UUIDs names neither.
    assert find_device(uuid_of(0, 1)[:12], devices) == []


def test_a_process_is_shown_its_devices_by_uuid(machine):
    devices = machine(*[Card()] * 2)

    assert visible_devices(devices)["CUDA_VISIBLE_DEVICES"] == f"{uuid_of(0)},{uuid_of(1)}"
    assert visible_devices(())["CUDA_VISIBLE_DEVICES"] == ""
