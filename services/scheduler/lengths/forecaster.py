"""Forecasts lengths for every run: answers calls immediately from what is known, and fits models in the background.

A call never waits for a fit: fits run in a thread, one at a time, and their result is installed once complete. The last
learner is the light one, whose model answers in milliseconds; models before it are tried first, for SLOW_TIMEOUT_S.
Beyond MAX_RUNS, the least recently used run is forgotten.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import structlog

from penstock.clock import Clock
from penstock.errors import UnknownRunError, require
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.fitting import Fit, fit_lengths
from services.scheduler.lengths.length_model import FitFailedError, Learner
from services.scheduler.lengths.metrics import LengthMetrics
from services.scheduler.lengths.ngrams import Floats
from services.scheduler.lengths.pairs_file import MAX_LENGTH_TOKENS, Row
from services.scheduler.lengths.prompt_features import PromptLengths, PromptView, read_prompt
from services.scheduler.lengths.run_lengths import Predicted, RunLengths
from services.scheduler.lengths.state_files import StateFiles

MAX_RUNS = 16
REFRESH_EVERY_S = 10.0
"""How often to check whether there is enough new data to refit a model of lengths."""
SLOW_TIMEOUT_S = 0.3
"""A broker waits half a second for forecasts, including the round trip."""
MAX_BYTES_AT_ONCE = 65_536

_log = structlog.get_logger()


class LengthForecaster:
    """Keeps, fits and serves the forecasts of every run; see the module.

    Args:
        learners: The preferred one first; the last is the light one.
        first_pairs: The pairs that a new run starts from.
        files: The files that keep what was learned; None keeps nothing.
        clock: Clock for the times of fits.
        metrics: Metrics to update.
    """

    def __init__(
        self,
        *,
        learners: Sequence[Learner],
        first_pairs: Sequence[Row] = (),
        files: StateFiles | None = None,
        clock: Clock,
        metrics: LengthMetrics,
    ) -> None:
        self.learners = tuple(learners)
        self._first_pairs = first_pairs
        self._files = files
        self._clock = clock
        self._metrics = metrics
        self._keeps_text = any(learner.needs_text for learner in learners)
        self._runs: OrderedDict[str, RunLengths] = OrderedDict()
        self._late: asyncio.Future[Floats] | None = None
        """A slow model's answer that no call waits for any longer."""
        for saved in reversed(files.load_all() if files is not None else []):
            run = self._runs[saved.progress.run_id] = RunLengths(saved.progress.run_id)
            run.restore(saved)

    async def forecast(
        self, run_id: str, queries: Sequence[pb.LengthQuery]
    ) -> tuple[list[pb.LengthForecast], RunLengths]:
        """One forecast per query, in order, and the run. Raises InvalidFieldError."""
        run = self._run(run_id)
        read = await self._read(queries)
        prompts = [run.known(query.group_id, prompt) for query, prompt in zip(queries, read, strict=True)]
        predicted = await self._predicted(run.fits, prompts) if prompts else None
        name = predicted.fit.model.name if predicted is not None else "means"
        self._metrics.forecasts.labels(name).inc(len(prompts))
        return run.forecast([query.group_id for query in queries], prompts, predicted), run

    async def observe(self, run_id: str, observations: Sequence[pb.LengthObservation]) -> None:
        """Learn from observed completions. Raises InvalidFieldError, and then learns from none of them."""
        for index, observation in enumerate(observations):
            length, field = observation.num_completion_tokens, f"observations[{index}].num_completion_tokens"
            require(length <= MAX_LENGTH_TOKENS, field, length, f"at most {MAX_LENGTH_TOKENS}")
        prompts = await self._read([observation.query for observation in observations])
        run = self._run(run_id)
        for observation, prompt in zip(observations, prompts, strict=True):
            run.observe(observation.query.group_id, prompt, observation.num_completion_tokens)
        self._metrics.observations.inc(len(observations))

    def describe(self, run_id: str) -> pb.GetLengthModelResponse:
        """Describe the model that forecasts a run's lengths. Raises UnknownRunError."""
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRunError(f"run_id: no length of {run_id!r} was requested or reported", run_id=run_id)
        return run.describe()

    async def refresh_forever(self, learner: Learner) -> None:
        """Run due fits with one of the learners until cancelled; a slow learner does not delay the light one."""
        while True:
            await asyncio.sleep(REFRESH_EVERY_S)
            await self._refresh_with(learner)

    async def refresh(self) -> None:
        """Run due fits with every learner, the light one first."""
        for learner in reversed(self.learners):
            await self._refresh_with(learner)

    async def _refresh_with(self, learner: Learner) -> None:
        for run in [run for run in self._runs.values() if run.is_fit_due(learner.name)]:
            await self._fit(run, learner, run.begin_fit(learner.name))
            self._metrics.observe(run.progress.run_id, run.describe())
            await self._save(run)

    async def close(self) -> None:
        """Save what was learned since the last fit and end the learners' processes."""
        for learner in self.learners:
            learner.close()
        for run in self._runs.values():
            await self._save(run)

    async def _fit(self, run: RunLengths, learner: Learner, pairs: Sequence[PromptLengths]) -> None:
        started_s = self._clock.monotonic_s()
        try:
            fit = await asyncio.to_thread(fit_lengths, pairs, learner)
        except FitFailedError as error:
            run.fit_problem = f"{learner.name}: {error}"
            self._metrics.fits.labels("failed").inc()
            _log.warning("lengths were not fitted", run_id=run.progress.run_id, learner=learner.name, error=str(error))
            return
        names, duration_s = [each.name for each in self.learners], self._clock.monotonic_s() - started_s
        run.install(fit, preference=names, now_s=self._clock.now_s(), duration_s=duration_s)
        self._metrics.fits.labels("installed").inc()
        _log.info(
            "lengths fitted",
            run_id=run.progress.run_id,
            learner=learner.name,
            model_version=run.progress.model_version,
            num_prompts=len(pairs),
            recall_20=round(fit.qualities[0].recall_longest_20_percent, 3),
            duration_s=round(duration_s, 2),
        )

    async def _save(self, run: RunLengths) -> None:
        if self._files is None:
            return
        try:
            await asyncio.to_thread(self._files.save, run.saved())
        except OSError as error:
            _log.warning("lengths were not saved", run_id=run.progress.run_id, error=str(error))

    async def _read(self, queries: Sequence[pb.LengthQuery]) -> list[PromptView]:
        """The prompts; read in a thread if long, since millions of characters take seconds."""
        num_bytes = sum(len(query.prompt_token_ids) + len(query.prompt_text) for query in queries)
        if num_bytes > MAX_BYTES_AT_ONCE:
            return await asyncio.to_thread(self._read_all, queries)
        return self._read_all(queries)

    def _read_all(self, queries: Sequence[pb.LengthQuery]) -> list[PromptView]:
        prompts = [read_prompt(query) for query in queries]
        return prompts if self._keeps_text else [replace(prompt, text="") for prompt in prompts]

    def _run(self, run_id: str) -> RunLengths:
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = RunLengths(run_id)
            for prompt, log in self._first_pairs:
                run.learn(prompt, log)
            if len(self._runs) > MAX_RUNS:
                forgotten, _ = self._runs.popitem(last=False)
                self._metrics.forget(forgotten)
        self._runs.move_to_end(run_id)
        return run

    async def _predicted(self, fits: Sequence[Fit], prompts: Sequence[PromptView]) -> Predicted | None:
        """The prediction of the first fit that answers in time; None if there is none."""
        for fit in fits:
            logs = await self._answer(fit, prompts, is_slow=fit.model.name != self.learners[-1].name)
            if logs is not None:
                baseline_logs = await asyncio.to_thread(fit.baseline.predict, prompts)
                return Predicted(fit=fit, logs=logs, baseline_logs=baseline_logs)
        return None

    async def _answer(self, fit: Fit, prompts: Sequence[PromptView], *, is_slow: bool) -> Floats | None:
        if is_slow and self._late is not None and not self._late.done():
            # At most one thread waits for a slow model; one must always be free for the light model.
            return None
        answer = asyncio.ensure_future(asyncio.to_thread(fit.model.predict, prompts))
        try:
            async with asyncio.timeout(SLOW_TIMEOUT_S if is_slow else None):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._late = answer
            answer.add_done_callback(_forget)
        except FitFailedError as error:
            _log.warning("a model does not answer; trying the next", model=fit.model.name, error=str(error))
        return None


def _forget(answer: asyncio.Future[Floats]) -> None:
    """Retrieve the error, so that an abandoned one is not reported as lost."""
    if not answer.cancelled():
        answer.exception()
