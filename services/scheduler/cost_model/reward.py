"""Computes what reward workers need and how many samples they score, from times that the problem states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import NodeClass, Problem


class RewardModel:
    """The reward workers of one problem. `usable_bytes` is of a GPU, by node entry."""

    def __init__(self, problem: Problem, usable_bytes: Mapping[str, float]) -> None:
        self._work, self._usable_bytes = problem.workload.reward, usable_bytes

    def fits(self, node: NodeClass, workers: int) -> bool:
        """Whether a machine of that entry has the memory for that many workers."""
        return self._lack(node, workers) is None

    def error(self, plan: PlanDocument, nodes: Mapping[str, NodeClass]) -> str | None:
        """Why a plan's reward workers cannot be where they are; None if they can, or nothing is known of them."""
        if self._work is None:
            return "reward_gpus: the workload states no reward; leave it out" if plan.reward_gpus else None
        if self._work.gpu_memory_GB and not plan.reward_gpus:
            return "reward_gpus: empty, and reward workers need a GPU each"
        if plan.reward_gpus and not self._work.gpu_memory_GB:
            return "reward_gpus: reward workers need no GPU (workload.reward.gpu_memory_GB); name machines in reward"
        field = "reward_gpus" if plan.reward_gpus else "reward"
        for name, workers in self._workers(plan).items():
            if (lack := self._lack(nodes[name], workers)) is not None:
                return f"{field}: {lack} of {name}"
        return None

    def samples_per_second(self, plan: PlanDocument, nodes: Mapping[str, NodeClass]) -> float:
        """What all of them score; infinite where nothing is known of them."""
        if (work := self._work) is None:
            return math.inf
        return sum(workers * work.samples_per_second(nodes[name].gpu) for name, workers in self._workers(plan).items())

    def _workers(self, plan: PlanDocument) -> Mapping[str, int]:
        """How many each machine has."""
        found = Counter({name: 1 for name in plan.reward or () if not plan.reward_gpus})
        for each in plan.reward_gpus:
            found[each.node] += each.gpus
        return found or Counter({plan.train[0].node: 1})

    def _lack(self, node: NodeClass, workers: int) -> str | None:
        work = self._work
        if work is None:
            return None
        if node.memory_GB is not None and node.memory_GB < workers * work.memory_GB:
            return f"{workers} workers need {workers * work.memory_GB:.1f} GB, and memory_GB is {node.memory_GB:.1f}"
        offered_GB = self._usable_bytes[node.name] / 1e9
        if offered_GB < work.gpu_memory_GB:
            return f"a worker needs a GPU of {work.gpu_memory_GB:.1f} GB, and {offered_GB:.1f} GB are offered by one"
        return None
