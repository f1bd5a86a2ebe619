"""What putting a revised plan in place costs."""

import pytest

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.replanning.migration import stands_still_s, stopped_share
from tests.helpers.plans.problems import problem


def plan(*generators, train=("h800-0", 8)):
    """Of (machine, tensor-parallel degree, replicas, samples at once)."""
    message = pb.Plan()
    message.assignments.add(node_id=train[0], role=pb.ROLE_TRAINER, accelerator_indices=range(train[1]))
    for node, degree, count, samples in generators:
        message.assignments.add(
            node_id=node,
            role=pb.ROLE_GENERATOR,
            tensor_parallel=degree,
            num_replicas=count,
            accelerator_indices=range(degree * count),
            num_concurrent_samples=samples,
        )
    return message


BEFORE = plan(("a", 1, 8, 64), ("b", 1, 8, 64))


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (BEFORE, 0.0),
        (plan(("a", 1, 8, 64)), 0.0),
        (plan(("a", 1, 8, 70), ("b", 1, 8, 64)), 0.0),
        (plan(("a", 1, 8, 128), ("b", 1, 8, 64)), 0.5),
        (plan(("a", 2, 4, 64), ("b", 1, 8, 64)), 0.5),
        (plan(("a", 1, 8, 64), ("b", 1, 8, 64), ("c", 1, 16, 64)), 0.5),
        (plan(("a", 1, 8, 64), ("b", 1, 8, 64), train=("h800-0", 4)), 1.0),
    ],
)
def test_new_and_restarted_generators_stop_and_all_do_when_trainers_change(after, share):
    assert stopped_share(BEFORE, after) == pytest.approx(share)


def test_a_generator_is_idle_for_the_measured_start_time():
    stated = problem("tiny_02")
    loading_s = stands_still_s(stated, [])
    views = [pb.NodeView(generator_start_s=seconds, is_alive=True) for seconds in (30.0, 40.0, 500.0)]

    assert loading_s >= stated.cost_model.sync_pause_s
    assert stands_still_s(stated, [*views, pb.NodeView(is_alive=True)]) == pytest.approx(loading_s + 40.0)
    assert stands_still_s(stated, [pb.NodeView(generator_start_s=40.0)]) == pytest.approx(loading_s)
