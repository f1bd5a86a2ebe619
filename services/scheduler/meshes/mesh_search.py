"""Finds the mesh of a training pool: islands of like GPUs, split layers, or pipelines over unlike GPUs.

The trainer has four kinds of meshes. Islands are runs of machines, or parts of one, with tokens by speed; layers are
split inside machines, the experts of a mixture over any neighbours; pipelines give each GPU type stages of its own,
whose layers `divide_layers` chooses exactly. All of each kind are tried that treat machines of one entry alike; a pool
is searched once. Only where the memory of none suffices, weights and optimiser are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product
from math import gcd, inf

from services.scheduler.cost_model.training_step import TrainingStep
from services.scheduler.meshes.islands import Island, Part, cut, size_of
from services.scheduler.meshes.layer_division import divide_layers
from services.scheduler.meshes.mesh_memory import MeshMemory
from services.scheduler.meshes.mesh_step import MeshSteps
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import SHARE_DIGITS, TrainShare
from services.scheduler.problem.problem import Problem

MAX_STAGES = 16
_MAX_ORDERED = 4
"""GPU types of a pool whose orders, and ways to be joined, are all tried; of more, one order."""
_MAX_COMBINED = 256
"""Combinations of islands that are tried one by one; of more, each entry's islands are changed in turn."""
_GOOD = 1.0005
"""A step this close to that of the computation alone ends the search."""

_Group = tuple[Part, ...]
"""A pool's machines of one entry."""
_Runs = tuple[_Group, ...]
"""Islands that only shard."""
Meshed = tuple[list[Island], Mesh]
"""GPUs in their places, and the directions in which they divide a step."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A pool in a mesh, and its step."""

    pool: tuple[TrainShare, ...]
    mesh: Mesh | None
    step: TrainingStep


