"""Derives what dispatch knows of generators from their reports; remembers the model of each. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel
from services.broker.fleet.snapshot import GeneratorStatus
from services.broker.operations.leasing import GeneratorFacts

STEP = math.log(1.05)
"""Measured speeds count in steps of 5 %, which is what they are good for: alike generators are indexed together."""


class FleetStatuses(Mapping[str, GeneratorStatus]):
    """Statuses that are derived when they are read: of a large fleet, a slice at a time is.

    Args:
        makers: Derives each generator's.
    """

    def __init__(self, makers: Mapping[str, Callable[[], GeneratorStatus]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> GeneratorStatus:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def with_seats(self, makers: Mapping[str, Callable[[], GeneratorStatus]]) -> FleetStatuses:
        """With these in place of, or beside, those known."""
        return FleetStatuses({**self._makers, **makers})


class Statuses:
    """The statuses of a run's generators."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[broker_pb2.GeneratorView, float, GeneratorStatus]] = {}
        """By generator: the view and the factor that its status was made from."""
        self._usual_factor = 1.0
        """Of the generators that were measured; one that states nothing counts as fast as the others."""

    def of(self, views: Sequence[broker_pb2.GeneratorView]) -> FleetStatuses:
        """The statuses of these generators."""
        factors = [view.measured_step_factor for view in views if view.measured_step_factor]
        self._usual_factor = sum(factors) / len(factors) if factors else 1.0
        if len(self._known) > 2 * len(views) + 64:
            names = {view.hello.generator_id for view in views}
            self._known = {name: known for name, known in self._known.items() if name in names}
        return FleetStatuses({view.hello.generator_id: partial(self._status, view) for view in views})

    def of_asking(
        self, view: broker_pb2.GeneratorView | None, generator: GeneratorFacts, num_free: int
    ) -> GeneratorStatus:
        """The status of a generator by what it asks with, which is newer than its last report."""
        known = None if view is None else self._status(view)
        return GeneratorStatus(
            generator_id=generator.generator_id,
            model=known.model if known else LatencyModel().scaled(_rounded(self._usual_factor)),
            num_free=num_free,
            max_context_tokens=generator.max_context_tokens,
            is_speed_known=known is not None and known.is_speed_known,
            policy_version=generator.policy_version,
        )

    def _status(self, view: broker_pb2.GeneratorView) -> GeneratorStatus:
        name, profile = view.hello.generator_id, view.hello.profile
        is_stated = profile.step_base_s > 0 or profile.step_per_sample_s > 0
        # Without measurements a stated profile is used; a generator without one counts as fast as the others.
        factor = _rounded(view.measured_step_factor or (1.0 if is_stated else self._usual_factor))
        known = self._known.get(name)
        if known is not None and known[0] is view and known[1] == factor and known[2].num_free == view.num_free_leases:
            return known[2]
        model = LatencyModel.from_profile(profile).scaled(factor)
        status = GeneratorStatus(
            generator_id=name,
            model=known[2].model if known is not None and known[2].model == model else model,
            num_free=view.num_free_leases,
            max_context_tokens=view.hello.max_context_tokens,
            is_speed_known=is_stated or bool(view.measured_step_factor),
            policy_version=view.beat.policy_version,
        )
        self._known[name] = (view, factor, status)
        return status


def _rounded(factor: float) -> float:
    return math.exp(STEP * round(math.log(factor) / STEP))
