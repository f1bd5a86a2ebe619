"""Turns leases into scores: batches, deadlines, retries.

Invariants:
- Every lease taken is answered with exactly one score, or was lost to another worker meanwhile.
- An error is never a value: what cannot be judged gets a status that says why.
- A model that is away costs no sample: work waits, its leases renewed. Only what happens to a call that reached the
  model counts as an attempt, and UNAVAILABLE only now and then while no call succeeds: it says little of the samples.
- What a grader's own errors (sandbox, judge) concern is tried again; a grader that fails too often is waited for.
- One bad sample costs its neighbours nothing: a batch that keeps failing is halved until the bad ones stand alone.
- At most `max_concurrent_batches` calls are under way; further leases wait with the source, which bounds them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from penstock.errors import InternalError, PenstockError, ServiceUnavailableError
from penstock.network.rpc import backoff_s
from penstock.rewards import ModelAwayError, RewardModel, ScoreStatus
from penstock.rewards.outcomes import describe
from penstock.rewards.wire import failed_score
from penstock.v1 import broker_pb2, types_pb2
from services.reward.attempts import Attempts
from services.reward.breaker import Breaker
from services.reward.config import RewardModelConfig
from services.reward.grader_errors import GraderErrors, is_grader_error
from services.reward.metrics import BATCH_SECONDS, HELD_SAMPLES, IS_HOLDING_BACK, RETRIES, SCORES

_LOG_EVERY_S = 10.0

_log = structlog.get_logger()


class LeaseSource(Protocol):
    """Where leases come from and results go; bounded by its own credits."""

    @property
    def num_held(self) -> int:
        """Leases not answered yet."""
        ...

    async def take(self, *, max_items: int) -> list[broker_pb2.ScoringLease]:
        """At least one lease, each handed out once; waits while there is none."""
        ...

    def is_held(self, lease_id: str) -> bool:
        """Whether the lease still counts."""
        ...

    def answer(self, results: Sequence[broker_pb2.ScoreResult]) -> None:
        """Take results; those of lost leases are ignored."""
        ...


class TextReader(Protocol):
    """Decodes the texts of samples."""

    async def read(self, leases: Sequence[broker_pb2.ScoringLease]) -> dict[str, str]:
        """Put the text into each lease's item; returns, by lease id, why a sample has no text to score."""
        ...


