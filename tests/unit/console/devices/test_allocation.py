"""Who gets which GPUs: what is promised of every allocation, and the refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.devices.allocation import DeviceNeed, allocate
from console.devices.nvidia_smi import GpuDevice


def gpus(count, name="H100"):
    return [GpuDevice(index=str(index), uuid=f"GPU-{index}", name=name) for index in range(count)]


def slices(gpu, count):
    return [GpuDevice(index=f"{gpu}/{index}", uuid=f"MIG-{gpu}-{index}", name="A100 MIG") for index in range(count)]


def need(process, count=1, *, named=(), nccl=False):
    return DeviceNeed(
        process=process,
        count=count,
        because="so set",
        fix="lower it",
        named=tuple(named),
        uses_nccl=nccl,
        setting="devices.x",
    )


def indices(allocation):
    return {process: [device.index for device in devices] for process, devices in allocation.devices.items()}


@pytest.mark.parametrize(
    ("num_gpus", "needs", "expected"),
    [
        (2, [need("trainer"), need("generator-0")], {"trainer": ["0"], "generator-0": ["1"]}),
        (
            4,
            [need("trainer", 2), need("generator-0"), need("generator-1")],
            {"trainer": ["0", "1"], "generator-0": ["2"], "generator-1": ["3"]},
        ),
        (
            8,
            [need("trainer", 4), need("generator-0", 2), need("generator-1", 2)],
            {"trainer": ["0", "1", "2", "3"], "generator-0": ["4", "5"], "generator-1": ["6", "7"]},
        ),
    ],
)
def test_every_process_has_its_own(num_gpus, needs, expected):
    allocation = allocate(needs, gpus(num_gpus))
    assert allocation.problems == []
    assert indices(allocation) == expected


def test_one_gpu_is_not_for_two_and_the_refusal_says_what_to_do():
    allocation = allocate([need("trainer"), need("generator-0")], gpus(1))

    assert indices(allocation) == {"trainer": ["0"]}
    assert allocation.problems == [
        "devices: generator-0 needs 1 GPU (so set), 0 of 1 left; lower it, or name GPUs to be shared: devices.x=[...]"
    ]
    assert [each.process for each in allocation.unplaced] == ["generator-0"]


def test_two_share_a_gpu_that_is_named_for_both():
    allocation = allocate([need("trainer", named=["0"]), need("generator-0", named=["0"])], gpus(1))

    assert allocation.problems == []
    assert indices(allocation) == {"trainer": ["0"], "generator-0": ["0"]}


def test_nccl_does_not_share():
    needs = [need("trainer", named=["0"], nccl=True), need("generator-0", named=["0"], nccl=True)]
    (problem,) = allocate(needs, gpus(2)).problems
    assert "generator-0 shares a GPU with trainer, which NCCL does not allow" in problem


def test_gpus_in_use_are_left_out():
    allocation = allocate([need("trainer", 2)], gpus(4), claimed={"GPU-0": "a run"}, in_use={"GPU-2": "x"})
    assert indices(allocation) == {"trainer": ["1", "3"]}

    (problem,) = allocate([need("trainer", 4)], gpus(4), in_use={"GPU-2": "somebody"}).problems
    assert "3 of 4 left (1 in use by others)" in problem


def test_a_named_gpu_is_shared_with_other_programs_but_not_with_another_run():
    wanted = [need("trainer", named=["1"])]
    assert indices(allocate(wanted, gpus(2), in_use={"GPU-1": "python (process 7)"})) == {"trainer": ["1"]}

    (problem,) = allocate(wanted, gpus(2), claimed={"GPU-1": "run r1 (process 7)"}).problems
    assert problem == "devices.x: taken: GPU 1 by run r1 (process 7); name other GPUs, or end that run"


def test_what_is_named_is_not_chosen_for_another():
    allocation = allocate([need("trainer"), need("generator-0", named=["0"])], gpus(2))
    assert indices(allocation) == {"generator-0": ["0"], "trainer": ["1"]}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["7"], "there is no GPU 7 to be given; there are: 0, 1"),
        (["0"], "needs 2 different GPUs (so set), not 0"),
        (["1", "1"], "needs 2 different GPUs (so set), not 1, 1"),
    ],
)
def test_names_that_do_not_do_are_refused(named, said):
    (problem,) = allocate([need("trainer", 2, named=named)], gpus(2)).problems
    assert said in problem
    assert problem.startswith("devices.x: ")


def test_mig_instances_are_for_single_processes():
    allocation = allocate([need("generator-0"), need("generator-1")], slices(0, 2))
    assert indices(allocation) == {"generator-0": ["0/0"], "generator-1": ["0/1"]}

    (problem,) = allocate([need("trainer", 2)], slices(0, 7)).problems
    assert "0 of 7 left (MIG instances cannot be joined)" in problem
    assert allocate([need("trainer", nccl=True)], slices(0, 7)).problems
    (problem,) = allocate([need("trainer", 2, named=["0/0", "0/1"])], slices(0, 2)).problems
    assert "a process sees one MIG instance at most" in problem
    (problem,) = allocate([need("trainer", named=["0"])], slices(0, 2)).problems
    assert "GPU 0 is divided into MIG instances; name some of 0/0, 0/1" in problem


def test_whole_gpus_are_kept_for_those_that_need_them():
    """The lowest index would go to the process that can use an instance as well."""
    devices = [*gpus(2), *slices(2, 1)]
    allocation = allocate([need("trainer"), need("generator-0", 2)], devices)

    assert allocation.problems == []
    assert indices(allocation) == {"generator-0": ["0", "1"], "trainer": ["2/0"]}


def test_a_process_gets_gpus_of_one_kind_where_there_are_enough():
    devices = [*gpus(1, "L4"), *(GpuDevice(index=str(i), uuid=f"GPU-{i}", name="H100") for i in (1, 2))]

    assert indices(allocate([need("generator-0", 2)], devices)) == {"generator-0": ["1", "2"]}
    assert indices(allocate([need("trainer", 3)], devices)) == {"trainer": ["0", "1", "2"]}


@given(
    counts=st.lists(st.integers(1, 4), max_size=6),
    num_gpus=st.integers(0, 6),
    num_slices=st.integers(0, 4),
    taken=st.sets(st.integers(0, 5)),
)
def test_nothing_is_given_twice_or_when_taken(counts, num_gpus, num_slices, taken):
    devices = [*gpus(num_gpus), *slices(num_gpus, num_slices)]
    users = {f"GPU-{index}": "somebody" for index in taken}
    needs = [need(f"p{index}", count) for index, count in enumerate(counts)]
    allocation = allocate(needs, devices, in_use=users)
    used = [device for devices in allocation.devices.values() for device in devices]

    assert len(used) == len(set(used))
    assert not {device.uuid for device in used} & users.keys()
    assert len(allocation.devices) + len(allocation.unplaced) == len(counts)
    assert len(allocation.problems) == len(allocation.unplaced)
    for each in needs:
        given_to = allocation.devices.get(each.process, ())
        assert len(given_to) in (0, each.count)
        assert each.count == 1 or not any(device.is_mig for device in given_to)
    assert indices(allocate(needs, devices, in_use=users)) == indices(allocation)