class MeshSearch:
    """The search of one problem."""

    def __init__(self, problem: Problem, memory: MeshMemory, steps: MeshSteps) -> None:
        self._problem, self._memory, self._steps = problem, memory, steps

    def best(self, pool: Sequence[Part], at_least: Trained | None) -> Trained | None:
        """The best mesh of these machines' GPUs; `at_least` is that of one copy over all, if it fits."""
        ideal_s = self._steps.ideal_s(pool)
        groups = _groups(pool)
        best = at_least

        def can_win(least_s: float) -> bool:
            return best is None or least_s < best.step.step_s

        def tried(meshes: Iterator[Meshed]) -> None:
            nonlocal best
            for islands, mesh in meshes:
                step = self._steps.step(islands, mesh)
                if can_win(step.step_s) and self._memory.error(islands, mesh) is None:
                    best = Trained(pool_of(islands), mesh, step)
                    if step.step_s <= ideal_s * _GOOD:
                        return

        tried(
            chain(
                self._island_meshes(groups),
                self._splits(groups),
                self._divided_experts(groups),
                self._pipelines(groups, pool, can_win),
            )
        )
        if best is None and self._problem.offload_obstacle is None:
            tried(self._offloaded(groups))
        return best

    def _island_meshes(self, groups: Sequence[_Group]) -> Iterator[Meshed]:
        for blocks in _blocks(groups):
            options = [self._runs(block) for block in blocks]
            if not all(options):
                continue
            for runs in self._combined(options):
                if len(runs) > 1:
                    yield self.islands(runs)

    def _combined(self, options: Sequence[Sequence[_Runs]]) -> Iterator[_Runs]:
        """Every choice for each block, or if they are too many, the best found by changing one at a time."""
        num = 1
        for each in options:
            num *= len(each)
        if num <= _MAX_COMBINED:
            for choice in product(*options):
                yield tuple(chain.from_iterable(choice))
            return
        chosen = [each[0] for each in options]
        best_s = inf
        is_better = True
        while is_better:
            is_better = False
            for index, each in enumerate(options):
                for option in each:
                    tried = [*chosen[:index], option, *chosen[index + 1 :]]
                    runs = tuple(chain.from_iterable(tried))
                    found_s = self._steps.step(*self.islands(runs)).step_s
                    if found_s < best_s * (1 - 1e-9):
                        chosen, best_s, is_better = tried, found_s, True
        yield tuple(chain.from_iterable(chosen))

    def _runs(self, block: _Group) -> list[_Runs]:
        """Ways to make islands of a block of machines; of unlike ones, one island."""
        if len({part.node.name for part in block}) > 1:
            return [(block,)] if self._fits(block) else []
        found: list[_Runs] = [(block,)]
        for width in _halvings(len(block)):
            found.append(tuple(_chunks(block, width)))
        for gpus in _halvings(max(part.gpus for part in block)):
            if all(part.gpus <= gpus or part.gpus % gpus == 0 for part in block):
                pieces = (
                    replace(part, gpus=min(gpus, part.gpus)) for part in block for _ in range(-(-part.gpus // gpus))
                )
                found.append(tuple((piece,) for piece in pieces))
        return [runs for runs in dict.fromkeys(found) if all(map(self._fits, set(runs)))]

    def _fits(self, run: _Group) -> bool:
        return any(
            all(
                self._memory.fits_whole(name, size_of(run), recomputes=recomputes)
                for name in {part.node.name for part in run}
            )
            for recomputes in (False, True)
        )

    def islands(self, runs: _Runs) -> Meshed:
        """With shares of tokens, so that all end at once."""
        speeds = [self._steps.island_speed(run) for run in runs]
        processes = [[speed * self._of_all(part, run) for part in run] for speed, run in zip(speeds, runs, strict=True)]
        most = max(map(max, processes))
        islands: list[Island] = []
        for run, own in zip(runs, processes, strict=True):
            shared = (
                replace(part, share=max(10.0**-SHARE_DIGITS, round(one / most, SHARE_DIGITS)))
                for part, one in zip(run, own, strict=True)
            )
            islands.append((tuple(shared),))
        return islands, Mesh(islands=tuple(map(size_of, runs)))

    def _of_all(self, part: Part, run: _Group) -> float:
        """What a process of a part computes of what its island does."""
        return self._steps.rates[part.node.name] / sum(each.gpus * self._steps.rates[each.node.name] for each in run)

    def _pipelines(
        self, groups: Sequence[_Group], pool: Sequence[Part], can_win: Callable[[float], bool]
    ) -> Iterator[Meshed]:
        total = sum(map(size_of, groups))
        common = gcd(*map(size_of, groups))
        for width in _divisors(total):
            # Several pipelines have as many GPUs of each entry, so that they are alike; one may mix them in a stage.
            for copies in _divisors(common):
                num_stages, rest = divmod(total, width * copies)
                if rest or not 2 <= num_stages <= min(MAX_STAGES, self._steps.num_layers):
                    continue
                if not can_win(self._steps.least_pipeline_s(pool, num_stages)):
                    continue
                for order in _orders(groups):
                    if (islands := _piped(order, width, copies)) is None:
                        continue
                    for mesh in self._with_layers(islands):
                        yield islands, mesh

    def _with_layers(self, islands: Sequence[Island]) -> Iterator[Mesh]:
        stages = islands[0]
        sizes = tuple(sum(map(size_of, island)) for island in islands)
        last = len(stages) - 1
        passage = self._steps.passage(islands)
        seen = set[tuple[int, ...] | None]()
        for recomputes in (False, True):
            most = [
                min(
                    self._memory.most_layers(
                        part.node.name,
                        size_of(stage),
                        is_first=index == 0,
                        is_last=index == last,
                        recomputes=recomputes,
                    )
                    for part in stage
                )
                for index, stage in enumerate(stages)
            ]
            layers = divide_layers(self._steps.num_layers, passage, most)
            if layers is not None and layers not in seen:
                seen.add(layers)
                yield Mesh(islands=sizes, pipeline=len(stages), layers_per_stage=layers)

    def _divided_experts(self, groups: Sequence[_Group]) -> Iterator[Meshed]:
        if (num_experts := self._problem.model.experts) is None:
            return
        for order in _orders(groups):
            for islands in self._equal_islands(order):
                sizes = tuple(sum(map(size_of, island)) for island in islands)
                for expert in _divisors(gcd(sizes[0], num_experts)):
                    if expert > 1:
                        yield islands, Mesh(islands=sizes, expert=expert)

    def _offloaded(self, groups: Sequence[_Group]) -> Iterator[Meshed]:
        for islands in self._equal_islands(_orders(groups)[0]):
            # FSDP offloads what it shards.
            if (size := sum(map(size_of, islands[0]))) > 1:
                yield islands, Mesh(islands=(size,) * len(islands), offload=True)

    def _equal_islands(self, order: Sequence[_Group]) -> Iterator[list[Island]]:
        """Of one copy, two, and so on, with tokens by the GPUs' speed."""
        parts = self._by_speed(order)
        total = size_of(parts)
        for copies in _divisors(total):
            yield [(run,) for run in cut(parts, (total // copies,) * copies)]

    def _by_speed(self, order: Sequence[_Group]) -> list[Part]:
        parts = [replace(part, share=self._steps.rates[part.node.name]) for group in order for part in group]
        most = max(part.share for part in parts)
        least = 10.0**-SHARE_DIGITS
        return [replace(part, share=max(least, round(part.share / most, SHARE_DIGITS))) for part in parts]

    def _splits(self, groups: Sequence[_Group]) -> Iterator[Meshed]:
        model = self._problem.model
        parts = self._by_speed(_orders(groups)[0])
        total = size_of(parts)
        for tensor in (2, 4, 8):
            widths = [part.gpus for part in parts] + [model.q_heads, model.kv_heads, model.experts or model.ffn or 1]
            if any(width % tensor for width in widths):
                continue
            for copies in _divisors(total // tensor):
                size = total // copies
                if size % tensor == 0:
                    islands: list[Island] = [(run,) for run in cut(parts, (size,) * copies)]
                    yield islands, Mesh(islands=(size,) * copies, tensor=tensor)


def _groups(pool: Sequence[Part]) -> list[_Group]:
    found: dict[str, list[Part]] = {}
    for part in pool:
        found.setdefault(part.node.name, []).append(part)
    return [tuple(sorted(group, key=lambda part: -part.gpus)) for group in found.values()]


def _orders(groups: Sequence[_Group]) -> list[tuple[_Group, ...]]:
    """Of the pool's entries; stages of one region stay together where there are many."""
    if len(groups) <= _MAX_ORDERED:
        return list(permutations(groups))
    return [tuple(sorted(groups, key=lambda group: group[0].node.region))]


def _blocks(groups: Sequence[_Group]) -> Iterator[list[_Group]]:
    """Ways to join entries: each block is an island of unlike GPUs, or one entry that is divided further."""
    if len(groups) > _MAX_ORDERED:
        yield list(groups)
        return
    yield from _partitions(list(groups))


def _partitions(groups: list[_Group]) -> Iterator[list[_Group]]:
    if not groups:
        yield []
        return
    first, rest = groups[0], groups[1:]
    for smaller in _partitions(rest):
        yield [first, *smaller]
        for index, block in enumerate(smaller):
            yield [*smaller[:index], (*first, *block), *smaller[index + 1 :]]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _halvings(whole: int) -> Iterator[int]:
    """Half of it, a quarter, ... one."""
    while whole > 1:
        whole = (whole + 1) // 2
        yield whole


def _chunks(parts: _Group, width: int) -> Iterator[_Group]:
    """Runs of that many machines; what is left over joins the last one."""
    starts = list(range(0, len(parts), width))
    if len(parts) % width and len(starts) > 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
        yield parts[start:end]


def _piped(order: Sequence[_Group], width: int, copies: int) -> list[Island] | None:
    """Pipelines with stages of that many processes; None if the ranks of a machine would not follow each other."""
    shares = [list(cut(group, (size_of(group) // copies,) * copies)) for group in order]
    islands: list[Island] = []
    for copy in range(copies):
        parts = [part for share in shares for part in share[copy]]
        islands.append(tuple(cut(parts, (width,) * (size_of(parts) // width))))
    machines = [part.machine for island in islands for stage in island for part in stage]
    changes = [machine for index, machine in enumerate(machines) if index == 0 or machines[index - 1] != machine]
    return islands if len(changes) == len(set(changes)) else None


def pool_of(islands: Sequence[Island]) -> tuple[TrainShare, ...]:
    """The pool in the order of its ranks."""
    found: list[TrainShare] = []
    for part in (part for island in islands for stage in island for part in stage):
        if found and found[-1].node == part.machine:
            found[-1] = found[-1].model_copy(update={"gpus": found[-1].gpus + part.gpus})
        else:
            found.append(TrainShare(node=part.machine, gpus=part.gpus, share=part.share))
    return tuple(found)
