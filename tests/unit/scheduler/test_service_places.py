"""Where broker, Redis, scheduler and relays stand by a plan, and what the links carry."""

import pytest

from console.run.run_plan import as_message
from penstock.config import ConfigError, validate
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_message import document_of, keep_center
from services.scheduler.planning.solve import make_advised_plan, make_plan
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import Broker, PlanDocument, Relay
from services.scheduler.problem.problem import Problem
from services.scheduler.service_placement.service_places import MAX_BROKERS, weight_routes, with_center, with_relays
from tests.helpers.plans.problems import document, plan, problem

FAR = plan([("l4-0", 2, 4), ("l4-1", 2, 3), ("l40s-0", 1, 8)], [("a100-0", 8)])
"""The head is in r0, both l4 in r1."""


def with_hosts(*hosts: dict, faster: str | None = None) -> Problem:
    stated = document("tiny_04")
    stated["hosts"] = list(hosts)
    if faster is not None:
        # One of the two machines of the entry, as an entry of its own.
        entry = next(node for node in stated["nodes"] if node["name"] == "l4")
        stated["nodes"] = [node for node in stated["nodes"] if node is not entry]
        rest = next(name for name in ("l4-0", "l4-1") if name != faster)
        stated["nodes"] += [
            {**entry, "name": "slow", "count": 1, "machines": [rest]},
            {**entry, "name": "fast", "count": 1, "machines": [faster], "nic_Gbps": 2 * entry["nic_Gbps"]},
        ]
    return Problem.model_validate(stated)


@pytest.mark.parametrize(
    ("hosts", "place"),
    [
        ((), "a100-0"),
        (({"name": "ctl", "region": "r1"},), "a100-0"),
        (({"name": "far", "region": "r1"}, {"name": "ctl", "region": "r0", "count": 2}), "ctl-0"),
        (({"name": "ctl", "region": "r0", "machines": ["desk.example"]},), "desk.example"),
    ],
)
def test_broker_and_scheduler_stand_beside_the_head_without_gpus_where_they_can(hosts, place):
    found = with_center(with_hosts(*hosts), FAR, None)
    assert (found.broker, found.scheduler) == (Broker(node=place), place)
    # Reward workers beside the head take nothing from a broker there.
    scored = FAR.model_copy(update={"reward": ("a100-0", "l4-0")})
    assert with_center(with_hosts(*hosts), scored, None).broker == Broker(node=place)
    # A broker carries 48,000 tokens a second; beside a trainer there is one.
    for rate, count in ((48_000.0, 1), (49_000.0, 2), (1e9, MAX_BROKERS)):
        busy = with_center(with_hosts(*hosts), FAR, None, tokens_per_second=rate)
        assert busy.broker == Broker(node=place, count=1 if place == "a100-0" else count)
    if place != "a100-0":
        stated = with_hosts(*({**host, "cores": 4} for host in hosts))
        assert with_center(stated, FAR, None, tokens_per_second=1e9).broker.count == 3, "Redis has the fourth core"
    kept = PlanDocument(broker=Broker(node="l40s-0"))
    again = with_center(with_hosts(*hosts), FAR, kept)
    assert (again.broker, again.scheduler) == (kept.broker, place), "a running plan's broker stays"


@pytest.mark.parametrize("faster", ["l4-0", "l4-1"])
def test_the_machine_with_the_fastest_card_relays_to_its_site(faster):
    stated = with_hosts(faster=faster)
    model, found = CostModel(stated), with_relays(stated, FAR)
    assert found.relay == (Relay(site="r1", node=faster),)
    assert violations(stated, found) == []
    assert model.score(found) == model.score(FAR)

    home, far = weight_routes(model, found)
    assert (home.from_site, home.to_site, home.relay, home.copies) == ("r0", "r0", None, 8)
    assert (far.from_site, far.to_site, far.relay, far.copies) == ("r0", "r1", faster, 1)
    gigabytes = stated.model.params * 2 / 1e9
    assert far.bytes_per_version == home.bytes_per_version == pytest.approx(gigabytes * 1e9)
    (link,) = stated.links
    slowest_Gbps = min(link.bw_Gbps, *(node.nic_Gbps for node in stated.nodes if node.machine(0) in ("a100-0", faster)))
    assert far.seconds == pytest.approx(8 * gigabytes / slowest_Gbps + link.latency_ms / 1e3)
    assert home.seconds == pytest.approx(8 * 8 * gigabytes / model.nodes["a100-0"].nic_Gbps)
    assert with_relays(stated, FAR.model_copy(update={"gen": FAR.gen[2:]})).relay == ()


def test_a_place_that_is_none_is_refused_with_its_field():
    stated = problem("tiny_04")
    for relay, told in (
        (Relay(site="r1", node="l4-9"), "relay.0.node: there is no machine 'l4-9'"),
        (Relay(site="r0", node="l4-0"), "relay.0.node: l4-0 of region 'r1' is no machine of site 'r0' that generates"),
        (Relay(site="r0", node="l40s-0"), "relay.0.site: the head is in 'r0' as well"),
    ):
        assert violations(stated, FAR.model_copy(update={"relay": (relay,)}))[0].startswith(told)
    twice = (Relay(site="r1", node="l4-0"), Relay(site="r1", node="l4-1"))
    assert violations(stated, FAR.model_copy(update={"relay": twice})) == ["relay: site 'r1' has 2; state one"]
    for hosts, told in (
        ([{"name": "ctl", "region": "moon"}], "hosts.0.region: no node is in 'moon'"),
        ([{"name": "l4"}], "hosts.0.region: no node is in 'default'"),
        ([{"name": "l4", "region": "r0"}], "nodes: 'l4-0' is the name of 2 machines"),
    ):
        with pytest.raises(ConfigError, match=told):
            validate(Problem, {**document("tiny_04"), "hosts": hosts}, source="problem")


def test_places_survive_the_wire_and_plans_without_them_are_read_as_ever():
    stated = with_hosts({"name": "ctl", "region": "r0"})
    full = with_center(stated, with_relays(stated, FAR), None)
    assert document_of(as_message(full)) == full
    assert document_of(as_message(FAR)) == FAR
    assert FAR.stated() == {
        "gen": [{"node": each.node, "tp": each.tp, "count": each.count} for each in FAR.gen],
        "train": [{"node": "a100-0", "gpus": 8}],
    }
    assert FAR.center == {"broker": "a100-0", "scheduler": "a100-0"}

    revised = as_message(with_relays(stated, FAR))
    keep_center(revised, as_message(full))
    assert document_of(revised) == full


def test_the_pipeline_states_all_places_and_the_plan_is_otherwise_what_it_was():
    stated = with_hosts({"name": "ctl", "region": "r0"})
    bare, model = CostModel(problem("tiny_04")), CostModel(stated)
    before = make_plan(bare, "partition", time_left=lambda: 10.0).plan
    assert before.broker is None, "who runs already decides where its broker is"

    advised = make_advised_plan(model, "partition", time_left=lambda: 10.0, simulate=lambda *_, **__: None)
    assert (advised.plan.gen, advised.plan.train) == (before.gen, before.train)
    assert advised.score == bare.score(before)
    assert advised.plan.center == {"broker": "ctl-0", "scheduler": "ctl-0"}
    sites = {stated.nodes[2].region} & {model.nodes[each.node].region for each in before.gen}
    assert {each.site for each in advised.plan.relay} == sites
    # A search that begins with such a plan has its places, too.
    again = make_advised_plan(
        model, "partition", time_left=lambda: 10.0, simulate=lambda *_, **__: None, starts=(advised.plan,)
    )
    assert again.plan == advised.plan
