"""What a machine runs by a plan, and what a revision changes there."""

from pathlib import Path

import pytest

from console.node.assignment import RELAY_PATIENCE_S, Placement, change, generator_config, misfits, placements, relay_of
from console.node.config import NodeConfig
from penstock.v1 import scheduler_pb2 as pb


def config(engine="vllm", **settings):
    generator = {"run_id": "r", "model_path": "/m", "cache_dir": "/c", "listen": "0.0.0.0:7400"}
    generator |= {"engine": {"engine": engine}, **settings}
    machine = {"node_id": "a", "gpu": "H20", "gpus": 8, "address": "a"}
    return NodeConfig.model_validate({**machine, "scheduler": "s:1", "dir": "/d", "generator": generator})


def plan(*assignments):
    return pb.Plan(run_id="r", assignments=[pb.Assignment(**each) for each in assignments])


def generators(node="a", *, first=0, tp=1, count=1, samples=64):
    indices = range(first, first + tp * count)
    return {
        "node_id": node,
        "role": pb.ROLE_GENERATOR,
        "accelerator_indices": indices,
        "tensor_parallel": tp,
        "num_replicas": count,
        "num_concurrent_samples": samples,
    }


def test_each_replica_is_a_process_with_its_own_gpus():
    trains = {"node_id": "a", "role": pb.ROLE_TRAINER, "accelerator_indices": range(2)}
    found = placements(plan(trains, generators(first=2, tp=2, count=3), generators("b")), config())

    assert {name: one.gpus for name, one in found.items()} == {"gen-2": (2, 3), "gen-4": (4, 5), "gen-6": (6, 7)}


def test_emulated_replicas_share_a_process():
    (one,) = placements(plan(generators(tp=2, count=4)), config("emulated")).values()
    document = generator_config(config("emulated"), one, port=7400)

    assert (one.num_replicas, one.tensor_parallel) == (4, 2)
    assert [each.count for each in document.instances] == [4]
    assert (document.engine.tensor_parallel, document.engine.max_concurrent_samples) == (2, 64)


@pytest.mark.parametrize("wrong", [generators(first=6, tp=4), {**generators(tp=4), "accelerator_indices": [0, 1]}])
def test_gpus_that_the_machine_does_not_have_are_not_used_and_reported(wrong):
    assert placements(plan(wrong, generators("b", first=6, tp=4)), config()) == {}
    (told,) = misfits(plan(wrong, generators("b", first=6, tp=4)), config())
    assert "of 4 GPUs" in told
    assert "there are 8" in told
    assert misfits(plan(generators(tp=4)), config()) == []


def test_a_revision_restarts_only_what_changes():
    before = placements(plan(generators(tp=4, count=2)), config())
    after = placements(plan(generators(tp=4), generators(first=4, tp=2, count=2)), config())
    todo = change(before, after)

    assert todo.stops == ("gen-4",)
    assert [one.gpus for one in todo.starts] == [(4, 5), (6, 7)]


@pytest.mark.parametrize(("samples", "num_restarted"), [(64, 0), (70, 0), (128, 1), (32, 1)])
def test_a_generator_is_restarted_for_quite_another_batch_only(samples, num_restarted):
    todo = change({"gen-0": Placement(gpus=(0,), num_samples=64)}, {"gen-0": Placement(gpus=(0,), num_samples=samples)})

    assert len(todo.stops) == len(todo.starts) == num_restarted


def test_a_machine_that_the_plan_does_not_name_runs_nothing():
    todo = change(placements(plan(generators()), config()), placements(plan(generators("b")), config()))

    assert (todo.stops, todo.starts) == (("gen-0",), ())


def test_generators_of_a_site_apart_relay_to_each_other():
    one = Placement(gpus=(3,), num_samples=0)
    near, far = (generator_config(config(site=site), one, port=7406) for site in ("", "r1"))

    assert near.relay_listen is None
    assert (far.relay_listen, far.relay_url) == ("0.0.0.0:7407", "a:7407")
    assert far.cache_dir == Path("/c/gen-3")
    assert far.engine.max_concurrent_samples == 128


@pytest.mark.parametrize(("relay", "patience_s"), [("a", 0.0), ("b", RELAY_PATIENCE_S), (None, 0.0)])
def test_generators_leave_the_link_to_the_relay_of_their_site(relay, patience_s):
    machine = config(site="oslo").model_copy(update={"site": "oslo"})
    stated = plan(generators())
    if relay is not None:
        stated.weight_relays.add(site="oslo", node_id=relay)
        stated.weight_relays.add(site="rome", node_id="c")
    assert relay_of(stated, machine) == relay
    (one, *_) = placements(stated, machine).values()
    document = generator_config(machine, one, port=7400, relay=relay_of(stated, machine))
    assert document.relay_patience_s == patience_s
