"""Keeps the lengths of one run: forecasts, actual lengths, and the data for the next fit. Pure.

    ForecastLengths --> known groups (prompt, forecast) --+--> log: forecast and length, for the prequential test
    ReportLengths ------------------------- length -------+--> prompts with their newest lengths --> next fit

A sample is tested against its group's first forecast, made before any of its lengths was known. Everything is bounded;
the least recently used entries are forgotten first.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.fitting import MIN_PROMPTS, Fit
from services.scheduler.lengths.length_model import log_tokens
from services.scheduler.lengths.ngrams import Floats
from services.scheduler.lengths.prompt_features import PromptLengths, PromptView
from services.scheduler.lengths.quality import measure
from services.scheduler.lengths.ridge import PROMPT_LENGTH, RIDGE
from services.scheduler.lengths.state_files import Progress, SavedLengths

MAX_GROUPS = 16_384
MAX_PROMPTS = 8_192
MAX_OWN_LENGTHS = 16
MAX_TESTED = 2_048
MIN_NEW_LENGTHS = 64
NEW_SHARE = 0.1
"""A fit is due after this many new lengths per prompt that it would use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A fit's predictions for some prompts, [num_prompts] each, natural logarithms."""

    fit: Fit
    logs: Floats
    baseline_logs: Floats


_Forecasts = Mapping[str, pb.LengthForecast]
"""A group's forecasts by forecaster: the model's, and the baseline's without an interval; empty before there is one."""


@dataclass(slots=True, kw_only=True)
class _Group:
    prompt: PromptView
    forecasts: _Forecasts


