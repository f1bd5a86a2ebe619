"""What dispatch knows of generators from what they say of themselves and how fast they turn out to be. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.v1 import broker_pb2
from services.broker.dispatch.latency import LatencyModel
from services.broker.fleet import GeneratorStatus
from services.broker.generation import GeneratorFacts

STEP = math.log(1.05)
"""Measured speeds are told apart by 5 %: they are no better known, and alike generators are indexed together."""


class Statuses:
    """Statuses by generator; each is made anew only when it was heard of since."""

    def __init__(self) -> None:
        self._usual_factor = 1.0
        """Of the generators that were measured: what one that says nothing is taken for."""
        self._known: dict[str, tuple[broker_pb2.GeneratorView, float, LatencyModel]] = {}
        """The view and the usual factor that a model was made of."""

    def of(self, views: Sequence[broker_pb2.GeneratorView]) -> dict[str, GeneratorStatus]:
        """What is known of these generators, each of which may start groups."""
        factors = [view.measured_step_factor for view in views if view.measured_step_factor]
        self._usual_factor = sum(factors) / len(factors) if factors else 1.0
        names = [view.hello.generator_id for view in views]
        # Now those are asked for that may start, now all: what is gone is let go of now and then.
        for name in self._known.keys() - names if len(self._known) > 2 * len(names) else ():
            del self._known[name]
        return {
            name: self._status(
                view, num_free=view.num_free_leases, max_context_tokens=view.hello.max_context_tokens, may_start=True
            )
            for name, view in zip(names, views, strict=True)
        }

    def of_asking(
        self,
        view: broker_pb2.GeneratorView | None,
        generator: GeneratorFacts,
        num_free: int,
        *,
        may_start: bool = True,
    ) -> GeneratorStatus:
        """What is known of the generator that asks; what it asks with is newer than what its last beat said."""
        if view is None:
            return GeneratorStatus(
                generator_id=generator.generator_id,
                model=LatencyModel().scaled(_rounded(self._usual_factor)),
                num_free=num_free,
                max_context_tokens=generator.max_context_tokens,
                is_speed_known=False,
                may_start=may_start,
            )
        return self._status(
            view, num_free=num_free, max_context_tokens=generator.max_context_tokens, may_start=may_start
        )

    def _status(
        self, view: broker_pb2.GeneratorView, *, num_free: int, max_context_tokens: int, may_start: bool
    ) -> GeneratorStatus:
        return GeneratorStatus(
            generator_id=view.hello.generator_id,
            model=self._model(view),
            num_free=num_free,
            max_context_tokens=max_context_tokens,
            is_speed_known=_is_stated(view) or bool(view.measured_step_factor),
            may_start=may_start,
        )

    def _model(self, view: broker_pb2.GeneratorView) -> LatencyModel:
        name = view.hello.generator_id
        known = self._known.get(name)
        # Where nothing was measured a stated profile is believed, and a silent generator is as fast as the others.
        factor = _rounded(view.measured_step_factor or (1.0 if _is_stated(view) else self._usual_factor))
        if known is not None and known[0] is view and known[1] == factor:
            return known[2]
        model = LatencyModel.from_profile(view.hello.profile).scaled(factor)
        if known is not None and known[2] == model:
            model = known[2]
        self._known[name] = (view, factor, model)
        return model


def _is_stated(view: broker_pb2.GeneratorView) -> bool:
    profile = view.hello.profile
    return profile.step_base_s > 0 or profile.step_per_sample_s > 0


def _rounded(factor: float) -> float:
    return math.exp(STEP * round(math.log(factor) / STEP))
