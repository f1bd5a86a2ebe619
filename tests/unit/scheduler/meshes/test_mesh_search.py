"""The search for a pool's mesh, compared with every mesh that the trainer could form of it."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import pytest

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.meshes.islands import Island, Part, cut, size_of
from services.scheduler.meshes.mesh_search import MeshSearch
from services.scheduler.meshes.mesh_step import MeshSteps
from services.scheduler.meshes.training_pools import TrainingPools
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import Mesh, PlanDocument, TrainShare
from services.scheduler.problem.problem import Problem
from tests.helpers.plans.problems import problem

GEN = {"gen": [{"node": "generates-0"}]}
Meshed = tuple[Sequence[Island], Mesh]


def drawn(seed: int) -> Problem:
    """One to four machines of up to 16 GPUs in all, of any types and network cards, and one that generates."""
    rng = random.Random(seed)
    stated = problem("tiny_04", "model.layers=8", "model.ffn=12288", "links=[]")
    nodes, left, num_machines = [], 16, rng.randint(1, 4)
    for index in range(num_machines):
        gpus = rng.choice([size for size in (1, 2, 4, 8) if size <= max(1, left - (num_machines - index - 1))])
        left -= gpus
        gpu, nic_Gbps = rng.choice(list(stated.gpu_types)), rng.choice([10, 25, 100, 400])
        kind = {"name": f"m{index}", "gpu": gpu, "gpus": gpus, "count": 1, "region": "r0", "nic_Gbps": nic_Gbps}
        nodes.append(stated.nodes[0].model_copy(update=kind))
    generates = stated.nodes[0].model_copy(update={"name": "generates", "gpus": 1, "count": 1})
    constants = stated.cost_model.model_copy(update={"train_pack_tokens": rng.choice([8_192, 32_768])})
    model = stated.model.model_copy(update={"params": rng.choice([2e9, 3e9, 4e9, 8e9])})
    return stated.model_copy(update={"nodes": (*nodes, generates), "cost_model": constants, "model": model})


def pool_of(model: CostModel) -> list[Part]:
    return [Part(name, node, node.gpus, 1.0) for name, node in model.nodes.items() if node.name != "generates"]


def islands_with(pools: TrainingPools, pool: Sequence[Part]) -> Iterator[Meshed]:
    """Every way to join machines; one alone may be cut into equal pieces."""
    for blocks in partitions(list(pool)):
        options = []
        for block in blocks:
            whole = [(tuple(block),)]
            if len(block) == 1:
                gpus = block[0].gpus
                whole += [((replace(block[0], gpus=size),),) * (gpus // size) for size in divisors(gpus)[:-1]]
            options.append(whole)
        for chosen in itertools.product(*options):
            runs = tuple(itertools.chain.from_iterable(chosen))
            if len(runs) > 1:
                yield pools.search.islands(runs)


def partitions(parts: list[Part]) -> Iterator[list[list[Part]]]:
    if not parts:
        yield []
        return
    first, *rest = parts
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, block in enumerate(smaller):
            yield [*smaller[:index], [first, *block], *smaller[index + 1 :]]


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def pipelines_of(order: Sequence[Part], num_layers: int) -> Iterator[Meshed]:
    total = size_of(order)
    for width, copies in itertools.product(divisors(total), divisors(total)):
        num_stages, rest = divmod(total, width * copies)
        if rest or not 2 <= num_stages <= num_layers:
            continue
        size = num_stages * width
        islands = [tuple(cut(parts, (width,) * num_stages)) for parts in cut(order, (size,) * copies)]
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            layers = tuple(end - start for start, end in itertools.pairwise((0, *cuts, num_layers)))
            yield islands, Mesh(islands=(size,) * copies, pipeline=num_stages, layers_per_stage=layers)


def all_meshes(model: CostModel, pool: Sequence[Part]) -> Iterator[Meshed]:
    yield from islands_with(model.pools, pool)
    for order in itertools.permutations(pool):
        yield from pipelines_of(order, model.problem.model.layers)


@pytest.mark.parametrize("seed", range(24))
def test_no_mesh_of_a_pool_is_faster(seed: int) -> None:
    model = CostModel(drawn(seed))
    pool, pools = pool_of(model), model.pools
    assert isinstance(pools.search, MeshSearch)
    assert isinstance(pools.steps, MeshSteps)
    shares = [TrainShare(node=part.machine, gpus=part.gpus) for part in pool]
    train, mesh = pools.arranged(shares, model.nodes)
    plan = PlanDocument.model_validate(GEN).model_copy(update={"train": train, "mesh": mesh})
    fastest_s = inf
    for islands, each in all_meshes(model, pool):
        if (step_s := pools.steps.step(islands, each).step_s) < fastest_s and not pools.memory.error(islands, each):
            fastest_s = step_s
    score = model.score(plan)
    lacking = violations(model.problem, plan)
    if isinstance(score, Infeasible):
        assert fastest_s == inf
        assert "training needs" in score.reason
        assert "needs" in lacking[0]
    else:
        assert isinstance(score, Score)
        assert score.training.step_s <= fastest_s * 1.005
        assert lacking == []


def test_all_kinds_of_meshes_are_found() -> None:
    found = set()
    for seed in range(24):
        model = CostModel(drawn(seed))
        shares = [TrainShare(node=part.machine, gpus=part.gpus) for part in pool_of(model)]
        _, mesh = model.pools.arranged(shares, model.nodes)
        found.add("none" if mesh is None else "pipeline" if mesh.pipeline > 1 else "islands")
    assert found == {"none", "pipeline", "islands"}
