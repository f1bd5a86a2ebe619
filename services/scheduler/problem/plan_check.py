"""Checks whether machines can run a plan, from the problem alone.

Solvers and the cost model apply these rules too; this is a second implementation that shares no code with either, so
that a mistake in one is caught; memory is the trainer's own formula in both. Every solver's plan passes here before it
is returned.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

from penstock.errors import InternalError
from penstock.model.training_memory import TrainingMode, frozen_bytes, working_bytes
from services.scheduler.problem.plan_document import PlanDocument, Replicas
from services.scheduler.problem.plan_mesh_check import mesh_violations, problem_shape
from services.scheduler.problem.problem import NodeClass, Problem

_MAX_DEGREE = 16
_WEIGHTS_HEADROOM = 1.02
"""A replica needs this multiple of its weights' bytes, which leaves headroom for a cache. Source: RM-1, "Space"."""


class InvalidPlanError(InternalError):
    """A solver returned a plan that machines cannot run: a fault of the solver, never of the problem."""


def check_plan(problem: Problem, plan: PlanDocument, *, solver: str) -> None:
    """Raise InvalidPlanError listing all violations."""
    if found := violations(problem, plan):
        raise InvalidPlanError(f"solver {solver} made a plan that cannot run: {'; '.join(found[:8])}")


def violations(problem: Problem, plan: PlanDocument) -> list[str]:
    """All violations, each starting with its field; empty if the plan can run."""
    machines = {node.machine(index): node for node in problem.nodes for index in range(node.count)}
    hosts = {host.machine(index) for host in problem.hosts for index in range(host.count)}
    unknown = [
        f"{field}: there is no machine {name!r}"
        for field, name in _named(plan)
        if name not in machines and not (name in hosts and field.startswith("reward."))
    ]
    if unknown:
        return unknown
    empty = [f"{field}: empty" for field, entries in (("gen", plan.gen), ("train", plan.train)) if not entries]
    return empty or [
        *_capacity(machines, plan),
        *_degrees(problem, machines, plan),
        *_training_memory(problem, machines, plan),
        *_scoring(problem, machines, plan),
        *_critic(problem, machines, plan),
        *_rewards(problem, machines, plan),
        *_regions(problem, machines, plan),
        *_relays(machines, plan),
    ]


def _named(plan: PlanDocument) -> list[tuple[str, str]]:
    generates = [(f"gen.{index}.node", each.node) for index, each in enumerate(plan.gen)]
    scores = [(f"score.{index}.node", each.node) for index, each in enumerate(plan.score)]
    rewards = [(f"reward.{index}", name) for index, name in enumerate(plan.reward)]
    rewards += [(f"reward_gpus.{index}.node", each.node) for index, each in enumerate(plan.reward_gpus)]
    relays = [(f"relay.{index}.node", each.node) for index, each in enumerate(plan.relay)]
    critic = [] if plan.critic is None else [("critic.node", plan.critic.node)]
    trains = [(f"train.{index}.node", each.node) for index, each in enumerate(plan.train)]
    return generates + trains + scores + rewards + critic + relays


