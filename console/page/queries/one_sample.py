"""Answers everything about one sample: its prompt, its tokens with their log-probs, its turns, score and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from console.page.files.gap_lines import GapLines
from console.page.files.indexed_recording import IndexedRecording
from console.page.files.token_texts import TokenTexts
from console.page.files.values import Answer, BadQuestionError, count, mapping, number, numbers, text, whole
from console.page.queries.sample_lists import components_of, key_of, messages_of, num_tokens, score_of, staleness_of
from console.recording.row_codec import Row

MAX_TOKENS = 20_000
"""Tokens of an answer; `offset` asks for later ones."""
MAX_SAME_PROMPT = 50
_MAX_TURNS = 1000


def one_sample(
    recording: IndexedRecording,
    query: Mapping[str, str],
    *,
    texts: TokenTexts,
    gaps: GapLines,
    time_of_step: Callable[[int], float | None],
) -> Answer:
    """The sample `key` (group/index) of `step`, or of the newest step that has it.

    Raises BadQuestionError if it is not recorded.

    Args:
        recording: Where it is.
        query: The question.
        texts: What tokens say.
        gaps: Of the trainer.
        time_of_step: When the step of a version ended, Unix seconds.
    """
    recording.advance()
    key = query.get("key", "")
    group_id = key.rpartition("/")[0]
    step = whole(query, "step", recording.index.newest_step_of(group_id))
    refs = recording.index.of_step(step, group_id)
    group = list({key_of(row): row for row in recording.rows(refs)}.values())
    row = next((each for each in group if key_of(each) == key), None)
    if row is None:
        raise BadQuestionError(f"key: step {step} has no recorded sample {key!r:.200}")
    scores = [score for each in group if (score := score_of(each)) is not None]
    mine, total = score_of(row), num_tokens(row)
    begin = whole(query, "offset", 0)
    is_whole_group = len(group) == count(row.get("group_size")) and len(scores) == len(group)
    return {
        "key": key,
        "step": step,
        "prompt": [{"role": role, "content": content} for role, content in messages_of(row)],
        "completion": text(row.get("completion")),
        "answer": text(row.get("answer")),
        "turns": _turns(row, texts),
        "score": _score(row),
        "tokens": _tokens(row, texts, gaps.of(step, group_id, count(row.get("sample_index")) or 0), begin=begin),
        "token_offset": begin,
        "num_tokens": total,
        "group_advantage": mine - sum(scores) / len(scores) if is_whole_group and mine is not None else None,
        "staleness": staleness_of(row),
        "times": {
            **{name: number(row.get(name)) for name in ("submit_s", "lease_s", "finish_s", "score_s")},
            "trained_s": time_of_step(step),
        },
        "finish_reason": text(row.get("finish_reason"), 64),
        "generator_id": text(row.get("generator_id"), 128),
        "num_leases": count(row.get("num_leases")),
        "same_prompt": _same_prompt(recording, refs),
    }


def _score(row: Row) -> Answer:
    score = mapping(row.get("score"))
    return {
        "value": number(score.get("value")),
        "status": text(score.get("status"), 64),
        "components": components_of(row),
        "details": {text(name, 128): text(value, 20_000) for name, value in mapping(score.get("details")).items()},
        "message": text(score.get("message"), 20_000),
        "model": text(score.get("model"), 256),
    }


def _tokens(row: Row, texts: TokenTexts, gaps: Sequence[float | None], *, begin: int) -> list[Answer]:
    ids = token_ids(row)
    said = texts.of(ids[: begin + MAX_TOKENS])
    logprobs, advantages = numbers(row.get("logprobs")), numbers(row.get("advantages"))
    mask: list[Any] = row["loss_mask"] if isinstance(row.get("loss_mask"), list) else []
    theirs = _trainer_logprobs(logprobs, gaps, mask)
    versions = _versions(row)
    step = count(row.get("policy_version"))

    def at(values: Sequence[Any], index: int) -> Any:
        return values[index] if index < len(values) else None

    return [
        {
            "text": said[index],
            "id": ids[index],
            "logprob": at(logprobs, index),
            "trainer_logprob": at(theirs, index),
            "advantage": at(advantages, index),
            "version": (version := at(versions, index)),
            "staleness": None if version is None or step is None else step - 1 - version,
            "mask": 1 if not mask else int(at(mask, index) == 1),
        }
        for index in range(begin, min(len(ids), begin + MAX_TOKENS))
    ]


def _trainer_logprobs(
    logprobs: Sequence[float | None], gaps: Sequence[float | None], mask: Sequence[object]
) -> list[float | None]:
    """The trainer's log-prob of each token: the engine's and the gap, which the trained ones have in order."""
    trained = [index for index in range(len(logprobs)) if not mask or (index < len(mask) and mask[index] == 1)]
    found: list[float | None] = [None] * len(logprobs)
    if len(trained) == len(gaps):
        for index, gap in zip(trained, gaps, strict=True):
            mine = logprobs[index]
            found[index] = None if gap is None or mine is None else mine + gap
    return found


def token_ids(row: Row) -> list[int]:
    """Ids of the completion's tokens; -1 where there is no id."""
    ids = row.get("token_ids")
    return (
        [each if (each := count(one)) is not None and each >= 0 else -1 for one in ids] if isinstance(ids, list) else []
    )


def _versions(row: Row) -> list[int | None]:
    """The policy version of each token."""
    runs, lengths = row.get("versions"), row.get("version_lengths")
    if not isinstance(runs, list) or not isinstance(lengths, list):
        return []
    found: list[int | None] = []
    most = num_tokens(row)
    for version, length in zip(runs, lengths, strict=False):
        found += [count(version)] * min(max(0, count(length) or 0), most - len(found))
    return found


def _turns(row: Row, texts: TokenTexts) -> list[Answer]:
    """What the policy said and what it was given in between, by the loss mask; without it one turn."""
    ids, mask = token_ids(row), row.get("loss_mask")
    rewards = numbers(mapping(row.get("score")).get("turn_values"))
    if not isinstance(mask, list) or len(mask) != len(ids) or all(each == 1 for each in mask):
        return [{"role": "assistant", "text": text(row.get("completion")), "reward": rewards[0] if rewards else None}]
    begins = [index for index in range(len(ids)) if not index or mask[index] != mask[index - 1]][:_MAX_TURNS]
    found: list[Answer] = []
    num_said = 0
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        is_said = mask[begin] == 1
        reward = rewards[num_said] if is_said and num_said < len(rewards) else None
        num_said += is_said
        said = "".join(each or "" for each in texts.of(ids[begin:end]))
        found.append({"role": "assistant" if is_said else "environment", "text": said, "reward": reward})
    return found


def _same_prompt(recording: IndexedRecording, refs: list[int]) -> list[Answer]:
    """The first sample of each other group with the same prompt, newest last."""
    index = recording.index
    others = [each for each in index.same_prompt(refs[:1]).get(refs[0], ()) if each not in refs][-MAX_SAME_PROMPT:]
    found = []
    for number_ in others:
        row = next(recording.rows([number_]), None)
        if row is not None:
            version = count(row.get("max_policy_version"))
            found.append({"step": index.version(number_), "key": key_of(row), "version": version})
    return found
