"""Small clusters of unlike machines drawn at random, for solvers to be compared on."""

import random

from services.scheduler.problem.problem import Problem
from tests.helpers.plans.problems import document


def drawn(seed: int) -> Problem:
    """A small cluster of unlike machines in two regions, some with slow links, tails, or pools that span regions."""
    rng = random.Random(seed)
    stated = document("tiny_04")
    for node in stated["nodes"]:
        node["gpus"] = rng.choice([2, 4])
        node["count"] = 1
    stated["links"][0]["bw_Gbps"] = rng.choice([0.2, 1, 10])
    stated["model"]["params"] = rng.choice([1e9, 4e9])
    stated["workload"]["staleness"] = rng.randint(0, 4)
    stated["constraints"]["tail_blocking"] = rng.random() < 0.5
    stated["constraints"]["train_single_region"] = rng.random() < 0.5
    stated["cost_model"]["train_overhead_s"] = rng.choice([0, 10])
    return Problem.model_validate(stated)