class ScoringPool:
    """Scores what a source hands out with one reward model."""

    def __init__(
        self,
        *,
        model: RewardModel,
        config: RewardModelConfig,
        source: LeaseSource | None = None,
        texts: TextReader | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `texts` the text sent with a sample is scored as it is; without `source` only `score` may be used."""
        self._source = source
        self._model = model
        self._config = config
        self._texts = texts
        self._monotonic_s = monotonic_s
        self._breaker = Breaker(model, num_waiting=lambda: source.num_held if source else 0, monotonic_s=monotonic_s)
        self._errors = GraderErrors(max_share=config.max_error_share)
        self._unscored: Counter[str] = Counter()
        self._log_unscored_at_s = 0.0

    @property
    def holding_reason(self) -> str:
        """Why samples wait for the reward model, in words; empty if they do not."""
        return self._breaker.reason

    async def run(self) -> None:
        """Score until cancelled."""
        assert self._source is not None
        async with asyncio.TaskGroup() as group:
            for _ in range(self._config.max_concurrent_batches):
                group.create_task(self._work(self._source))

    async def _work(self, source: LeaseSource) -> None:
        while True:
            leases = await source.take(max_items=self._config.max_batch_size)
            HELD_SAMPLES.set(source.num_held)
            source.answer(await self.score(leases))
            HELD_SAMPLES.set(source.num_held)

    async def score(self, leases: Sequence[broker_pb2.ScoringLease]) -> list[broker_pb2.ScoreResult]:
        """The result of each lease that is not lost meanwhile, in any order."""
        started_s = self._monotonic_s()
        faults = {} if self._texts is None else await self._texts.read(leases)
        results = [self._unreadable(lease, faults[lease.lease_id]) for lease in leases if lease.lease_id in faults]
        results += await self._judge([lease for lease in leases if lease.lease_id not in faults], self._attempts())
        latency_s = self._monotonic_s() - started_s
        for result in results:
            self._complete(result.score, latency_s)
        BATCH_SECONDS.labels(self._model.name).observe(latency_s)
        return results

    async def _judge(
        self, leases: Sequence[broker_pb2.ScoringLease], attempts: Attempts
    ) -> list[broker_pb2.ScoreResult]:
        results: list[broker_pb2.ScoreResult] = []
        num_repeats = 0
        for delay_s in backoff_s():
            leases = [lease for lease in leases if self._source is None or self._source.is_held(lease.lease_id)]
            if not leases:
                return results
            answer = await self._try(leases)
            if isinstance(answer, list):
                judged = list(zip(leases, answer, strict=True))
                leases = [lease for lease, score in judged if is_grader_error(score)]
                # While the grader is broken nothing is given up; a sample that breaks it each time is, later.
                goes_on = bool(leases) and (self._breaker.is_open or num_repeats < self._config.max_retries)
                done = [pair for pair in judged if not (goes_on and is_grader_error(pair[1]))]
                results += [_result(lease, score) for lease, score in done]
                if not goes_on:
                    return results
                num_repeats += 1
            elif not isinstance(answer, ModelAwayError) and attempts.are_exhausted_by(answer):
                return results + await self._settle(leases, answer, attempts)
            RETRIES.labels(self._model.name).inc()
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: backoff_s never ends")

    async def _try(self, leases: Sequence[broker_pb2.ScoringLease]) -> list[types_pb2.Score] | PenstockError:
        items = [lease.item for lease in leases]
        async with self._breaker.permit():
            try:
                scores = await self._model.score(items, timeout_s=self._config.timeout_s)
                if broken := self._errors.broken_by(scores):
                    self._breaker.failed(broken, is_away=True, what="cannot judge")
                elif not all(map(is_grader_error, scores)):
                    self._breaker.succeeded()
                return scores
            except PenstockError as error:
                if error.is_retryable:
                    self._breaker.failed(str(error), is_away=isinstance(error, ServiceUnavailableError))
                return error
            except Exception as error:  # a defect of the model's adapter must cost samples, never the worker
                _log.error("reward model's adapter raised", model=self._model.name, exc_info=error)
                return InternalError(f"{self._model.name} raised {describe(error)}")
            finally:
                IS_HOLDING_BACK.set(self._breaker.is_open)

    async def _settle(
        self, leases: Sequence[broker_pb2.ScoringLease], error: PenstockError, attempts: Attempts
    ) -> list[broker_pb2.ScoreResult]:
        if len(leases) > 1:
            middle = len(leases) // 2
            attempts.grant_one_more()
            first = await self._judge(leases[:middle], attempts)
            attempts.grant_one_more()
            return first + await self._judge(leases[middle:], attempts)
        status = ScoreStatus.TIMEOUT if error.is_retryable else ScoreStatus.FAILED
        return [_result(lease, failed_score(str(error), model=self._model.name, status=status)) for lease in leases]

    def _unreadable(self, lease: broker_pb2.ScoringLease, fault: str) -> broker_pb2.ScoreResult:
        return _result(lease, failed_score(fault, model=self._model.name, status=ScoreStatus.INVALID))

    def _attempts(self) -> Attempts:
        return Attempts(
            max_tries=self._config.max_retries + 1,
            num_successes=lambda: self._breaker.num_successes,
            monotonic_s=self._monotonic_s,
        )

    def _complete(self, score: types_pb2.Score, latency_s: float) -> None:
        score.model = score.model or self._model.name
        score.latency.FromNanoseconds(int(latency_s * 1e9))
        status = types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_").lower()
        SCORES.labels(self._model.name, status).inc()
        if score.status not in (types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_ABSTAINED):
            self._note_unscored(status, score.message)

    def _note_unscored(self, status: str, message: str) -> None:
        self._unscored[status] += 1
        now_s = self._monotonic_s()
        if now_s >= self._log_unscored_at_s:
            self._log_unscored_at_s = now_s + _LOG_EVERY_S
            _log.warning("samples could not be scored", model=self._model.name, latest=message, **self._unscored)


def _result(lease: broker_pb2.ScoringLease, score: types_pb2.Score) -> broker_pb2.ScoreResult:
    return broker_pb2.ScoreResult(lease_id=lease.lease_id, key=lease.item.key, score=score)
