import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.planning.first_fit import InfeasiblePlanError, first_fit
from services.scheduler.planning.machine_registry import Inventory, UnknownNodeError


def machine(node_id, *, flops=1e12, roles=(), cores=2):
    node = pb.Node(node_id=node_id, roles=roles, num_cpu_cores=cores)
    node.accelerators.add(kind="cpu", count=1, flops_per_second=flops)
    return node


def inventory_of(*nodes):
    inventory = Inventory(heartbeat_interval_s=5)
    for node in nodes:
        inventory.register(node, [], now_s=0)
    return inventory


def assigned(plan, role):
    return {each.node_id: each for each in plan.assignments if each.role == role}


def test_the_strongest_machine_trains_and_generators_spread_evenly():
    inventory = inventory_of(machine("weak"), machine("strong", flops=9e14), machine("middle", flops=2e14))

    plan = first_fit(inventory.views(now_s=1, unix_s=1), run_id="r", num_generators=4)

    assert list(assigned(plan, pb.ROLE_TRAINER)) == ["strong"]
    replicas = {name: each.num_replicas for name, each in assigned(plan, pb.ROLE_GENERATOR).items()}
    assert replicas == {"strong": 2, "middle": 1, "weak": 1}
    assert sum(each.share for each in assigned(plan, pb.ROLE_GENERATOR).values()) == pytest.approx(1)


def test_measured_rates_set_the_generators_shares():
    inventory = inventory_of(machine("a"), machine("b"))
    for name, rate in (("a", 300), ("b", 100)):
        measured = pb.MeasuredRate(role=pb.ROLE_GENERATOR, tokens_per_second=rate)
        inventory.report(pb.ReportNodeRequest(node_id=name, rates=[measured]), now_s=1)

    plan = first_fit(inventory.views(now_s=1, unix_s=1), run_id="r", num_generators=0)

    assert assigned(plan, pb.ROLE_GENERATOR)["a"].share == pytest.approx(0.75)


def test_a_role_that_no_machine_allows_is_named():
    inventory = inventory_of(machine("a", roles=[pb.ROLE_GENERATOR, pb.ROLE_BROKER, pb.ROLE_REWARD]))

    with pytest.raises(InfeasiblePlanError, match="trainer"):
        first_fit(inventory.views(now_s=1, unix_s=1), run_id="r", num_generators=1)


def test_a_machine_that_stopped_reporting_gets_no_work():
    inventory = inventory_of(machine("gone"))
    inventory.register(machine("here"), [], now_s=100)

    plan = first_fit(inventory.views(now_s=101, unix_s=101), run_id="r", num_generators=2)

    assert {each.node_id for each in plan.assignments} == {"here"}


def test_a_machine_that_leaves_must_register_again():
    inventory = inventory_of(machine("a"))
    inventory.report(pb.ReportNodeRequest(node_id="a", is_leaving=True), now_s=1)

    with pytest.raises(UnknownNodeError):
        inventory.report(pb.ReportNodeRequest(node_id="a"), now_s=2)


@pytest.mark.parametrize(
    "node",
    [
        pb.Node(node_id=""),
        pb.Node(node_id="no-accelerator"),
        pb.Node(node_id="none", accelerators=[pb.Accelerator(kind="cpu", count=0)]),
        pb.Node(node_id="price", accelerators=[pb.Accelerator(kind="cpu", count=1)], price_per_hour=float("nan")),
    ],
)
def test_impossible_machines_are_refused(node):
    with pytest.raises(InvalidFieldError):
        inventory_of(node)
