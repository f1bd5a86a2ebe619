"""Small clusters whose workload has services: scorers, a critic, reward models, drawn at random; and time in plans."""

import itertools
import random

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import Problem
from services.scheduler.solvers.interface import TimeLeft
from tests.helpers.plans.drawn_problems import drawn

ACTOR = {"name": "actor", "kind": "train"}
SCORED = {"name": "reference", "kind": "infer", "is_service": True}
CRITIC = [
    {"name": "critic", "kind": "infer", "shares_weights": True, "is_service": True},
    {"name": "critic_train", "kind": "train", "is_service": True},
]


def drawn_with_services(seed: int) -> Problem:
    """One of these services at least, some with reward models that need a GPU each."""
    rng = random.Random(seed + 1000)
    kinds = rng.sample(["scorers", "critic", "reward"], rng.randint(1, 3))
    stated = drawn(seed).model_dump(by_alias=True, mode="json")
    tasks = [ACTOR, *([SCORED] if "scorers" in kinds else []), *(CRITIC if "critic" in kinds else [])]
    reward = {"seconds_per_sample": rng.choice([0.1, 1, 4]), "gpu_memory_GB": rng.choice([0, 10, 16])}
    stated["workload"] |= {"train_tasks": tasks, "reward": reward if "reward" in kinds else None}
    return Problem.model_validate(stated)


def grown_to_16_gpus(problem: Problem) -> Problem:
    """The problem with further machines of its entries, until it has 13 to 16 GPUs."""
    counts = [node.count for node in problem.nodes]
    for index in itertools.cycle(range(len(counts))):
        num_gpus = sum(node.gpus * count for node, count in zip(problem.nodes, counts, strict=True))
        if num_gpus >= 13:
            break
        counts[index] += num_gpus + problem.nodes[index].gpus <= 16
    nodes = [node.model_copy(update={"count": count}) for node, count in zip(problem.nodes, counts, strict=True)]
    stated = problem.model_copy(update={"nodes": tuple(nodes)})
    return Problem.model_validate(stated.model_dump(by_alias=True, mode="json"))


class CountedTime:
    """Time that passes with the plans that are scored, whatever the machine does meanwhile.

    Use it as a context: all cost models count as long as it lasts.
    """

    def __init__(self) -> None:
        self.num_scored = 0

    def __enter__(self) -> "CountedTime":
        self._score = CostModel.score

        def score(model, plan):
            self.num_scored += 1
            return self._score(model, plan)

        CostModel.score = score
        return self

    def __exit__(self, *_: object) -> None:
        CostModel.score = self._score

    def budget(self, num_plans: int) -> TimeLeft:
        """That many plans from now on, 1,024 a second: halves of it are the same numbers whenever they begin."""
        end = self.num_scored + num_plans
        return lambda: (end - self.num_scored) / 1024
