"""Computes what reward workers need and how many samples they score, from times that the problem states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from services.scheduler.problem.plan_document import PlanDocument, host_classes
from services.scheduler.problem.problem import HostClass, NodeClass, Problem

CORES_OF_REDIS = 1
"""Of a machine without GPUs that has a broker."""


class RewardModel:
    """The reward workers of one problem. `usable_bytes` is of a GPU, by node entry."""

    def __init__(self, problem: Problem, usable_bytes: Mapping[str, float]) -> None:
        self._work, self._usable_bytes = problem.workload.reward, usable_bytes
        self._hosts = host_classes(problem)

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
            host = self._hosts.get(name)
            beside = plan.broker.count if plan.broker is not None and plan.broker.node == name else None
            lack = self._lack(nodes[name], workers) if host is None else self._host_lack(host, brokers=beside)
            if lack is not None:
                return f"{field}: {lack} of {name}"
        return None

    def samples_per_second(self, plan: PlanDocument, nodes: Mapping[str, NodeClass]) -> float:
        """What all of them score; infinite where nothing is known of them."""
        if (work := self._work) is None:
            return math.inf
        gpus = {name: "" if name in self._hosts else nodes[name].gpu for name in self._workers(plan)}
        return sum(workers * work.samples_per_second(gpus[name]) for name, workers in self._workers(plan).items())

    def fits_host(self, host: HostClass, *, brokers: int | None) -> bool:
        """Whether a machine without GPUs has memory and cores for one worker, beside that many brokers and Redis."""
        return self._host_lack(host, brokers=brokers) is None

    def _host_lack(self, host: HostClass, *, brokers: int | None) -> str | None:
        work = self._work
        if work is None:
            return None
        if host.memory_GB is not None and host.memory_GB < work.memory_GB:
            return f"a worker needs {work.memory_GB:.1f} GB, and memory_GB is {host.memory_GB:.1f}"
        taken = 0 if brokers is None else brokers + CORES_OF_REDIS
        if host.cores is not None and host.cores < work.cores + taken:
            beside = f" beside {taken} of brokers and Redis" if taken else ""
            return f"a worker keeps {work.cores} cores busy{beside}, and cores is {host.cores}"
        return None

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
