"""Scorers, critic and reward workers of a machine whose plan is revised, beside a broker that says who is connected."""

from __future__ import annotations

import pytest

from console.node.config import NodeConfig
from console.node.scoring_processes import ScoringProcesses
from penstock.network.rpc import service_of
from penstock.security import NO_SECURITY
from penstock.v1 import broker_pb2, broker_pb2_grpc
from penstock.v1 import scheduler_pb2 as pb
from tests.helpers.serving import serving
from tests.helpers.waiting import until

SCORER, REWARD, CRITIC = pb.ROLE_SCORER, pb.ROLE_REWARD, pb.ROLE_CRITIC


class Broker(broker_pb2_grpc.BrokerServiceServicer):
    def __init__(self):
        self.rewards, self.scorers, self.num_asked = ["here-reward"], ["here-scorer-0"], 0

    async def GetRun(self, request, _context):
        self.num_asked += 1
        return broker_pb2.GetRunResponse(run_id=request.run_id, reward_worker_ids=self.rewards, scorer_ids=self.scorers)


class Services:
    """What runs, instead of processes."""

    def __init__(self):
        self.names = set()

    def launch_service(self, _kind, _settings, *, name, **_):
        self.names.add(name)

    async def stop(self, names, *, within_s=None):
        self.names.difference_update(names)


def plan(*places):
    found = pb.Plan(run_id="r")
    for node, role, gpus in places:
        found.assignments.add(node_id=node, role=role, accelerator_indices=gpus)
    return found


@pytest.fixture
async def made(tmp_path):
    broker = Broker()
    async with serving(service_of(broker)) as (_, target):
        common = {"run_id": "r", "listen": "127.0.0.1:0"}
        config = NodeConfig.model_validate(
            {
                "node_id": "here", "gpu": "L4", "gpus": 4, "scheduler": "127.0.0.1:1", "dir": str(tmp_path),
                "generator": {
                    "run_id": "r", "broker": target, "weights": "127.0.0.1:1", "listen": "127.0.0.1:0",
                    "model_path": str(tmp_path), "cache_dir": str(tmp_path), "engine": {"engine": "emulated"},
                    "emulated": {"gpu": "L4"},
                },
                "reward": {**common, "broker": target, "tokenizer_path": str(tmp_path)},
                "scorer": {**common, "broker": target, "model_path": str(tmp_path)},
                "critic": {**common, "model_path": str(tmp_path), "state_dir": str(tmp_path / "critic")},
            }
        )  # fmt: skip
        services = Services()
        processes = ScoringProcesses(config, services=services, gpus=(), security=NO_SECURITY)

        async def follow(*places, taken=()):
            await processes.make_room(plan(*places), taken=taken)
            processes.start()

        await follow(("here", REWARD, []), ("here", SCORER, [0]), ("here", CRITIC, [1]))
        assert services.names == {"reward", "scorer-0", "critic"}
        yield follow, services, broker
        await processes.stop()
        assert not services.names


async def test_workers_serve_on_until_those_that_take_over_are_connected(made):
    follow, services, broker = made
    elsewhere = [("there", REWARD, []), ("there", SCORER, [2, 3]), ("there", CRITIC, [0])]
    await follow(*elsewhere)
    assert services.names == {"reward", "scorer-0"}, "of critics there is one at a time"

    broker.rewards.append("there-reward")
    broker.scorers.append("there-scorer-2")
    await until(lambda: "reward" not in services.names)
    num_asked = broker.num_asked
    await until(lambda: broker.num_asked >= num_asked + 2)
    assert services.names == {"scorer-0"}, "one of two is there"
    broker.scorers.append("there-scorer-3")
    await until(lambda: not services.names)


async def test_a_gpu_that_something_else_is_to_have_is_left_at_once(made):
    follow, services, _ = made
    await follow(("there", REWARD, []), ("there", SCORER, [2]), ("there", CRITIC, [0]), taken=[0])
    assert services.names == {"reward"}


async def test_a_revision_that_has_a_worker_here_again_keeps_it_and_without_successors_it_ends(made):
    follow, services, broker = made
    await follow(("there", REWARD, []), ("here", CRITIC, [1]))
    assert services.names == {"reward", "critic"}, "no scorer takes over"
    await follow(("here", REWARD, []), ("here", CRITIC, [1]))
    broker.rewards.append("there-reward")
    await follow(("here", REWARD, []), ("here", CRITIC, [1]))
    assert services.names == {"reward", "critic"}
