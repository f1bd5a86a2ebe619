"""Computes what it costs to move a run's critic to another machine, and which machines can take it. Pure.

A move is: its process ends, another one starts elsewhere, reads the newest checkpoint from the storage that both reach,
and takes the steps since again. Generators go on until the staleness bound holds them; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import CriticPlace
from services.scheduler.replanning.live_problem import Live
from services.scheduler.replanning.trainer_move import START_S


def critic_machines(live: Live, views: Sequence[pb.NodeView]) -> frozenset[str]:
    """Machines that registered as such that a critic can go on at, in the live problem's names.

    One that registered without saying so keeps the state of its critic on its disk.
    """
    able = {view.node.node_id for view in views if view.is_alive and pb.ROLE_CRITIC in view.node.roles}
    return frozenset(name for name, real in live.node_ids.items() if real in able)


def critic_moving_s(model: CostModel, place: CriticPlace, views: Sequence[pb.NodeView]) -> float:
    """How long the trainer has no critic while one starts at `place`, seconds.

    As long as machines measured that a generator takes to start, or a minute, and its state by the network card.
    """
    starts_s = [view.generator_start_s for view in views if view.is_alive and view.HasField("generator_start_s")]
    start_s = median(starts_s) if starts_s else START_S
    return start_s + model.critic.state_bytes / (model.nodes[place.node].nic_Gbps * 1e9 / 8)
