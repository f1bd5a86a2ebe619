"""Measures held-out accuracy like any sampling: prompts to the broker, completions and scores back.

Promises:

- Both kinds are measured on the same prompts, one completion each: sampled (as in training) and greedy.
- Only generators that hold at least the measured version decode them. None of these samples is ever trained on.
- A measurement is written to evaluations.jsonl before the broker may forget its groups, so that after a crash it is
  either on disk or can still be collected.
- No endless wait: without any new result for `trainer.max_evaluation_silence_s`, or the limit derived in its place, the
  measurement fails and says what it waited for. Time in which the broker was away does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from penstock.errors import DeadlineError
from penstock.process.tasks import end
from penstock.v1 import trainer_pb2, types_pb2
from penstock.wire.source_tag import SourceTag
from services.trainer.data.prompt_mixture import PromptSource
from services.trainer.data.prompt_order import build_prompt, evaluation_group_id, sampling_seed
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.metrics import JsonLines
from services.trainer.run.context import RunContext
from services.trainer.run.prompt_feeder import PromptSubmitter
from services.trainer.run.stall_watch import StallWatch

CONSUMER_ID = "trainer-0-evaluation"
LEAST_SILENCE_S = 900.0
MAX_HELD_GROUPS = 128
GROUPS_PER_MICROBATCH = 32
POLL_S = 0.5
_KINDS = ("sampled_accuracy", "greedy_accuracy")

_log = structlog.get_logger()


class Evaluator:
    """Measures one run's policy on its held-out prompts."""

    def __init__(
        self,
        *,
        context: RunContext,
        submitter: PromptSubmitter,
        sources: Sequence[PromptSource],
        record: JsonLines,
        events: RunEvents,
    ) -> None:
        self._context = context
        self._config = context.config
        self._stall = StallWatch(
            context,
            setting="trainer.max_evaluation_silence_s",
            configured_s=context.config.trainer.max_evaluation_silence_s,
            least_s=LEAST_SILENCE_S,
        )
        self._run_id = context.run_id
        self._client = context.client
        self._clock = context.clock
        self._submitter = submitter
        self._prompts = [(source, source.prompts[index]) for source in sources for index in range(len(source.prompts))]
        self._record = record
        self._events = events
        self._beside: asyncio.Task[None] | None = None
        """A measurement made during training."""

    async def forget_leftovers(self) -> None:
        """Let the broker forget groups of recorded measurements, when a run continues after a crash."""
        for line in self._record.read():
            ids = list(self._groups(int(line["policy_version"]), int(line["history"])))
            await self._client.drop_groups(self._run_id, ids, reason="evaluated")

    async def measure(self) -> None:
        """Measure the current version while training is idle.

        Raises:
            DeadlineError: No new result for too long, see above.
            PenstockError: The broker refused something for good.
        """
        version = self._context.progress.policy_version
        self._events.change_state(trainer_pb2.TRAINER_STATE_EVALUATING, f"version {version}")
        await self._measure(version, on_waiting=self._events.say_waiting)

    def begin_if_due(self) -> None:
        """Start measuring beside training, every `run.eval_every_steps`; raises the previous measurement's error."""
        run, version = self._config.run, self._context.progress.policy_version
        if self._beside is not None and self._beside.done():
            self._beside.result()
            self._beside = None
        is_due = run.eval_every_steps > 0 and version % run.eval_every_steps == 0 and version < run.num_steps
        if is_due and self._beside is not None:
            _log.warning("an evaluation is left out: the last one is still under way", policy_version=version)
        elif is_due:
            self._beside = asyncio.create_task(self._measure(version, on_waiting=lambda _reason: None))

    def begin_again(self) -> None:
        """Measure, beside training, what a step to come counts and an interrupted run has not recorded.

        Weights of that version are gone; those of a later one count, as they may in any measurement.
        """
        version, every = self._context.progress.policy_version, self._config.run.eval_every_steps
        due = version - version % every
        if self._line_of(due) is None:
            self._beside = asyncio.create_task(self._measure(due, on_waiting=lambda _reason: None))

    async def accuracies(self, policy_version: int) -> dict[str, float]:
        """Greedy accuracy by source, once a version's measurement beside training is done; raises what it raised."""
        await self.finish()
        line = self._line_of(policy_version) or {}
        found = {source.name: line.get(f"source/{source.name}/greedy_accuracy") for source, _ in self._prompts}
        return {name: float(value) for name, value in found.items() if value is not None}

    async def finish(self) -> None:
        """Wait for the current measurement, if any; raises what it raised."""
        if self._beside is not None:
            await self._beside

    async def cancel(self) -> None:
        """Abandon the current measurement."""
        if self._beside is not None:
            await end(self._beside)

    async def _measure(self, policy_version: int, *, on_waiting: Callable[[str], None]) -> None:
        """Report the version's score, from the record if it has one."""
        if not self._prompts:
            return
        line = self._line_of(policy_version)
        self._events.report_evaluation(_report(line or await self._measured(policy_version, on_waiting)))

    def _line_of(self, policy_version: int) -> Mapping[str, Any] | None:
        """Of the record."""
        return next((line for line in self._record.read() if line["policy_version"] == policy_version), None)

    async def _measured(self, policy_version: int, on_waiting: Callable[[str], None]) -> dict[str, object]:
        groups = self._groups(policy_version, self._context.progress.history)
        sending = asyncio.create_task(self._submitter.submit(list(groups.values())))
        try:
            scores = await self._collect(groups, sending, on_waiting)
        finally:
            await end(sending)
        measured = self._line(policy_version, groups, scores)
        self._record.append(measured)
        await self._client.drop_groups(self._run_id, list(groups), reason="evaluated")
        return measured

    def _groups(self, policy_version: int, history: int) -> dict[str, types_pb2.Prompt]:
        prompts: dict[str, types_pb2.Prompt] = {}
        for is_greedy, temperature in ((False, self._config.sampling.temperature), (True, 0.0)):
            for index, (source, encoded) in enumerate(self._prompts):
                group_id = evaluation_group_id(
                    policy_version=policy_version, history=history, is_greedy=is_greedy, index=index
                )
                prompts[group_id] = build_prompt(
                    encoded,
                    group_id=group_id,
                    group_size=1,
                    sampling=types_pb2.SamplingParams(
                        temperature=temperature,
                        max_new_tokens=source.max_new_tokens,
                        # The same seeds at every version: differences come from the policy.
                        seed=sampling_seed(self._config.run.seed, index),
                    ),
                    purpose=types_pb2.PURPOSE_EVALUATE,
                    tag=SourceTag(source=source.name, row=encoded.row_number) if source.name else None,
                )
                prompts[group_id].min_policy_version = policy_version
        return prompts

    async def _collect(
        self, groups: dict[str, types_pb2.Prompt], sending: asyncio.Task[None], on_waiting: Callable[[str], None]
    ) -> dict[str, float | None]:
        """The score of each group, or None."""
        scores: dict[str, float | None] = {}
        session = self._client.consumer(
            self._run_id,
            CONSUMER_ID,
            purpose=types_pb2.PURPOSE_EVALUATE,
            max_groups=GROUPS_PER_MICROBATCH,
            max_held_groups=MAX_HELD_GROUPS,
        )
        self._stall.restart()
        async with session:
            while len(scores) < len(groups):
                if sending.done():
                    sending.result()
                microbatch = await session.next(timeout_s=POLL_S)
                num_before = len(scores)
                if microbatch is not None:
                    ids = [group.prompt.group_id for group in microbatch.groups]
                    scores |= {i: _score(g) for i, g in zip(ids, microbatch.groups, strict=True) if i in groups}
                    await self._forget_strays([i for i in ids if i not in groups])
                    session.release(ids)
                if len(scores) > num_before or session.is_away:
                    self._stall.restart()
                elif (limit := await self._stall.exceeded()) is not None:
                    raise DeadlineError(
                        f"evaluation: {len(groups) - len(scores)} of {len(groups)} held-out completions did not come "
                        f"within {limit}; last word: {session.waiting_reason}"
                    )
                why = f"; {session.waiting_reason}" if session.waiting_reason else ""
                on_waiting(f"{len(scores)} of {len(groups)} held-out completions scored{why}")
        return scores

    async def _forget_strays(self, group_ids: Sequence[str]) -> None:
        """Drop groups of an earlier measurement that was interrupted and is no longer wanted."""
        if group_ids:
            await self._client.drop_groups(self._run_id, group_ids, reason="evaluated")

    def _line(
        self, policy_version: int, groups: dict[str, types_pb2.Prompt], scores: dict[str, float | None]
    ) -> dict[str, object]:
        means: dict[str, float | None] = {}
        # Both kinds come in the order of the prompts.
        names, ids = [source.name for source, _ in self._prompts], list(groups)
        for index, kind in enumerate(_KINDS):
            part = ids[index * len(names) : (index + 1) * len(names)]
            found = [(name, scores.get(group_id)) for name, group_id in zip(names, part, strict=True)]
            means[kind] = _mean(found)
            for name in dict.fromkeys(filter(None, names)):
                of_source = [pair for pair in found if pair[0] == name]
                means |= {f"source/{name}/{kind}": _mean(of_source), f"source/{name}/num_prompts": len(of_source)}
            if num_missing := sum(score is None for _, score in found):
                _log.warning("held-out completions without a score", kind=kind, num_missing=num_missing)
        return {
            "policy_version": policy_version,
            "history": self._context.progress.history,
            "time": self._clock.now_s(),
            "num_prompts": len(self._prompts),
            **means,
        }


def _score(group: types_pb2.TrajectoryGroup) -> float | None:
    for trajectory in group.trajectories:
        if trajectory.score.status == types_pb2.SCORE_STATUS_OK and trajectory.score.HasField("value"):
            return float(trajectory.score.value)
    return None


def _mean(scores: Sequence[tuple[str, float | None]]) -> float | None:
    values = [score for _, score in scores if score is not None]
    return sum(values) / len(values) if values else None


def _report(line: Mapping[str, Any]) -> trainer_pb2.EvaluationReport:
    names = ("policy_version", "sampled_accuracy", "greedy_accuracy", "num_prompts")
    return trainer_pb2.EvaluationReport(**{name: line[name] for name in names})
