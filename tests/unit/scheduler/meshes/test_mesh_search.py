"""The search for a pool's mesh, compared with every mesh that the trainer could form of it."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

import pytest

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.meshes.islands import Island, Part, cut, size_of
from services.scheduler.meshes.mesh_search import MeshSearch
from services.scheduler.meshes.mesh_step import MeshSteps
from services.scheduler.meshes.training_pools import TrainingPools
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import PlanDocument, TrainShare
from services.scheduler.problem.problem import Problem
from tests.helpers.plans.problems import problem

EXPERTS = {"experts": 8, "experts_per_token": 2}
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


def mixture(seed: int) -> Problem:
    """The same of a mixture of 8 experts, with short packs; three in four machines have main memory to spare."""
    rng, stated = random.Random(seed), drawn(seed)
    width = rng.choice([1024, 2048, 4096, 8192])
    params = 2.2e9 + stated.model.layers * 8 * 3 * stated.model.hidden * width
    model = stated.model.model_copy(update={**EXPERTS, "expert_ffn": width, "params": params})
    memory_GB, nic_Gbps = rng.choice([None, 400.0, 800.0, 1600.0]), rng.choice([25, 100, 400])
    update = {"memory_GB": memory_GB, "nic_Gbps": nic_Gbps}
    nodes = tuple(node.model_copy(update=update) for node in stated.nodes)
    constants = stated.cost_model.model_copy(update={"train_pack_tokens": rng.choice([2048, 8192])})
    return stated.model_copy(update={"model": model, "nodes": nodes, "cost_model": constants})


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


def equal_islands(model: CostModel, order: Sequence[Part]) -> Iterator[list[Island]]:
    rates = [model.pools.steps.rates[part.node.name] for part in order]
    parts = [replace(part, share=rate / max(rates)) for part, rate in zip(order, rates, strict=True)]
    for copies in divisors(size_of(parts)):
        yield [(run,) for run in cut(parts, (size_of(parts) // copies,) * copies)]


def with_experts(model: CostModel, order: Sequence[Part]) -> Iterator[Meshed]:
    for islands in equal_islands(model, order):
        for expert in (2, 4, 8):
            if size_of(islands[0][0]) % expert == 0:
                yield islands, Mesh(expert=expert, islands=(size_of(islands[0][0]),) * len(islands))


def offloaded(model: CostModel, order: Sequence[Part]) -> Iterator[Meshed]:
    for islands in equal_islands(model, order):
        yield islands, Mesh(offload=True, islands=(size_of(islands[0][0]),) * len(islands))


def all_meshes(model: CostModel, pool: Sequence[Part]) -> Iterator[Meshed]:
    yield from islands_with(model.pools, pool)
    for order in itertools.permutations(pool):
        yield from pipelines_of(order, model.problem.model.layers)
        if model.problem.model.experts:
            yield from with_experts(model, order)


@pytest.mark.parametrize("drawing", [drawn, mixture])
@pytest.mark.parametrize("seed", range(24))
def test_no_mesh_of_a_pool_is_faster(seed: int, drawing: Callable[[int], Problem]) -> None:
    model = CostModel(drawing(seed))
    pool, pools = pool_of(model), model.pools
    assert isinstance(pools.search, MeshSearch)
    assert isinstance(pools.steps, MeshSteps)
    shares = [TrainShare(node=part.machine, gpus=part.gpus) for part in pool]
    train, mesh = pools.arranged(shares, model.nodes)
    plan = PlanDocument.model_validate(GEN).model_copy(update={"train": train, "mesh": mesh})

    def fastest_of(meshes: Iterator[Meshed]) -> float:
        fastest_s = inf
        for islands, each in meshes:
            if (step_s := pools.steps.step(islands, each).step_s) < fastest_s and not pools.memory.error(islands, each):
                fastest_s = step_s
        return fastest_s

    fastest_s = fastest_of(all_meshes(model, pool))
    if fastest_s == inf and not model.pool_memory.fits([(part.node, part.gpus) for part in pool]):
        fastest_s = fastest_of(offloaded(model, pool))
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
    for seed, drawing in itertools.product(range(24), (drawn, mixture)):
        model = CostModel(drawing(seed))
        shares = [TrainShare(node=part.machine, gpus=part.gpus) for part in pool_of(model)]
        _, mesh = model.pools.arranged(shares, model.nodes)
        divided = [name for name in ("pipeline", "expert") if mesh is not None and getattr(mesh, name) > 1]
        found.add("none" if mesh is None else divided[0] if divided else "offload" if mesh.offload else "islands")
    assert found == {"none", "pipeline", "islands", "expert", "offload"}
