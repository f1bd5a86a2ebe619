"""Solves an integer program, then searches locally: for clusters too large for exhaustive search.

The program (`columns`) gives a first plan and an upper bound. It does not see slow links, all-reduce and the staleness
bound, so the search continues under the true score, from its plans and from plain divisions: whole entries or single
machines are divided differently, then random changes of two machines restart it from the best, until they stop helping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from random import Random

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.problem import NodeClass
from services.scheduler.solvers.columns import solve_columns
from services.scheduler.solvers.divisions import Division, Split, machine_splits, packed
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, TimeLeft
from services.scheduler.solvers.scored import BETTER, Parts, Scored, climb, homes_of, ordered_nodes, parts_of, with_part

MAX_COLUMNS = 20_000
"""Most ways to divide one machine of each entry, in total."""
_PROGRAM_SHARE = 0.3
"""Share of the time for the integer programs."""
MAX_KICKS = 40
"""Unsuccessful random changes in a row after which the search ends."""
_GOAL_GAP = 1e-4
"""A plan this close to its bound counts as the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpSolver:
    """Implements the search: columns, then local search."""

    name: str = "milp"
    has_programs: bool = True
    """Without them the search starts from the given plans only, and has no bound."""

    def solve(self, model: CostModel, *, time_left: TimeLeft, seed: int, starts: Plans = ()) -> Solution:
        """A good plan, and an upper bound if every integer program proved one."""
        columns = {
            node.name: list(islice(machine_splits(model, node), MAX_COLUMNS)) for node in ordered_nodes(model.problem)
        }
        if sum(map(len, columns.values())) >= MAX_COLUMNS:
            raise ProblemTooLargeError(f"milp: machines can be divided in more than {MAX_COLUMNS:,} ways; lower max_tp")
        search = _Search(model, columns, time_left, Random(seed))
        given = [parts_of(model, start) for start in starts]
        for start in given:
            search.scored.rate(start)
        bound, solved = self._programs(model, columns, time_left, seed) if self.has_programs else (math.inf, [])
        goal = bound / (1 + _GOAL_GAP)
        for start in solved:
            search.scored.rate(start)
        for start in chain(given, solved, search.plain_starts()):
            if search.scored.best_rate < goal:
                search.climb(start)
        if search.scored.best_rate < goal:
            search.kick()
        proved = bound if math.isfinite(bound) else None
        return search.scored.solution(self.name, bound=proved, is_optimal=search.scored.best_rate >= goal)

    @staticmethod
    def _programs(
        model: CostModel, columns: dict[str, list[Split]], time_left: TimeLeft, seed: int
    ) -> tuple[float, list[Parts]]:
        """The bound over all training sites, infinite if one proved none; and each program's plan."""
        is_linked = any(link.a != link.b for link in model.problem.links)
        homes = [home for home in homes_of(model.problem) if len(home) == 1 or is_linked]
        limit_s = _PROGRAM_SHARE * time_left() / len(homes)
        bound, starts = 0.0, list[Parts]()
        for home in homes:
            if time_left() <= 0:
                return math.inf, starts
            solved = solve_columns(model, columns, home, limit_s=limit_s, seed=seed)
            bound = max(bound, solved.upper_bound)
            if solved.parts is not None:
                starts.append(solved.parts)
        return bound, starts


class _Search:
    """The best plan so far, and the moves to better ones."""

    def __init__(self, model: CostModel, columns: dict[str, list[Split]], time_left: TimeLeft, random: Random) -> None:
        self._model, self._columns, self._time_left, self._random = model, columns, time_left, random
        self.scored = Scored(model)

    def climb(self, parts: Parts) -> None:
        """Go to better neighbours until there is none, or no time; the very first plans are tried in any case."""
        if self.scored.best is not None and self._time_left() <= 0:
            return
        climb(self.scored, parts, self._neighbours, time_left=self._time_left)

    def kick(self) -> None:
        """Change two machines of the best plan at random and climb, until that stops helping."""
        fruitless = 0
        while self.scored.best is not None and fruitless < MAX_KICKS and self._time_left() > 0:
            before, kicked = self.scored.best_rate, self.scored.best
            for _ in range(2):
                kicked = self._changed(kicked)
            self.climb(kicked)
            fruitless = 0 if self.scored.best_rate > before * BETTER else fruitless + 1

    def plain_starts(self) -> Iterator[Parts]:
        """For each training site, part of its machines' GPUs or whole entries train; others generate or idle."""
        nodes = ordered_nodes(self._model.problem)
        for home in dict.fromkeys(node.region for node in nodes):
            for share in (0.25, 0.5, 0.75, 1.0):
                here = [
                    self._uniform(node, round(share * node.gpus * node.count) if node.region == home else 0, 0)
                    for node in nodes
                ]
                yield tuple(here)
                yield tuple(part if part.node.region == home else self._idle(part.node) for part in here)
        for chosen in nodes:
            yield tuple(self._uniform(node, node.gpus * node.count if node is chosen else 0, 0) for node in nodes)

    def _neighbours(self, parts: Parts) -> Iterator[Parts]:
        moves: list[tuple[int, Callable[[], Division]]] = []
        for index, part in enumerate(parts):
            node = part.node
            for degree in range(max(1, len(self._model.degrees[node.name]))):
                gpu_counts = range(node.gpus * node.count + 1)
                moves += [(index, partial(self._uniform, node, gpus, degree)) for gpus in gpu_counts]
            moves.append((index, partial(self._idle, node)))
            for old in set(part.splits):
                position = part.splits.index(old)
                new_splits = (new for new in self._columns[node.name] if new != old)
                moves += [(index, partial(part.with_split, position, new)) for new in new_splits]
        self._random.shuffle(moves)
        return (with_part(parts, index, divided()) for index, divided in moves)

    def _changed(self, parts: Parts) -> Parts:
        index = self._random.randrange(len(parts))
        part = parts[index]
        old, new = self._random.choice(part.splits), self._random.choice(self._columns[part.node.name])
        return with_part(parts, index, part.with_split(part.splits.index(old), new))

    def _idle(self, node: NodeClass) -> Division:
        return Division(node, (Split((0,) * len(self._model.degrees[node.name]), 0),) * node.count)

    def _uniform(self, node: NodeClass, train_gpus: int, degree: int) -> Division:
        """Machines train in order until `train_gpus` GPUs do; the rest generates at one degree, or smaller."""
        splits = []
        degrees = self._model.degrees[node.name]
        for trains in packed(node, train_gpus):
            free, replicas = node.gpus - trains, [0] * len(degrees)
            for index in reversed(range(min(degree + 1, len(degrees)))):
                replicas[index], free = divmod(free, degrees[index])
            splits.append(Split(tuple(replicas), trains))
        return Division(node, tuple(splits))
