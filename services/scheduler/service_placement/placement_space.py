"""Lists every placement of the services that take GPUs, each with a bound on the rate of any plan around it.

Machines of an entry are alike, so a placement is a multiset of uses for each entry. What is left of a machine makes at
most what its best replicas do, and trains at most what its GPUs do. Of all ways to divide what is left, the smaller of
both sums is bounded by every weighted mean of them (Lagrange), and a machine's part of such a mean is the best of its
own divisions. As pauses and fixed times make both rates concave in these sums, the mean is taken in units of what the
best plan so far needs: with `ratio` times that, no plan makes more than `ratio` times its rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import CriticPlace, GpuWorkers
from services.scheduler.problem.problem import NodeClass
from services.scheduler.service_placement.worker_placement import gpu_rewards, scorers
from services.scheduler.solvers.exhaustive import Free
from services.scheduler.solvers.generation_bound import GenerationBound
from services.scheduler.solvers.interface import ProblemTooLargeError, TimeLeft

MAX_PLACEMENTS = 1_000_000
"""Most placements to bound; each takes some 100 bytes."""
_LOOK_EVERY = 4096
"""Listed uses of an entry's machines after which the time is looked at."""

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """GPUs of one machine that services take."""

    score: int = 0
    reward: int = 0
    critic: int = 0

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.score + self.reward + self.critic


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for every service that takes GPUs; the critic is beside the trainer, or there is none, if it has none."""

    uses: tuple[tuple[NodeClass, tuple[Use, ...]], ...]

    @property
    def free(self) -> Free:
        """GPUs that are left."""
        return {node.name: tuple(node.gpus - use.gpus for use in uses) for node, uses in self.uses}

    @property
    def critic(self) -> CriticPlace | None:
        """The critic on GPUs of its own."""
        found = (CriticPlace(node=name, gpus=use.critic) for name, use in self._machines() if use.critic)
        return next(found, None)

    @property
    def score(self) -> tuple[GpuWorkers, ...]:
        """Scorers."""
        return tuple(GpuWorkers(node=name, gpus=use.score) for name, use in self._machines() if use.score)

    @property
    def reward_gpus(self) -> tuple[GpuWorkers, ...]:
        """Reward workers."""
        return tuple(GpuWorkers(node=name, gpus=use.reward) for name, use in self._machines() if use.reward)

    def _machines(self) -> Iterator[tuple[str, Use]]:
        return ((node.machine(index), use) for node, uses in self.uses for index, use in enumerate(uses))


@dataclass(frozen=True, slots=True)
class _Options:
    """The ways in which services use the machines of one entry."""

    node: NodeClass
    uses: list[tuple[Use, ...]]
    score: _Array
    """Samples per second of scorers; the next two likewise."""
    reward: _Array
    critic: _Array
    num_left: npt.NDArray[np.int64]
    """Machines by GPUs that are left, a row for each number."""


class PlacementSpace:
    """All placements of one problem. Raises ProblemTooLargeError.

    Args:
        model: The problem and its cost model.
        alone: The same without services.
        time_left: Time left for the list.
    """

    def __init__(self, model: CostModel, alone: CostModel, *, time_left: TimeLeft) -> None:
        self._model, self._alone, self._time_left = model, alone, time_left
        self._nodes = model.problem.nodes
        self._has_critic = bool(model.problem.workload.critic_tasks)
        kinds = (scorers(model), gpu_rewards(model))
        self._rates = [{} if kind is None else kind.rates for kind in kinds]
        self._needs = [kind is not None for kind in kinds]
        uses = [self._machine_uses(node) for node in self._nodes]
        # Counted first: listing the placements of each entry of a large cluster would take longer than any search.
        if math.prod(map(_num_options, self._nodes, uses)) > MAX_PLACEMENTS:
            raise _too_large()
        self._critic_s = self._least_critic_s()
        self._generation = GenerationBound(alone)
        self._made = {node.name: self._generation.best_worth(node) for node in self._nodes}
        self._options = list(map(self._options_of, self._nodes, uses))
        self._shape = tuple(len(options.uses) for options in self._options)
        self._services = self._service_rates()

    def placement(self, index: int) -> Placement:
        """One of them."""
        chosen = zip(self._options, np.unravel_index(index, self._shape), strict=True)
        return Placement(tuple((options.node, options.uses[position]) for options, position in chosen))

    def bounds(self, reached: float) -> _Array:
        """Samples per second that no plan around each placement exceeds; at least `reached` of those that may be used.

        Args:
            reached: Of a plan that is known; the bounds are the tighter the faster it is.
        """
        samples, constants = self._model.demand.samples_per_step, self._model.problem.cost_model
        needed_made = _needed(reached, constants.sync_pause_s / samples)
        needed_trained = _needed(reached, constants.train_overhead_s / samples)
        ratio = self._ratio(needed_made, needed_trained)
        if self._has_critic:
            needed_beside = _needed(reached, (constants.train_overhead_s + self._critic_s) / samples)
            ratio = np.where(self._is_beside, self._ratio(needed_made, needed_beside), ratio)
        # Sums in another order may round below the rate.
        return np.minimum(self._services, reached * np.maximum(ratio, 1.0)) * (1 + 1e-12)

    def _ratio(self, needed_made: float, needed_trained: float) -> _Array:
        """How many times what is needed may be made and trained on the GPUs that are left."""
        best: _Array = np.full(math.prod(self._shape), math.inf)
        if math.isinf(needed_made) or math.isinf(needed_trained):
            return np.zeros_like(best)
        trained = {name: rate / needed_trained for name, rate in self._alone.gpu_training_rate.items()}
        for row, price in enumerate(self._generation.prices):
            made = {name: rates[row] / needed_made for name, rates in self._made.items()}
            all_under_way = price * self._generation.most_under_way / needed_made
            # The least mean is at a weight at which an entry's GPUs are worth as much in both stages, or in one alone.
            worths = ((trained[name], float(np.max(rates))) for name, rates in made.items())
            weights = {0.0, 1.0, *(train / (train + most) for train, most in worths if train + most > 0)}
            for weight in weights:
                each = (
                    _mean_worth(made[options.node.name], trained[options.node.name], weight) @ options.num_left
                    for options in self._options
                )
                best = np.minimum(best, _summed(list(each)) + weight * all_under_way)
        return best

    def _least_critic_s(self) -> float:
        """What a critic beside the trainer adds to a step at least."""
        critic = self._model.critic
        fitting = [node for node in self._nodes if self._has_critic and critic.fits(node, node.gpus)]
        return min((critic.step_s(node, node.gpus) for node in fitting), default=math.inf)

    def _machine_uses(self, node: NodeClass) -> list[Use]:
        most = [node.gpus if rates.get(node.name) else 0 for rates in self._rates]
        return [
            Use(score, reward, critic)
            for score in range(most[0] + 1)
            for reward in range(min(most[1], node.gpus - score) + 1)
            for critic in range(node.gpus - score - reward + 1)
            if not critic or (self._has_critic and self._model.critic.fits(node, critic))
        ]

    def _options_of(self, node: NodeClass, each: list[Use]) -> _Options:
        uses = list(self._chosen(node, each))
        left = [[node.gpus - use.gpus for use in one] for one in uses]
        score, reward = (rates.get(node.name, 0.0) for rates in self._rates)

        @cache
        def critic_rate(gpus: int) -> float:
            return self._model.demand.samples_per_step / self._model.critic.step_s(node, gpus) if gpus else 0.0

        return _Options(
            node=node,
            uses=uses,
            score=np.array([score * sum(use.score for use in one) for one in uses], dtype=np.float64),
            reward=np.array([reward * sum(use.reward for use in one) for one in uses], dtype=np.float64),
            critic=np.array([critic_rate(max(use.critic for use in one)) for one in uses], dtype=np.float64),
            num_left=np.array([[one.count(gpus) for one in left] for gpus in range(node.gpus + 1)]),
        )

    def _chosen(self, node: NodeClass, each: list[Use]) -> Iterator[tuple[Use, ...]]:
        """The uses of an entry's machines, one critic at most."""
        if math.comb(len(each) + node.count - 1, node.count) > MAX_PLACEMENTS:
            raise _too_large()
        for number, one in enumerate(combinations_with_replacement(each, node.count)):
            if number % _LOOK_EVERY == 0 and self._time_left() <= 0:
                raise _too_large()
            if sum(use.critic > 0 for use in one) <= 1:
                yield one

    def _service_rates(self) -> _Array:
        """What the services of each placement keep up with; 0 where one is missing, or two critics are."""
        rates: _Array = np.full(math.prod(self._shape), math.inf)
        for is_needed, values in zip(
            self._needs,
            ([each.score for each in self._options], [each.reward for each in self._options]),
            strict=True,
        ):
            if is_needed:
                rates = np.minimum(rates, _summed(values))
        self._is_beside = np.zeros(len(rates), dtype=bool)
        if self._has_critic:
            num_critics = _summed([(each.critic > 0).astype(np.float64) for each in self._options])
            self._is_beside = num_critics == 0
            critic = np.where(self._is_beside, math.inf, _summed([each.critic for each in self._options]))
            rates = np.where(num_critics > 1, 0.0, np.minimum(rates, critic))
        return rates


