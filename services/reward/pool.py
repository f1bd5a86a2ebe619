"""Turns leases into scores: batches, deadlines, retries.

Invariants:
- Every lease taken is answered with exactly one score, or was lost to another worker meanwhile.
- An error is never a value: what cannot be judged gets a status that says why.
- A model that is away costs no sample: work waits, its leases renewed. Only what happens to a call that reached the
  model counts as an attempt, and UNAVAILABLE only now and then while no call succeeds: it says little of the samples.
- What a grader's own errors concern is tried again; a grader that fails too often is waited for.
- Nothing that has its score waits for what is tried again; with canaries, a batch does until they have vouched for it.
- One bad sample costs its neighbours nothing: a batch that keeps failing is halved until the bad ones stand alone.
- Nothing is scored while canaries drift, and what was being scored when a drift was found is scored again.
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
from penstock.rewards.grader_errors import GraderErrors, is_grader_error, may_pass
from penstock.rewards.outcomes import describe
from penstock.rewards.score_messages import failed_score
from penstock.tracing.measuring import measuring
from penstock.tracing.recording import Value
from penstock.tracing.sampled import BatchLinks
from penstock.v1 import broker_pb2, types_pb2
from services.reward.attempts import Attempts
from services.reward.breaker import Breaker
from services.reward.canaries.known import read_canaries
from services.reward.canaries.watch import CanaryWatch
from services.reward.config import RewardModelConfig
from services.reward.full_rate import FullRate
from services.reward.metrics import BATCH_SECONDS, HELD_SAMPLES, IS_HOLDING_BACK, RETRIES, SCORES
from services.reward.texts import SentTexts

_LOG_EVERY_S = 10.0

_log = structlog.get_logger()

_Answer = Callable[[Sequence[broker_pb2.ScoreResult]], None]


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
        """Put what the model wrote into each lease's item; returns, by lease id, why a sample has nothing to score."""
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
        """Without `texts` the text sent with a sample is scored, if all of it is the model's.

        Without `source` only `score` may be used.

        Raises ConfigError: the canaries cannot be read.
        """
        self._source = source
        self._model = model
        self._config = config
        self._texts: TextReader = texts or SentTexts()
        self._monotonic_s = monotonic_s
        self._breaker = Breaker(model, num_waiting=lambda: source.num_held if source else 0, monotonic_s=monotonic_s)
        self._canaries = self._watch()
        self._errors = GraderErrors(max_share=config.max_error_share)
        self._unscored: Counter[str] = Counter()
        self._log_unscored_at_s = 0.0
        self._rate = FullRate(num_calls=config.max_concurrent_batches, monotonic_s=monotonic_s)

    @property
    def samples_per_second(self) -> float:
        """Scored while as many calls as may be were under way; 0 if they never were for long enough."""
        return self._rate.samples_per_second

    @property
    def holding_reason(self) -> str:
        """Why samples wait for the reward model, in words; empty if they do not."""
        return self._breaker.reason or ("" if self._canaries is None else self._canaries.reason)

    async def run(self) -> None:
        """Score until cancelled."""
        assert self._source is not None
        async with asyncio.TaskGroup() as group:
            for _ in range(self._config.max_concurrent_batches):
                group.create_task(self._work(self._source))

    async def _work(self, source: LeaseSource) -> None:
        while True:
            leases = await source.take(max_items=self._config.max_batch_size)
            HELD_SAMPLES.labels(self._model.name).set(source.num_held)
            with self._rate.call(len(leases)):
                await self._score(leases, source.answer)
            HELD_SAMPLES.labels(self._model.name).set(source.num_held)

    async def score(self, leases: Sequence[broker_pb2.ScoringLease]) -> list[broker_pb2.ScoreResult]:
        """The result of each lease that is not lost meanwhile, in any order."""
        results: list[broker_pb2.ScoreResult] = []
        await self._score(leases, results.extend)
        return results

    async def _score(self, leases: Sequence[broker_pb2.ScoringLease], answer: _Answer) -> None:
        """Answer each lease as soon as it has its result."""
        attributes: dict[str, Value] = {"rl.reward.model": self._model.name, "rl.reward.samples": len(leases)}
        with measuring("rl.reward.score", attributes, run_id=leases[0].item.run_id if leases else "") as measured:
            links = BatchLinks(leases, measured.links)

            def noted(results: Sequence[broker_pb2.ScoreResult]) -> None:
                links.note_failed(result for result in results if not _is_scored(result.score))
                answer(results)

            await self._score_measured(leases, noted)

    async def _score_measured(self, leases: Sequence[broker_pb2.ScoringLease], answer: _Answer) -> None:
        started_s = self._monotonic_s()

        def complete(results: Sequence[broker_pb2.ScoreResult]) -> None:
            for result in results:
                self._complete(result, self._monotonic_s() - started_s)
            answer(results)

        faults = await self._texts.read(leases)
        complete([self._unreadable(lease, faults[lease.lease_id]) for lease in leases if lease.lease_id in faults])
        await self._judge_watched([lease for lease in leases if lease.lease_id not in faults], complete)
        BATCH_SECONDS.labels(self._model.name).observe(self._monotonic_s() - started_s)

    async def _judge_watched(self, leases: Sequence[broker_pb2.ScoringLease], complete: _Answer) -> None:
        if self._canaries is None or not leases:
            await self._judge(leases, self._attempts(), complete, self._is_held)
            return
        while True:
            await self._canaries.admit(len(leases))
            num_drifts = self._canaries.num_drifts
            results: list[broker_pb2.ScoreResult] = []
            await self._judge(leases, self._attempts(), results.extend, self._is_held)
            if await self._canaries.vouches(num_drifts):
                complete(results)
                return
            self._rate.skip()
            for lease in leases:
                lease.item.must_be_fresh = True

    async def _judge_canaries(self, leases: Sequence[broker_pb2.ScoringLease]) -> list[broker_pb2.ScoreResult]:
        most = self._config.max_batch_size
        results: list[broker_pb2.ScoreResult] = []
        # One after the other: the worker whose samples wait for them has one place.
        for start in range(0, len(leases), most):
            await self._judge(leases[start : start + most], self._attempts(), results.extend, lambda _: True)
        return results

    def _is_held(self, lease_id: str) -> bool:
        return self._source is None or self._source.is_held(lease_id)

    async def _judge(
        self,
        leases: Sequence[broker_pb2.ScoringLease],
        attempts: Attempts,
        complete: _Answer,
        is_held: Callable[[str], bool],
    ) -> None:
        num_repeats = 0
        for delay_s in backoff_s():
            leases = [lease for lease in leases if is_held(lease.lease_id)]
            if not leases:
                return
            answer = await self._try(leases, are_new=not num_repeats)
            may_repeat = num_repeats < self._config.max_retries
            if not isinstance(answer, list | ModelAwayError) and attempts.are_exhausted_by(answer):
                if len(leases) > 1:
                    await self._halve(leases, attempts, complete, is_held)
                    return
                answer, may_repeat = self._given_up(answer, are_new=not num_repeats), False
            if isinstance(answer, list):
                leases = self._completed(leases, answer, may_repeat=may_repeat, complete=complete)
                if not leases:
                    return
                num_repeats += 1
            RETRIES.labels(self._model.name).inc()
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: backoff_s never ends")

    def _completed(
        self,
        leases: Sequence[broker_pb2.ScoringLease],
        scores: Sequence[types_pb2.Score],
        *,
        may_repeat: bool,
        complete: _Answer,
    ) -> list[broker_pb2.ScoringLease]:
        """Complete what has its result; returns what is to be tried again."""

        def is_repeated(score: types_pb2.Score) -> bool:
            # While the grader is broken nothing is given up; a sample that breaks it each time is, later.
            return self._errors.holds(score) or (is_grader_error(score) and may_repeat and may_pass(score))

        judged = list(zip(leases, scores, strict=True))
        complete([_result(lease, score) for lease, score in judged if not is_repeated(score)])
        return [lease for lease, score in judged if is_repeated(score)]

    async def _try(
        self, leases: Sequence[broker_pb2.ScoringLease], *, are_new: bool
    ) -> list[types_pb2.Score] | PenstockError:
        items = [lease.item for lease in leases]
        was_open = self._breaker.is_open
        async with self._breaker.permit():
            if was_open:
                self._rate.skip()
            try:
                scores = await self._model.score(items, timeout_s=self._config.timeout_s)
                if not self._note_errors(scores, are_new=are_new) and not all(map(is_grader_error, scores)):
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
                IS_HOLDING_BACK.labels(self._model.name).set(self._breaker.is_open)

    async def _halve(
        self,
        leases: Sequence[broker_pb2.ScoringLease],
        attempts: Attempts,
        complete: _Answer,
        is_held: Callable[[str], bool],
    ) -> None:
        middle = len(leases) // 2
        for half in (leases[:middle], leases[middle:]):
            attempts.grant_one_more()
            await self._judge(half, attempts, complete, is_held)

    def _given_up(self, error: PenstockError, *, are_new: bool) -> list[types_pb2.Score]:
        """The score of the one sample whose attempts are used up."""
        status = ScoreStatus.TIMEOUT if error.is_retryable else ScoreStatus.FAILED
        scores = [failed_score(str(error), model=self._model.name, status=status)]
        self._note_errors(scores, are_new=are_new)
        return scores

    def _note_errors(self, scores: Sequence[types_pb2.Score], *, are_new: bool) -> bool:
        """Count the grader's errors, each sample once; returns whether they are too many, which holds work back."""
        broken = self._errors.broken_by(scores, are_new=are_new)
        if broken:
            self._breaker.failed(broken, is_away=True, what="cannot judge")
        return bool(broken)

    def _unreadable(self, lease: broker_pb2.ScoringLease, fault: str) -> broker_pb2.ScoreResult:
        return _result(lease, failed_score(fault, model=self._model.name, status=ScoreStatus.INVALID))

    def _watch(self) -> CanaryWatch | None:
        if (config := self._config.canaries) is None:
            return None
        return CanaryWatch(
            read_canaries(config),
            every=config.every,
            score=self._judge_canaries,
            name=lambda: self._model.name,
            monotonic_s=self._monotonic_s,
        )

    def _attempts(self) -> Attempts:
        return Attempts(
            max_tries=self._config.max_retries + 1,
            num_successes=lambda: self._breaker.num_successes,
            monotonic_s=self._monotonic_s,
        )

    def _complete(self, result: broker_pb2.ScoreResult, latency_s: float) -> None:
        score, key = result.score, result.key
        score.model = score.model or self._model.name
        score.latency.FromNanoseconds(int(latency_s * 1e9))
        status = types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_").lower()
        SCORES.labels(self._model.name, status).inc()
        if not _is_scored(score):
            ids = {"group_id": key.group_id, "sample_index": key.sample_index}
            _log.info("sample not scored", status=status, message=score.message, **ids)
            self._note_unscored(status, score.message)

    def _note_unscored(self, status: str, message: str) -> None:
        self._unscored[status] += 1
        now_s = self._monotonic_s()
        if now_s >= self._log_unscored_at_s:
            self._log_unscored_at_s = now_s + _LOG_EVERY_S
            _log.warning("samples could not be scored", model=self._model.name, latest=message, **self._unscored)


def _is_scored(score: types_pb2.Score) -> bool:
    return score.status in (types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_ABSTAINED)


def _result(lease: broker_pb2.ScoringLease, score: types_pb2.Score) -> broker_pb2.ScoreResult:
    return broker_pb2.ScoreResult(lease_id=lease.lease_id, key=lease.item.key, score=score)
