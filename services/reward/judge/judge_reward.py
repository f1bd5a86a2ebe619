"""A language model's grade of the completion, from 0 to 1: the reward `judge`.

Invariants:
- What a judge says is a number only if it has exactly the form asked for; anything else is JUDGE_ERROR.
- What a completion says is data (`prompts`): it cannot change what the judge is asked.
- A vote that can be used is paid for once while the cache holds it, also where its batch is tried again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from penstock.rewards import BatchReward, ModelAwayError, RewardItem, RewardLoadError, RewardResult, ScoreStatus
from penstock.security import NO_SECURITY, Security
from penstock.tracing.measuring import measuring_detail
from penstock.tracing.recording import Value
from services.reward.judge.answer_cache import Answer, AnswerCache
from services.reward.judge.config import JudgeConfig
from services.reward.judge.endpoint import Endpoint, JudgeRefusesError
from services.reward.judge.metrics import REQUESTS, VOTES
from services.reward.judge.prompts import Prompt, Prompts
from services.reward.judge.verdicts import UnusableAnswerError, Verdict, read_verdict
from services.reward.judge.votes import joined

DEFAULT_TIMEOUT_S = 60.0
CHECK_TIMEOUT_S = 20.0
_MAX_SHOWN_CHARACTERS = 48
_Result = TypeVar("_Result")
_Vote = tuple[Verdict | UnusableAnswerError, Answer | None]


class JudgeReward(BatchReward):
    """Asks a judge for `votes` answers on each sample."""

    def __init__(self, config: JudgeConfig, *, security: Security = NO_SECURITY) -> None:
        """`security` is what third parties' reward models are shown. Raises RewardLoadError and ConfigError."""
        self._config = config
        self._prompts = Prompts(config)
        self._endpoint = Endpoint(config, security=security)
        self._cache = AnswerCache(max_bytes=config.cache_mb * 1024**2)
        self.name = f"judge:{config.model[:_MAX_SHOWN_CHARACTERS]}"
        self.version = self._prompts.version
        if self._endpoint.shows_key_in_plain and not security.allows_plain:
            raise RewardLoadError(
                f"reward.judge.url {config.url}: the key in {config.key_variable} would go there in plain text; use "
                f"https, unset {config.key_variable}, or set insecure: true inside a private network"
            )

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order. Raises ModelAwayError."""
        return await self.score_within(items, timeout_s=DEFAULT_TIMEOUT_S)

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """One result per item, in order; those without a verdict after `timeout_s` seconds are JUDGE_ERROR.

        Raises ModelAwayError where the endpoint judges nothing at present; what it had judged is in the cache.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return await _all(self._score_one(item, deadline_s, timeout_s) for item in items)

    async def probe(self) -> None:
        """Return when the endpoint answers. Raises ModelAwayError."""
        await self._endpoint.probe()

    async def check(self) -> str:
        """Have a sample judged; returns which model answered and how. Raises RewardLoadError and ModelAwayError."""
        prompt = self._prompts.write(prompt="What is 2 + 3?", completion="2 + 3 = 5", reference="5")
        deadline_s = asyncio.get_running_loop().time() + CHECK_TIMEOUT_S
        try:
            answer = await self._endpoint.answer(self._body(prompt, 0), deadline_s=deadline_s)
            verdict = read_verdict(answer.content, self._config)
        except JudgeRefusesError as error:
            raise RewardLoadError(str(error)) from error
        except UnusableAnswerError as error:
            is_plain = self._config.response_format == "none"
            hint = "" if is_plain else "; perhaps reward.judge.response_format: none helps"
            raise RewardLoadError(f"judge {self._config.url}: {error}{hint}") from error
        except TimeoutError as error:
            raise ModelAwayError(f"judge {self._config.url} did not answer within {CHECK_TIMEOUT_S:g} s") from error
        return f"{answer.answered_by or self._config.model} answers; it gives a right answer {verdict.value:.3g}"

    async def close(self) -> None:
        """Close connections."""
        await self._endpoint.close()

    async def _score_one(self, item: RewardItem, deadline_s: float, timeout_s: float) -> RewardResult:
        if not self._config.rubric and not item.answer.strip():
            return _invalid("this row has no reference answer, which a judge without a rubric compares with")
        turns = item.completion_turns if self._config.shows_turns and len(item.completion_turns) > 1 else ()
        num_characters = len(item.prompt) + len(item.completion) + len(item.answer)
        num_characters += sum(len(turn.content) for turn in turns)
        if num_characters > self._config.max_characters:
            return _invalid(
                f"{num_characters} characters; reward.judge.max_characters is {self._config.max_characters}"
            )
        prompt = self._prompts.write(prompt=item.prompt, completion=item.completion, reference=item.answer, turns=turns)
        numbers = range(self._config.votes)
        votes = await _all(self._vote(item, prompt, number, deadline_s, timeout_s) for number in numbers)
        result = joined([vote for vote, _ in votes], self._config)
        if result.value is None:
            return result
        return RewardResult(result.value, result.components, details=self._details(votes))

    def _details(self, votes: Sequence[_Vote]) -> dict[str, str]:
        answers = [answer for _, answer in votes if answer is not None]
        values = [round(vote.value, 4) if isinstance(vote, Verdict) else None for vote, _ in votes]
        return {
            "judge": self._config.model,
            "answered": ", ".join(sorted({answer.answered_by for answer in answers})),
            "prompt": self.version,
            "votes": json.dumps(values),
        }

    async def _vote(self, item: RewardItem, prompt: Prompt, number: int, deadline_s: float, timeout_s: float) -> _Vote:
        key = AnswerCache.key(self._config.url, self._body_beside_messages(number), self.version, prompt.canonical())
        kept = self._cache.get(key)
        if kept is not None and not item.must_be_fresh:
            REQUESTS.labels(self._config.model, "cached").inc()
            return read_verdict(kept.content, self._config), kept
        try:
            about: dict[str, Value] = {"rl.judge.model": self._config.model, "rl.judge.vote": number}
            with measuring_detail("rl.judge.ask", about, sample=item.traceparent, run_id=item.run_id):
                answer = await self._endpoint.answer(self._body(prompt, number), deadline_s=deadline_s)
                verdict = read_verdict(answer.content, self._config)
        except (UnusableAnswerError, TimeoutError) as error:
            VOTES.labels(self._config.model, "unusable").inc()
            return error if isinstance(error, UnusableAnswerError) else _too_late(timeout_s), None
        VOTES.labels(self._config.model, "usable").inc()
        if kept is not None and read_verdict(kept.content, self._config) != verdict:
            # The judge has changed since: what else is kept may be of another mind, too.
            self._cache.clear()
        self._cache.put(key, answer)
        return verdict, answer

    def _body(self, prompt: Prompt, seed: int) -> dict[str, Any]:
        return {"messages": prompt.messages(), **self._body_beside_messages(seed)}

    def _body_beside_messages(self, seed: int) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {
            "model": config.model,
            "temperature": config.temperature,
            "seed": seed,
            "max_tokens": config.max_tokens,
        }
        if config.response_format == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": self._prompts.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif config.response_format == "json_object":
            body["response_format"] = {"type": "json_object"}
        return {name: value for name, value in {**body, **config.body}.items() if value is not None}


async def _all(calls: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """What all calls return, or the error of the first that raised, once none of them runs any more."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _too_late(timeout_s: float) -> UnusableAnswerError:
    return UnusableAnswerError(
        f"no answer within {timeout_s:.3g} s; more of reward.judge.max_concurrent or reward.timeout_s, or less of "
        "reward.max_batch_size, leaves more time for each"
    )


def _invalid(message: str) -> RewardResult:
    return RewardResult(status=ScoreStatus.INVALID, message=message)