def _num_options(node: NodeClass, each: Sequence[Use]) -> int:
    """Ways to use the machines of an entry, one critic at most."""
    without = sum(not use.critic for use in each)
    num_rest = math.comb(without + node.count - 2, node.count - 1)
    return math.comb(without + node.count - 1, node.count) + (len(each) - without) * num_rest


def _summed(values: Sequence[_Array]) -> _Array:
    """Over entries, flat in row-major order of their options."""
    total: _Array = np.zeros(1)
    for each in values:
        total = (total[:, np.newaxis] + each).ravel()
    return total


def _mean_worth(made: _Array, trained: float, weight: float) -> _Array:
    """The best weighted mean of both stages on one machine, by the GPUs that are left of it."""
    training = (1 - weight) * trained * np.arange(len(made))
    return np.array([np.max(weight * made[: gpus + 1][::-1] + training[: gpus + 1]) for gpus in range(len(made))])


def _needed(rate: float, lost_s: float) -> float:
    """What must be made or trained for a rate where each sample also takes that much time of the whole stage."""
    left = 1 - rate * lost_s
    return rate / left if left > 0 else math.inf


def _too_large() -> ProblemTooLargeError:
    return ProblemTooLargeError(
        f"exhaustive: services can be placed in more than {MAX_PLACEMENTS:,} ways, or in more than could be listed in "
        "this time; use --solver auto"
    )