def _capacity(machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    used: Counter[str] = Counter()
    for replicas in plan.gen:
        used[replicas.node] += replicas.tp * replicas.pp * replicas.count
    for share in plan.train:
        used[share.node] += share.gpus
    for workers in (*plan.score, *plan.reward_gpus):
        used[workers.node] += workers.gpus
    if plan.critic is not None and not plan.critic.is_beside_trainer:
        used[plan.critic.node] += plan.critic.gpus
    shares = Counter(share.node for share in plan.train)
    return [
        *(f"train: machine {name} is listed {times} times" for name, times in shares.items() if times > 1),
        *(
            f"gen and train: {gpus} GPUs of machine {name} are used, and it has {machines[name].gpus}"
            for name, gpus in used.items()
            if gpus > machines[name].gpus
        ),
    ]


def _degrees(problem: Problem, machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    found = []
    weights_GB = problem.model.params * problem.model.weight_bytes / 1e9
    most = min(_MAX_DEGREE, problem.constraints.max_tp)
    for index, replicas in enumerate(plan.gen):
        field, degree, node = f"gen.{index}.tp", replicas.tp, machines[replicas.node]
        if degree > most or degree & (degree - 1):
            found.append(f"{field}: {degree} is not a power of two up to {most}")
        if node.gpus % degree or problem.model.q_heads % degree:
            found.append(f"{field}: {degree} divides not both {node.gpus} GPUs and {problem.model.q_heads} query heads")
        offered_GB = degree * _usable_GB(problem, node)
        if replicas.pp > 1 or replicas.batch is not None:
            found += _stages(problem, replicas, f"gen.{index}", offered_GB)
        elif offered_GB <= weights_GB * _WEIGHTS_HEADROOM:
            found.append(
                f"{field}: {degree} GPUs of {replicas.node} offer {offered_GB:.1f} GB to weights and a cache, and the "
                f"weights alone are {weights_GB:.1f} GB"
            )
    return found


def _stages(problem: Problem, replicas: Replicas, field: str, offered_GB: float) -> list[str]:
    """What the GPUs of one stage lack: each has a run of layers and the cache of its batch's samples in them."""
    model, most = problem.model, min(problem.constraints.gen_pp, problem.model.layers)
    if replicas.pp > most:
        return [f"{field}.pp: {replicas.pp} stages; constraints.gen_pp and {model.layers} layers allow {most}"]
    embedding = model.vocab * model.hidden
    of_layer = (model.params - (1 if model.tied_embeddings else 2) * embedding) / model.layers
    layers = [model.layers // replicas.pp] * replicas.pp
    for extra in range(model.layers % replicas.pp):
        layers[-2 - extra] += 1
    mean, mean_square = problem.workload.output_len.moments()
    sharers = problem.workload.group_size if problem.cost_model.prefix_sharing else 1
    held_tokens = problem.workload.prompt_len / sharers + (mean_square + mean) / 2 / mean
    of_token = 2.0 * model.kv_heads * model.head_dim * model.kv_bytes * max(1.0, replicas.tp / model.kv_heads)
    for stage, count in enumerate(layers):
        is_first, is_last = stage == 0, stage == replicas.pp - 1
        ends = is_first + is_last - (is_first and is_last and model.tied_embeddings)
        weights_GB = (count * of_layer + ends * embedding) * model.weight_bytes / 1e9
        cache_GB = (replicas.batch or 0) * held_tokens * of_token * count / 1e9
        if max(weights_GB * _WEIGHTS_HEADROOM, (weights_GB + cache_GB) * (1 - 1e-9)) > offered_GB:
            return [
                f"{field}: {replicas.tp} GPUs of {replicas.node} offer {offered_GB:.1f} GB to stage {stage + 1}, whose "
                f"weights are {weights_GB:.1f} GB, and the cache of {replicas.batch or 0} samples {cache_GB:.1f} GB"
            ]
    return []


def _training_memory(problem: Problem, machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    needed_GB = 0.0
    for task in problem.workload.pool_tasks:
        if not task.shares_weights:
            bytes_per_param = problem.cost_model.train_bytes_per_param if task.kind == "train" else 2.0
            needed_GB += bytes_per_param * problem.model.params * task.scale / 1e9
    # What a critic takes of each GPU of the pool, by machine.
    taken_GB: dict[str, float] = {}
    if plan.critic is not None and plan.critic.is_beside_trainer:
        taken_GB[plan.critic.node] = _critic_GB(problem, plan.critic.gpus)
    if problem.cost_model.train_pack_tokens:
        return mesh_violations(problem, machines, plan, needed_GB, taken_GB)
    if plan.mesh is not None:
        return ["mesh: what islands and stages need is only known with cost_model.train_pack_tokens; state that"]
    offered_GB = sum(
        share.gpus * (_usable_GB(problem, machines[share.node]) - taken_GB.get(share.node, 0.0)) for share in plan.train
    )
    if offered_GB >= needed_GB * (1 - 1e-12):
        return []
    gpus = sum(share.gpus for share in plan.train)
    return [f"train: the tasks need {needed_GB:.1f} GB, and the pool's {gpus} GPUs offer {offered_GB:.1f} GB"]


def _scoring(problem: Problem, machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    """Scorers where a task needs them and nowhere else, each with memory for the frozen model and a pass."""
    task = problem.workload.scored_task
    if (task is None) == bool(plan.score):
        return [
            f"score: {len(plan.score)} machines, and the workload has {'no' if task is None else 'a'} task for them"
        ]
    if task is None:
        return []
    needed_GB = 2.0 * problem.model.params * task.scale / 1e9
    if problem.cost_model.train_pack_tokens and problem.model.token_ffn is not None:
        needed_GB = frozen_bytes(problem_shape(problem), problem.cost_model.train_pack_tokens) * task.scale / 1e9
    return [
        f"score.{index}.node: a scorer needs {needed_GB:.1f} GB, and a GPU of {each.node} offers {offered_GB:.1f} GB"
        for index, each in enumerate(plan.score)
        if (offered_GB := _usable_GB(problem, machines[each.node])) < needed_GB * (1 - 1e-12)
    ]


def _rewards(problem: Problem, machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    """Reward workers with a GPU where the workload asks for one and nowhere else, and with memory."""
    work = problem.workload.reward
    takes_gpus = work is not None and work.gpu_memory_GB > 0
    if takes_gpus != bool(plan.reward_gpus):
        return [
            f"reward_gpus: {len(plan.reward_gpus)} machines, and reward workers take {'' if takes_gpus else 'no '}GPUs"
        ]
    if plan.reward and plan.reward_gpus:
        return ["reward_gpus: stated beside reward, and reward workers have a GPU each, or none"]
    if work is None:
        return []
    found = [
        f"reward_gpus.{index}.node: a GPU of {each.node} offers {offered_GB:.1f} of {work.gpu_memory_GB:.1f} GB"
        for index, each in enumerate(plan.reward_gpus)
        if (offered_GB := _usable_GB(problem, machines[each.node])) < work.gpu_memory_GB
    ]
    # Without either field the head has one.
    held = Counter(plan.reward if plan.reward or plan.reward_gpus else [plan.train[0].node])
    for each in plan.reward_gpus:
        held[each.node] += each.gpus
    return [*found, *_hosts(problem, plan), *_main_memory(machines, held, work.memory_GB)]


def _hosts(problem: Problem, plan: PlanDocument) -> list[str]:
    """What machines without GPUs lack for a reward worker."""
    work, found = problem.workload.reward, list[str]()
    if work is None:
        return found
    for host in problem.hosts:
        for name in {host.machine(index) for index in range(host.count)} & set(plan.reward):
            others = plan.broker.count + 1 if plan.broker is not None and plan.broker.node == name else 0
            if (host.cores or math.inf) < others + work.cores:
                found.append(f"reward: {name} has {host.cores} cores; a worker needs {work.cores} beside {others} more")
            if (host.memory_GB or math.inf) < work.memory_GB:
                found.append(f"reward: {name} has {host.memory_GB} GB, and a worker needs {work.memory_GB:.1f} GB")
    return found


def _main_memory(machines: dict[str, NodeClass], held: Counter[str], memory_GB: float) -> list[str]:
    return [
        f"reward: {count} workers on {name} need {count * memory_GB:.1f} GB, and it has {offered_GB:.1f} GB"
        for name, count in held.items()
        if name in machines and (offered_GB := machines[name].memory_GB) is not None and count * memory_GB > offered_GB
    ]


def _critic(problem: Problem, machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    """A critic where a trained service needs one and nowhere else, with memory for its shards, beside the trainer's."""
    is_needed = any(task.is_service and task.kind == "train" for task in problem.workload.train_tasks)
    if is_needed != (plan.critic is not None):
        return [
            f"critic: {'un' if is_needed else ''}set, and the workload has {'a' if is_needed else 'no'} task for it"
        ]
    if plan.critic is None:
        return []
    place = plan.critic
    trained = sum(share.gpus for share in plan.train if share.node == place.node)
    if place.is_beside_trainer and trained != place.gpus:
        return [f"critic.gpus: {place.gpus}, and beside the trainer it shares {trained} GPUs of {place.node}"]
    home, region = machines[plan.train[0].node].region, machines[place.node].region
    if home != region and not any({link.a, link.b} == {home, region} for link in problem.links):
        return [f"critic.node: {place.node} is in region {region!r}, which no link joins with {home!r}, the head's"]
    needed_GB, offered_GB = _critic_GB(problem, place.gpus), _usable_GB(problem, machines[place.node])
    if offered_GB >= needed_GB * (1 - 1e-12):
        return []
    return [
        f"critic.node: each of {place.gpus} GPUs needs {needed_GB:.1f} GB, and one of {place.node} offers "
        f"{offered_GB:.1f} GB"
    ]


def _critic_GB(problem: Problem, gpus: int) -> float:
    """What a critic of its own takes of each of its GPUs: its shard and a pass, recomputed where that takes less."""
    scale = sum(task.scale for task in problem.workload.train_tasks if task.is_service and task.kind == "train")
    needed = problem.cost_model.train_bytes_per_param * problem.model.params * scale / gpus
    if pack_tokens := problem.cost_model.train_pack_tokens:
        modes = [
            TrainingMode(num_shards=gpus, pack_tokens=pack_tokens, is_half=True, checkpoints_layers=recomputes)
            for recomputes in (True, False)
        ]
        needed += min(working_bytes(problem_shape(problem), mode) for mode in modes)
    return needed / 1e9


def _regions(problem: Problem, machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    homes = sorted({machines[share.node].region for share in plan.train})
    linked = {frozenset((link.a, link.b)) for link in problem.links}
    if problem.constraints.train_single_region and len(homes) > 1:
        return [f"train: the pool spans the regions {', '.join(homes)}, and constraints.train_single_region is set"]
    apart = [pair for pair in combinations(homes, 2) if frozenset(pair) not in linked]
    unreached = [
        f"gen.{index}.node: no link brings weights to {replicas.node} in region {region!r}"
        for index, replicas in enumerate(plan.gen)
        if (region := machines[replicas.node].region) not in homes
        and not any(frozenset((home, region)) in linked for home in homes)
    ]
    return [f"train: the pool spans {one!r} and {other!r}, which no link joins" for one, other in apart] + unreached


def _relays(machines: dict[str, NodeClass], plan: PlanDocument) -> list[str]:
    """One at most for a site, which generates there and gets its weights over a link."""
    generating, home = {each.node for each in plan.gen}, machines[plan.train[0].node].region
    sites = Counter(each.site for each in plan.relay)
    return [
        *(f"relay: site {site!r} has {count}; state one" for site, count in sites.items() if count > 1),
        *(
            f"relay.{index}.node: {each.node} of region {machines[each.node].region!r} is no machine of site "
            f"{each.site!r} that generates"
            for index, each in enumerate(plan.relay)
            if each.node not in generating or machines[each.node].region != each.site
        ),
        *(
            f"relay.{index}.site: the head is in {home!r} as well, and sends weights to each generator there itself"
            for index, each in enumerate(plan.relay)
            if each.site == home
        ),
    ]


def _usable_GB(problem: Problem, node: NodeClass) -> float:
    constants = problem.cost_model
    return problem.gpu_types[node.gpu].hbm_GB * constants.mem_util - constants.reserve_GB