@dataclass(slots=True)
class _Moments:
    """Running count, mean and sum of squared deviations (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    def forecast(self) -> pb.LengthForecast:
        if not self.count:
            return pb.LengthForecast()
        forecast = pb.LengthForecast(expected_tokens=self.mean)
        if self.count > 1:
            forecast.deviation_tokens = math.sqrt(self.squares / (self.count - 1))
        return forecast


class RunLengths:
    """The lengths of one run; see the module. Lives on the event loop; fits are made elsewhere from `pairs`."""

    def __init__(self, run_id: str) -> None:
        self.progress = Progress(run_id=run_id)
        self.fits: tuple[Fit, ...] = ()
        """At most one fit of each learner, the preferred one first; the last answers immediately."""
        self.fit_problem = ""
        self._overall = _Moments()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._seen: OrderedDict[bytes, PromptLengths] = OrderedDict()
        self._tested: deque[tuple[_Forecasts, int]] = deque(maxlen=MAX_TESTED)
        self._num_learned = 0
        self._num_learned_at_fit: dict[str, int] = {}
        """Lengths learned when the newest fit of each learner began."""

    # -- forecasts -----------------------------------------------------------------------------------------------------

    def known(self, group_id: str, prompt: PromptView) -> PromptView:
        """The prompt, or the known prompt of a group that was given by name only."""
        group = self._groups.get(group_id)
        return group.prompt if group is not None and not prompt.has_content else prompt

    def forecast(
        self, group_ids: Sequence[str], prompts: Sequence[PromptView], predicted: Predicted | None
    ) -> list[pb.LengthForecast]:
        """One forecast per prompt; without a model from means: the prompt's own, else the run's."""
        forecasts = []
        for index, (group_id, prompt) in enumerate(zip(group_ids, prompts, strict=True)):
            made: _Forecasts = {}
            if predicted is None or not prompt.has_content:
                forecast = self._from_means(prompt)
            else:
                fit, seen = predicted.fit, self._seen.get(prompt.key)
                own_logs = seen.logs if seen is not None else ()
                forecast = fit.shape.forecast(float(predicted.logs[index]), own_logs)
                baseline = fit.shape.mean_forecast(float(predicted.baseline_logs[index]))
                made = {fit.model.name: forecast, PROMPT_LENGTH: baseline}
            forecasts.append(forecast)
            if group_id:
                self._note_group(group_id, prompt, made)
        return forecasts

    def _from_means(self, prompt: PromptView) -> pb.LengthForecast:
        seen = self._seen.get(prompt.key)
        if seen is None:
            return self._overall.forecast()
        own = _Moments()
        for log in seen.logs:
            own.add(math.exp(log))
        return own.forecast()

    def _note_group(self, group_id: str, prompt: PromptView, forecasts: _Forecasts) -> None:
        if group_id in self._groups:
            self._groups.move_to_end(group_id)
            return
        self._groups[group_id] = _Group(prompt=prompt, forecasts=forecasts)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    # -- lengths -------------------------------------------------------------------------------------------------------

    def observe(self, group_id: str, prompt: PromptView, num_tokens: int) -> None:
        """Record the length of a sample of this group, or of this prompt."""
        self.progress.num_observations += 1
        self._overall.add(num_tokens)
        group = self._groups.get(group_id)
        if group is not None and group.forecasts:
            self._tested.append((group.forecasts, num_tokens))
        self.learn(self.known(group_id, prompt), log_tokens(num_tokens))

    def learn(self, prompt: PromptView, log: float) -> None:
        """Record a sample's log length for its prompt, without testing a forecast."""
        seen = self._seen.pop(prompt.key, None) or PromptLengths(prompt=prompt, logs=())
        self._seen[prompt.key] = replace(seen, logs=(*seen.logs, log)[-MAX_OWN_LENGTHS:])
        self._num_learned += prompt.has_content
        if len(self._seen) > MAX_PROMPTS:
            self._seen.popitem(last=False)

    # -- fits ----------------------------------------------------------------------------------------------------------

    def pairs(self) -> list[PromptLengths]:
        """The data of a fit, the most recently seen prompt last."""
        return [seen for seen in self._seen.values() if seen.prompt.has_content]

    def is_fit_due(self, learner: str) -> bool:
        """Whether enough lengths arrived since this learner's last fit began."""
        num_prompts = len(self._seen)
        num_new = self._num_learned - self._num_learned_at_fit.get(learner, 0)
        return num_prompts >= MIN_PROMPTS and num_new >= max(MIN_NEW_LENGTHS, NEW_SHARE * num_prompts)

    def begin_fit(self, learner: str) -> list[PromptLengths]:
        """`pairs`, and mark a fit as begun, whether or not it succeeds: the next is due after more lengths only."""
        self._num_learned_at_fit[learner] = self._num_learned
        return self.pairs()

    def install(self, fit: Fit, *, preference: Sequence[str], now_s: float, duration_s: float) -> None:
        """Use this fit from now on, replacing the last one of its kind; `preference` names the kinds in order."""
        kept = [other for other in self.fits if other.model.name != fit.model.name]
        self.fits = tuple(sorted([*kept, fit], key=lambda each: preference.index(each.model.name)))
        self.progress.model_version += 1
        self.progress.fit_time_s, self.progress.fit_duration_s, self.fit_problem = now_s, duration_s, ""

    def saved(self) -> SavedLengths:
        """The state kept on disk."""
        return SavedLengths(
            progress=self.progress.model_copy(),
            pairs=tuple(self.pairs()),
            fit=next((fit for fit in self.fits if fit.model.name == RIDGE), None),
        )

    def restore(self, saved: SavedLengths) -> None:
        """Continue from saved state."""
        for pair in saved.pairs:
            for log in pair.logs:
                self.learn(pair.prompt, log)
                self._overall.add(math.exp(log))
        self.progress = saved.progress
        self.fits = (saved.fit,) if saved.fit is not None else ()
        self._num_learned_at_fit = {fit.model.name: self._num_learned for fit in self.fits}

    # -- quality -------------------------------------------------------------------------------------------------------

    def prequential(self) -> list[pb.LengthQuality]:
        """Quality of forecasts that preceded the lengths: each forecaster's, then the baseline's."""
        tested: dict[str, list[tuple[int, pb.LengthForecast]]] = {}
        for forecasts, length in self._tested:
            for name, forecast in forecasts.items():
                tested.setdefault(name, []).append((length, forecast))
        return [
            measure(
                np.array([float(length) for length, _ in tested[name]]),
                [forecast for _, forecast in tested[name]],
                forecaster=name,
                test=pb.LENGTH_TEST_PREQUENTIAL,
            )
            for name in sorted(tested, key=PROMPT_LENGTH.__eq__)
        ]

    def describe(self) -> pb.GetLengthModelResponse:
        """Describe the current forecaster and its quality."""
        held_out: dict[str, pb.LengthQuality] = {}
        for fit in self.fits:
            for quality in fit.qualities:
                held_out.setdefault(quality.forecaster, quality)
        response = pb.GetLengthModelResponse(
            model_version=self.progress.model_version,
            num_prompts=sum(seen.prompt.has_content for seen in self._seen.values()),
            num_observations=self.progress.num_observations,
            qualities=[*held_out.values(), *self.prequential()],
            fit_problem=self.fit_problem,
        )
        if self.fits:
            response.model = self.fits[0].model.name
            response.fit_time.FromMilliseconds(int(self.progress.fit_time_s * 1000))
            response.fit_duration.FromMilliseconds(int(self.progress.fit_duration_s * 1000))
        return response
